"""Memory that FlashInfer's kernels and planners work in, shared by all wrappers of a model.

    float     partial results of sequences that are split over their keys; one for all launches,
              since only one runs at a time
    schedule  one per launch of a step: what the planner wrote for it
    pages     the list of pages of a captured step, one for all numbers of sequences
    staging   on the host, in turns: a step's own integers, then its schedules

Since schedules are shared, a plan is stale as soon as the next one is made. FlashInfer would
take 8 MiB of schedule on the device and on the host for each wrapper.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from .flashinfer_library import FlashInferLibrary
from .metadata import AttentionSpec
from .page_plan import IntArray, num_plan_ints
from .pinned_ring import PinnedRing

logger = logging.getLogger("stepgraph.attention")

_ALIGNMENT = 256
_SMALLEST_SCHEDULE = 256 << 10
# Query heads per key/value head up to which decodes gain nothing from tensor cores.
_MAX_GROUP_WITHOUT_TENSOR_CORES = 3
# A kernel of 128 threads leaves room for this many blocks on a multiprocessor.
_MAX_BLOCKS_PER_SM = 16


class Staging:
    """One turn of the ring: where a plan's integers and schedules are written."""

    def __init__(
        self, buffer: torch.Tensor, num_ints: int, num_launches: int, schedule_bytes: int
    ) -> None:
        self.number = 0
        """Counts the plans made in the workspace."""
        self.ints: IntArray = buffer[: 4 * num_ints].numpy().view(np.int32)
        """[num_ints], undefined."""
        first = _aligned(4 * num_ints)
        self.schedules = [
            buffer[first + index * schedule_bytes :][:schedule_bytes]
            for index in range(num_launches)
        ]
        """[num_launches], each [schedule_bytes] uint8, for the planner of one launch."""


class FlashInferWorkspace:
    """Owns the buffers, sized for the largest step that is known of.

    Args:
        spec: what is attended, with the limits of a step.
        library: whose planner it is.
        num_launches: most launches planned in one step.
        fa3: whether prefills use the kernel whose schedules are longer.
        ring: in place of one that suits the device.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        library: FlashInferLibrary,
        *,
        num_launches: int,
        fa3: bool = False,
        ring: PinnedRing | None = None,
    ) -> None:
        self._spec, self._library, self._fa3 = spec, library, fa3
        self._num_launches = num_launches
        self.num_sms = _num_multiprocessors(spec.device)
        self._max_seqs, self._max_rows = 0, 0
        self._schedule_bytes = 0
        self._pages = torch.empty(0, dtype=torch.int32, device=spec.device)
        self._ranks = torch.empty(0, dtype=torch.int32, device=spec.device)
        self._stagings: dict[int, Staging] = {}  # by their buffers' addresses
        self.num_plans = 0
        """Plans made so far; only the last one's schedules are there."""
        self.float_buffer = torch.empty(0, dtype=torch.uint8, device=spec.device)
        """uint8, zero at first."""
        self.schedules: list[torch.Tensor] = []
        """One per launch of a step, uint8."""
        self.ring = ring or PinnedRing(0, spec.device)
        """Buffers that a Staging divides."""
        self.reserve(spec.max_num_seqs, spec.max_num_tokens, "the limits of a step")

    @contextmanager
    def next_plan(self) -> Iterator[Staging]:
        """Host memory for a plan, whose copies are queued on the current stream inside."""
        self.num_plans += 1
        with self.ring.turn() as buffer:
            staging = self._stagings.get(buffer.data_ptr())
            if staging is None:
                num_ints = num_plan_ints(self._max_seqs)
                staging = Staging(buffer, num_ints, self._num_launches, self._schedule_bytes)
                self._stagings[buffer.data_ptr()] = staging
            staging.number = self.num_plans
            yield staging

    def pages(self, num_pages: int) -> torch.Tensor:
        """[num_pages] int32, device: for the list of pages of a captured step."""
        if num_pages > len(self._pages):
            self._pages = torch.zeros(num_pages, dtype=torch.int32, device=self._spec.device)
        return self._pages[:num_pages]

    def ranks(self, num_pages: int) -> torch.Tensor:
        """[num_pages] int32, device: 0, 1, ..."""
        if num_pages > len(self._ranks):
            size = 2 * max(num_pages, 1 << 12)
            self._ranks = torch.arange(size, dtype=torch.int32, device=self._spec.device)
        return self._ranks[:num_pages]

    def reserve(self, num_seqs: int, num_rows: int, reason: str) -> bool:
        """Make room for steps of so many sequences and rows; whether buffers had to move.

        Wrappers that were made before keep the buffers they have, so graphs stay valid.
        """
        if num_seqs <= self._max_seqs and num_rows <= self._max_rows:
            return False
        self._max_seqs = max(num_seqs, self._max_seqs)
        self._max_rows = max(num_rows, self._max_rows)
        spec = self._spec
        float_bytes = float_workspace_bytes(spec, self._library, self.num_sms, self._max_seqs)
        schedule_bytes = schedule_workspace_bytes(
            spec, self.num_sms, self._max_seqs, self._max_rows, fa3=self._fa3
        )
        if float_bytes > len(self.float_buffer):
            logger.info(
                "attention workspace: %.1f MiB for %d query heads, %d KV heads of size %d and %d "
                "sequences (%s)",
                *(float_bytes / 2**20, spec.num_heads, spec.num_kv_heads, spec.head_dim),
                *(self._max_seqs, reason),
            )
            self.float_buffer = torch.zeros(float_bytes, dtype=torch.uint8, device=spec.device)
        if schedule_bytes > self._schedule_bytes:
            self._schedule_bytes = schedule_bytes
            self.schedules = [
                torch.empty(schedule_bytes, dtype=torch.uint8, device=spec.device)
                for _ in range(self._num_launches)
            ]
        self._stagings.clear()
        own = _aligned(4 * num_plan_ints(self._max_seqs))
        self.ring.grow(own + self._num_launches * self._schedule_bytes)
        return True


def decodes_on_tensor_cores(spec: AttentionSpec) -> bool:
    """Which kernel eager decodes take. The one without tensor cores reads past any window."""
    return spec.queries_per_kv > _MAX_GROUP_WITHOUT_TENSOR_CORES or any(spec.windows)


def float_workspace_bytes(
    spec: AttentionSpec, library: FlashInferLibrary, num_sms: int, num_seqs: int
) -> int:
    """Most bytes of partial results that any plan reserves, by the planner's own arithmetic.

    A plan that splits sequences makes as many parts as keep the device busy, each of one tile
    of query rows, a row being one query head of one token. Captured plans reserve for the parts
    of any step; before 0.7.4 also for steps of so many sequences that none is split.

    Args:
        spec: what is attended.
        library: whose planner it is.
        num_sms: multiprocessors of the device.
        num_seqs: most sequences of a captured step.
    """
    group = spec.queries_per_kv
    most_parts = 2 * num_sms // spec.num_kv_heads
    tile, decode_tile = _tile_rows(1 << 20, spec.head_dim), _tile_rows(group, spec.head_dim)
    captured_parts = most_parts
    if not library.full_decodes_stay_whole:
        captured_parts = max(most_parts, -(-num_seqs * group // decode_tile) + num_seqs - 1)
    packed_rows = max(most_parts * tile, captured_parts * decode_tile)
    rows = -(-packed_rows // group) if library.partial_rows_by_group else packed_rows
    if not decodes_on_tensor_cores(spec):  # sequences without pages count twice
        rows = max(rows, 2 * _MAX_BLOCKS_PER_SM * num_sms // spec.num_kv_heads)
    bytes_per_row = spec.num_heads * (spec.head_dim + 1) * 4
    return _aligned(rows * bytes_per_row + 2 * _ALIGNMENT)


def schedule_workspace_bytes(
    spec: AttentionSpec, num_sms: int, num_seqs: int, num_rows: int, *, fa3: bool = False
) -> int:
    """Most bytes that a plan's schedule takes: some integers per tile, per sequence and per row.

    Args:
        spec: what is attended.
        num_sms: multiprocessors of the device.
        num_seqs: most sequences of a step.
        num_rows: most query rows of a step.
        fa3: whether the prefill kernel is fa3, which schedules each query head by itself.
    """
    # The tile is chosen by the mean length, and no step has twice the tiles of that many rows.
    packed_rows = num_rows * spec.queries_per_kv
    num_tiles = 2 * num_seqs + packed_rows // 64 + _MAX_BLOCKS_PER_SM * num_sms
    num_bytes = 13 * num_tiles + 4 * (num_seqs + num_rows + 8)
    if fa3:
        num_works = (num_rows // 128 + num_seqs) * spec.num_heads
        num_bytes = max(num_bytes, 4 * (7 * num_works + num_sms + 1))
    return max(_SMALLEST_SCHEDULE, _aligned(num_bytes + 16 * _ALIGNMENT))


def _tile_rows(packed_rows: int, head_dim: int) -> int:
    """Query rows of one tile of the fa2 kernel, for sequences of so many on average."""
    if packed_rows > 64 and head_dim < 256:
        return 128
    return 64 if packed_rows > 16 else 16


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # a stand-in plans for the H100
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
