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
from .linear import PackedWeight, num_threads
from .native_region import NativeRegion, RegionCall
from .rotary import gather_rotary

if TYPE_CHECKING:
    from attention import LayerAttention

    from .decoder import Decoder, DecoderLayer
    from .rotary import RotaryFactors


_BAD_INPUT = -1


class _ForwardCall(ctypes.Structure):
    """ForwardCall of csrc/forward.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_threads", "num_rows", "num_layers")),
        *((name, ctypes.c_void_p) for name in ("regions", "input_ids", "positions", "embedding")),
        *((name, ctypes.c_int64) for name in ("is_packed", "vocab", "embedding_width")),
        ("num_positions", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("rotary", "residual", "qkv", "attended", "out")),
        ("attention", AttentionTeam),
    )


class NativeForward:
    """The forward of this decoder alone, which region_refusal must have nothing against.

    It holds the addresses of all weights but the embedding's: they may change in place, but not be
    replaced.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        layers: tuple[DecoderLayer | None, ...] = (None, *decoder.layers, None)
        self._native = [NativeRegion(decoder, *pair) for pair in pairwise(layers)]
        self._calls = (RegionCall * len(self._native))(*(r.constants for r in self._native))
        self._products_per_row = sum(r.products_per_row for r in self._native) // len(self._native)
        self._function = load_library(self._native[0].library).stepgraph_forward
        every_position = torch.arange(len(decoder.rotary_table))
        factors = gather_rotary(decoder.rotary_table, every_position, torch.bfloat16)
        self._rotary = torch.cat(factors, dim=-1)  # [positions, 1, 2 * head_dim]
        self._constants = self._make_constants()
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
        cache, plan = attend.cache, attend.plan
        planned = plan.slot_mapping, plan.block_tables, plan.layers
        table = self._embedding_table()
        step = input_ids, positions, table, cache.keys, cache.values, planned, attend.backend
        if rows is None:
            return self._run(*step)[0]
        if len(rows) == len(input_ids):
            return self._run(*step)[0].index_select(0, rows)
        attended, residual = self._run(*step, finish=False)
        attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
        return self._native[-1].run(attended, residual, None, None)[0]

    @leaf
    def _run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        table: Tensor,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        planned: tuple[Tensor, Tensor, tuple[Tensor, ...]],
        backend: NativeBackend,
        finish: bool = True,
    ) -> tuple[Tensor, ...]:
        """All layers and the last norm, or without `finish` what goes into the last region.

        Its arguments hold all tensors that it reads and that may move, so that a graph knows them.
        """
        slot_mapping, block_tables, work = planned
        config, num_rows = self._decoder.config, len(input_ids)
        ids = input_ids.to(torch.int32).contiguous()
        assert positions.dtype == torch.int64 and positions.is_contiguous()
        residual = torch.empty((num_rows, config.hidden_size), dtype=torch.bfloat16)
        qkv = residual.new_empty((num_rows, self._native[0].width))
        attended = residual.new_empty((num_rows, config.num_heads, config.head_dim))
        out = torch.empty_like(residual)
        team = backend.team(
            *self._native[0].split_heads(qkv),
            PagedKVCache(keys=keys, values=values),
            NativePlan(slot_mapping=slot_mapping, block_tables=block_tables, layers=work),
            attended,
        )
        call = _ForwardCall.from_buffer_copy(self._constants)
        call.num_threads = num_threads(num_rows * self._products_per_row)
        call.num_rows = num_rows
        call.input_ids, call.positions = ids.data_ptr(), positions.data_ptr()
        call.embedding = table.data_ptr()
        call.residual, call.qkv = residual.data_ptr(), qkv.data_ptr()
        call.attended, call.out = attended.data_ptr(), out.data_ptr() if finish else None
        call.attention = team
        bad = ctypes.c_int64()
        status = self._function(ctypes.byref(call), ctypes.byref(bad))
        assert status != _BAD_INPUT, "a token id or a position is outside the model's tables"
        check_status(status, bad, keys[0])
        return (out,) if finish else (attended, residual)

    def _embedding_table(self) -> Tensor:
        """Plain or in panels. A plain one may move when weights are released and read again."""
        weight = self._decoder.embed_tokens
        return weight.panels if isinstance(weight, PackedWeight) else weight

    def _make_constants(self) -> _ForwardCall:
        table, config = self._embedding_table(), self._decoder.config
        assert table.dtype == torch.bfloat16 and table.is_contiguous()
        is_packed = table.dim() > 2  # a plain one is a matrix
        return _ForwardCall(
            num_layers=config.num_layers,
            regions=ctypes.addressof(self._calls),
            is_packed=is_packed,
            vocab=config.vocab_size,
            embedding_width=2 * table.shape[1] if is_packed else table.shape[1],
            num_positions=len(self._rotary),
            rotary=self._rotary.data_ptr(),
        )

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
