"""Paged attention: KV cache layout, step metadata, and the backends that compute it."""

from .backend import AttentionBackend, AttentionPlan, BoundAttention, LayerAttention
from .flashinfer_options import FlashInferOptions
from .metadata import AttentionMetadata, AttentionSpec
from .paged_kv_cache import PagedKVCache, write_kv
from .selection import (
    backend_names,
    block_size_multiple,
    preferred_block_size,
    rejected_backends,
    select_backend,
)

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionPlan",
    "AttentionSpec",
    "BoundAttention",
    "FlashInferOptions",
    "LayerAttention",
    "PagedKVCache",
    "backend_names",
    "block_size_multiple",
    "preferred_block_size",
    "rejected_backends",
    "select_backend",
    "write_kv",
]
