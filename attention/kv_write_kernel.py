"""A Triton kernel that writes a step's keys and values to their slots, both in one launch.

Import this module only where Triton is: the kernel is made at the first call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def write_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See write_kv. Queues one kernel and allocates nothing, so it can be captured.

    The current device must be that of the tensors.
    """
    num_tokens, num_heads, head_dim = key.shape
    assert value.shape == key.shape, "value differs in shape from key"
    assert keys.shape[2:] == values.shape[2:] == key.shape[1:], "the cache has other heads"
    assert key.dtype == value.dtype == keys.dtype == values.dtype, "the cache has another dtype"
    assert keys.is_contiguous() and values.is_contiguous() and slot_mapping.is_contiguous()
    assert slot_mapping.dtype == torch.int64 and slot_mapping.shape == (num_tokens,)
    if num_tokens == 0:
        return
    row_size = num_heads * head_dim
    _kernel()[(num_tokens,)](
        key,
        value,
        keys,
        values,
        slot_mapping,
        *key.stride(),
        *value.stride(),
        head_dim=head_dim,
        row_size=row_size,
        block=1 << (row_size - 1).bit_length(),
    )


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    # Every alignment of slots would be a compilation of its own, which a scalar doesn't repay.
    @triton.jit(do_not_specialize_on_alignment=["slots"])  # type: ignore[untyped-decorator]
    def write_row(  # type: ignore[no-untyped-def] # noqa: PLR0913 - a kernel's arguments are flat
        key,
        value,
        keys,
        values,
        slots,
        key_row,
        key_head,
        key_dim,
        value_row,
        value_head,
        value_dim,
        head_dim: tl.constexpr,
        row_size: tl.constexpr,
        block: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + row)
        place = tl.arange(0, block)
        inside = place < row_size
        head, dim = place // head_dim, place % head_dim
        new_key = tl.load(key + row * key_row + head * key_head + dim * key_dim, mask=inside)
        tl.store(keys + slot * row_size + place, new_key, mask=inside)
        new_value = tl.load(
            value + row * value_row + head * value_head + dim * value_dim, mask=inside
        )
        tl.store(values + slot * row_size + place, new_value, mask=inside)

    return write_row
