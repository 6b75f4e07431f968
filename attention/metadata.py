"""What one step looks like to attention, and what a model needs of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

MAX_BLOCK_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention of one model on one device: shapes, dtype, and each layer's window.

    Raises ValueError for a combination that no backend could run.
    """

    num_heads: int
    """Query heads; a multiple of num_kv_heads."""
    num_kv_heads: int
    """Key/value heads; query head h reads key/value head h // (num_heads // num_kv_heads)."""
    head_dim: int
    """Elements of one head, the same for queries, keys and values."""
    dtype: torch.dtype
    """Of queries, keys, values, the KV cache and the result."""
    device: torch.device
    """Where all of these live."""
    block_size: int
    """Tokens in one KV block: a power of two from 1 to 256."""
    windows: tuple[int | None, ...]
    """One entry per layer: None, or w > 0 where a query at position p sees keys p-w+1 .. p."""
    scale: float
    """What q.k is multiplied by before the softmax; usually head_dim ** -0.5."""
    soft_cap: float | None = None
    """None, or c > 0 where a scaled score x becomes c * tanh(x / c) before the softmax."""
    max_num_seqs: int = 256
    """Most sequences of a step, for sizing workspaces; more make them grow."""
    max_num_tokens: int = 8192
    """Most rows of a step, likewise."""

    def __post_init__(self) -> None:
        counts = ("num_heads", "num_kv_heads", "head_dim", "max_num_seqs", "max_num_tokens")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} query heads "
                f"for {self.num_kv_heads} key/value heads"
            )
        size = self.block_size
        if not 1 <= size <= MAX_BLOCK_SIZE or size & (size - 1):
            raise ValueError(
                f"block_size must be a power of two from 1 to {MAX_BLOCK_SIZE}, got {size}"
            )
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap must be None or positive, got {self.soft_cap}")
        for layer, window in enumerate(self.windows):
            if window is not None and window < 1:
                raise ValueError(
                    f"the window of layer {layer} must be None or at least 1, got {window}"
                )

    @property
    def num_layers(self) -> int:
        """Layers that attend."""
        return len(self.windows)

    @property
    def queries_per_kv(self) -> int:
        """Query heads that read one key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionMetadata:
    """The geometry of one step's flat batch; every backend plans from this value alone.

    num_tokens counts the rows of the flat batch, padding included. Rows of sequence s are
    cu_seqlens_q[s] up to cu_seqlens_q[s + 1]; rows from cu_seqlens_q[-1] on are padding.
    A sequence whose context length is 0 is padding too, whatever its query length. Block 0
    is the null block: padded rows write to it, and unused table entries hold it.

    Row r of sequence s is the token at position
    context_lens[s] - (cu_seqlens_q[s + 1] - r), so the queries are the context's last tokens.
    """

    cu_seqlens_q: torch.Tensor  # [num_seqs + 1] int32, device; first row of each sequence
    cu_seqlens_k: torch.Tensor  # [num_seqs + 1] int32, device; running sum of context_lens
    max_seqlen_q: int
    max_seqlen_k: int
    slot_mapping: torch.Tensor  # [num_tokens] int64, device; where each row's K/V is written
    context_lens: torch.Tensor  # [num_seqs] int32, device; computed + new tokens
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32, device
    num_decodes: int
    """The first num_decodes sequences have one query row each and are decoding."""
    block_size: int
    cu_seqlens_q_cpu: npt.NDArray[np.int32]  # [num_seqs + 1], host copy
    context_lens_cpu: npt.NDArray[np.int32]  # [num_seqs], host copy
    block_tables_cpu: npt.NDArray[np.int32]  # [num_seqs, max_blocks], host copy

    def __post_init__(self) -> None:
        num_seqs = self.num_seqs
        assert self.cu_seqlens_q_cpu.shape == (num_seqs + 1,), "cu_seqlens_q_cpu: wrong length"
        assert self.cu_seqlens_q.shape == (num_seqs + 1,), "cu_seqlens_q: wrong length"
        assert self.cu_seqlens_k.shape == (num_seqs + 1,), "cu_seqlens_k: wrong length"
        assert self.context_lens.shape == (num_seqs,), "context_lens: wrong length"
        assert self.block_tables_cpu.shape[0] == num_seqs, "block_tables_cpu: wrong length"
        assert self.block_tables.shape == self.block_tables_cpu.shape, (
            "block_tables differs in shape from its host copy"
        )
        assert 0 <= self.num_decodes <= num_seqs, (
            f"num_decodes is {self.num_decodes} for {num_seqs} sequences"
        )
        assert self.cu_seqlens_q_cpu[self.num_decodes] == self.num_decodes, (
            f"the first {self.num_decodes} sequences must have one query row each"
        )
        assert self.cu_seqlens_q_cpu[-1] <= self.num_tokens, (
            f"{self.cu_seqlens_q_cpu[-1]} rows belong to sequences, the batch has {self.num_tokens}"
        )

    @property
    def num_seqs(self) -> int:
        """Sequences of the step, padded ones included."""
        return len(self.context_lens_cpu)

    @property
    def num_tokens(self) -> int:
        """Rows of the flat batch, padded ones included."""
        return self.slot_mapping.shape[0]
