"""FlashAttention 2 over pages for a CPU: its signatures, its refusals, and the numbers.

What is computed follows from the arguments alone, in float64. Where the kernels would silently
go wrong (read beyond a table, leave tokens out, leave rows unwritten), the doubles raise; memory
that the kernels leave as it was is NaN here.
"""

from __future__ import annotations

import types
from typing import Any

import torch

PAGE_MULTIPLE = 256


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Double of torch.nn.attention.varlen.varlen_attn with a block table."""
    assert return_aux is None, "the double gives the result alone"
    assert cu_seq_k is not None, "the kernels of FlashAttention 2 need cu_seq_k with a block table"
    assert block_table is not None and seqused_k is not None
    _check_int32(seqused_k, "seqused_k", (len(cu_seq_q) - 1,))
    heads, kv_heads = query.shape[1], key.shape[2]
    if not enable_gqa and heads != kv_heads:
        raise ValueError("Try setting enable_gqa=True for GQA.")
    packed = max_q == 1 and heads > kv_heads and window_size == (-1, -1)
    assert packed or num_splits == 1, "split-KV combines its parts wrongly unless rows are packed"
    return _attend(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        scale=scale,
        window_size=window_size,
        lengths=seqused_k,
        block_table=block_table,
        packed=packed,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Double of flash_attn.flash_attn_varlen_func with a block table."""
    assert (dropout_p, softcap, alibi_slopes, return_attn_probs) == (0.0, 0.0, None, False)
    assert block_table is not None
    # One row sees everything, causal or not; that is decided before rows are packed.
    right = 0 if causal and max_seqlen_q > 1 else window_size[1]
    window_size = (window_size[0], right)
    return _attend(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        scale=softmax_scale,
        window_size=window_size,
        lengths=cu_seqlens_k.diff(),
        block_table=block_table,
        packed=max_seqlen_q == 1 and q.shape[1] > k.shape[2] and window_size == (-1, -1),
    )


def flash_attn_package(version: str = "2.8.3.post2") -> types.ModuleType:
    """The package, for sys.modules."""
    module = types.ModuleType("flash_attn")
    module.__version__ = version  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    packed: bool,
) -> torch.Tensor:
    _check(query, keys, values, cu_seqlens_q, cu_seqlens_k, block_table)
    num_seqs, page_size = len(lengths), keys.shape[1]
    if packed and len(query) != num_seqs:
        raise RuntimeError("shape is invalid for input: packed rows are one per sequence")
    out = torch.full(query.shape, float("nan"), dtype=query.dtype)
    bounds = list(range(num_seqs + 1)) if packed else cu_seqlens_q.tolist()
    assert bounds[0] == 0 and bounds[-1] <= len(query), "cu_seqlens_q exceeds the query's rows"
    for sequence, length in enumerate(lengths.tolist()):
        rows = slice(bounds[sequence], bounds[sequence + 1])
        num_rows = rows.stop - rows.start
        assert num_rows <= max_seqlen_q, f"{num_rows} rows, but max_seqlen_q is {max_seqlen_q}"
        assert length <= max_seqlen_k, f"{length} keys, but max_seqlen_k is {max_seqlen_k}"
        pages = block_table[sequence, : -(-length // page_size)].long()
        assert len(pages) * page_size >= length, "the block table is too short"
        assert not len(pages) or 0 <= pages.min() <= pages.max() < len(keys), "no such page"
        out[rows] = _one_sequence(
            query[rows].double(),
            keys[pages].flatten(0, 1)[:length].double(),
            values[pages].flatten(0, 1)[:length].double(),
            query.shape[-1] ** -0.5 if scale is None else scale,
            window_size,
        ).to(query.dtype)
    return out


def _one_sequence(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """The last row stands at the last key; rows that see nothing are zero."""
    num_rows, num_keys = len(query), len(keys)
    if num_keys == 0:
        return torch.zeros_like(query)
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    row = torch.arange(num_keys - num_rows, num_keys)[:, None]
    key = torch.arange(num_keys)
    left, right = window_size
    hidden = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    if left >= 0:
        hidden |= key < row - left
    if right >= 0:
        hidden |= key > row + right
    scores = torch.einsum("rhd,khd->hrk", query, keys) * scale
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0)
    return torch.einsum("hrk,khd->rhd", weights, values)


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    tensors = (query, keys, values)
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if any(tensor.dtype != query.dtype for tensor in tensors):
        raise RuntimeError("query, key and value must have the same dtype")
    if any(tensor.stride(-1) != 1 for tensor in (*tensors, block_table)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    assert not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    page_size, kv_heads, head_dim = keys.shape[1:]
    if page_size % PAGE_MULTIPLE:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
    assert values.shape == keys.shape and query.shape[2] == head_dim
    assert head_dim % 8 == 0 and head_dim <= 256 and query.shape[1] % kv_heads == 0
    num_seqs = len(cu_seqlens_q) - 1
    assert num_seqs > 0, "batch size must be positive"
    _check_int32(cu_seqlens_q, "cu_seqlens_q", (num_seqs + 1,))
    _check_int32(cu_seqlens_k, "cu_seqlens_k", (num_seqs + 1,))
    if block_table.dtype != torch.int32 or len(block_table) != num_seqs:
        raise RuntimeError("block_table must have dtype torch.int32 and a row per sequence")


def _check_int32(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.shape != shape:
        raise RuntimeError(f"{name} must be int32, contiguous, and of shape {shape}")
