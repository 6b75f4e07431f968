"""Steps in the terms of paged kernels: compressed lists of each sequence's rows and pages.

The host's part is numpy on the metadata's host arrays, without a loop over sequences or blocks,
and is small: some integers per sequence. The list of all pages is made on the device, from the
block tables that are there anyway. Kernels for decoding and kernels for everything else differ,
so a step is split into these two parts, each counted from zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .metadata import AttentionMetadata

IntArray: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagePart:
    """Successive sequences of a step. Rows and pages are counted from the part's first ones.

    A sequence without context has no pages, whatever its rows.
    """

    qo_indptr: IntArray  # [num_seqs + 1]; where each sequence's rows begin
    kv_indptr: IntArray  # [num_seqs + 1]; where its pages begin in the part's list
    last_page_len: IntArray  # [num_seqs]; tokens in its last page, 0 without context
    context_lens: IntArray  # [num_seqs]

    @property
    def num_seqs(self) -> int:
        """Sequences of the part."""
        return len(self.context_lens)

    @property
    def num_rows(self) -> int:
        """Query rows of the part."""
        return int(self.qo_indptr[-1])

    @property
    def num_pages(self) -> int:
        """Pages of the part, each sequence's counted by itself."""
        return int(self.kv_indptr[-1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagePlan:
    """A step's sequences as lists of pages: all of them, and the two parts.

    The pages of the decodes come first in the list of all.
    """

    packed: IntArray
    """[3 * num_seqs + 1], of all sequences, one after the other:

    kv_indptr     [num_seqs + 1]; where each sequence's pages begin in the list of all
    last_page_len [num_seqs]
    offsets       [num_seqs]; entry p of the list, a page of sequence s, is entry p + offsets[s]
                  of the flattened block tables
    """
    decode: PagePart
    """The first num_decodes sequences."""
    prefill: PagePart
    """All others, one-row chunks included."""

    @property
    def num_pages(self) -> int:
        """Pages of the step."""
        return self.decode.num_pages + self.prefill.num_pages


def num_plan_ints(num_seqs: int) -> int:
    """How many integers plan_pages writes for so many sequences, at most."""
    return 6 * num_seqs + 5


def plan_pages(metadata: AttentionMetadata, out: IntArray) -> PagePlan:
    """Make the lists of one step.

    Args:
        metadata: of the step; only its host arrays are read.
        out: [at least num_plan_ints(num_seqs)], where all arrays of the result are kept.
    """
    bounds, contexts = metadata.cu_seqlens_q_cpu, metadata.context_lens_cpu
    num_seqs, split, size = metadata.num_seqs, metadata.num_decodes, metadata.block_size
    has_context = contexts > 0
    if split < num_seqs:
        assert (contexts[split:] >= np.diff(bounds[split:]))[has_context[split:]].all(), (
            "a sequence's context must hold its query rows"
        )
    width = metadata.block_tables_cpu.shape[1]
    assert contexts.max(initial=0) <= width * size, "a context exceeds its block table"
    first = 0

    def take(length: int) -> IntArray:
        nonlocal first
        first += length
        return out[first - length : first]

    kv_indptr, last_page_len = take(num_seqs + 1), take(num_seqs)
    kv_indptr[0] = 0
    np.cumsum((contexts + (size - 1)) >> (size.bit_length() - 1), out=kv_indptr[1:])
    np.bitwise_and(contexts - 1, size - 1, out=last_page_len)
    last_page_len += 1
    last_page_len *= has_context
    np.subtract(np.arange(num_seqs, dtype=np.int32) * width, kv_indptr[:-1], out=take(num_seqs))
    kept_contexts = take(num_seqs)
    kept_contexts[:] = contexts
    prefill_rows, prefill_pages = take(num_seqs - split + 1), take(num_seqs - split + 1)
    np.subtract(bounds[split:], split, out=prefill_rows)
    np.subtract(kv_indptr[split:], kv_indptr[split], out=prefill_pages)
    return PagePlan(
        packed=out[: 3 * num_seqs + 1],
        decode=PagePart(
            qo_indptr=bounds[: split + 1],
            kv_indptr=kv_indptr[: split + 1],
            last_page_len=last_page_len[:split],
            context_lens=kept_contexts[:split],
        ),
        prefill=PagePart(
            qo_indptr=prefill_rows,
            kv_indptr=prefill_pages,
            last_page_len=last_page_len[split:],
            context_lens=kept_contexts[split:],
        ),
    )


def expand_pages(
    block_tables: torch.Tensor, packed: torch.Tensor, ranks: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the list of all pages of a step, on the device; the host doesn't wait for it.

    Args:
        block_tables: [num_seqs, max_blocks] int32, contiguous.
        packed: [3 * num_seqs + 1] int32; see PagePlan.packed.
        ranks: [num_pages] int32; 0, 1, ...
        out: [num_pages] int32.
    """
    num_seqs = block_tables.shape[0]
    ends, offsets = packed[1 : num_seqs + 1], packed[2 * num_seqs + 1 :]
    sequence = torch.searchsorted(ends, ranks, right=True, out_int32=True)
    entries = offsets.index_select(0, sequence).add_(ranks)
    torch.index_select(block_tables.view(-1), 0, entries, out=out)
