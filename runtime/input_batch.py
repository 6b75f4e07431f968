"""The unified batch builder: one flat batch of whatever a step holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attention import AttentionMetadata

from .logits_batch import LogitsBatch, LogitsPlan
from .row_table import NO_LOGPROBS, RowTable
from .sampler import SamplingBatch, stream_uniforms
from .staging import StagingBuffer
from .step import ScheduledBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapBatch:
    """Ids that go from one step to the next on the device, by row of the tables. Int64, device."""

    sampled_rows: torch.Tensor
    """[num_sampled] rows whose drawn tokens are kept for the next step."""
    placeholders: torch.Tensor | None
    """[p] places in `input_ids` that the device fills in; None: there are none."""
    placeholder_rows: torch.Tensor | None
    """[p] rows whose kept tokens belong there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """All device inputs of one step. Valid until the next `pack` into the same buffer."""

    input_ids: torch.Tensor
    """[num_tokens] int32, device; the new tokens of all sequences, one after another."""
    positions: torch.Tensor
    """[num_tokens] int64, device; place of each token in its own sequence."""
    metadata: AttentionMetadata
    """Where each sequence lies in the batch and in the paged cache."""
    logits_indices: torch.Tensor
    """[num_sampled + num_scored] int64, device; rows of the batch whose next token is wanted, then
    those whose next token is known and scored."""
    sampling: SamplingBatch
    """Sampling inputs of the sampled rows."""
    logits: LogitsBatch | None
    """What happens to their logits before they are sampled; None: nothing."""
    logprobs_of: torch.Tensor | None
    """[m] int64, device; those of the sampled rows whose log-probabilities are wanted; None: of
    none."""
    logprobs_of_cpu: np.ndarray
    """[m] int64, the same on the host; [0] for None."""
    num_logprobs: int
    """Most likeliest tokens that one of these rows wants."""
    scored_ids: torch.Tensor | None
    """[num_scored] int64, device; the tokens that are scored; None: there are none."""
    num_scored_logprobs: int
    """Most likeliest tokens that one of them wants."""
    block_copies: torch.Tensor | None
    """[2, c] int64, device; blocks to copy and where to, before the forward; None: none."""
    overlap: OverlapBatch | None
    """What the steps before and after have to do with it; None: steps don't overlap."""


def pack(table: RowTable, scheduled: ScheduledBatch, staging: StagingBuffer) -> InputBatch:
    """Build the flat batch with numpy, no Python per token, and copy it to the device once.

    Args:
        table: the rows, after `table.apply(scheduled)`. Not changed here.
        scheduled: a step with at least one token.
        staging: buffer for the copy; its earlier views become invalid.
    """
    num_seqs, num_tokens = scheduled.num_seqs, scheduled.num_tokens
    new, rows, sampled = scheduled.num_new_tokens, scheduled.rows, scheduled.sampled
    context = scheduled.num_computed_tokens + new
    max_context = int(context.max())
    max_blocks = -(-max_context // table.block_size)
    sampled_rows, num_sampled = rows[sampled], len(sampled)
    output_positions = context[sampled] - table.num_prompt_tokens[sampled_rows]
    extras = _Extras(table, scheduled, sampled_rows, output_positions)
    layout = staging.lay_out(
        {
            "positions": (np.int64, (num_tokens,)),
            "slot_mapping": (np.int64, (num_tokens,)),
            "logits_indices": (np.int64, (num_sampled + extras.num_scored,)),
            "input_ids": (np.int32, (num_tokens,)),
            "cu_seqlens_q": (np.int32, (num_seqs + 1,)),
            "cu_seqlens_k": (np.int32, (num_seqs + 1,)),
            "context_lens": (np.int32, (num_seqs,)),
            "block_tables": (np.int32, (num_seqs, max_blocks)),
            "temperature": (np.float32, (num_sampled,)),
            "top_k": (np.int32, (num_sampled,)),
            "top_p": (np.float32, (num_sampled,)),
            "min_p": (np.float32, (num_sampled,)),
            "uniforms": (np.float32, (num_sampled,)),
            **{name: (array.dtype.type, array.shape) for name, array in extras.arrays.items()},
        }
    )
    host, cu_seqlens_q = layout.host, layout.host["cu_seqlens_q"]
    cu_seqlens_q[0] = host["cu_seqlens_k"][0] = 0
    new.cumsum(out=cu_seqlens_q[1:])
    context.cumsum(out=host["cu_seqlens_k"][1:])
    host["context_lens"][:] = context
    host["input_ids"][:] = scheduled.token_ids
    table.block_tables[:, :max_blocks].take(rows, axis=0, out=host["block_tables"], mode="clip")
    _fill_positions(host, scheduled, table.block_size)
    np.subtract(cu_seqlens_q[1:][sampled], 1, out=host["logits_indices"][:num_sampled])
    if scheduled.scoring is not None:
        host["logits_indices"][num_sampled:] = scheduled.scoring.places
    for name, array in extras.arrays.items():
        host[name][:] = array
    for name in ("temperature", "top_k", "top_p", "min_p"):
        getattr(table, name).take(sampled_rows, out=host[name], mode="clip")
    host["uniforms"][:] = stream_uniforms(table.streams[sampled_rows], output_positions)
    device = staging.upload(layout)
    metadata = AttentionMetadata(
        cu_seqlens_q=device["cu_seqlens_q"],
        cu_seqlens_k=device["cu_seqlens_k"],
        max_seqlen_q=int(new.max()),
        max_seqlen_k=max_context,
        slot_mapping=device["slot_mapping"],
        context_lens=device["context_lens"],
        block_tables=device["block_tables"],
        num_decodes=scheduled.num_decodes,
        block_size=table.block_size,
        cu_seqlens_q_cpu=cu_seqlens_q,
        context_lens_cpu=host["context_lens"],
        block_tables_cpu=host["block_tables"],
    )
    return InputBatch(
        input_ids=device["input_ids"],
        positions=device["positions"],
        metadata=metadata,
        logits_indices=device["logits_indices"],
        sampling=_sampling_batch(table, sampled_rows, device),
        logits=None if extras.plan is None else extras.plan.batch(device),
        logprobs_of=device.get("logprobs_of"),
        logprobs_of_cpu=extras.logprobs_of,
        num_logprobs=extras.num_logprobs,
        scored_ids=device.get("scored_ids"),
        num_scored_logprobs=0 if scheduled.scoring is None else scheduled.scoring.num_top,
        block_copies=device.get("block_copies"),
        overlap=_overlap_batch(device),
    )


def pack_logits(
    table: RowTable, scheduled: ScheduledBatch, staging: StagingBuffer
) -> LogitsBatch | None:
    """What `pack` left out of a step whose draw waits for ids, now that the table has them."""
    rows = scheduled.rows[scheduled.sampled]
    context = scheduled.num_computed_tokens + scheduled.num_new_tokens
    num_outputs = context[scheduled.sampled] - table.num_prompt_tokens[rows]
    plan = LogitsPlan(table, rows, num_outputs)
    layout = staging.lay_out({n: (a.dtype.type, a.shape) for n, a in plan.arrays.items()})
    for name, array in plan.arrays.items():
        layout.host[name][:] = array
    return plan.batch(staging.upload(layout))


class _Extras:
    """Arrays of a step that most steps don't have: none of them costs anything there."""

    def __init__(
        self,
        table: RowTable,
        scheduled: ScheduledBatch,
        sampled_rows: np.ndarray,
        output_positions: np.ndarray,
    ) -> None:
        self.plan: LogitsPlan | None = None
        self.logprobs_of = _NOTHING
        self.num_logprobs = self.num_scored = 0
        self.arrays: dict[str, np.ndarray] = {}
        if table.num_with_rules and not scheduled.draw_waits:
            self.plan = LogitsPlan(table, sampled_rows, output_positions)
            self.arrays |= self.plan.arrays
        if table.num_with_logprobs:
            self.logprobs_of = np.flatnonzero(table.num_logprobs[sampled_rows] != NO_LOGPROBS)
            if len(self.logprobs_of):
                self.num_logprobs = int(table.num_logprobs[sampled_rows].max())
                self.arrays["logprobs_of"] = self.logprobs_of
        if scheduled.scoring is not None:
            self.num_scored = len(scheduled.scoring.places)
            self.arrays["scored_ids"] = scheduled.scoring.next_ids
        if scheduled.block_copies.size:
            self.arrays["block_copies"] = scheduled.block_copies
        if table.keeps_drawn:
            self.arrays["sampled_rows"] = sampled_rows
        if len(scheduled.placeholders):
            self.arrays["placeholders"] = scheduled.placeholders
            self.arrays["placeholder_rows"] = scheduled.rows[scheduled.placeholders]


_NOTHING = np.empty(0, dtype=np.int64)


def _fill_positions(
    host: dict[str, np.ndarray], scheduled: ScheduledBatch, block_size: int
) -> None:
    """positions and slot_mapping, from the counts and the packed block tables."""
    positions, num_seqs = host["positions"], scheduled.num_seqs
    sequence_of_token = np.arange(num_seqs)
    if scheduled.is_uniform_decode:
        positions[:] = scheduled.num_computed_tokens
    else:
        new = scheduled.num_new_tokens
        shift = scheduled.num_computed_tokens - host["cu_seqlens_q"][:-1]
        sequence_of_token = np.repeat(sequence_of_token, new)
        np.add(np.arange(scheduled.num_tokens), np.repeat(shift, new), out=positions)
    blocks = host["block_tables"][sequence_of_token, positions >> (block_size.bit_length() - 1)]
    np.multiply(blocks, block_size, out=host["slot_mapping"])
    host["slot_mapping"] += positions & (block_size - 1)


def _overlap_batch(device: dict[str, torch.Tensor]) -> OverlapBatch | None:
    if "sampled_rows" not in device:
        return None
    return OverlapBatch(
        sampled_rows=device["sampled_rows"],
        placeholders=device.get("placeholders"),
        placeholder_rows=device.get("placeholder_rows"),
    )


def _sampling_batch(
    table: RowTable, sampled_rows: np.ndarray, device: dict[str, torch.Tensor]
) -> SamplingBatch:
    return SamplingBatch(
        temperature=device["temperature"],
        top_k=device["top_k"],
        top_p=device["top_p"],
        min_p=device["min_p"],
        uniforms=device["uniforms"],
        all_greedy=not table.num_random,
        max_top_k=int(table.top_k[sampled_rows].max(initial=0)) if table.num_top_k else 0,
        any_top_p=bool(table.num_top_p),
        any_min_p=bool(table.num_min_p),
    )
