"""A backend for full graphs of decode: masked attention over every block a table could name.

Plan and tables live in buffers of fixed size, so that a captured run reads each step's values
from them. Mixed steps are the reference backend's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attention import AttentionMetadata, AttentionPlan, AttentionSpec, PagedKVCache, write_kv
from attention.torch_backend import TorchBackend


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedPlan(AttentionPlan):
    """The runner's static tensors of one size, and what is planned for them."""

    metadata: AttentionMetadata  # of the capture: its tensors hold each step's values
    hidden: dict[int | None, torch.Tensor]  # per window [num_seqs, max_keys] bool
    active: torch.Tensor  # [num_seqs, 1, 1] bool


class CapturablePaddedPlan:
    """Plans on the host, into the buffers of one PaddedPlan."""

    def __init__(self, spec: AttentionSpec, metadata: AttentionMetadata) -> None:
        num_seqs, num_blocks = metadata.block_tables.shape
        self._spec = spec
        self.num_refreshes = 0
        self.plan = PaddedPlan(
            metadata=metadata,
            hidden={
                window: torch.ones(
                    num_seqs, num_blocks * spec.block_size, dtype=torch.bool, device=spec.device
                )
                for window in set(spec.windows)
            },
            active=torch.ones(num_seqs, 1, 1, dtype=torch.bool, device=spec.device),
        )
        self.refresh(metadata)

    def refresh(self, metadata: AttentionMetadata) -> bool:
        """See CapturablePlan.refresh; the launch never changes."""
        captured = self.plan.metadata
        for name in ("slot_mapping", "context_lens", "block_tables", "cu_seqlens_q"):
            assert getattr(metadata, name).data_ptr() == getattr(captured, name).data_ptr()
        self.num_refreshes += 1
        contexts = metadata.context_lens_cpu[:, None]
        for window, hidden in self.plan.hidden.items():
            key = np.arange(hidden.shape[1])
            outside = key >= contexts
            if window is not None:
                outside |= key < contexts - window
            hidden.copy_(torch.from_numpy(outside))
        self.plan.active.copy_(torch.from_numpy(contexts[:, None] > 0))
        return True


class PaddedBackend(TorchBackend):
    """The reference backend, with full graphs of decode steps."""

    name = "padded"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.plans: dict[int, CapturablePaddedPlan] = {}

    def capturable_plan(self, metadata: AttentionMetadata) -> CapturablePaddedPlan:
        """See GraphSupport.capturable_plan."""
        plan = CapturablePaddedPlan(self.spec, metadata)
        self.plans[metadata.num_seqs] = plan
        return plan

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
        """Write, then attend; padded rows give zeros."""
        if not isinstance(plan, PaddedPlan):
            return super().run(layer, query, key, value, cache, plan, out)
        assert out is None, "a full graph's attention makes its own memory"
        spec, metadata = self.spec, plan.metadata
        keys, values = cache.keys[layer], cache.values[layer]
        write_kv(key, value, keys, values, metadata.slot_mapping)
        hidden = plan.hidden[spec.windows[layer]]
        last = (metadata.context_lens[:, None] - 1).clamp(min=0)
        # Hidden columns read the sequence's own last slot: what others hold may be NaN.
        position = torch.arange(hidden.shape[1], device=spec.device).minimum(last)
        blocks = metadata.block_tables.long().gather(1, position // spec.block_size)
        slots = blocks * spec.block_size + position % spec.block_size
        heads = (len(query), spec.num_kv_heads, spec.queries_per_kv, spec.head_dim)
        read_keys = keys.flatten(0, 1)[slots]  # [num_seqs, max_keys, num_kv_heads, head_dim]
        read_values = values.flatten(0, 1)[slots]
        grouped = query.reshape(heads)
        scores = torch.einsum("shgd,skhd->shgk", grouped, read_keys) * spec.scale
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
        attended = torch.einsum("shgk,skhd->shgd", weights, read_values).flatten(1, 2)
        return torch.where(plan.active, attended, torch.zeros_like(attended))
