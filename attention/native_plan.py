"""Plans of the native backend: the step's work, cut into items of similar cost.

An item is some query rows of one sequence, for some key/value heads, against a range of keys.
Threads take items from the list, the most expensive ones first. All in numpy, once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .backend import AttentionPlan
from .metadata import AttentionMetadata, AttentionSpec

IntArray: TypeAlias = npt.NDArray[np.int64]

WORK_COLUMNS = 9
"""Columns of a work list; csrc/call.h mirrors their order."""
# Query rows times query heads per key/value head: enough to repay packing a tile of keys.
_TILE_ROWS = 96
# What loading a key and its value costs, in rows that are multiplied with them. A few rows leave
# out packing, but then memory is what they wait for, and that costs as much.
_LOADING_ROWS = 4
# Keys that a part must have, so that merging the parts costs little beside them.
_MIN_PART_KEYS = 128
# What suffices where a thread would have nothing else to do.
_MIN_IDLE_PART_KEYS = 96
# Parts end at multiples of what the kernel attends at once.
_KERNEL_KEYS = 64
_ITEMS_PER_THREAD = 4
# Products per thread below which waking it costs more than it saves.
_MIN_THREAD_PRODUCTS = 1 << 16
_NOTHING = np.empty((0, WORK_COLUMNS), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NativePlan(AttentionPlan):
    """One step's plan of the native backend."""

    slot_mapping: torch.Tensor  # [num_tokens] int64
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32
    layers: tuple[torch.Tensor, ...]
    """Per layer its work list, [1 + items + reductions, WORK_COLUMNS] int32:

    header     items, reductions, partial results, threads
    item       position minus row, sequence, first and last row, first and last key/value head,
               first and last key, and where its partial results begin (-1: it has none)
    reduction  first and last row, first and last key/value head, where the first part's results
               begin, parts; the results of one part follow those of another
    """


def make_plan(spec: AttentionSpec, metadata: AttentionMetadata, num_threads: int) -> NativePlan:
    """Plan one step for so many threads; layers with the same window share a work list."""
    contexts = metadata.context_lens_cpu
    longest = contexts.max(initial=0)
    assert longest <= metadata.block_tables_cpu.shape[1] * metadata.block_size, (
        "a context exceeds its block table"
    )
    windows = [None if w is None or w >= longest else w for w in spec.windows]
    lists = {w: _work_list(spec, metadata, w, num_threads) for w in dict.fromkeys(windows)}
    return NativePlan(
        slot_mapping=metadata.slot_mapping,
        block_tables=metadata.block_tables,
        layers=tuple(lists[w] for w in windows),
    )


class CapturableNativePlan:
    """Plans decode steps of one number of sequences into buffers that never move.

    Args:
        spec: what is attended.
        metadata: the first step, uniform decode. Its tensors are kept: they hold the slots and the
            block tables of every later step.
        num_threads: the threads of all steps.
    """

    def __init__(self, spec: AttentionSpec, metadata: AttentionMetadata, num_threads: int) -> None:
        self._spec = spec
        self._num_threads = num_threads
        num_seqs = metadata.num_seqs
        # Splitting adds at most 2 * _ITEMS_PER_THREAD items a thread, and a sequence has one
        # reduction at most; one without keys has an item too.
        num_rows = 1 + 2 * num_seqs + 2 * _ITEMS_PER_THREAD * num_threads
        self._buffers = {
            window: torch.zeros((num_rows, WORK_COLUMNS), dtype=torch.int32)
            for window in dict.fromkeys(spec.windows)
        }
        self.plan = NativePlan(
            slot_mapping=metadata.slot_mapping,
            block_tables=metadata.block_tables,
            layers=tuple(self._buffers[window] for window in spec.windows),
        )
        """What a graph is captured with."""
        self.refresh(metadata)

    def refresh(self, metadata: AttentionMetadata) -> bool:
        """Plan a step of as many sequences, whose tensors are those of the first; always True.

        Nothing but the work lists depends on the step, and the kernel reads their lengths there.
        """
        plan = make_plan(self._spec, metadata, self._num_threads)
        for name in ("slot_mapping", "block_tables"):
            given, kept = getattr(plan, name), getattr(self.plan, name)
            assert given.data_ptr() == kept.data_ptr(), f"{name} isn't the first step's"
        work_lists = dict(zip(self._spec.windows, plan.layers, strict=True))
        for window, work in work_lists.items():
            self._buffers[window][: len(work)] = work
        return True


def _work_list(
    spec: AttentionSpec, metadata: AttentionMetadata, window: int | None, num_threads: int
) -> torch.Tensor:
    num_seqs, num_decodes = metadata.num_seqs, metadata.num_decodes
    only_decodes = num_seqs == num_decodes == metadata.num_tokens
    only_decodes = only_decodes and bool(metadata.context_lens_cpu.all())
    make_items = _decode_items if only_decodes else _tile
    items = make_items(spec, metadata, window)
    cost = _cost(spec, items)
    # All threads or one: OpenMP runtimes end threads that a smaller team leaves over.
    if cost.sum() * spec.head_dim < _MIN_THREAD_PRODUCTS * num_threads:
        num_threads = 1
    items, reductions, num_partials = _split_keys(spec, items, cost, num_threads)
    if len(items) == 1:
        num_threads = 1  # there is nothing to share
    if len(items) > 1:
        items = items[np.argsort(-_cost(spec, items), kind="stable")]
    idle = _NOTHING if only_decodes else _idle_items(spec, metadata)
    header = np.zeros((1, WORK_COLUMNS), dtype=np.int64)
    header[0, :4] = len(items) + len(idle), len(reductions), num_partials, num_threads
    work = np.concatenate([header, items, idle, reductions])
    return torch.from_numpy(work.astype(np.int32))


def _cost(spec: AttentionSpec, items: IntArray) -> IntArray:
    rows = (items[:, 3] - items[:, 2]) * spec.queries_per_kv
    heads = items[:, 5] - items[:, 4]
    cost: IntArray = (rows + _LOADING_ROWS) * heads * (items[:, 7] - items[:, 6])
    return cost


def _decode_items(spec: AttentionSpec, metadata: AttentionMetadata, window: int | None) -> IntArray:
    """What `_tile` gives for rows that all decode, which few sequences need without delay."""
    contexts = metadata.context_lens_cpu
    sequence = np.arange(len(contexts))
    items = np.zeros((len(contexts), WORK_COLUMNS), dtype=np.int64)
    items[:, 1] = items[:, 2] = sequence
    items[:, 3] = sequence + 1
    items[:, 0] = contexts - items[:, 3]
    items[:, 5] = spec.num_kv_heads
    if window is not None:
        items[:, 6] = np.maximum(0, contexts - window)
    items[:, 7] = contexts
    items[:, 8] = -1
    return items


def _tile(spec: AttentionSpec, metadata: AttentionMetadata, window: int | None) -> IntArray:
    """Items with all of their keys. A decoding row takes all heads: for one it has little to do."""
    bounds = metadata.cu_seqlens_q_cpu.astype(np.int64)
    num_rows = np.diff(bounds)
    contexts = metadata.context_lens_cpu.astype(np.int64)
    active = np.flatnonzero((contexts > 0) & (num_rows > 0))
    assert np.all(contexts[active] >= num_rows[active]), (
        "a sequence's context must hold its query rows"
    )
    tile_rows = max(1, _TILE_ROWS // spec.queries_per_kv)
    tiles = -(-num_rows[active] // tile_rows)
    head_items = np.where(num_rows[active] == 1, 1, spec.num_kv_heads)
    counts = tiles * head_items
    owner = np.repeat(np.arange(len(active)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    head_items, tiles = head_items[owner], tiles[owner]
    sequence = active[owner]
    rows = num_rows[sequence]
    tile, head = np.divmod(within, head_items)
    first = bounds[sequence] + tile * rows // tiles
    last = bounds[sequence] + (tile + 1) * rows // tiles
    offset = contexts[sequence] - bounds[sequence + 1]
    items = np.empty((len(owner), WORK_COLUMNS), dtype=np.int64)
    items[:, 0] = offset
    items[:, 1] = sequence
    items[:, 2] = first
    items[:, 3] = last
    items[:, 4] = head
    items[:, 5] = np.where(head_items == 1, spec.num_kv_heads, head + 1)
    items[:, 6] = 0 if window is None else np.maximum(0, offset + first - window + 1)
    items[:, 7] = offset + last
    items[:, 8] = -1
    return items


def _split_keys(
    spec: AttentionSpec, items: IntArray, cost: IntArray, num_threads: int
) -> tuple[IntArray, IntArray, int]:
    """Cut items that would keep one thread busy while others idle; also the reductions needed."""
    if num_threads == 1 or not len(items):
        return items, _NOTHING, 0
    num_keys = items[:, 7] - items[:, 6]
    limit = max(1, int(cost.sum()) // (num_threads * _ITEMS_PER_THREAD))
    most = num_keys // _MIN_PART_KEYS
    if len(items) < num_threads:
        share = -(-num_threads // len(items))
        most = np.maximum(most, np.minimum(share, num_keys // _MIN_IDLE_PART_KEYS))
    parts = np.maximum(1, np.minimum(-(-cost // limit), most))
    if parts.max() == 1:
        return items, _NOTHING, 0
    owner = np.repeat(np.arange(len(items)), parts)
    part = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    split = items[owner]
    keys = num_keys[owner]
    for column, number in ((6, part), (7, part + 1)):
        ends = -(-number * keys // (parts[owner] * _KERNEL_KEYS)) * _KERNEL_KEYS
        split[:, column] = items[owner, 6] + np.minimum(ends, keys)
    results = (split[:, 3] - split[:, 2]) * (split[:, 5] - split[:, 4]) * spec.queries_per_kv
    results[parts[owner] == 1] = 0
    split[:, 8] = np.where(results > 0, np.cumsum(results) - results, -1)
    first_parts = split[(part == 0) & (results > 0)]
    reductions = np.zeros((len(first_parts), WORK_COLUMNS), dtype=np.int64)
    reductions[:, :4] = first_parts[:, 2:6]
    reductions[:, 4] = first_parts[:, 8]
    reductions[:, 5] = parts[parts > 1]
    return split, reductions, int(results.sum())


def _idle_items(spec: AttentionSpec, metadata: AttentionMetadata) -> IntArray:
    """One item without keys per padded row, which makes the row zero."""
    bounds = metadata.cu_seqlens_q_cpu
    idle = np.ones(metadata.num_tokens, dtype=bool)
    idle[: bounds[-1]] = np.repeat(metadata.context_lens_cpu == 0, np.diff(bounds))
    rows = np.flatnonzero(idle)
    items = np.zeros((len(rows), WORK_COLUMNS), dtype=np.int64)
    items[:, 2] = rows
    items[:, 3] = rows + 1
    items[:, 5] = spec.num_kv_heads
    items[:, 8] = -1
    return items
