"""Attention with torch operators alone: any device, any floating dtype, any head size.

The other backends are compared with this one. It gathers pages into contiguous memory and
calls scaled_dot_product_attention, where on a CPU the fused kernel of FlashAttention's kind is
taken for every call made here.

The query heads that share a key/value head are laid out as further query rows of it, so keys
and values are never repeated, and one decoding row gives the kernel a small matrix in place of
a vector: [batch, num_kv_heads, rows * queries_per_kv, head_dim].
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F

from .backend import AttentionBackend, AttentionPlan
from .metadata import AttentionMetadata, AttentionSpec
from .paged_kv_cache import PagedKVCache, write_kv
from .torch_plan import QueryTile, TorchPlan, compute_dtype, make_plan

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TorchBackend(AttentionBackend):
    """The reference backend; see the module's docstring."""

    name: ClassVar[str] = "torch"

    def __init__(self, spec: AttentionSpec, *, cache_dir: Path | None = None) -> None:
        super().__init__(spec, cache_dir=cache_dir)
        self._dtype = compute_dtype(spec)
        self._extra_rows = _extra_rows(spec, self._dtype)

    @classmethod
    def unsupported_reasons(
        cls, spec: AttentionSpec, *, cache_dir: Path | None = None
    ) -> list[str]:
        """A dtype that isn't a usual floating type is refused, and capped scores."""
        reasons = []
        if spec.dtype not in _DTYPES:
            reasons.append(f"dtype {spec.dtype} is none of {', '.join(map(str, _DTYPES))}")
        if spec.soft_cap is not None:
            reasons.append("scores can't be capped")
        return reasons

    def plan(self, metadata: AttentionMetadata) -> TorchPlan:
        """Make the index tensors and masks that all layers of the step use."""
        assert metadata.block_size == self.spec.block_size, (
            f"metadata is for blocks of {metadata.block_size}, the backend for "
            f"{self.spec.block_size}"
        )
        return make_plan(self.spec, metadata)

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
        assert isinstance(plan, TorchPlan), "the plan is another backend's"
        keys, values = cache.keys[layer], cache.values[layer]
        write_kv(key, value, keys, values, plan.slot_mapping)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        if plan.singles_are_the_batch:
            attended = self._attend_singles(query, keys, values, plan, layer)
            return attended if out is None else out.copy_(attended)
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if plan.single_rows is not None:
            rows = query.index_select(0, plan.single_rows)
            attended = self._attend_singles(rows, keys, values, plan, layer)
            out.index_copy_(0, plan.single_rows, attended)
        for prefill in plan.layers[layer].prefills:
            own = slice(prefill.first_row, prefill.last_row)
            if prefill.slots is None:
                source = key[own], value[own]
            else:
                source = _gather(keys, values, prefill.slots, plan)
            self._attend_prefill(query[own], *source, prefill.tiles, out[own])
        if plan.idle_rows is not None:
            out.index_fill_(0, plan.idle_rows, 0)
        return out

    def _attend_singles(
        self,
        rows: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: TorchPlan,
        layer: int,
    ) -> torch.Tensor:
        """Attend rows [n, num_heads, head_dim], each the only row of its sequence."""
        spec = self.spec
        query = rows.view(-1, spec.num_kv_heads, spec.queries_per_kv, spec.head_dim)
        query = query.to(self._dtype)
        if self._extra_rows:
            query = F.pad(query, (0, 0, 0, self._extra_rows))
        results = []
        for group in plan.layers[layer].groups:
            # Shape [n, num_kv_heads, padded_len, head_dim], the heads strided.
            shape = (group.last - group.first, -1, spec.num_kv_heads, spec.head_dim)
            key, value = _gather(keys, values, group.slots, plan)
            results.append(
                F.scaled_dot_product_attention(
                    query[group.first : group.last],
                    key.to(self._dtype).view(shape).transpose(1, 2),
                    value.to(self._dtype).view(shape).transpose(1, 2),
                    attn_mask=group.mask,
                    scale=spec.scale,
                )
            )
        result = results[0] if len(results) == 1 else torch.cat(results)
        return result[:, :, : spec.queries_per_kv].flatten(1, 2).to(rows.dtype)

    def _attend_prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiles: tuple[QueryTile, ...],
        out: torch.Tensor,
    ) -> None:
        """Attend query rows [n, num_heads, head_dim] of one sequence, into out."""
        spec = self.spec
        by_kv_head = (-1, spec.num_kv_heads, spec.queries_per_kv, spec.head_dim)
        query = query.to(self._dtype).view(by_kv_head).transpose(0, 1)
        out = out.view(by_kv_head).transpose(0, 1)
        # Shape [1, num_kv_heads, num_keys, head_dim], the heads strided.
        key = key.to(self._dtype).transpose(0, 1)[None]
        value = value.to(self._dtype).transpose(0, 1)[None]
        for tile in tiles:
            rows = slice(tile.first_row, tile.last_row)
            seen = slice(tile.first_key, tile.last_key)
            result = F.scaled_dot_product_attention(
                query[:, rows].flatten(1, 2)[None],
                key[:, :, seen],
                value[:, :, seen],
                attn_mask=tile.mask,
                scale=spec.scale,
            )
            out[:, rows] = result.view(out[:, rows].shape)


def _gather(
    keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, plan: TorchPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy slots of one layer into the plan's scratch; good until the next gather."""
    count = slots.shape[0]
    key, value = plan.key_scratch[:count], plan.value_scratch[:count]
    torch.index_select(keys, 0, slots, out=key)
    torch.index_select(values, 0, slots, out=value)
    return key, value


def _extra_rows(spec: AttentionSpec, dtype: torch.dtype) -> int:
    """Rows to add to one decoding row's query heads for the CPU's matrix products.

    An odd number of rows is slower than the next even one, by 20 % at 3 and threefold for
    a single bfloat16 row, which is taken for a vector; single rows of other dtypes are fast.
    """
    rows = spec.queries_per_kv
    if spec.device.type != "cpu" or rows % 2 == 0 or (rows == 1 and dtype != torch.bfloat16):
        return 0
    return 1
