"""Pairs a GGUF file's tensors with a model's parameters and writes them as safetensors.

Tensors are decoded a slice at a time straight into the file, so the whole model is never in memory.
Tensor names are those of the GGUF specification and of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ModelLoadError, UnsupportedModelError
from .gguf_file import GgufFile, GgufTensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

_ELEMENTS_PER_SLICE = 1 << 22  # 16 MiB of float32: small beside any model, large beside call costs


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One tensor of the safetensors file and where it comes from."""

    name: str
    """Name in the file that is written."""

    source: GgufTensor
    """What holds its elements."""

    shape: tuple[int, ...]
    """Row-major, and that of the source."""

    row_order: npt.NDArray[np.int64] | None
    """Which stored row is row i; None keeps the order."""


def match_tensors(file: GgufFile, config: dict[str, Any]) -> list[OutputTensor]:
    """Pair the file's tensors with the model's parameters; one too many or too few is an error."""
    expected = {target.stored: target for target in _parameters(config)}
    missing = [name for name in expected if name not in file.tensors]
    if missing:
        raise ModelLoadError(f"{file.path} lacks {_name_some(missing)}")
    unknown = [n for n in file.tensors if n not in expected and n != "rope_freqs.weight"]
    if unknown:
        raise UnsupportedModelError(
            f"{file.path} holds tensors that a {config['model_type']} model doesn't have: "
            + _name_some(unknown)
        )
    outputs = []
    for target in expected.values():
        source = file.tensors[target.stored]
        if source.shape != target.shape:
            raise ModelLoadError(
                f"{file.path}: {source.name} has shape {source.shape}, but the metadata say "
                f"{target.shape}"
            )
        order = None if target.rotated_heads is None else _rotary_order(target)
        outputs.append(
            OutputTensor(name=target.name, source=source, shape=target.shape, row_order=order)
        )
    return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """One parameter of the model under both of its names."""

    stored: str
    name: str
    shape: tuple[int, ...]
    rotated_heads: int | None = None
    """Number of heads whose rows llama.cpp's converter interleaved, for q and k of llama."""


def _parameters(config: dict[str, Any]) -> Iterator[_Parameter]:
    """All parameters of the model that `config` describes."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield _Parameter(
        stored="token_embd.weight", name="model.embed_tokens.weight", shape=(vocab, hidden)
    )
    for layer in range(config["num_hidden_layers"]):
        yield from _layer_parameters(config, f"blk.{layer}", f"model.layers.{layer}")
    yield _Parameter(stored="output_norm.weight", name="model.norm.weight", shape=(hidden,))
    if not config["tie_word_embeddings"]:
        yield _Parameter(stored="output.weight", name="lm_head.weight", shape=(vocab, hidden))


def _layer_parameters(config: dict[str, Any], stored: str, name: str) -> Iterator[_Parameter]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim, kind = config["head_dim"], config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention_bias = config.get("attention_bias", False)
    qkv_bias, mlp_bias = attention_bias or kind == "qwen2", config.get("mlp_bias", False)
    interleaved = kind in ("llama", "mistral")
    linears = (
        ("attn_q", "self_attn.q_proj", heads * head_dim, hidden, qkv_bias),
        ("attn_k", "self_attn.k_proj", kv_heads * head_dim, hidden, qkv_bias),
        ("attn_v", "self_attn.v_proj", kv_heads * head_dim, hidden, qkv_bias),
        ("attn_output", "self_attn.o_proj", hidden, heads * head_dim, attention_bias),
        ("ffn_gate", "mlp.gate_proj", inner, hidden, mlp_bias),
        ("ffn_up", "mlp.up_proj", inner, hidden, mlp_bias),
        ("ffn_down", "mlp.down_proj", hidden, inner, mlp_bias),
    )
    for short, long, rows, columns, bias in linears:
        rotated = {"attn_q": heads, "attn_k": kv_heads}.get(short) if interleaved else None
        for suffix, shape in (("weight", (rows, columns)), ("bias", (rows,))):
            if suffix == "weight" or bias:
                yield _Parameter(
                    stored=f"{stored}.{short}.{suffix}",
                    name=f"{name}.{long}.{suffix}",
                    shape=shape,
                    rotated_heads=rotated,
                )
    norms = [
        ("attn_norm", "input_layernorm", hidden),
        ("ffn_norm", "post_attention_layernorm", hidden),
    ]
    if kind == "qwen3":
        norms += [
            ("attn_q_norm", "self_attn.q_norm", head_dim),
            ("attn_k_norm", "self_attn.k_norm", head_dim),
        ]
    for short, long, size in norms:
        yield _Parameter(
            stored=f"{stored}.{short}.weight", name=f"{name}.{long}.weight", shape=(size,)
        )


def _rotary_order(target: _Parameter) -> npt.NDArray[np.int64]:
    """Undo the order of rows that llama.cpp gives the queries and keys of llama.

    Hugging Face rotates row i of a head with row i + head_dim / 2; llama.cpp rotates neighbours,
    so its converter interleaves the two halves of each head.
    """
    import numpy as np

    assert target.rotated_heads is not None, "only rotated projections are reordered"
    stored = np.arange(target.shape[0]).reshape(target.rotated_heads, -1, 2)
    order: npt.NDArray[np.int64] = stored.swapaxes(1, 2).ravel()
    return order


def _name_some(names: list[str], limit: int = 5) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def stored_dtype(file: GgufFile) -> str:
    """Element type of the written weights, as config.json names it."""
    encodings = {tensor.encoding for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get("".join(encodings), "bfloat16")


def write_safetensors(path: Path, tensors: list[OutputTensor], dtype: str) -> None:
    """Write the tensors one after the other: length of the header, JSON header, raw elements."""
    import torch

    torch_dtype: torch.dtype = getattr(torch, dtype)
    code = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + math.prod(tensor.shape) * torch_dtype.itemsize
        header[tensor.name] = {
            "dtype": code,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # keeps the elements aligned
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            for values in _slices(tensor):
                elements = torch.from_numpy(values).to(torch_dtype).view(torch.uint8)
                out.write(elements.numpy().data)
    written = path.stat().st_size
    assert written == 8 + len(encoded) + end, f"{path}: {written} bytes do not match the header"


def _slices(tensor: OutputTensor) -> Iterator[npt.NDArray[np.float32]]:
    """The tensor's elements in order, as many rows at a time as fit in a slice."""
    import numpy as np

    count = tensor.source.data.shape[0]
    step = max(1, _ELEMENTS_PER_SLICE // tensor.shape[-1])
    if tensor.row_order is not None and count == 1:  # a bias is one encoded row: reorder elements
        yield tensor.source.decode(slice(None))[:, tensor.row_order]
        return
    for start in range(0, count, step):
        rows = slice(start, start + step)
        picked = rows if tensor.row_order is None else tensor.row_order[rows]
        yield np.array(tensor.source.decode(picked))  # a copy: float32 comes as a read-only view
