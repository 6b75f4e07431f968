"""FlashInfer's decode wrappers as part of captured graphs.

There is one wrapper per number of sequences and window, over buffers that never move. Decodes are
always captured on tensor cores: without them the planner makes no room for sequences without
context, which pad a captured step.
"""

from __future__ import annotations

import torch

from .flashinfer_launch import LAUNCHES_PER_WINDOW, FlashInferPlan, Kernels, Launch, plan_vector
from .metadata import AttentionMetadata
from .page_plan import expand_pages, plan_pages


class CapturedFlashInferPlan:
    """Plans of one number of decoding sequences, in buffers that never move.

    Args:
        kernels: of the backend that makes it.
        metadata: see GraphSupport.capturable_plan.
    """

    def __init__(self, kernels: Kernels, metadata: AttentionMetadata) -> None:
        num_seqs, max_blocks = metadata.block_tables.shape
        assert metadata.num_decodes == num_seqs, "only decodes are captured"
        spec = kernels.spec
        self._kernels = kernels
        self._captured_tables = metadata.block_tables
        self._packed = torch.zeros(3 * num_seqs + 1, dtype=torch.int32, device=spec.device)
        self._pages = kernels.workspace.pages(num_seqs * max_blocks)
        self._wrappers = {
            window: kernels.new_wrapper(
                "BatchDecodeWithPagedKVCacheWrapper",
                LAUNCHES_PER_WINDOW * place,
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=self._packed[: num_seqs + 1],
                paged_kv_indices_buffer=self._pages,
                paged_kv_last_page_len_buffer=self._packed[num_seqs + 1 : 2 * num_seqs + 1],
                backend="fa2",
            )
            for place, window in enumerate(kernels.windows)
        }
        rows = slice(0, num_seqs)
        launches = {w: (Launch(wrapper=x, rows=rows),) for w, x in self._wrappers.items()}
        padding = None
        if not kernels.library.empty_rows_are_zero:
            padding = torch.zeros(num_seqs, 1, 1, dtype=torch.bool, device=spec.device)
        self.plan = FlashInferPlan(
            slot_mapping=metadata.slot_mapping,
            layers=tuple(launches[window] for window in spec.windows),
            idle_rows=(),
            padding=padding,
            number=None,
        )
        """What run() is captured with."""
        self._captured = self._plan(metadata, fast=False)

    def refresh(self, metadata: AttentionMetadata) -> bool:
        """See CapturablePlan.refresh."""
        return self._plan(metadata, fast=True) == self._captured

    def _plan(self, metadata: AttentionMetadata, *, fast: bool) -> list[tuple[int, ...]]:
        """Fill the buffers and plan each window; the plan vectors."""
        assert metadata.block_tables.data_ptr() == self._captured_tables.data_ptr(), (
            "the step's tables aren't those of the capture"
        )
        kernels = self._kernels
        with kernels.workspace.next_plan() as staging:
            pages = plan_pages(metadata, staging.ints)
            self._packed.copy_(torch.from_numpy(pages.packed), non_blocking=True)
            indices = self._pages[: pages.num_pages]
            ranks = kernels.workspace.ranks(pages.num_pages)
            expand_pages(metadata.block_tables, self._packed, ranks, indices)
            if self.plan.padding is not None:
                torch.eq(metadata.context_lens.view(-1, 1, 1), 0, out=self.plan.padding)
            for place, (window, wrapper) in enumerate(self._wrappers.items()):
                schedule = staging.schedules[LAUNCHES_PER_WINDOW * place]
                fast_plan = kernels.fast_plan if fast else None
                kernels.plan_decode(wrapper, window, pages.decode, indices, schedule, fast_plan)
        return [plan_vector(wrapper) for wrapper in self._wrappers.values()]
