"""Lists of pages against a builder that goes through sequences and blocks one by one."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import AttentionMetadata, page_plan
from attention.page_plan import PagePart, PagePlan, expand_pages, num_plan_ints, plan_pages


def make_metadata(
    rows: list[int], contexts: list[int], tables: np.ndarray, block_size: int, num_decodes: int
) -> AttentionMetadata:
    bounds = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    host_contexts = np.array(contexts, dtype=np.int32)
    return AttentionMetadata(
        cu_seqlens_q=torch.from_numpy(bounds),
        cu_seqlens_k=torch.from_numpy(np.concatenate([[0], np.cumsum(contexts)]).astype(np.int32)),
        max_seqlen_q=max(rows, default=0),
        max_seqlen_k=max(contexts, default=0),
        slot_mapping=torch.zeros(int(bounds[-1]), dtype=torch.int64),
        context_lens=torch.from_numpy(host_contexts),
        block_tables=torch.from_numpy(tables),
        num_decodes=num_decodes,
        block_size=block_size,
        cu_seqlens_q_cpu=bounds,
        context_lens_cpu=host_contexts,
        block_tables_cpu=tables,
    )


def naive_part(
    rows: list[int], contexts: list[int], tables: list[list[int]], block_size: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """qo_indptr, kv_indptr, indices, last_page_len."""
    qo_indptr, kv_indptr, indices, last_page_len = [0], [0], [], []
    for num_rows, context, table in zip(rows, contexts, tables, strict=True):
        pages = 0
        left = context
        while left > 0:
            indices.append(table[pages])
            pages += 1
            left -= block_size
        qo_indptr.append(qo_indptr[-1] + num_rows)
        kv_indptr.append(kv_indptr[-1] + pages)
        last_page_len.append(block_size + left if context else 0)
    return qo_indptr, kv_indptr, indices, last_page_len


@st.composite
def steps(draw: st.DrawFn) -> AttentionMetadata:
    block_size = 2 ** draw(st.integers(0, 8))
    num_decodes, num_others = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    rows = [1] * num_decodes + draw(st.lists(st.integers(0, 70), min_size=0, max_size=num_others))
    contexts = []
    for num_rows in rows:
        is_padding = draw(st.integers(0, 5)) == 0
        computed = draw(st.sampled_from([0, 1, 15, 16, 17, 255, 256, 300]))
        contexts.append(0 if is_padding else num_rows + computed)
    width = max((-(-n // block_size) for n in contexts), default=0) + draw(st.integers(0, 2))
    seed = draw(st.integers(0, 99))
    tables = np.random.default_rng(seed).integers(1, 10_000, (len(rows), width), dtype=np.int32)
    return make_metadata(rows, contexts, tables, block_size, num_decodes)


def plan(metadata: AttentionMetadata) -> PagePlan:
    out = np.full(num_plan_ints(metadata.num_seqs), -7, dtype=np.int32)
    return plan_pages(metadata, out)


def expand(metadata: AttentionMetadata, pages: PagePlan) -> torch.Tensor:
    indices = torch.full((pages.num_pages,), -1, dtype=torch.int32)
    ranks = torch.arange(pages.num_pages, dtype=torch.int32)
    expand_pages(metadata.block_tables, torch.from_numpy(pages.packed), ranks, indices)
    return indices


@settings(max_examples=300, deadline=None)
@given(steps())
def test_both_parts_equal_the_naive_lists(metadata: AttentionMetadata) -> None:
    pages = plan(metadata)
    indices = expand(metadata, pages)
    rows = np.diff(metadata.cu_seqlens_q_cpu).tolist()
    contexts, tables = metadata.context_lens_cpu.tolist(), metadata.block_tables_cpu.tolist()
    split, first_page = metadata.num_decodes, 0
    parts: list[tuple[PagePart, slice]] = [
        (pages.decode, slice(0, split)),
        (pages.prefill, slice(split, None)),
    ]
    for part, own in parts:
        qo_indptr, kv_indptr, expected, last_page_len = naive_part(
            rows[own], contexts[own], tables[own], metadata.block_size
        )
        assert part.qo_indptr.tolist() == qo_indptr
        assert part.kv_indptr.tolist() == kv_indptr
        assert part.last_page_len.tolist() == last_page_len
        assert part.context_lens.tolist() == contexts[own]
        assert (part.num_seqs, part.num_rows) == (len(rows[own]), qo_indptr[-1])
        last_page = first_page + part.num_pages
        assert indices[first_page:last_page].tolist() == expected
        first_page = last_page
    assert first_page == pages.num_pages


@settings(max_examples=50, deadline=None)
@given(steps())
def test_everything_is_int32_and_lies_in_the_memory_given(metadata: AttentionMetadata) -> None:
    out = np.zeros(num_plan_ints(metadata.num_seqs), dtype=np.int32)
    pages = plan_pages(metadata, out)
    arrays = [pages.packed, pages.prefill.qo_indptr]
    for part in (pages.decode, pages.prefill):
        arrays += [part.kv_indptr, part.last_page_len, part.context_lens]
    for array in arrays:
        assert array.dtype == np.int32
        assert array.size == 0 or np.shares_memory(array, out)
    num_seqs, split = metadata.num_seqs, metadata.num_decodes
    assert pages.packed[: split + 1].tolist() == pages.decode.kv_indptr.tolist()
    last_page_len = [*pages.decode.last_page_len, *pages.prefill.last_page_len]
    assert pages.packed[num_seqs + 1 : 2 * num_seqs + 1].tolist() == last_page_len


@pytest.mark.parametrize(
    ("rows", "context", "message"),
    [(6, 5, "must hold its query rows"), (1, 65, "exceeds its block table")],
)
def test_contexts_that_contradict_rows_or_tables_are_a_bug(
    rows: int, context: int, message: str
) -> None:
    tables = np.zeros((1, 4), dtype=np.int32)
    with pytest.raises(AssertionError, match=message):
        plan(make_metadata([rows], [context], tables, 16, 0))


def test_no_loop_over_sequences_or_blocks() -> None:
    tree = ast.parse(inspect.getsource(page_plan))
    loops = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
    assert not [node for node in ast.walk(tree) if isinstance(node, loops)]


def test_tables_wider_than_needed_and_what_the_memory_held_do_not_matter(
    make_metadata: Callable[..., AttentionMetadata],
) -> None:
    metadata = make_metadata(
        [1, 3], [20, 40], [[5, 9], [3, 8, 2]], block_size=16, num_decodes=1, unused_columns=4
    )
    out = np.full(200, 99, dtype=np.int32)
    pages = plan_pages(metadata, out)
    assert expand(metadata, pages).tolist() == [5, 9, 3, 8, 2]
    assert pages.prefill.kv_indptr.tolist() == [0, 3]
    assert pages.prefill.last_page_len.tolist() == [8]
