"""The buffers that captured graphs read a step from, and how a step is padded into them.

Padding has to be harmless and never stale:

    rows beyond the batch          token 0, position 0, a slot of the null block
    sequences beyond the batch     one such row each, context length 0, all blocks null
    table entries beyond the batch the null block
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attention import AttentionMetadata


class StaticInputs:
    """One buffer per input, as large as the largest capture; a size uses the first part of it.

    Args:
        max_tokens: rows of the largest captured step.
        max_seqs: sequences of the largest captured decode step, 0 if none is captured.
        max_blocks: columns of the widest block table.
        block_size: tokens in one KV block.
        device: where the model runs.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._block_size = block_size
        self.input_ids = zeros(max_tokens, dtype=torch.int32)  # [max_tokens]
        self.positions = zeros(max_tokens, dtype=torch.int64)  # [max_tokens]
        self.slot_mapping = zeros(max_tokens, dtype=torch.int64)  # [max_tokens]
        # Rows of padding take turns in the null block.
        self._null_slots = torch.arange(max_tokens, device=device) % block_size
        # Every sequence of a decode step has one row, the padded ones too.
        self._cu_seqlens_q_cpu = np.arange(max_seqs + 1, dtype=np.int32)
        self._cu_seqlens_q = torch.from_numpy(self._cu_seqlens_q_cpu).to(device)
        self._cu_seqlens_k = zeros(max_seqs + 1, dtype=torch.int32)
        self._context_lens = zeros(max_seqs, dtype=torch.int32)
        self._block_tables = zeros(max_seqs, max_blocks, dtype=torch.int32)
        self._context_lens_cpu = np.zeros(max_seqs, dtype=np.int32)
        self._block_tables_cpu = np.zeros((max_seqs, max_blocks), dtype=np.int32)
        self._filled = (0, 0)  # rows and columns of the block tables that may not be null
        self._decode_views: dict[int, dict[str, Any]] = {}  # by size, for _decode_metadata

    def load(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        size: int,
    ) -> None:
        """Copy the rows of a step in, and pad them up to size."""
        num_tokens = input_ids.shape[0]
        self.input_ids[:num_tokens].copy_(input_ids)
        self.positions[:num_tokens].copy_(positions)
        self.slot_mapping[:num_tokens].copy_(slot_mapping)
        if num_tokens < size:  # a copy of nothing costs the host as much as any other
            self._load_padding(num_tokens, size)

    def load_decode(self, metadata: AttentionMetadata, size: int) -> AttentionMetadata:
        """Copy a uniform decode step's sequences in, and pad them up to size.

        `load` has copied the rows. The tensors of the result are slices of the buffers, at the
        same addresses for every step of this size; its host arrays are good until the next call.
        """
        num_seqs, num_blocks = metadata.block_tables_cpu.shape
        assert num_blocks <= self._block_tables.shape[1], (
            f"a block table of {num_blocks} columns exceeds the {self._block_tables.shape[1]} "
            "that were captured"
        )
        self._clear_tables(num_seqs, num_blocks)
        self._block_tables[:num_seqs, :num_blocks].copy_(metadata.block_tables)
        self._block_tables_cpu[:num_seqs, :num_blocks] = metadata.block_tables_cpu
        self._context_lens[:num_seqs].copy_(metadata.context_lens)
        self._context_lens_cpu[:num_seqs] = metadata.context_lens_cpu
        self._cu_seqlens_k[: num_seqs + 1].copy_(metadata.cu_seqlens_k)
        if num_seqs < size:
            self._context_lens[num_seqs:size].zero_()
            self._context_lens_cpu[num_seqs:size] = 0
            last = metadata.cu_seqlens_k[-1:]
            self._cu_seqlens_k[num_seqs + 1 : size + 1].copy_(last.expand(size - num_seqs))
        return self._decode_metadata(size, metadata.max_seqlen_k)

    def dummy_decode(self, size: int) -> AttentionMetadata:
        """A decode step of size sequences, each with one token, in the null block."""
        self._load_padding(0, size)
        self._clear_tables(0, 0)
        self._context_lens[:size].fill_(1)
        self._context_lens_cpu[:size] = 1
        torch.arange(size + 1, dtype=torch.int32, out=self._cu_seqlens_k[: size + 1])
        return self._decode_metadata(size, 1)

    def dummy_mixed(self, size: int) -> AttentionMetadata:
        """A step of size rows: one sequence of one token in the null block, the rest padding."""
        self._load_padding(0, size)
        bounds = np.array([0, 1], dtype=np.int32)
        contexts = np.ones(1, dtype=np.int32)
        tables = np.zeros((1, 1), dtype=np.int32)
        device = self.input_ids.device
        return AttentionMetadata(
            cu_seqlens_q=torch.from_numpy(bounds).to(device),
            cu_seqlens_k=torch.from_numpy(bounds).to(device),
            max_seqlen_q=1,
            max_seqlen_k=1,
            slot_mapping=self.slot_mapping[:size],
            context_lens=torch.from_numpy(contexts).to(device),
            block_tables=torch.from_numpy(tables).to(device),
            num_decodes=0,
            block_size=self._block_size,
            cu_seqlens_q_cpu=bounds,
            context_lens_cpu=contexts,
            block_tables_cpu=tables,
        )

    def _load_padding(self, first: int, size: int) -> None:
        self.input_ids[first:size].zero_()
        self.positions[first:size].zero_()
        self.slot_mapping[first:size].copy_(self._null_slots[first:size])

    def _clear_tables(self, num_seqs: int, num_blocks: int) -> None:
        """Null what an earlier step left beyond this step's rows and columns."""
        rows, columns = self._filled
        for tables in (self._block_tables, self._block_tables_cpu):
            if num_blocks < columns:
                tables[:rows, num_blocks:columns] = 0
            if num_seqs < rows:
                tables[num_seqs:rows, :columns] = 0
        self._filled = (num_seqs, num_blocks)

    def _decode_metadata(self, size: int, max_seqlen_k: int) -> AttentionMetadata:
        views = self._decode_views.get(size)
        if views is None:
            views = self._decode_views[size] = {
                "cu_seqlens_q": self._cu_seqlens_q[: size + 1],
                "cu_seqlens_k": self._cu_seqlens_k[: size + 1],
                "slot_mapping": self.slot_mapping[:size],
                "context_lens": self._context_lens[:size],
                "block_tables": self._block_tables[:size],
                "cu_seqlens_q_cpu": self._cu_seqlens_q_cpu[: size + 1],
                "context_lens_cpu": self._context_lens_cpu[:size],
                "block_tables_cpu": self._block_tables_cpu[:size],
            }
        return AttentionMetadata(
            **views,
            max_seqlen_q=1,
            max_seqlen_k=max_seqlen_k,
            num_decodes=size,
            block_size=self._block_size,
        )
