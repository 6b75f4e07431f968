"""The regions of a forward as one native call each, for packed decoders on the CPU.

Twins of the plain regions in decoder.py, which round where those do: every operator's result in
bfloat16, sums in float32. Only the order of sums differs, and the exponential in silu by parts in
ten million. The kernel is csrc/region.h.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention.native_build import load_library
from graphs.host_graph import leaf

from .decoder import AttentionInputs
from .linear import PANEL, PackedWeight, num_threads

if TYPE_CHECKING:
    from .decoder import Decoder, DecoderLayer
    from .rotary import RotaryFactors

_NUMBERS = (
    *("num_threads", "num_rows", "hidden", "inner", "attended_width", "attended_stride"),
    *("qkv_width", "head_dim", "num_rotated_heads"),
)
_ADDRESSES = (
    *("attended", "residual", "o_weight", "o_scales", "o_bias", "post_norm"),
    *("gate_up_weight", "gate_up_scales", "gate_up_bias", "down_weight", "down_scales"),
    *("down_bias", "norm", "qkv_weight", "qkv_scales", "qkv_bias", "qk_norm", "cos", "sin"),
)
_ROTATION = (("rotary_stride", ctypes.c_int64), ("positions", ctypes.c_void_p))
_RESULTS = ("new_residual", "out")


class RegionCall(ctypes.Structure):
    """RegionCall of csrc/region.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in _ADDRESSES),
        *_ROTATION,
        *((name, ctypes.c_void_p) for name in _RESULTS),
    )


def region_refusal(decoder: Decoder) -> str | None:
    """Why the regions of a decoder run operator by operator; None if they can be native."""
    config = decoder.config
    if not isinstance(decoder.layers[0].qkv_weight, PackedWeight):
        return "the weights are not packed"
    if config.intermediate_size % PANEL:
        return f"intermediate_size {config.intermediate_size} is not a multiple of {PANEL}"
    inputs_per_word = decoder.layers[0].qkv_weight.panels.shape[-1]
    widths = {
        "hidden_size": config.hidden_size,
        "num_heads * head_dim": config.num_heads * config.head_dim,
    }
    for name, width in widths.items():
        if width % inputs_per_word:
            return f"{name} {width} is not a multiple of {inputs_per_word}"
    return None


class NativeRegion:
    """A region's constants, ready for calls.

    Args:
        decoder: packed.
        layer: the layer to finish; None: the region begins with the residual.
        next_layer: the layer to project for; None: the region ends with the final norm.
    """

    def __init__(
        self, decoder: Decoder, layer: DecoderLayer | None, next_layer: DecoderLayer | None
    ) -> None:
        config = decoder.config
        self._head_dim = config.head_dim
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.width = config.hidden_size
        weights: dict[str, Tensor | PackedWeight] = {}
        others: dict[str, Tensor | None] = {"norm": decoder.norm}
        if layer is not None:
            weights |= {"o_weight": layer.o_weight, "gate_up_weight": layer.gate_up_weight}
            weights |= {"down_weight": layer.down_weight}
            others |= {"o_bias": layer.o_bias, "gate_up_bias": layer.gate_up_bias}
            others |= {"down_bias": layer.down_bias, "post_norm": layer.post_attention_norm}
        if next_layer is not None:
            weights |= {"qkv_weight": next_layer.qkv_weight}
            others |= {"qkv_bias": next_layer.qkv_bias, "qk_norm": next_layer.qk_norm}
            others |= {"norm": next_layer.input_norm}
            self.width = sum(self._heads) * config.head_dim
        packed = {name: _packed(weight) for name, weight in weights.items()}
        tensors = others | {name: weight.panels for name, weight in packed.items()}
        tensors |= {
            name.replace("weight", "scales"): weight.scales for name, weight in packed.items()
        }
        (self.library,) = {weight.library for weight in packed.values()}
        self._function = load_library(self.library).stepgraph_region
        self.products_per_row = sum(weight.panels.numel() for weight in packed.values())
        self.constants = RegionCall(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            attended_width=config.num_heads * config.head_dim,
            qkv_width=self.width,
            head_dim=config.head_dim,
            rotary_stride=config.head_dim,
            num_rotated_heads=config.num_heads + config.num_kv_heads,
            eps=config.rms_norm_eps,
            **{name: t.data_ptr() for name, t in tensors.items() if t is not None},
        )
        self._keep = tensors

    def project(
        self, attended: Tensor | None, residual: Tensor, rotary: RotaryFactors
    ) -> AttentionInputs:
        """Run a region that has a next layer."""
        projected, residual = self.run(attended, residual, rotary.cos, rotary.signed_sin)
        query, key, value = self.split_heads(projected)
        return AttentionInputs(query=query, key=key, value=value, residual=residual)

    def split_heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, heads, head_dim], views of such a region's rows."""
        heads = projected.view(projected.shape[0], -1, self._head_dim)
        query, key, value = heads.split_with_sizes(self._heads, dim=1)
        return query, key, value

    @leaf
    def run(
        self, attended: Tensor | None, residual: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Projected and rotated rows, or normalised ones, and the new residual."""
        assert residual.dtype == torch.bfloat16 and residual.is_contiguous()
        call = RegionCall.from_buffer_copy(self.constants)
        num_rows = residual.shape[0]
        call.num_rows = num_rows
        call.num_threads = num_threads(num_rows * self.products_per_row)
        call.residual = residual.data_ptr()
        if attended is not None:
            attended = attended.flatten(1)
            if attended.stride(1) != 1:
                attended = attended.contiguous()
            residual = torch.empty_like(residual)
            call.attended, call.attended_stride = attended.data_ptr(), attended.stride(0)
            call.new_residual = residual.data_ptr()
        if cos is not None and sin is not None:
            assert cos.is_contiguous() and sin.is_contiguous()
            call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
        out = residual.new_empty((num_rows, self.width))
        call.out = out.data_ptr()
        self._function(ctypes.byref(call))
        return out, residual


def _packed(weight: Tensor | PackedWeight) -> PackedWeight:
    assert isinstance(weight, PackedWeight), "the weights are not packed"
    return weight
