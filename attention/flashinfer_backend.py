"""Attention on CUDA with FlashInfer, the default there.

A step is at most two launches per layer: the decode wrapper on the first sequences, which have
one row each, and the prefill wrapper on all others. One launch for both would be simpler, but in
a mixed batch it gives each decoding row a tile of 128. Layers with different windows have
wrappers and plans of their own. Planning is host work, once per step and window.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from .backend import AttentionBackend, AttentionPlan
from .flashinfer_capture import CapturedFlashInferPlan
from .flashinfer_launch import (
    LAUNCHES_PER_WINDOW,
    FlashInferPlan,
    Kernels,
    Launch,
    MixedLauncher,
    WindowLauncher,
)
from .flashinfer_library import (
    FlashInferLibrary,
    library_reasons,
    load_flashinfer,
    version_reasons,
)
from .flashinfer_options import FlashInferOptions
from .flashinfer_workspace import FlashInferWorkspace, Staging
from .metadata import AttentionMetadata, AttentionSpec
from .page_plan import PagePlan, expand_pages, plan_pages
from .paged_kv_cache import PagedKVCache, write_kv
from .pinned_ring import PinnedRing

logger = logging.getLogger("stepgraph.attention")

_MIXED_WORKSPACE_BYTES = 384 << 20


class FlashInferBackend(AttentionBackend):
    """The CUDA backend; see the module's docstring.

    Args:
        spec: what to attend.
        cache_dir: not used; FlashInfer keeps its kernels where FLASHINFER_WORKSPACE_BASE says.
        options: see there.
        ring: host buffers, in place of those that suit the device.
    """

    name: ClassVar[str] = "flashinfer"
    library: ClassVar[Any] = None
    """A subclass may name a module that stands in for the package. It runs on any device."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    """Of queries, keys and values, as the kernels have them."""
    head_dims: ClassVar[tuple[int, ...]] = (64, 128, 256)
    """Likewise: the sizes for which parts of split sequences can be merged."""

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        cache_dir: Path | None = None,
        options: FlashInferOptions | None = None,
        ring: PinnedRing | None = None,
    ) -> None:
        super().__init__(spec, cache_dir=cache_dir)
        options = options or FlashInferOptions()
        library = FlashInferLibrary.of(self.library or load_flashinfer())
        fast_plan = library.fast_decode_plan()
        if fast_plan is None:
            logger.warning(
                "flashinfer %s has no fast_decode_plan of the known signature: captured decode "
                "steps are planned by plan(), which takes longer",
                library.module.__version__,
            )
        workspace = FlashInferWorkspace(
            spec,
            library,
            num_launches=LAUNCHES_PER_WINDOW * len(set(spec.windows)),
            fa3=options.prefill_kernel == "fa3",
            ring=ring,
        )
        self._workspace = workspace
        self._kernels = Kernels(
            spec=spec, library=library, workspace=workspace, fast_plan=fast_plan
        )
        self._launchers = {
            window: WindowLauncher(
                self._kernels,
                window,
                LAUNCHES_PER_WINDOW * place,
                prefill_kernel=options.prefill_kernel,
                ragged_prompts=options.ragged_prompts,
            )
            for place, window in enumerate(self._kernels.windows)
        }
        self._mixed = self._new_mixed_launcher() if options.mixed_kernel else None
        self._load_kernels()

    @classmethod
    def unsupported_reasons(
        cls, spec: AttentionSpec, *, cache_dir: Path | None = None
    ) -> list[str]:
        """Other devices, dtypes and head sizes are refused, and packages of other versions.

        The package is imported, which takes seconds, only where all else is right.
        """
        reasons = []
        if cls.library is None and spec.device.type != "cuda":
            reasons.append(f"device {spec.device} is not a CUDA device")
        if spec.dtype not in cls.dtypes:
            reasons.append(f"dtype {spec.dtype} is none of {', '.join(map(str, cls.dtypes))}")
        if spec.head_dim not in cls.head_dims:
            sizes = ", ".join(map(str, cls.head_dims))
            reasons.append(f"head_dim {spec.head_dim} is none of {sizes}")
        if reasons:
            return reasons
        if cls.library is not None:
            return version_reasons(FlashInferLibrary.of(cls.library))
        major, minor = torch.cuda.get_device_capability(spec.device)
        if major < 8:
            reasons.append(f"compute capability {major}.{minor} is below 8.0")
        return reasons + library_reasons()

    def plan(self, metadata: AttentionMetadata) -> FlashInferPlan:
        """Plan one step, for which all wrappers give up the plans they had."""
        self._make_room(metadata, "a larger step")
        with self._workspace.next_plan() as staging:
            pages = plan_pages(metadata, staging.ints)
            packed = torch.from_numpy(pages.packed).to(self.spec.device, non_blocking=True)
            indices = torch.empty(pages.num_pages, dtype=torch.int32, device=self.spec.device)
            ranks = self._workspace.ranks(pages.num_pages)
            expand_pages(metadata.block_tables, packed, ranks, indices)
            launches = self._plan_launches(metadata, pages, indices, staging)
        return FlashInferPlan(
            slot_mapping=metadata.slot_mapping,
            layers=tuple(launches[window] for window in self.spec.windows),
            idle_rows=_idle_rows(metadata),
            padding=None,
            number=staging.number,
        )

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        plan: AttentionPlan,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write, then attend; padded rows give zeros. See AttentionBackend.run."""
        assert isinstance(plan, FlashInferPlan), "the plan is another backend's"
        assert plan.number in (None, self._workspace.num_plans), "another step was planned since"
        keys, values = cache.keys[layer], cache.values[layer]
        write_kv(key, value, keys, values, plan.slot_mapping)
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for launch in plan.layers[layer]:
            launch.run(query, key, value, (keys, values), out)
        for rows in plan.idle_rows:
            out[rows].zero_()
        if plan.padding is not None:
            out.masked_fill_(plan.padding, 0)
        return out

    def capturable_plan(self, metadata: AttentionMetadata) -> CapturedFlashInferPlan:
        """See GraphSupport.capturable_plan."""
        self._make_room(metadata, f"a graph of {metadata.num_seqs} sequences")
        return CapturedFlashInferPlan(self._kernels, metadata)

    def _make_room(self, metadata: AttentionMetadata, reason: str) -> None:
        assert metadata.block_size == self.spec.block_size, (
            f"metadata is for blocks of {metadata.block_size}, the backend for "
            f"{self.spec.block_size}"
        )
        if self._workspace.reserve(metadata.num_seqs, metadata.num_tokens, reason):
            for launcher in self._launchers.values():
                launcher.bind()

    def _plan_launches(
        self,
        metadata: AttentionMetadata,
        pages: PagePlan,
        indices: torch.Tensor,
        staging: Staging,
    ) -> dict[int | None, tuple[Launch, ...]]:
        if self._mixed is not None and pages.prefill.num_pages:
            launches = self._mixed.plan(pages, metadata.cu_seqlens_q_cpu, indices)
            return {None: launches}
        return {
            window: launcher.plan(pages, indices, staging)
            for window, launcher in self._launchers.items()
        }

    def _new_mixed_launcher(self) -> MixedLauncher:
        spec, num_sms = self.spec, self._workspace.num_sms
        if any(spec.windows):
            raise ValueError(f"mixed_kernel knows no windows, the model has {spec.windows}")
        parts = 4 * (128 + 16) * num_sms * (1 if spec.head_dim >= 256 else 2)
        needed = parts * spec.num_kv_heads * (2 * spec.head_dim + 4)
        if needed > _MIXED_WORKSPACE_BYTES:
            raise ValueError(
                f"mixed_kernel would need {needed >> 20} MiB of its workspace of "
                f"{_MIXED_WORKSPACE_BYTES >> 20} MiB for {spec.num_kv_heads} key/value heads of "
                f"{spec.head_dim}; leave it off"
            )
        return MixedLauncher(self._kernels)

    def _load_kernels(self) -> None:
        """Plan a decode and a chunk, which compiles what isn't yet, so that no step has to."""
        version = self._kernels.library.module.__version__
        logger.info("loading kernels of flashinfer %s; compiling new ones takes minutes", version)
        try:
            for num_decodes, context in ((1, 1), (0, 2)):
                self.plan(_one_row_step(self.spec, num_decodes, context))
        except RuntimeError as error:
            raise RuntimeError(
                f"flashinfer {version} can't plan attention of {self._kernels.heads()} heads in "
                f"{self.spec.dtype}: {error}"
            ) from error


def _idle_rows(metadata: AttentionMetadata) -> tuple[slice, ...]:
    """Rows after the last sequence, and those of sequences without context."""
    bounds, contexts = metadata.cu_seqlens_q_cpu, metadata.context_lens_cpu
    slices = []
    if not contexts.all():
        empty = np.flatnonzero((contexts == 0) & (np.diff(bounds) > 0))
        slices = [slice(int(bounds[i]), int(bounds[i + 1])) for i in empty]
    if bounds[-1] < metadata.num_tokens:
        slices.append(slice(int(bounds[-1]), metadata.num_tokens))
    return tuple(slices)


def _one_row_step(spec: AttentionSpec, num_decodes: int, context: int) -> AttentionMetadata:
    """One row of one sequence, in the null block."""
    bounds = np.array([0, 1], dtype=np.int32)
    contexts = np.array([context], dtype=np.int32)
    tables = np.zeros((1, context), dtype=np.int32)
    device = spec.device
    return AttentionMetadata(
        cu_seqlens_q=torch.from_numpy(bounds).to(device),
        cu_seqlens_k=torch.from_numpy(bounds * context).to(device),
        max_seqlen_q=1,
        max_seqlen_k=context,
        slot_mapping=torch.zeros(1, dtype=torch.int64, device=device),
        context_lens=torch.from_numpy(contexts).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        num_decodes=num_decodes,
        block_size=spec.block_size,
        cu_seqlens_q_cpu=bounds,
        context_lens_cpu=contexts,
        block_tables_cpu=tables,
    )
