"""Tiny GGUF files with random weights, written the way llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel

from runtime.gguf_conversion import convert_gguf

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
START, END, TURN, TOOL = "<|start|>", "<|end|>", "<|turn|>", "<tool>"
MERGES = ["1 2", "12 3", "Ġ 1", "h i", "Ġ hi", "Ġ Ġ", "e Ì"]
TOKENS = [
    START,
    END,
    TURN,
    *sorted(ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
    TOOL,
    "[PAD]",
]
VOCAB = len(TOKENS)
CONTROL, NORMAL, USER_DEFINED, UNUSED = 3, 1, 4, 5
TYPES = [CONTROL] * 3 + [NORMAL] * (VOCAB - 5) + [USER_DEFINED, UNUSED]

Weights = dict[str, npt.NDArray[np.float32]]


def tiny_metadata(architecture: str = "llama", pre: str = "smollm") -> dict[str, Any]:
    """Metadata of a sound file; a test changes or removes what it is about."""
    return {
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 50_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m.content }}{% endfor %}",
    }


def random_weights(
    architecture: str = "llama", *, tied: bool = True, biases: Sequence[str] = (), seed: int = 0
) -> Weights:
    """Weights by Hugging Face name; `biases` are linears with a bias, such as self_attn.q_proj."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "self_attn.q_proj.weight": (queries, HIDDEN),
        "self_attn.k_proj.weight": (keys, HIDDEN),
        "self_attn.v_proj.weight": (keys, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, queries),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if architecture == "qwen2":
        biases = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    layer |= {f"{linear}.bias": layer[f"{linear}.weight"][:1] for linear in biases}
    if architecture == "qwen3":
        layer |= {f"self_attn.{name}_norm.weight": (HEAD_DIM,) for name in ("q", "k")}
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for index in range(LAYERS):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    random = np.random.default_rng(seed)
    return {n: random.normal(0, 0.3, s).astype(np.float32) for n, s in shapes.items()}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    weights: Weights,
    *,
    architecture: str = "llama",
    encoding: str = "F32",
    extra: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> Weights:
    """Write the file, matrices in `encoding`, and return the weights that it really holds.

    `extra` are tensors under names of GGUF.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add_value(writer, key, value)
    kind = gguf.GGMLQuantizationType[encoding]
    held = {}
    for name, values in weights.items():
        stored = _interleave(name, values) if architecture == "llama" else values
        if values.ndim == 1:
            held[name] = values
            writer.add_tensor(_gguf_name(name), stored)
        else:
            held[name] = dequantize(quantize(values, kind), kind)
            writer.add_tensor(_gguf_name(name), quantize(stored, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def write_tiny_gguf(path: Path, *, seed: int = 0) -> Path:
    """A sound little llama, different for each seed."""
    write_gguf(path, tiny_metadata(), random_weights(seed=seed))
    return path


def convert_tiny_gguf(
    tmp_path: Path, metadata: dict[str, Any], weights: Weights, **options: Any
) -> Path:
    """Write a file with these weights and convert it; the directory it became."""
    target = tmp_path / "converted"
    target.mkdir(exist_ok=True)
    write_gguf(tmp_path / "tiny.gguf", metadata, weights, **options)
    convert_gguf(tmp_path / "tiny.gguf", target)
    return target


def _add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        assert isinstance(value, int)
        writer.add_uint32(key, value)


def _interleave(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """llama.cpp's `permute`, which its converter applies to queries and keys of llama."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _gguf_name(name: str) -> str:
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    module, _, suffix = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{names[inner]}.{suffix}"
    return f"{names[module]}.{suffix}"
