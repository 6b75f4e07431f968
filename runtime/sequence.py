"""One stream of tokens being generated."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .logits_rules import LogitsRules
from .logprobs import LogprobsRecord
from .outputs import FinishReason
from .sampling_params import SamplingParams
from .siblings import Siblings

if TYPE_CHECKING:
    from .block import Block

ROOT_UID = 0
"""`Sequence.chain_uid` before the first block: the parent of every first block."""
BROKEN_CHAIN = -1
"""`Sequence.chain_uid` of a sequence whose further blocks can't be registered."""


class SequenceStatus(enum.Enum):
    """Where a sequence stands. Prefill and decode are not states: they follow from counts."""

    WAITING = "waiting"
    """Queued: owns no row and no block. Never admitted yet, or preempted."""
    RUNNING = "running"
    """Owns a row of the sequence table and blocks."""
    HELD = "held"
    """Taken out of the queue, as others are tried without it after a step that failed."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """What the scheduler knows of one sequence. Only the scheduler changes it.

    While the sequence runs, its counts and its newest tokens are in the row `row` of the
    `SequenceTable`; `token_ids` is brought up to date when it leaves the row.
    """

    request_id: str
    token_ids: np.ndarray
    """[num_tokens] int32: the prompt, and what was generated until it last left a row."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    """Seed of this sequence's draws; `params.seed` where that is given."""
    max_total_tokens: int
    """Prompt and output together: where the sequence ends with reason "length"."""
    arrival_index: int
    arrival_time: float
    """Seconds, of the engine's clock."""
    priority: int = 0
    """Under policy "priority", lower runs first."""
    extra_key: bytes = b""
    """What, besides the tokens, two sequences must share to share cached blocks."""
    rules: LogitsRules | None = None
    """How its logits are changed before the draw; None: not at all."""
    logprobs: LogprobsRecord | None = None
    """Of the output's tokens; None: not wanted."""
    prompt_logprobs: LogprobsRecord | None = None
    """Of the prompt's tokens from the second on; None: not wanted."""
    index: int = 0
    """Place among the request's sequences."""
    siblings: Siblings | None = None
    """All sequences of the request; None if it is the only one."""

    status: SequenceStatus = SequenceStatus.WAITING
    row: int = -1
    admission_index: int = -1
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache, or a sibling, served at first admission."""
    num_preemptions: int = 0
    starts_after_endings: int = 0
    """It is not resumed before the scheduler has seen that many sequences end."""
    blocks: list[Block] = field(default_factory=list)
    """In order of position; the block manager keeps it."""
    num_chained_blocks: int = 0
    """Leading blocks whose content `chain_uid` names."""
    chain_uid: int = ROOT_UID

    first_token_time: float | None = None
    last_token_time: float = math.nan
    """As of the last time the sequence left its row; NaN before the first token."""
    finish_time: float | None = None
    finish_reason: FinishReason | None = None
    """None while unfinished."""
    stop_string: str | None = None
    """The one of `params.stop` that ended it."""
    error: Exception | None = None

    @property
    def streams(self) -> tuple[Sequence, ...]:
        """All sequences of its request, itself among them, in the order of their indices."""
        return (self,) if self.siblings is None else self.siblings.members

    @property
    def name(self) -> str:
        """For messages."""
        of = "" if self.siblings is None else f", output {self.index}"
        return f"request {self.request_id}{of}"

    @property
    def is_finished(self) -> bool:
        """True once no further step runs for it."""
        return self.status is SequenceStatus.FINISHED

    @property
    def stop_reason(self) -> int | str | None:
        """What of `params` ended it under reason "stop": a string or a token id."""
        if self.finish_reason != "stop" or self.stop_string is not None:
            return self.stop_string
        last = int(self.token_ids[-1])
        return last if last in self.params.stop_token_ids else None

    @property
    def is_ended_by_token(self) -> bool:
        """True if its last token is one that ends a sequence."""
        return self.finish_reason == "stop" and self.stop_string is None

    @property
    def shareable_token_ids(self) -> np.ndarray:
        """[n] int32: the leading tokens whose K/V, all but the last one's, may come from the cache.

        All of them, unless log-probabilities of the prompt are still wanted: only computing a
        token gives that of the next.
        """
        if self.prompt_logprobs is None or len(self.prompt_logprobs) >= self.num_prompt_tokens - 1:
            return self.token_ids
        return self.token_ids[: len(self.prompt_logprobs) + 1]

    @property
    def output_token_ids(self) -> list[int]:
        """Generated ids as of the last time the sequence left its row."""
        return [int(token) for token in self.token_ids[self.num_prompt_tokens :].tolist()]
