"""Reads the config.json of a model out of a GGUF file's metadata.

Metadata keys are those of the GGUF specification. A key of the model's own that is not known here
is refused by name: passed over in silence it would make a model that runs and answers wrongly.
"""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

from .errors import ModelLoadError, UnsupportedModelError
from .gguf_file import GgufFile, GgufTensor

SUPPORTED_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`general.architecture` of a GGUF to the Hugging Face class; Mistral is stored as llama."""

_KNOWN_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
}


def read_config(file: GgufFile) -> dict[str, Any]:
    """The config.json of the model, still without token ids."""
    architecture = file.require("general.architecture", str)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} has architecture {architecture!r}; GGUF files of these can be read: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)} (Mistral models are stored as llama)"
        )
    _refuse_unknown_keys(file, architecture)
    heads = _size(file, architecture, "attention.head_count")
    hidden = _size(file, architecture, "embedding_length")
    kv_heads = heads
    if f"{architecture}.attention.head_count_kv" in file.metadata:
        kv_heads = _size(file, architecture, "attention.head_count_kv")
    head_dim = _read_head_dim(file, architecture, hidden, heads)
    config = {
        "architectures": [SUPPORTED_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _size(file, architecture, "feed_forward_length"),
        "num_hidden_layers": _size(file, architecture, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _size(file, architecture, "context_length"),
        "rms_norm_eps": _float32(
            file.require(f"{architecture}.attention.layer_norm_rms_epsilon", float)
        ),
        "rope_parameters": _read_rope(file, architecture, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": _vocab_size(file),
        "transformers_version": version("transformers"),
    }
    if architecture != "qwen2":  # where q, k and v always have biases and no other linear has
        config["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    _set_window(file, architecture, config)
    return config


def _refuse_unknown_keys(file: GgufFile, architecture: str) -> None:
    prefix = f"{architecture}."
    unknown = sorted(
        key
        for key, value in file.metadata.items()
        if key.startswith(prefix)
        and key.removeprefix(prefix) not in _KNOWN_KEYS
        and not (type(value) is int and value == 0)  # zero experts, say
    )
    if unknown:
        raise UnsupportedModelError(
            f"{file.path} has model options that are not implemented: "
            + ", ".join(f"{key} = {file.metadata[key]}" for key in unknown)
        )


def _size(file: GgufFile, architecture: str, name: str) -> int:
    """A dimension: one positive number, for all layers alike."""
    key = f"{architecture}.{name}"
    if isinstance(file.metadata.get(key), list):
        values = set(file.require_list(key, int))
        if len(values) != 1:
            raise UnsupportedModelError(
                f"{file.path}: {key} differs between layers, which is not implemented"
            )
        value = values.pop()
    else:
        value = file.require(key, int)
    if value <= 0:
        raise ModelLoadError(f"{file.path}: {key} is {value}, but must be positive")
    return value


def _read_head_dim(file: GgufFile, architecture: str, hidden: int, heads: int) -> int:
    """Size of a head; key, value and rotated part must all have it."""
    key = f"{architecture}.attention.key_length"
    if key not in file.metadata and hidden % heads:
        raise ModelLoadError(f"{file.path} lacks {key}, and {hidden} / {heads} heads leaves a rest")
    if key in file.metadata:
        head_dim = _size(file, architecture, "attention.key_length")
    else:
        head_dim = hidden // heads
    for name in ("attention.value_length", "rope.dimension_count"):
        size = file.get(f"{architecture}.{name}", int)
        if size is not None and size != head_dim:
            raise UnsupportedModelError(
                f"{file.path}: {architecture}.{name} is {size} where heads have {head_dim}; "
                "heads must be rotated whole, and keys and values be of one size"
            )
    return head_dim


def _read_rope(file: GgufFile, architecture: str, head_dim: int) -> dict[str, Any]:
    """Rotary parameters as Hugging Face names them."""
    theta = file.get(f"{architecture}.rope.freq_base", float)
    theta = 10_000.0 if theta is None else _float32(theta)  # llama.cpp's default
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = file.get(f"{architecture}.rope.scaling.type", str) or "none"
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: {architecture}.rope.scaling.type is {kind!r}; none, linear and yarn "
            "can be read"
        )
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None and kind != "none":
        raise UnsupportedModelError(f"{file.path} has both rope_freqs.weight and {kind} scaling")
    if factors is not None:
        return rope | _recognise_llama3_scaling(file, factors, theta, head_dim)
    if kind != "none":
        rope["rope_type"] = kind
        rope["factor"] = _float32(file.require(f"{architecture}.rope.scaling.factor", float))
    if kind == "yarn":
        rope["original_max_position_embeddings"] = file.require(
            f"{architecture}.rope.scaling.original_context_length", int
        )
    return rope


def _recognise_llama3_scaling(
    file: GgufFile, tensor: GgufTensor, theta: float, head_dim: int
) -> dict[str, Any]:
    """Parameters behind the frequency divisors that Llama 3.1 and later store as a tensor.

    Many parameters give equal divisors, so those of Meta's own models are tried and must fit.
    """
    import numpy as np

    stored = tensor.decode(slice(None)).ravel()
    factor = round(float(stored.max()), 4)
    low, high, original = 1.0, 4.0, 8192
    turns = original / (2 * math.pi) / theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{file.path}: rope_freqs.weight is not the frequency scaling of Llama 3.1 "
            f"(low {low}, high {high}, original context {original}); use the Hugging Face "
            "directory of this model, which names its parameters"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _set_window(file: GgufFile, architecture: str, config: dict[str, Any]) -> None:
    """Llama with a sliding window is what Hugging Face calls Mistral."""
    window = file.get(f"{architecture}.attention.sliding_window", int)
    if not window:
        return
    if architecture != "llama":
        raise UnsupportedModelError(
            f"{file.path}: {architecture}.attention.sliding_window is {window}; which layers it "
            "applies to is not stored, so it can't be converted"
        )
    config |= {"model_type": "mistral", "sliding_window": window}
    config["architectures"] = ["MistralForCausalLM"]
    if config.pop("attention_bias") or config.pop("mlp_bias"):
        raise UnsupportedModelError(f"{file.path} has both a sliding window and biases")


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path} lacks the tensor token_embd.weight")
    return embedding.shape[0]


def _float32(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))
