"""The values that one engine step passes on: from the scheduler to the runner and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .errors import LogitsProcessorError, NonFiniteLogitsError, StructuredOutputError
from .logits_rules import LogitsRules
from .logprobs import LogprobsOutput
from .sampling_params import SamplingParams
from .sequence import Sequence
from .step_cost import chunk_pairs

_NOTHING = np.empty(0, dtype=np.int64)
_NO_COPIES = np.empty((2, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringBatch:
    """Prompt tokens whose log-probabilities a step gives. Arrays are int64, host memory."""

    places: np.ndarray
    """[m] rows of the flat batch, each that of the token before one..."""
    next_ids: np.ndarray
    """[m] ...of these."""
    rows: np.ndarray
    """[k] rows of the sequences in the tables, in the order of `places`."""
    firsts: np.ndarray
    """[k] each one's first token that is scored: how many before it have been."""
    counts: np.ndarray
    """[k] how many of `places` are each one's."""
    num_top: int
    """Most likeliest tokens that one of them wants beside each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBatch:
    """What one step runs, and what changed since the last one.

    Sequences are ordered: those decoding first, then those with prompt tokens to process.
    All arrays are int64 unless stated, host memory. Nothing in it grows with context length but
    `admitted_token_ids`.
    """

    step: int
    """Number of this step, from 0."""
    rows: np.ndarray
    """[num_seqs] row of each sequence in the tables of scheduler and runner."""
    num_computed_tokens: np.ndarray
    """[num_seqs] tokens in the cache before the step."""
    num_new_tokens: np.ndarray
    """[num_seqs] query lengths."""
    num_decodes: int
    """The first `num_decodes` sequences are past their prompt; each has one new token."""
    token_ids: np.ndarray
    """[num_tokens] int32, the new tokens of all sequences, one after another; 0 at the
    `placeholders`."""
    sampled: np.ndarray
    """[num_sampled] positions in `rows` of the sequences whose next token is wanted."""

    released_rows: np.ndarray
    """[r] rows whose sequences left since the last step; apply before the admissions."""
    admitted_rows: np.ndarray
    """[a] rows that new or resumed sequences took."""
    admitted_params: tuple[SamplingParams, ...]
    """[a]"""
    admitted_seeds: np.ndarray
    """[a] uint64"""
    admitted_num_prompt_tokens: np.ndarray
    """[a]"""
    new_block_rows: np.ndarray
    """[b] rows whose block tables grew..."""
    new_block_indices: np.ndarray
    """[b] ...at this place of the table..."""
    new_block_ids: np.ndarray
    """[b] ...by this block."""
    block_copies: np.ndarray = field(default_factory=lambda: _NO_COPIES)
    """[2, c] blocks and the new ones that get their content, in all layers, before the step
    writes any K/V. No block is in both."""
    bucket: int = 0
    """Captured size that the step is launched at; 0: at its own size, without a graph."""
    admitted_rules: tuple[LogitsRules | None, ...] = ()
    """[a], or () if none of the admitted sequences has any."""
    admitted_token_ids: tuple[np.ndarray | None, ...] = ()
    """[a] as `admitted_rules`: [num_tokens] int32, prompt and output so far, of a sequence whose
    rules look back at its tokens; None for others."""
    host_rows: np.ndarray = field(default_factory=lambda: _NOTHING)
    """[h] those of `sampled` whose logits the host works on with all ids so far in its hands: bad
    words of several tokens, logits processors. If the id of one is a placeholder, the step's draw
    waits for the ids of the step before; its forward doesn't."""
    placeholders: np.ndarray = field(default_factory=lambda: _NOTHING)
    """[p] those of the decodes whose new token is still being drawn by the step in flight: the
    device fills in what it drew for their rows last."""
    scoring: ScoringBatch | None = None
    """Log-probabilities of prompt tokens that are wanted of this step; None: none."""

    @property
    def num_seqs(self) -> int:
        """Sequences in the step."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Real tokens in the step, padding excluded."""
        return len(self.token_ids)

    @property
    def num_kv_tokens(self) -> int:
        """Context of all sequences after the step: the K/V rows that attention reads."""
        return int(self.num_computed_tokens.sum()) + self.num_tokens

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that attention looks at."""
        return int(chunk_pairs(self.num_computed_tokens, self.num_new_tokens).sum())

    @property
    def is_uniform_decode(self) -> bool:
        """True if every query length is one."""
        return self.num_tokens == self.num_seqs

    @property
    def draw_waits(self) -> bool:
        """True if the host has to know the ids of the step before ahead of this step's draw."""
        return bool(len(self.placeholders)) and bool(
            np.isin(self.host_rows, self.placeholders).any()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LateIdsBatch:
    """What became known of a step between its launch and its draw. Host memory."""

    token_ids: np.ndarray
    """[num_tokens] int32, `ScheduledBatch.token_ids` with ids in place of placeholders; where the
    sequence has ended, they mean nothing."""
    ended_rows: np.ndarray
    """[e] int64, rows of the step whose sequences have ended since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What the model gave for one `ScheduledBatch`. Host memory."""

    token_ids: np.ndarray
    """[num_sampled] int64, aligned with `ScheduledBatch.sampled`."""
    is_valid: np.ndarray
    """[num_sampled] bool; False where the logits were NaN or infinite and the id means nothing."""
    row_errors: Mapping[int, str] = field(default_factory=dict)
    """Why a row that is not valid failed, by row of the tables, if its own logits processor or
    grammar did."""
    logprobs: LogprobsOutput | None = None
    """Of the sampled tokens at `logprobs_of`; None: not wanted."""
    logprobs_of: np.ndarray = field(default_factory=lambda: _NOTHING)
    """[m] int64 places in `token_ids`, ascending."""
    prompt_logprobs: LogprobsOutput | None = None
    """Of the prompt tokens in `ScheduledBatch.scoring`; None if that is."""

    def error_of(self, sequence: Sequence, num_tokens: int) -> RuntimeError:
        """Why the row of `sequence`, which has that many tokens, is not valid."""
        what = f"{sequence.name}, output token {num_tokens - sequence.num_prompt_tokens}"
        if sequence.row in self.row_errors:
            message = self.row_errors[sequence.row]
            of_grammar = message.startswith("structured_outputs")
            kind = StructuredOutputError if of_grammar else LogitsProcessorError
            return kind(f"{what}: {message}")
        if sequence.rules is not None and sequence.rules.forbids:
            return NonFiniteLogitsError(
                f"{what}: the logits are NaN or infinite, or allowed_token_ids, bad_words, "
                f"min_tokens and structured_outputs leave no token; forbid less, or check the "
                f"weights and the dtype"
            )
        return NonFiniteLogitsError(
            f"{what}: the logits are NaN or infinite; check the weights and the dtype"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceUpdates:
    """What one step brought."""

    sequences: list[Sequence]
    """Those that got a token, aborted ones excluded."""
    token_ids: np.ndarray
    """[len(sequences)] int64, aligned with `sequences`."""
    gaps: np.ndarray
    """[len(sequences)] float64, seconds since each one's token before; NaN for its first."""
    finished: list[Sequence]
    """Those that ended in this step."""

    @classmethod
    def nothing(cls) -> SequenceUpdates:
        """Of a step that had nothing to do."""
        return cls(sequences=[], token_ids=np.empty(0, np.int64), gaps=np.empty(0), finished=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailure:
    """A step that raised while it was prepared or run. The engine is as it was before it."""

    error: Exception
    """What was raised."""
    sequences: list[Sequence]
    """Those of the step, in the queue again with all their tokens."""
