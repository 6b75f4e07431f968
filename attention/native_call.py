"""The native kernel's calls, as csrc/call.h and csrc/attention_team.h lay them out."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
import torch

from .native_build import load_library

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the kernel computes with, and its code for it."""
# Words of a call that differ between layers.
_KEYS, _VALUES, _WORK, _WINDOW = 3, 4, 8, 24


class AttentionTeam(ctypes.Structure):
    """Attention of all layers for a caller's own threads; AttentionTeam of csrc/attention_team.h.

    It refers to the tensors that it was made from. Both must outlive its use: a copy of the
    structure doesn't keep the calls.
    """

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("begin", "work", "end", "calls"))


def pack_call(  # noqa: PLR0913 - a call's fields are flat
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    work: torch.Tensor,
    scale: float,
    window: int,
    *,
    out: torch.Tensor,
) -> list[int]:
    """The words of one layer's call.

    Args:
        query: [num_tokens, num_heads, head_dim], last dimension contiguous.
        key: [num_tokens, num_kv_heads, head_dim], last dimension contiguous.
        value: like key.
        keys: [num_blocks, block_size, num_kv_heads, head_dim], changed in place; blocks lie as
            far apart as all their slots, and a head's elements side by side.
        values: like keys, of the same strides.
        slot_mapping: [num_tokens] int64, contiguous.
        block_tables: [num_seqs, max_blocks] int32, rows contiguous.
        work: [n, WORK_COLUMNS] int32, contiguous; see NativePlan.
        scale: what scores are multiplied by.
        window: keys that a query sees, itself included; 0 for all.
        out: [num_tokens, num_heads, head_dim], contiguous, of query's dtype.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, _ = keys.shape
    slot_stride, head_stride = _page_strides(keys)
    assert values.stride() == keys.stride() and work.is_contiguous()
    assert key.dtype == value.dtype == keys.dtype == values.dtype == query.dtype
    assert out.is_contiguous() and (out.shape, out.dtype) == (query.shape, query.dtype)
    # In the order of Call in csrc/call.h.
    return [
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        slot_mapping.data_ptr(),
        block_tables.data_ptr(),
        work.data_ptr(),
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        slot_stride,
        head_stride,
        num_tokens,
        num_blocks * block_size,
        block_size.bit_length() - 1,
        num_heads,
        num_kv_heads,
        head_dim,
        block_tables.stride(0),
        window,
        DTYPES[query.dtype],
        ctypes.c_int64.from_buffer(ctypes.c_double(scale)).value,
    ]


def _page_strides(keys: torch.Tensor) -> tuple[int, int]:
    """From slot to slot and from head to head, in elements."""
    block, slot, head, element = keys.stride()
    assert block == keys.shape[1] * slot and element == 1
    return slot, head


@functools.cache
def _functions(library: str) -> tuple[int | None, ...]:
    """Addresses of what an AttentionTeam calls."""
    functions = load_library(library)
    named = (getattr(functions, f"stepgraph_attention_{name}") for name in ("begin", "work", "end"))
    return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in named)


def attention_team(  # noqa: PLR0913 - as above
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    work: Sequence[torch.Tensor],
    scale: float,
    windows: Sequence[int],
    library: str,
    *,
    out: torch.Tensor,
) -> AttentionTeam:
    """Calls of all layers, which differ in `keys`, `values`, `work` and `windows` alone.

    The tensors are as for `pack_call`; `library` is the path of the built one to use.
    """
    first = pack_call(
        *(query, key, value, keys[0], values[0], slot_mapping, block_tables, work[0], scale, 0),
        out=out,
    )
    calls = np.empty((len(keys), len(first)), dtype=np.int64)
    calls[:] = first
    calls[:, _KEYS] = [tensor.data_ptr() for tensor in keys]
    calls[:, _VALUES] = [tensor.data_ptr() for tensor in values]
    calls[:, _WORK] = [tensor.data_ptr() for tensor in work]
    calls[:, _WINDOW] = windows
    team = AttentionTeam(*_functions(library), calls.ctypes.data)
    team.keep = calls
    return team


def check_status(status: int, bad: ctypes.c_int64, keys: torch.Tensor) -> None:
    """Raise IndexError unless a call of the kernel on such a cache has gone well."""
    if status:
        what = ("slot", "block")[status - 1]
        raise IndexError(f"{what} {bad.value} is outside the cache of {keys.shape[0]} blocks")
