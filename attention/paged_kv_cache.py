"""The paged KV cache: who owns the memory, and how a step's keys and values get into it."""

from __future__ import annotations

import functools
import logging
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .huge_pages import empty_in_huge_pages
from .metadata import AttentionSpec

logger = logging.getLogger("stepgraph.attention")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedKVCache:
    """Keys and values of every layer, in blocks that block tables point to.

    One allocation holds all layers, on the CPU in huge pages; what is handed out are per-layer
    views::

        storage   | layer 0: keys, values | layer 1: keys, values | ...
        keys[i]   block 0 (null) | block 1 | block 2 | ...
        block     block_size slots, each [num_kv_heads, head_dim]
        slot      block_id * block_size + offset

    Where heads are outermost, a layer's keys (and values) are in memory one such array per head,
    with slots of [head_dim]. The views' shapes are the same.

    Compiled code takes these views as arguments. It must not index a stacked tensor, since
    Inductor can lose the storage offset of such an index under dynamic shapes.
    """

    keys: tuple[torch.Tensor, ...]
    """Per layer [num_blocks, block_size, num_kv_heads, head_dim]; see allocate for strides."""
    values: tuple[torch.Tensor, ...]
    """Like keys."""

    @classmethod
    def allocate(
        cls, spec: AttentionSpec, num_blocks: int, *, heads_outermost: bool = False
    ) -> PagedKVCache:
        """Make a cache of num_blocks blocks, the null block among them.

        It is filled with zeros, so that the null block is finite before anything is written.

        Args:
            spec: its layers, heads, dtype and device.
            num_blocks: at least 2, else ValueError.
            heads_outermost: each head's keys, and values, of successive slots lie side by side.
                False: each slot's heads do, and the views are contiguous.
        """
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}"
            )
        blocks, heads = (num_blocks, spec.block_size), (spec.num_kv_heads,)
        slots = (*heads, *blocks) if heads_outermost else (*blocks, *heads)
        storage = _zeros(spec, (spec.num_layers, 2, *slots, spec.head_dim))
        if heads_outermost:
            storage = storage.movedim(2, 4)
        return cls(
            keys=tuple(storage[layer, 0] for layer in range(spec.num_layers)),
            values=tuple(storage[layer, 1] for layer in range(spec.num_layers)),
        )

    @staticmethod
    def bytes_per_block(spec: AttentionSpec) -> int:
        """Bytes that one block takes over all layers, keys and values together."""
        elements = spec.block_size * spec.num_kv_heads * spec.head_dim
        return 2 * spec.num_layers * elements * spec.dtype.itemsize

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the null block included."""
        return self.keys[0].shape[0]

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Give `targets` what `sources` hold, in every layer. The host doesn't wait for it.

        Args:
            sources: [n] int64 block ids, on the cache's device.
            targets: [n] int64, all different, and none of them among `sources`.
        """
        for blocks in (*self.keys, *self.values):
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))


def _zeros(spec: AttentionSpec, shape: tuple[int, ...]) -> torch.Tensor:
    if spec.device.type != "cpu":
        return torch.zeros(shape, dtype=spec.dtype, device=spec.device)
    memory = empty_in_huge_pages(math.prod(shape) * spec.dtype.itemsize)
    # Pages exist once they are written: memory that runs out does so here, not in a step.
    memory[:: mmap.PAGESIZE] = 0
    return memory.view(spec.dtype).view(shape)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write row t of key and value to slot slot_mapping[t] of one layer's cache.

    One Triton kernel on CUDA where Triton is installed, else torch's index_copy_.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], any strides, of the cache's dtype.
        value: like key.
        keys: [num_blocks, block_size, num_kv_heads, head_dim], contiguous; changed in place.
        values: like keys.
        slot_mapping: [num_tokens] int64, on the cache's device. Live rows have distinct
            slots; padded rows share those of the null block, and any of them may win.
    """
    if keys.is_cuda:
        with torch.cuda.device(keys.device):
            _cuda_writer()(key, value, keys, values, slot_mapping)
    else:
        _copy_rows(key, value, keys, values, slot_mapping)


def _copy_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    keys.view(-1, *keys.shape[2:]).index_copy_(0, slot_mapping, key)
    values.view(-1, *values.shape[2:]).index_copy_(0, slot_mapping, value)


@functools.cache
def _cuda_writer() -> Callable[..., None]:
    """What write_kv calls on CUDA; says once if it isn't the kernel."""
    try:
        import triton  # noqa: F401 - the kernel's module imports it later
    except ImportError as error:
        logger.warning("K/V is written by index_copy_, since Triton can't be imported: %s", error)
        return _copy_rows
    from .kv_write_kernel import write_rows

    return write_rows
