"""What every attention backend offers: plan once per step, run once per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from .paged_kv_cache import PagedKVCache

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from .metadata import AttentionMetadata, AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionPlan:
    """What a backend's plan() made for one step; each backend derives its own type."""


class AttentionBackend(ABC):
    """Computes causal attention over the paged KV cache for one model on one device.

    Args:
        spec: what to attend.
        cache_dir: where it may keep what it builds; None: stepgraph in the user's cache.
    """

    name: ClassVar[str]
    """What users call the backend, as in select_backend(name, spec)."""
    block_size_multiple: ClassVar[int] = 1
    """What spec.block_size must be a multiple of."""
    heads_outermost: ClassVar[bool] = False
    """The layout of the cache that it reads, see PagedKVCache.allocate."""

    def __init__(self, spec: AttentionSpec, *, cache_dir: Path | None = None) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def unsupported_reasons(
        cls, spec: AttentionSpec, *, cache_dir: Path | None = None
    ) -> list[str]:
        """Say why this backend can't run spec here; an empty list means that it can."""

    def allocate_cache(self, num_blocks: int) -> PagedKVCache:
        """A cache of zeros for this backend; see PagedKVCache.allocate."""
        return PagedKVCache.allocate(self.spec, num_blocks, heads_outermost=self.heads_outermost)

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Do the host's work for one step. The plan serves every layer of that step."""

    @abstractmethod
    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        plan: AttentionPlan,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's keys and values into the cache, then attend.

        All rows are written before any is read, since equal prompts of one step may share
        blocks.

        Args:
            layer: which layer's cache and window to use.
            query: [num_tokens, num_heads, head_dim], last dimension contiguous.
            key: [num_tokens, num_kv_heads, head_dim], last dimension contiguous.
            value: like key.
            cache: changed in place.
            plan: what this backend's plan() returned for the step.
            out: where to put the result: contiguous, of query's shape and dtype, and no part of
                it query, key or value. None: new memory.

        Returns:
            [num_tokens, num_heads, head_dim], contiguous; `out` itself if it was given. Padded
            rows are finite.
        """


class LayerAttention(Protocol):
    """Attention as a model sees it: tensors in, tensor out, everything else bound."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attend in one layer; shapes as in AttentionBackend.run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundAttention:
    """A LayerAttention for one step: a backend, its plan, and the cache it works on."""

    backend: AttentionBackend
    plan: AttentionPlan
    cache: PagedKVCache

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the backend on one layer; see AttentionBackend.run."""
        return self.backend.run(layer, query, key, value, self.cache, self.plan, out)
