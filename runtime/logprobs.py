"""Log-probabilities on the host: of one step, and of one sequence as they come in."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import InvalidRequestError
from .outputs import Logprob

if TYPE_CHECKING:
    from .sequence import Sequence
    from .step import ScheduledBatch, StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsOutput:
    """Log-probabilities of n tokens, each with its likeliest rivals. Host memory."""

    token_ids: np.ndarray
    """[n, 1 + k] int32: the token itself, then the k likeliest ones in falling order."""
    logprobs: np.ndarray
    """[n, 1 + k] float32, aligned with `token_ids`."""
    ranks: np.ndarray
    """[n] int32: how many tokens are as likely as the token itself or likelier, itself counted."""


class LogprobsRecord:
    """Log-probabilities of consecutive tokens of one sequence.

    Args:
        num_top: how many of the likeliest tokens to keep for each.
    """

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._length = 0
        self._parts: list[LogprobsOutput] = []
        self._starts: list[int] = []

    def __len__(self) -> int:
        return self._length

    def append(self, output: LogprobsOutput, start: int, end: int) -> None:
        """Take in tokens `start` to `end` of a step's output."""
        columns = self.num_top + 1
        part = LogprobsOutput(
            token_ids=output.token_ids[start:end, :columns].copy(),
            logprobs=output.logprobs[start:end, :columns].copy(),
            ranks=output.ranks[start:end].copy(),
        )
        self._parts.append(part)
        self._starts.append(self._length)
        self._length += end - start

    def as_dicts(
        self, text_of: Callable[[int], str] | None, start: int = 0, stop: int | None = None
    ) -> list[dict[int, Logprob]]:
        """One mapping of token id to `Logprob` for each token; the token itself comes first.

        Args:
            text_of: text of a token id; None: no texts.
            start: only from that token on, which is where an `append` began.
            stop: and only up to that token, where another began or will; None: all.
        """
        first = bisect.bisect_left(self._starts, start)
        last = None if stop is None else bisect.bisect_left(self._starts, stop)
        dicts = []
        for part in self._parts[first:last]:
            columns = (part.token_ids.tolist(), part.logprobs.tolist(), part.ranks.tolist())
            for ids, values, rank in zip(*columns, strict=True):
                # A token that is among the likeliest has its rank there, ties in their order.
                ranks = [rank, *range(1, len(ids))]
                dicts.append(
                    {
                        id_: Logprob(
                            logprob=value,
                            rank=own_rank,
                            decoded_token=None if text_of is None else text_of(id_),
                        )
                        for id_, value, own_rank in zip(ids, values, ranks, strict=True)
                    }
                )
        return dicts


def new_record(
    name: str, asked: int | None, vocab_size: int, max_logprobs: int
) -> LogprobsRecord | None:
    """A record for as many likeliest tokens as the parameter `name` asks for.

    Args:
        name: "logprobs" or "prompt_logprobs".
        asked: its value; -1: all tokens; None: none are wanted.
        vocab_size: all tokens.
        max_logprobs: the engine's option of that name.

    Raises:
        InvalidRequestError: it is too many.
    """
    if asked is None:
        return None
    num = vocab_size if asked == -1 else asked
    most = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
    if num > most:
        raise InvalidRequestError(
            f"{name}={asked} asks for {num} tokens of {vocab_size}, and the engine's "
            f"max_logprobs={max_logprobs} allows {most}; ask for fewer, or make the engine with a "
            "larger one"
        )
    return LogprobsRecord(num)


def record_logprobs(
    sequences: list[Sequence | None], scheduled: ScheduledBatch, output: StepOutput
) -> None:
    """Hand a step's log-probabilities to the sequences that wanted them.

    Args:
        sequences: by row; None where the sequence has left since.
        scheduled: the step.
        output: what it gave.
    """
    if output.logprobs is not None:
        places = output.logprobs_of
        rows = scheduled.rows[scheduled.sampled[places]]
        for i, row in enumerate(rows.tolist()):
            sequence = sequences[row]
            if sequence is not None and output.is_valid[places[i]]:
                assert sequence.logprobs is not None, f"{sequence.request_id} wants none"
                sequence.logprobs.append(output.logprobs, i, i + 1)
    if output.prompt_logprobs is not None and scheduled.scoring is not None:
        scoring, start = scheduled.scoring, 0
        columns = (scoring.rows.tolist(), scoring.firsts.tolist(), scoring.counts.tolist())
        for row, first, count in zip(*columns, strict=True):
            sequence = sequences[row]
            if sequence is not None:
                record = sequence.prompt_logprobs
                assert record is not None, f"{sequence.request_id} wants none"
                assert first == len(record), f"{sequence.request_id}: tokens were left out"
                record.append(output.prompt_logprobs, start, start + count)
            start += count
