"""Plans of the torch backend: which slots are read, and which keys each query row sees.

Everything here happens once per step, mostly in numpy on the host copies; the tensors made are
used by all layers. Layers with the same window share one plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .backend import AttentionPlan
from .metadata import AttentionMetadata, AttentionSpec

IntArray: TypeAlias = npt.NDArray[np.int64]

# The most keys that a group of several sequences gathers. On a CPU they should still be in its
# cache when they are multiplied; elsewhere this only bounds the memory.
_CPU_GROUP_BYTES = 4 << 20
_ACCELERATOR_GROUP_BYTES = 256 << 20
# Gathering this much padding costs about as much as another group's operator calls.
_GROUP_OVERHEAD_BYTES = 192 << 10
_MAX_PADDED_FRACTION = 1 / 8
# Query rows times query heads per key/value head. Larger tiles spend more work above the
# diagonal, smaller ones repack the keys more often.
_TILE_ROWS = 384


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowGroup:
    """Sequences with one query row each and similar context lengths, attended as one batch."""

    first: int  # where the group begins in TorchPlan.single_rows
    last: int
    slots: torch.Tensor  # [num_rows * padded_len] int64, device; row by row
    mask: torch.Tensor | None  # [num_rows, 1, 1, padded_len], 0 or -inf; None: equal lengths


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryTile:
    """Successive query rows of one sequence, and the keys that any of them sees."""

    first_row: int  # rows of the sequence
    last_row: int
    first_key: int  # keys of the sequence's source
    last_key: int
    mask: torch.Tensor  # [num_rows * queries_per_kv, num_keys], 0 or -inf; rows vary slowest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefill:
    """A sequence with several query rows. Its source is the keys and values that it reads."""

    first_row: int  # rows of the flat batch
    last_row: int
    slots: torch.Tensor | None  # [num_keys] int64, device; None: the source is its own rows
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowPlan:
    """What the layers of one window do."""

    groups: tuple[RowGroup, ...]
    prefills: tuple[Prefill, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchPlan(AttentionPlan):
    """One step's plan of the torch backend."""

    slot_mapping: torch.Tensor  # [num_tokens] int64, device
    single_rows: torch.Tensor | None  # [n] int64, device; rows that are their sequence's only one
    singles_are_the_batch: bool  # single_rows is 0, 1, .. num_tokens - 1, as in most decode steps
    idle_rows: torch.Tensor | None  # [n] int64, device; padded rows
    layers: tuple[WindowPlan, ...]  # per layer
    key_scratch: torch.Tensor  # [most slots gathered at once, num_kv_heads, head_dim], device
    value_scratch: torch.Tensor  # like key_scratch


def compute_dtype(spec: AttentionSpec) -> torch.dtype:
    """The dtype to attend in. CPUs multiply float16 matrices many times slower than float32."""
    if spec.dtype == torch.float16 and spec.device.type == "cpu":
        return torch.float32
    return spec.dtype


def make_plan(spec: AttentionSpec, metadata: AttentionMetadata) -> TorchPlan:
    """Plan one step; see TorchPlan."""
    geometry = _Geometry(metadata)
    longest = geometry.context_lens.max(initial=0)
    windows = [None if w is None or w >= longest else w for w in spec.windows]
    plans = {w: _plan_window(spec, geometry, w) for w in dict.fromkeys(windows)}
    rows = geometry.first_rows[geometry.singles]
    scratch_shape = (_most_slots(plans.values()), spec.num_kv_heads, spec.head_dim)
    return TorchPlan(
        slot_mapping=metadata.slot_mapping,
        single_rows=_to_device(rows, spec) if rows.size else None,
        singles_are_the_batch=np.array_equal(rows, np.arange(metadata.num_tokens)),
        idle_rows=_to_device(geometry.idle_rows, spec) if geometry.idle_rows.size else None,
        layers=tuple(plans[w] for w in windows),
        # Kept for all layers: a fresh allocation of this size may cost a page fault per page.
        key_scratch=torch.empty(scratch_shape, dtype=spec.dtype, device=spec.device),
        value_scratch=torch.empty(scratch_shape, dtype=spec.dtype, device=spec.device),
    )


def _most_slots(plans: Iterable[WindowPlan]) -> int:
    most = 0
    for plan in plans:
        sizes = [group.slots.shape[0] for group in plan.groups]
        sizes += [prefill.slots.shape[0] for prefill in plan.prefills if prefill.slots is not None]
        most = max(most, *sizes, 0)
    return most


class _Geometry:
    """The step's sequences, split by how they are attended; arrays over all sequences."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        bounds = metadata.cu_seqlens_q_cpu.astype(np.int64)
        self.first_rows: IntArray = bounds[:-1]
        self.num_rows: IntArray = np.diff(bounds)
        self.context_lens: IntArray = metadata.context_lens_cpu.astype(np.int64)
        self.block_tables = metadata.block_tables_cpu
        self.block_size = metadata.block_size
        active = (self.context_lens > 0) & (self.num_rows > 0)
        assert np.all(self.context_lens >= self.num_rows * active), (
            "a sequence's context must hold its query rows"
        )
        widest = self.block_tables.shape[1] * self.block_size
        assert self.context_lens.max(initial=0) <= widest, "a context exceeds its block table"
        # A prefill chunk of one row is attended like a decode.
        singles = np.flatnonzero(active & (self.num_rows == 1))
        order = np.argsort(-self.context_lens[singles], kind="stable")
        self.singles: IntArray = singles[order]  # the longest context first
        self.prefills: IntArray = np.flatnonzero(active & (self.num_rows > 1))
        idle = np.ones(metadata.num_tokens, dtype=bool)
        idle[: bounds[-1]] = np.repeat(~active, self.num_rows)
        self.idle_rows: IntArray = np.flatnonzero(idle)

    def slots(self, sequences: IntArray, starts: IntArray, num_keys: IntArray) -> IntArray:
        """[len(sequences), max(num_keys)]: slots of positions starts .. starts + num_keys - 1.

        Short rows repeat their last slot. What a masked column reads must belong to the same
        sequence: a zero weight doesn't cancel the NaN that some other slot may hold.
        """
        offsets = np.minimum(np.arange(num_keys.max()), num_keys[:, None] - 1)
        positions = offsets + starts[:, None]
        shift = self.block_size.bit_length() - 1
        tables = self.block_tables[sequences]
        blocks = np.take_along_axis(tables, positions >> shift, axis=1).astype(np.int64)
        return (blocks << shift) + (positions & (self.block_size - 1))


def _plan_window(spec: AttentionSpec, geometry: _Geometry, window: int | None) -> WindowPlan:
    return WindowPlan(
        groups=_plan_groups(spec, geometry, window),
        prefills=_plan_prefills(spec, geometry, window),
    )


def _plan_groups(
    spec: AttentionSpec, geometry: _Geometry, window: int | None
) -> tuple[RowGroup, ...]:
    contexts = geometry.context_lens[geometry.singles]
    num_keys = contexts if window is None else np.minimum(contexts, window)
    groups = []
    for first, last in _split_by_length(num_keys, spec):
        lens = num_keys[first:last]
        starts = contexts[first:last] - lens
        slots = geometry.slots(geometry.singles[first:last], starts, lens)
        mask = None
        if lens[0] != lens[-1]:
            hidden = np.arange(lens[0]) >= lens[:, None]
            mask = torch.zeros(hidden.shape, dtype=compute_dtype(spec))
            mask = mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))
            mask = mask[:, None, None].to(spec.device)
        slots_on_device = _to_device(slots.ravel(), spec)
        groups.append(RowGroup(first=first, last=last, slots=slots_on_device, mask=mask))
    return tuple(groups)


def _split_by_length(num_keys: IntArray, spec: AttentionSpec) -> list[tuple[int, int]]:
    """Cut lengths in descending order into runs that padding to the longest costs little."""
    token_bytes = spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    on_cpu = spec.device.type == "cpu"
    max_tokens = (_CPU_GROUP_BYTES if on_cpu else _ACCELERATOR_GROUP_BYTES) // token_bytes
    overhead = _GROUP_OVERHEAD_BYTES // token_bytes
    runs = []
    first, used = 0, 0
    lens: list[int] = num_keys.tolist()
    for row, length in enumerate(lens):
        total = (row + 1 - first) * lens[first]
        padding = total - used - length
        if row > first and (
            total > max_tokens or padding > max(overhead, total * _MAX_PADDED_FRACTION)
        ):
            runs.append((first, row))
            first, used = row, 0
        used += length
    if lens:
        runs.append((first, len(lens)))
    return runs


def _plan_prefills(
    spec: AttentionSpec, geometry: _Geometry, window: int | None
) -> tuple[Prefill, ...]:
    sequences = geometry.prefills.tolist()
    spans = {sequence: _tile(spec, geometry, sequence, window) for sequence in sequences}
    if not spans:
        return ()
    mask = _widest_mask(spec, [span for group in spans.values() for span in group], window)
    prefills = []
    for sequence, tiles in spans.items():
        first_row = int(geometry.first_rows[sequence])
        context_len = int(geometry.context_lens[sequence])
        start = tiles[0].first_key
        slots = None
        if context_len > geometry.num_rows[sequence]:
            # Otherwise nothing is computed, and the step's own rows are the whole context.
            num_keys = np.array([context_len - start])
            slots = geometry.slots(np.array([sequence]), np.array([start]), num_keys)[0]
        prefills.append(
            Prefill(
                first_row=first_row,
                last_row=first_row + tiles[-1].last_row,
                slots=None if slots is None else _to_device(slots, spec),
                tiles=tuple(
                    QueryTile(
                        first_row=tile.first_row,
                        last_row=tile.last_row,
                        first_key=tile.first_key - start,
                        last_key=tile.last_key - start,
                        mask=_cut(mask, tile, spec),
                    )
                    for tile in tiles
                ),
            )
        )
    return tuple(prefills)


class _Span(NamedTuple):
    """A tile's rows of its sequence, and the positions of the keys that they see."""

    first_row: int
    last_row: int
    first_key: int
    last_key: int


def _tile(
    spec: AttentionSpec, geometry: _Geometry, sequence: int, window: int | None
) -> list[_Span]:
    """Cut a sequence's rows into tiles of about equal size."""
    num_rows = int(geometry.num_rows[sequence])
    computed = int(geometry.context_lens[sequence]) - num_rows
    max_rows = max(1, _TILE_ROWS // spec.queries_per_kv)
    num_tiles = -(-num_rows // max_rows)
    bounds = [tile * num_rows // num_tiles for tile in range(num_tiles + 1)]
    return [
        _Span(
            first_row=first,
            last_row=last,
            first_key=0 if window is None else max(0, computed + first - window + 1),
            last_key=computed + last,
        )
        for first, last in itertools.pairwise(bounds)
    ]


def _widest_mask(spec: AttentionSpec, spans: list[_Span], window: int | None) -> torch.Tensor:
    """Make the mask that those of all spans are cut from: [rows * queries_per_kv, keys].

    Rows and keys end at the same token, so which keys a row sees depends only on its distance
    from the last row: a smaller tile's mask is the lower right corner of a larger one's.
    """
    rows = max(span.last_row - span.first_row for span in spans)
    keys = max(span.last_key - span.first_key for span in spans)
    row = torch.arange(rows)[:, None]
    key = torch.arange(keys) - (keys - rows)
    hidden = key > row
    if window is not None:
        hidden |= key <= row - window
    mask = torch.zeros((rows, spec.queries_per_kv, keys), dtype=compute_dtype(spec))
    mask.masked_fill_(hidden[:, None], float("-inf"))
    return mask.flatten(0, 1).to(spec.device)


def _cut(mask: torch.Tensor, tile: _Span, spec: AttentionSpec) -> torch.Tensor:
    rows = (tile.last_row - tile.first_row) * spec.queries_per_kv
    corner = mask[-rows:, tile.first_key - tile.last_key :]
    # Fused kernels of accelerators may need rows that begin at an aligned address.
    return corner if spec.device.type == "cpu" else corner.contiguous()


def _to_device(array: IntArray, spec: AttentionSpec) -> torch.Tensor:
    return torch.from_numpy(array).to(spec.device)
