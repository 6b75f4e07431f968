"""Attention on CUDA with FlashAttention 2, which reads pages of 256 tokens in place.

The alternative to flashinfer: nothing is planned on the host beyond the longest lengths, and
nothing needs to be installed with a recent torch. See flash_attn_kernels.py for where the kernel
comes from.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from .backend import AttentionBackend, AttentionPlan
from .flash_attn_kernels import KernelMissingError, SequenceGroup, find_kernel
from .metadata import AttentionMetadata, AttentionSpec
from .paged_kv_cache import PagedKVCache, write_kv

logger = logging.getLogger("stepgraph.attention")

_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
_MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashAttnPlan(AttentionPlan):
    """One step's plan of the flash_attn backend."""

    slot_mapping: torch.Tensor  # [num_tokens] int64, device
    groups: tuple[SequenceGroup, ...]  # in the order of their rows, from row 0 on without gaps


class CapturableFlashAttnPlan:
    """A plan over the static tensors of captured decode steps; see GraphSupport.

    The kernel reads lengths and tables from these tensors, so nothing is planned anew. The
    longest context is baked into the launch: it is what the widest table can hold. That number
    decides how many splits there are, each for an equal share of the longest context. So a
    context much shorter than that lies in the first few splits and gains little from the others;
    the results are right for any. From about 1.6 * SMs / num_kv_heads sequences on, the GPU is
    full without splits, and the number changes nothing.
    """

    def __init__(self, metadata: AttentionMetadata) -> None:
        longest = metadata.block_tables.shape[1] * metadata.block_size
        self.plan = FlashAttnPlan(
            slot_mapping=metadata.slot_mapping,
            groups=(
                SequenceGroup(
                    first_row=0,
                    last_row=metadata.num_seqs,
                    cu_seqlens_q=metadata.cu_seqlens_q,
                    cu_seqlens_k=metadata.cu_seqlens_k,
                    context_lens=metadata.context_lens,
                    block_tables=metadata.block_tables,
                    max_seqlen_q=1,
                    max_seqlen_k=longest,
                ),
            ),
        )

    def refresh(self, metadata: AttentionMetadata) -> bool:
        """Nothing to do: the tensors are the captured ones, refilled, and no launch differs."""
        for name in ("cu_seqlens_q", "cu_seqlens_k", "context_lens", "block_tables"):
            tensor, captured = getattr(metadata, name), getattr(self.plan.groups[0], name)
            assert tensor.data_ptr() == captured.data_ptr(), f"{name} has moved since the capture"
        return True


class FlashAttnBackend(AttentionBackend):
    """FlashAttention 2; see the module's docstring.

    Logs which build of the kernel it takes, and why.

    Raises KernelMissingError if there is none.
    """

    name: ClassVar[str] = "flash_attn"
    block_size_multiple: ClassVar[int] = 256

    def __init__(self, spec: AttentionSpec, *, cache_dir: Path | None = None) -> None:
        super().__init__(spec, cache_dir=cache_dir)
        kernel = find_kernel()
        self._attend = kernel.attend
        logger.info("flash_attn backend: %s (%s)", kernel.name, kernel.reason)

    @classmethod
    def unsupported_reasons(
        cls, spec: AttentionSpec, *, cache_dir: Path | None = None
    ) -> list[str]:
        """What the kernels don't take, older GPUs, and a missing kernel."""
        reasons = _device_reasons(spec.device)
        if spec.dtype not in _DTYPES:
            reasons.append(f"dtype {spec.dtype} is none of {', '.join(map(str, _DTYPES))}")
        if spec.head_dim % 8 or spec.head_dim > _MAX_HEAD_DIM:
            reasons.append(f"head_dim {spec.head_dim} is not a multiple of 8 up to {_MAX_HEAD_DIM}")
        if spec.block_size % cls.block_size_multiple:
            reasons.append(
                f"block_size {spec.block_size} is not a multiple of {cls.block_size_multiple} "
                "(left open, it becomes one where this backend is asked for)"
            )
        if not spec.scale > 0:
            reasons.append(f"scale {spec.scale} is not positive")
        if spec.soft_cap is not None:
            reasons.append("scores can't be capped")
        if not reasons:
            try:
                find_kernel()
            except KernelMissingError as error:
                reasons.append(str(error))
        return reasons

    def plan(self, metadata: AttentionMetadata) -> FlashAttnPlan:
        """Split the batch into decodes and the rest, so that a chunk's tiles don't hold decodes."""
        assert metadata.block_size == self.spec.block_size, (
            f"metadata is for blocks of {metadata.block_size}, the backend for "
            f"{self.spec.block_size}"
        )
        cuts = sorted({0, metadata.num_decodes, metadata.num_seqs})
        groups = [_group(metadata, first, last) for first, last in itertools.pairwise(cuts)]
        return FlashAttnPlan(
            slot_mapping=metadata.slot_mapping,
            groups=tuple(group for group in groups if group.last_row > group.first_row),
        )

    def capturable_plan(self, metadata: AttentionMetadata) -> CapturableFlashAttnPlan:
        """See GraphSupport.capturable_plan and CapturableFlashAttnPlan."""
        return CapturableFlashAttnPlan(metadata)

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
        assert isinstance(plan, FlashAttnPlan), "the plan is another backend's"
        keys, values = cache.keys[layer], cache.values[layer]
        window = self.spec.windows[layer]
        with torch.no_grad():
            write_kv(key, value, keys, values, plan.slot_mapping)
            parts = []
            for group in plan.groups:
                limited = window is not None and window < group.max_seqlen_k
                parts.append(
                    self._attend(
                        query[group.first_row : group.last_row],
                        keys,
                        values,
                        group,
                        window=window if limited else None,
                        scale=self.spec.scale,
                    )
                )
            num_padded = query.shape[0] - sum(part.shape[0] for part in parts)
            if num_padded:
                parts.append(query.new_zeros((num_padded, *query.shape[1:])))
            if out is not None:
                return torch.cat(parts, out=out)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _device_reasons(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return [f"device {device} is not a CUDA device"]
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            return [f"compute capability {capability} is below {_MIN_CAPABILITY}"]
    return []


def _group(metadata: AttentionMetadata, first: int, last: int) -> SequenceGroup:
    """Sequences first up to last."""
    bounds = metadata.cu_seqlens_q_cpu[first : last + 1]
    contexts = metadata.context_lens_cpu[first:last]
    num_rows = np.diff(bounds)
    assert np.all((contexts == 0) | (contexts >= num_rows)), (
        "a sequence's context must hold its query rows"
    )
    longest = int(contexts.max())
    widest = metadata.block_tables.shape[1] * metadata.block_size
    assert longest <= widest, "a context exceeds its block table"
    cu_seqlens_q = metadata.cu_seqlens_q[first : last + 1]
    cu_seqlens_k = metadata.cu_seqlens_k[first : last + 1]
    if first:
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q - cu_seqlens_q[0], cu_seqlens_k - cu_seqlens_k[0]
    return SequenceGroup(
        first_row=int(bounds[0]),
        last_row=int(bounds[-1]),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        context_lens=metadata.context_lens[first:last],
        block_tables=metadata.block_tables[first:last],
        # A sequence without a row must not be taken for one with a row.
        max_seqlen_q=1 if (num_rows == 1).all() else max(2, int(num_rows.max())),
        max_seqlen_k=longest,
    )
