"""A packed decoder's forward on the CPU: one native call for all layers, or one per region.

Where attention is native too, one team of threads runs through regions and attention in turn
(csrc/forward.h), so nothing but the kernels lies between two layers. Under any other attention the
same regions are called one by one, with the same results.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention import BoundAttention
from attention.native_backend import NativeBackend
from attention.native_build import load_library
from attention.native_call import AttentionTeam, check_status
from attention.native_plan import NativePlan
from attention.paged_kv_cache import PagedKVCache
from graphs.host_graph import leaf

from .decoder import AttentionInputs, Regions
from .linear import num_threads
from .native_region import NativeRegion, RegionCall
from .rotary import gather_rotary

if TYPE_CHECKING:
    from attention import LayerAttention

    from .decoder import Decoder, DecoderLayer
    from .rotary import RotaryFactors


class _ForwardCall(ctypes.Structure):
    """ForwardCall of csrc/forward.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_threads", "num_rows", "num_layers")),
        ("regions", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("residual", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("qkv", "attended", "out")),
        ("attention", AttentionTeam),
    )


class NativeForward:
    """The forward of this decoder alone, which region_refusal must have nothing against.

    It holds the weights' addresses: weights may change in place, but not be replaced.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        layers: tuple[DecoderLayer | None, ...] = (None, *decoder.layers, None)
        self._native = [NativeRegion(decoder, *pair) for pair in pairwise(layers)]
        self._calls = (RegionCall * len(self._native))(*(r.constants for r in self._native))
        self._products_per_row = sum(r.products_per_row for r in self._native) // len(self._native)
        self._function = load_library(self._native[0].library).stepgraph_forward
        self.regions = self._make_regions()
        """The forward's parts, as any forward can be given them."""

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: LayerAttention,
        *,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states; as Decoder.forward."""
        if not isinstance(attend, BoundAttention) or not isinstance(attend.backend, NativeBackend):
            hidden: Tensor = self._decoder(input_ids, positions, attend, self.regions, rows=rows)
            return hidden
        assert isinstance(attend.plan, NativePlan), "the plan is another backend's"
        embedded = self._decoder.embed(input_ids)
        rotary = gather_rotary(self._decoder.rotary_table, positions, embedded.dtype)
        cache, plan = attend.cache, attend.plan
        planned = plan.slot_mapping, plan.block_tables, plan.layers
        step = embedded, rotary, cache.keys, cache.values, planned, attend.backend
        if rows is None:
            return self._run(*step)
        if len(rows) == len(embedded):
            return self._run(*step).index_select(0, rows)
        attended = self._run(*step, finish=False).index_select(0, rows)
        return self._native[-1].run(attended, embedded.index_select(0, rows), None, None)[0]

    @leaf
    def _run(
        self,
        residual: Tensor,
        rotary: RotaryFactors,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        planned: tuple[Tensor, Tensor, tuple[Tensor, ...]],
        backend: NativeBackend,
        finish: bool = True,
    ) -> Tensor:
        """All layers and the last norm, on a residual stream that is overwritten.

        Its arguments hold all tensors that it reads, so that a graph knows them. Without `finish`
        it ends with the last attention, whose result it returns.
        """
        slot_mapping, block_tables, work = planned
        cos, sin = rotary.cos, rotary.signed_sin
        assert residual.dtype == torch.bfloat16 and residual.is_contiguous()
        assert cos.is_contiguous() and sin.is_contiguous()
        config, num_rows = self._decoder.config, residual.shape[0]
        qkv = residual.new_empty((num_rows, self._native[0].width))
        attended = residual.new_empty((num_rows, config.num_heads, config.head_dim))
        out = torch.empty_like(residual)
        team = backend.team(
            *self._native[0].split_heads(qkv),
            PagedKVCache(keys=keys, values=values),
            NativePlan(slot_mapping=slot_mapping, block_tables=block_tables, layers=work),
            attended,
        )
        call = _ForwardCall(
            num_threads=num_threads(num_rows * self._products_per_row),
            num_rows=num_rows,
            num_layers=config.num_layers,
            regions=ctypes.addressof(self._calls),
            residual=residual.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            qkv=qkv.data_ptr(),
            attended=attended.data_ptr(),
            out=out.data_ptr() if finish else None,
            attention=team,
        )
        bad = ctypes.c_int64()
        check_status(self._function(ctypes.byref(call), ctypes.byref(bad)), bad, keys[0])
        return out if finish else attended

    def _make_regions(self) -> Regions:
        first, *_, last = self._native
        inner = dict(zip(self._decoder.layers, self._native[1:-1], strict=False))

        def enter(
            decoder: Decoder, input_ids: Tensor, positions: Tensor
        ) -> tuple[AttentionInputs, RotaryFactors]:
            residual = decoder.embed(input_ids)
            rotary = gather_rotary(decoder.rotary_table, positions, residual.dtype)
            return first.project(None, residual, rotary), rotary

        def between(
            layer: DecoderLayer,
            next_layer: DecoderLayer,
            attended: Tensor,
            residual: Tensor,
            rotary: RotaryFactors,
        ) -> AttentionInputs:
            return inner[layer].project(attended, residual, rotary)

        def leave(decoder: Decoder, attended: Tensor, residual: Tensor) -> Tensor:
            return last.run(attended, residual, None, None)[0]

        return Regions(enter=enter, between=between, leave=leave)
