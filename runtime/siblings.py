"""The sequences of one request with n above 1, and how they come by their prompt's K/V."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from .logprobs import LogprobsRecord

if TYPE_CHECKING:
    from .block import Block
    from .block_manager import BlockManager
    from .sequence import Sequence


def stream_seed(seed: int, index: int) -> int:
    """The seed of a request's stream `index`, 64 bits.

    Stream 0 has the request's own seed, so it draws what a request with n=1 would; stream i has
    xxh3_64 of seed and i, both as 8 bytes in little-endian order, so that neighbouring seeds
    (vLLM adds i) don't give two requests the same streams.
    """
    if index == 0:
        return seed
    return xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little") + index.to_bytes(8, "little"))


def make_streams(first: Sequence) -> tuple[Sequence, ...]:
    """All n sequences of a request that was not queued yet, from its first one.

    The prompt's log-probabilities are those of all, and are left to the first.
    """
    others = [
        dataclasses.replace(
            first,
            index=index,
            seed=stream_seed(first.seed, index),
            arrival_index=first.arrival_index + index,
            logprobs=None if first.logprobs is None else LogprobsRecord(first.logprobs.num_top),
            prompt_logprobs=None,
            blocks=[],
        )
        for index in range(1, first.params.n)
    ]
    if others:
        siblings = Siblings((first, *others))
        for sequence in siblings.members:
            sequence.siblings = siblings
    return first.streams


class Siblings:
    """Which of a request's sequences have their prompt's K/V, for the others to take it over.

    The first one that is admitted computes the prompt. The others are set aside until it has, and
    are then admitted as any sequence is, but with all of the prompt computed except its last
    token. They share its full blocks and get a copy of the partly filled one behind them, since
    they write on in it. The last token each computes itself: so its first draw, with its own seed
    and rules, is that of any other prompt, and neither update, rollback nor preemption knows of
    siblings. Where nobody has the prompt any more, as the one who computed it has ended or was
    preempted, the next in the queue computes it again, as far as the prefix cache doesn't have it.
    """

    __slots__ = ("_donors", "_num_prefilling", "members")

    def __init__(self, members: tuple[Sequence, ...]) -> None:
        self.members = members
        """In the order of their indices."""
        self._donors: dict[Sequence, None] = {}  # their prompt is computed by earlier steps
        self._num_prefilling = 0  # running, and no donors

    def admit(self) -> None:
        """One of them is admitted."""
        self._num_prefilling += 1

    def complete(self, sequence: Sequence) -> None:
        """A step that was scheduled computes the rest of its prompt."""
        self._num_prefilling -= 1
        self._donors[sequence] = None

    def leave(self, sequence: Sequence) -> None:
        """It loses its blocks."""
        if sequence in self._donors:
            del self._donors[sequence]
        else:
            self._num_prefilling -= 1

    def donor(self, sequence: Sequence) -> Sequence | None:
        """Whose K/V of the prompt `sequence` can take over; None: nobody's."""
        return next(iter(self._donors), None) if _can_take_over(sequence) else None

    def should_wait(self, sequence: Sequence) -> bool:
        """True while one of them computes the prompt that `sequence` needs."""
        return self._num_prefilling > 0 and not self._donors and _can_take_over(sequence)


def _can_take_over(sequence: Sequence) -> bool:
    """If there is something, and it need not compute it for the sake of prompt_logprobs."""
    return 1 < sequence.num_prompt_tokens <= len(sequence.shareable_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedPrefix:
    """The tokens that a sequence need not compute once it is admitted."""

    blocks: list[Block]
    """The full blocks that hold them, to be shared."""
    copied: Block | None = None
    """The block of the tokens behind those, to be copied; None: there are none."""
    num_tokens: int
    """In all of these blocks."""


def computed_prefix(sequence: Sequence, manager: BlockManager) -> ComputedPrefix:
    """What of a waiting sequence's tokens is there: in the prefix cache, or with a sibling."""
    siblings, block_size = sequence.siblings, manager.block_size
    donor = None if siblings is None else siblings.donor(sequence)
    num_shared = sequence.num_prompt_tokens - 1
    if donor is None or len(sequence.token_ids) > sequence.num_prompt_tokens:
        hits = manager.find_prefix(sequence.shareable_token_ids, sequence.extra_key)
        num_cached = len(hits) * block_size
        if donor is None or num_cached >= num_shared:
            return ComputedPrefix(blocks=hits, num_tokens=num_cached)
    num_full, num_left = divmod(num_shared, block_size)
    return ComputedPrefix(
        blocks=donor.blocks[:num_full],
        copied=donor.blocks[num_full] if num_left else None,
        num_tokens=num_shared,
    )
