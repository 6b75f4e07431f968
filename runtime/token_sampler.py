"""From hidden states to the next tokens, and the log-probabilities that were asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from attention.native_build import NativeBuildError

from .grammar_mask import apply_mask, prepare_mask
from .input_batch import InputBatch
from .logits_batch import LogitsBatch, apply_rules, run_processors
from .logprobs import LogprobsOutput
from .native_sampler import sampler_library
from .sampler import SampledTokens, sample
from .step import ScheduledBatch, StepOutput
from .token_counts import TokenCounts

logger = logging.getLogger("stepgraph.runtime")

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]
"""[n, hidden_size] hidden states to [n, vocab] float32 logits."""

_SCORED_ROWS = 64
"""Prompt rows whose logits exist at one time: a prompt's, all at once, could fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLogprobsOutput:
    """`LogprobsOutput` before it is on the host, as tensors."""

    token_ids: torch.Tensor
    """[n, 1 + k] int32."""
    logprobs: torch.Tensor
    """[n, 1 + k] float32."""
    ranks: torch.Tensor
    """[n] int32."""

    def start_copy(self) -> DeviceLogprobsOutput:
        """The same in host memory, once the stream has come this far."""
        return DeviceLogprobsOutput(
            token_ids=_start_copy(self.token_ids),
            logprobs=_start_copy(self.logprobs),
            ranks=_start_copy(self.ranks),
        )

    def on_host(self) -> LogprobsOutput:
        """Views of tensors that are in host memory."""
        return LogprobsOutput(
            token_ids=self.token_ids.numpy(),
            logprobs=self.logprobs.numpy(),
            ranks=self.ranks.numpy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOutput:
    """What a step drew. Still on the device, and not waited for unless a processor had to run."""

    sampled: SampledTokens
    """Of the n rows whose next token is wanted."""
    row_errors: dict[int, str] = field(default_factory=dict)
    """As in `StepOutput`."""
    logprobs: DeviceLogprobsOutput | None = None
    """Of the rows that want theirs."""
    prompt_logprobs: DeviceLogprobsOutput | None = None
    """Of the prompt tokens that are scored."""


class TokenSampler:
    """Draws the tokens of each step. Owns the counts that penalties need, and the last ids drawn.

    Args:
        max_num_seqs: rows of the tables.
        vocab_size: tokens of the model.
        device: where the logits are.
        cache_dir: where the native library of CPUs is kept; None: stepgraph in the user's cache.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        *,
        cache_dir: Path | None = None,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        self._counts: TokenCounts | None = None
        self._last_ids = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._library: str | None = None
        if device.type == "cpu":
            try:
                self._library = sampler_library(cache_dir=cache_dir)
            except NativeBuildError as error:
                logger.info("tokens are drawn by torch's operators: %s", error)

    @torch.inference_mode()
    def admit(self, scheduled: ScheduledBatch) -> None:
        """Count the tokens of admitted sequences that have penalties."""
        if not scheduled.admitted_rules:
            return
        columns = (scheduled.admitted_rules, scheduled.admitted_token_ids)
        rows = scheduled.admitted_rows.tolist()
        lengths = scheduled.admitted_num_prompt_tokens.tolist()
        for row, num_prompt, rules, token_ids in zip(rows, lengths, *columns, strict=True):
            if rules is not None and rules.has_penalties:
                assert token_ids is not None, f"row {row} came without its tokens"
                self._own_counts().reset(row, token_ids[:num_prompt], token_ids[num_prompt:])

    @torch.inference_mode()
    def fill_placeholders(self, batch: InputBatch) -> None:
        """Write what the step before drew into the inputs of a step that was packed without it."""
        overlap = batch.overlap
        if overlap is not None and overlap.placeholders is not None:
            assert overlap.placeholder_rows is not None, "placeholders without rows"
            ids = self._last_ids.index_select(0, overlap.placeholder_rows)
            batch.input_ids.index_copy_(0, overlap.placeholders, ids)

    @torch.inference_mode()
    def draw(
        self, compute_logits: ComputeLogits, hidden: torch.Tensor, batch: InputBatch
    ) -> DrawOutput:
        """Draw the step's tokens.

        Args:
            compute_logits: the model's head.
            hidden: [num_sampled + num_scored, hidden_size], of `batch.logits_indices`.
            batch: the step's inputs.
        """
        scored_ids, num_scored = batch.scored_ids, 0
        if scored_ids is not None:
            num_scored = len(scored_ids)
            hidden, scored = hidden[: len(hidden) - num_scored], hidden[len(hidden) - num_scored :]
        # Some kernels refuse a product without rows, as a step that only scores would have.
        logits = compute_logits(hidden) if len(hidden) else self._no_logits()
        changed, errors = logits, {}
        if batch.logits is not None:
            changed = logits.clone()  # log-probabilities are of the model's own
            errors = self._change(changed, batch.logits)
        sampled = sample(changed, batch.sampling, self._library)
        if batch.logits is not None and batch.logits.penalties is not None:
            self._own_counts().add(batch.logits.penalties, sampled.token_ids)
        if batch.overlap is not None:
            self._last_ids.index_copy_(0, batch.overlap.sampled_rows, sampled.token_ids.int())
        logprobs = prompt_logprobs = None
        if batch.logprobs_of is not None:
            wanted = batch.logprobs_of
            logprobs = gather_logprobs(
                logits[wanted], sampled.token_ids[wanted], batch.num_logprobs
            )
        if scored_ids is not None:
            prompt_logprobs = _score(compute_logits, scored, scored_ids, batch.num_scored_logprobs)
        return DrawOutput(
            sampled=sampled,
            row_errors=errors,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _change(self, logits: torch.Tensor, batch: LogitsBatch) -> dict[int, str]:
        mask = prepare_mask(batch.grammar_work) if batch.grammar_work else None
        errors = run_processors(logits, batch) if batch.host_work else {}
        if mask is not None:
            apply_mask(logits, mask)
            errors |= mask.row_errors
        apply_rules(logits, batch)
        if batch.penalties is not None:
            self._own_counts().penalise(logits, batch.penalties)
        return errors

    def _no_logits(self) -> torch.Tensor:
        return torch.empty((0, self._vocab_size), dtype=torch.float32, device=self._device)

    def _own_counts(self) -> TokenCounts:
        if self._counts is None:
            self._counts = TokenCounts(self._max_num_seqs, self._vocab_size, self._device)
        return self._counts


class OutputCopy:
    """A step's outcome on its way to the host, which goes on meanwhile.

    Args:
        drawn: what the step drew.
        batch: its inputs.
    """

    def __init__(self, drawn: DrawOutput, batch: InputBatch) -> None:
        sampled = drawn.sampled
        self._token_ids = _start_copy(torch.where(sampled.is_valid, sampled.token_ids, -1))
        self._row_errors = drawn.row_errors
        self._logprobs = None if drawn.logprobs is None else drawn.logprobs.start_copy()
        self._logprobs_of = batch.logprobs_of_cpu
        scores = drawn.prompt_logprobs
        self._prompt_logprobs = None if scores is None else scores.start_copy()
        self._copied: torch.cuda.Event | None = None
        if sampled.token_ids.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> StepOutput:
        """The outcome, once it is there."""
        if self._copied is not None:
            self._copied.synchronize()  # sync: the one of a step: the scheduler needs the ids
        ids = self._token_ids.numpy()
        scores = self._prompt_logprobs
        return StepOutput(
            token_ids=ids,
            is_valid=ids >= 0,
            row_errors=self._row_errors,
            logprobs=None if self._logprobs is None else self._logprobs.on_host(),
            logprobs_of=self._logprobs_of,
            prompt_logprobs=None if scores is None else scores.on_host(),
        )


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of its own in host memory, complete once the stream has come this far.

    On a CPU the tensor itself.
    """
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_step_output(drawn: DrawOutput, batch: InputBatch) -> StepOutput:
    """The step's outcome on the host, which waits for the device here."""
    return OutputCopy(drawn, batch).wait()


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> DeviceLogprobsOutput:
    """Log-probabilities of one token a row and of the likeliest ones.

    Args:
        logits: [n, vocab] float32.
        token_ids: [n] int64.
        num_top: how many of the likeliest; at most the vocabulary.
    """
    logprobs = logits.log_softmax(dim=-1)
    own_ids = token_ids[:, None]
    own = logprobs.gather(-1, own_ids)
    ranks = (logprobs >= own).sum(dim=-1)
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return DeviceLogprobsOutput(
        token_ids=torch.cat([own_ids, top.indices], dim=-1).int(),
        logprobs=torch.cat([own, top.values], dim=-1),
        ranks=ranks.int(),
    )


def _score(
    compute_logits: ComputeLogits, hidden: torch.Tensor, next_ids: torch.Tensor, num_top: int
) -> DeviceLogprobsOutput:
    parts = [
        gather_logprobs(compute_logits(rows), ids, num_top)
        for rows, ids in zip(
            torch.split(hidden, _SCORED_ROWS), torch.split(next_ids, _SCORED_ROWS), strict=True
        )
    ]
    return DeviceLogprobsOutput(
        token_ids=torch.cat([part.token_ids for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
    )
