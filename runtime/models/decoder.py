"""The decoder of every supported family, for inference: pre-norm, rotary GQA, gated SiLU MLP.

Tokens of all sequences lie in one flat batch [T]; what belongs to which sequence only the attention
call knows. Between two attention calls stands one region, the same code for all layers:

    enter | attend 0 | between(0, 1) | attend 1 | between(1, 2) | ... | attend n-1 | leave

`enter`, `between` and `leave` take tensors and parameters only, so each can be compiled as one code
object, and a forward can be given others in their place. No gradients are kept anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import PackedWeight, embedding, linear, linear_in_float
from .rotary import gather_rotary, rotary_table, rotate

if TYPE_CHECKING:
    from attention.backend import LayerAttention

    from .config import DecoderConfig
    from .rotary import RotaryFactors


class AttentionInputs(NamedTuple):
    """What one layer hands to attention, and what it keeps for afterwards.

    Heads are contiguous in their last dimension; the rows of value (and of slices of query and key)
    may be strided, being views of one fused projection.
    """

    query: Tensor
    """[T, num_heads, head_dim], rotated."""
    key: Tensor
    """[T, num_kv_heads, head_dim], rotated."""
    value: Tensor
    """[T, num_kv_heads, head_dim]."""
    residual: Tensor
    """[T, hidden_size]."""


class DecoderLayer(nn.Module):
    """Parameters of one layer, projections fused along their output rows, uninitialised."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

        def empty(*shape: int) -> nn.Parameter:
            return _parameter(torch.empty(shape, dtype=dtype, device=device))

        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        rotated_heads = config.num_heads + config.num_kv_heads
        qkv_rows = (rotated_heads + config.num_kv_heads) * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size

        self.input_norm = empty(hidden)
        # Rows: all query heads, all key heads, all value heads.
        self.qkv_weight = empty(qkv_rows, hidden)
        self.qkv_bias = empty(qkv_rows) if config.qkv_bias else None
        # One row per head, so that queries and keys are normalised in one call.
        self.qk_norm = empty(rotated_heads, config.head_dim) if config.qk_norm else None
        self.o_weight = empty(hidden, config.num_heads * config.head_dim)
        self.o_bias = empty(hidden) if config.o_bias else None
        self.post_attention_norm = empty(hidden)
        # Rows: gate, then up.
        self.gate_up_weight = empty(2 * inner, hidden)
        self.gate_up_bias = empty(2 * inner) if config.mlp_bias else None
        self.down_weight = empty(hidden, inner)
        self.down_bias = empty(hidden) if config.mlp_bias else None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in float32, rounded to x's dtype before `weight` multiplies.

    That is transformers' order. With the weight handed to F.rms_norm, which rounds once, after it,
    a quarter of the results in bfloat16 would differ in their last bit.
    """
    return F.rms_norm(x, (x.shape[-1],), eps=eps) * weight


def project(layer: DecoderLayer, residual: Tensor, rotary: RotaryFactors) -> AttentionInputs:
    """From the residual stream [T, hidden_size] to one layer's queries, keys and values."""
    normed = rms_norm(residual, layer.input_norm, layer.eps)
    qkv = linear(normed, layer.qkv_weight, layer.qkv_bias)
    heads = qkv.view(qkv.shape[0], -1, layer.head_dim)
    num_rotated = layer.num_heads + layer.num_kv_heads
    rotated = heads[:, :num_rotated]
    if layer.qk_norm is not None:
        rotated = rms_norm(rotated, layer.qk_norm, layer.eps)
    rotated = rotate(rotated, rotary)
    return AttentionInputs(
        query=rotated[:, : layer.num_heads],
        key=rotated[:, layer.num_heads :],
        value=heads[:, num_rotated:],
        residual=residual,
    )


def finish(layer: DecoderLayer, attended: Tensor, residual: Tensor) -> Tensor:
    """The rest of a layer: from attention's result [T, num_heads, head_dim] to the new residual."""
    residual = residual + linear(attended.flatten(1), layer.o_weight, layer.o_bias)
    normed = rms_norm(residual, layer.post_attention_norm, layer.eps)
    gate, up = linear(normed, layer.gate_up_weight, layer.gate_up_bias).chunk(2, dim=-1)
    return residual + linear(F.silu(gate) * up, layer.down_weight, layer.down_bias)


def between(
    layer: DecoderLayer,
    next_layer: DecoderLayer,
    attended: Tensor,
    residual: Tensor,
    rotary: RotaryFactors,
) -> AttentionInputs:
    """The region between two attention calls."""
    return project(next_layer, finish(layer, attended, residual), rotary)


class Decoder(nn.Module):
    """A decoder-only language model, its parameters not yet filled.

    They are allocated on `device`, or with `weights_device` there: on "meta" they have a shape
    alone, until `put` brings each one's values.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weights_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        where = weights_device or device

        def empty(*shape: int) -> nn.Parameter:
            return _parameter(torch.empty(shape, dtype=dtype, device=where))

        self.embed_tokens = empty(*shape)
        self.layers = tuple(
            DecoderLayer(config, dtype=dtype, device=where) for _ in range(config.num_layers)
        )
        # Makes them submodules. The tuple keeps their type, and each step's loop cheaper.
        self.registered_layers = nn.ModuleList(self.layers)
        self.norm = empty(config.hidden_size)
        # None: the head is the embedding's weight.
        self.lm_head = None if config.tie_word_embeddings else empty(*shape)
        self.rotary_table: Tensor
        self.register_buffer(
            "rotary_table",
            rotary_table(config.rope, config.head_dim, config.max_position_embeddings, device),
            persistent=False,
        )

    def get(self, name: str) -> Tensor | PackedWeight:
        """What was put under that name."""
        path, _, attribute = name.rpartition(".")
        weight: Tensor | PackedWeight = getattr(self.get_submodule(path), attribute)
        return weight

    def put(self, name: str, weight: Tensor | PackedWeight) -> None:
        """Make `weight` the parameter that named_parameters() calls `name`, or a new "lm_head"."""
        path, _, attribute = name.rpartition(".")
        module = self.get_submodule(path)
        if getattr(module, attribute) is weight:
            return  # its numbers changed in place
        delattr(module, attribute)
        setattr(module, attribute, _parameter(weight) if isinstance(weight, Tensor) else weight)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T, hidden_size], contiguous: the embeddings of `input_ids` [T] int32 or int64."""
        rows, width = embedding(input_ids, self.embed_tokens), self.config.hidden_size
        return rows if rows.shape[1] == width else rows[:, :width].contiguous()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: LayerAttention,
        regions: Regions | None = None,
        *,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states [T, hidden_size], normalised, of a flat batch.

        `input_ids` [T] int32 or int64 below vocab_size; `positions` [T] int64 below
        max_position_embeddings; `attend` is called once per layer, in order; `regions` are run
        between those calls, None: the plain ones; of all states only `rows` [n] int64 are returned,
        None: all of them.
        """
        regions = regions or PLAIN_REGIONS
        inputs, rotary = regions.enter(self, input_ids, positions)
        for index, (layer, next_layer) in enumerate(pairwise(self.layers)):
            attended = attend(index, inputs.query, inputs.key, inputs.value)
            inputs = regions.between(layer, next_layer, attended, inputs.residual, rotary)
        attended = attend(len(self.layers) - 1, inputs.query, inputs.key, inputs.value)
        hidden = regions.leave(self, attended, inputs.residual)
        return hidden if rows is None else hidden.index_select(0, rows)

    def enter(self, input_ids: Tensor, positions: Tensor) -> tuple[AttentionInputs, RotaryFactors]:
        """The region before the first attention call."""
        residual = self.embed(input_ids)
        rotary = gather_rotary(self.rotary_table, positions, residual.dtype)
        return project(self.layers[0], residual, rotary), rotary

    def leave(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The region after the last attention call."""
        residual = finish(self.layers[-1], attended, residual)
        return rms_norm(residual, self.norm, self.config.rms_norm_eps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size] float32 of normalised hidden states [n, hidden_size]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return linear_in_float(hidden, head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """The three regions of a forward: the plain functions above, or what computes the same."""

    enter: Callable[[Decoder, Tensor, Tensor], tuple[AttentionInputs, RotaryFactors]]
    """As `Decoder.enter`."""
    between: Callable[[DecoderLayer, DecoderLayer, Tensor, Tensor, RotaryFactors], AttentionInputs]
    """As `between`."""
    leave: Callable[[Decoder, Tensor, Tensor], Tensor]
    """As `Decoder.leave`."""


PLAIN_REGIONS = Regions(enter=Decoder.enter, between=between, leave=Decoder.leave)
"""Operator by operator."""


def _parameter(data: Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)
