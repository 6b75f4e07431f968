"""Fill a decoder: from a safetensors checkpoint, tensor by tensor into fused parameters, or with
random numbers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError, ModelLoadError, UnsupportedModelError
from .checkpoint import WEIGHT_DTYPES, StoredTensor, read_headers, read_into
from .decoder import Decoder, DecoderLayer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch import Tensor

    from .config import DecoderConfig

_logger = logging.getLogger("stepgraph.runtime")

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_BASE_PREFIX = "model."
# Rotary buffers that old versions of transformers saved; they follow from the config.
_HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_MAX_LISTED = 10
_DUMMY_STD = 0.02


def load_decoder(
    config: DecoderConfig,
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
) -> Decoder:
    """A decoder with its weights in `dtype` on `device`.

    `load_format` "auto" reads the safetensors of the model directory `path`; "dummy" reads nothing
    and draws weights from `seed` (equal for equal seed, dtype and device), for tests and
    benchmarks.

    A tied head follows transformers: with only the embedding or only the head stored, both use it;
    with both stored and different, each keeps its own (logged as a warning).

    Raises ModelLoadError for missing, unexpected or misshapen tensors, naming them, and for files
    that are missing or damaged; UnsupportedModelError for packed (quantised) weights.
    """
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format must be 'auto' or 'dummy', got {load_format!r}")
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError(
            f"weights can't be held in {dtype}; use float32, float16, bfloat16 or float64"
        )
    if load_format == "dummy":
        decoder = Decoder(config, dtype=dtype, device=device)
        _draw_weights(decoder, seed)
        return decoder
    stored = _with_base_prefix(read_headers(path))
    stored = {name: t for name, t in stored.items() if not name.endswith(_HARMLESS_SUFFIXES)}
    _refuse_packed(path, stored)
    decoder = Decoder(config, dtype=dtype, device=device)
    slots = dict(_slots(decoder))
    second_head = None
    if config.tie_word_embeddings and _HEAD in stored:
        if _EMBEDDING in stored:
            second_head = stored.pop(_HEAD)
        else:
            stored[_EMBEDDING] = stored.pop(_HEAD)
    _check_fit(path, stored, slots)
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].file, item[1].offset)):
        read_into(tensor, slots[name].target)
    if second_head is not None:
        _load_second_head(path, decoder, second_head)
    return decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Where one checkpoint tensor belongs."""

    target: Tensor
    """Part of a parameter."""
    shape: tuple[int, ...]
    """Shape that the checkpoint must have; it broadcasts to the target's."""


def _slots(decoder: Decoder) -> Iterator[tuple[str, _Slot]]:
    """Every tensor that a checkpoint must hold, under its name in transformers."""
    yield _EMBEDDING, _whole(decoder.embed_tokens)
    yield "model.norm.weight", _whole(decoder.norm)
    if decoder.lm_head is not None:
        yield _HEAD, _whole(decoder.lm_head)
    for index, layer in enumerate(decoder.layers):
        for name, slot in _layer_slots(layer):
            yield f"model.layers.{index}.{name}", slot


def _layer_slots(layer: DecoderLayer) -> Iterator[tuple[str, _Slot]]:
    yield "input_layernorm.weight", _whole(layer.input_norm)
    yield "post_attention_layernorm.weight", _whole(layer.post_attention_norm)
    query_rows, kv_rows = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    inner = layer.down_weight.shape[1]
    fused = (
        (("q_proj", "k_proj", "v_proj"), [query_rows, kv_rows, kv_rows], "self_attn", "qkv"),
        (("o_proj",), [layer.o_weight.shape[0]], "self_attn", "o"),
        (("gate_proj", "up_proj"), [inner, inner], "mlp", "gate_up"),
        (("down_proj",), [layer.down_weight.shape[0]], "mlp", "down"),
    )
    for names, rows, block, parameter in fused:
        for kind in ("weight", "bias"):
            whole: Tensor | None = getattr(layer, f"{parameter}_{kind}")
            if whole is not None:
                for name, part in zip(names, torch.split(whole, rows), strict=True):
                    yield f"{block}.{name}.{kind}", _whole(part)
    if layer.qk_norm is not None:
        heads = [layer.num_heads, layer.num_kv_heads]
        for name, part in zip(("q_norm", "k_norm"), torch.split(layer.qk_norm, heads), strict=True):
            # The checkpoint has one row for all heads of a kind.
            yield f"self_attn.{name}.weight", _Slot(target=part, shape=(layer.head_dim,))


def _whole(target: Tensor) -> _Slot:
    return _Slot(target=target, shape=tuple(target.shape))


def _with_base_prefix(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Names as in a model with a head; a checkpoint of the bare decoder lacks their prefix."""
    if any(name.startswith(_BASE_PREFIX) for name in stored):
        return stored
    return {name if name == _HEAD else _BASE_PREFIX + name: t for name, t in stored.items()}


def _refuse_packed(path: Path, stored: dict[str, StoredTensor]) -> None:
    packed = [
        f"{name} ({tensor.dtype_code})"
        for name, tensor in stored.items()
        if tensor.dtype_code not in WEIGHT_DTYPES
    ]
    if packed:
        raise UnsupportedModelError(
            f"{path} holds packed or quantised weights, which aren't supported: {_listed(packed)}; "
            f"supported are {', '.join(WEIGHT_DTYPES)}"
        )


def _check_fit(path: Path, stored: dict[str, StoredTensor], slots: dict[str, _Slot]) -> None:
    missing = [name for name in slots if name not in stored]
    unexpected = [name for name in stored if name not in slots]
    misshapen = [
        f"{name} (expected {list(slot.shape)}, found {list(stored[name].shape)})"
        for name, slot in slots.items()
        if name in stored and stored[name].shape != slot.shape
    ]
    problems = [
        f"{len(names)} {kind}: {_listed(names)}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshapen", misshapen),
        )
        if names
    ]
    if problems:
        raise ModelLoadError(
            f"the weights in {path} don't fit its config.json; {'; '.join(problems)}. Check that "
            "both are of the same model (sizes, attention_bias, mlp_bias, tie_word_embeddings)"
        )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _load_second_head(path: Path, decoder: Decoder, stored: StoredTensor) -> None:
    """Give a tied decoder the head that is stored beside its embedding, unless it is the same."""
    embedding = decoder.embed_tokens
    _check_fit(path, {_HEAD: stored}, {_HEAD: _whole(embedding)})
    head = torch.empty_like(embedding)
    read_into(stored, head)
    if not torch.equal(head, embedding):
        _logger.warning(
            "the config of %s ties the head to the embedding, but its weights hold two different "
            "ones: each is used as stored",
            path,
        )
        decoder.give_own_head(head)


def _draw_weights(decoder: Decoder, seed: int) -> None:
    """Norm weights 1, everything else normal with a standard deviation that keeps logits finite."""
    generator = torch.Generator(device=decoder.embed_tokens.device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, _DUMMY_STD, generator=generator)
