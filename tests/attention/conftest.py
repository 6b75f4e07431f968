"""Builders and the naive reference that the attention tests share, handed out as fixtures.

A Step is one step's inputs over a pool in which every slot that no sequence owns is NaN,
with the result that is right for them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    AttentionSpec,
    BoundAttention,
    PagedKVCache,
    select_backend,
)

# Largest absolute error over results of about unit size. The rounding of one result is up to
# 6e-8, 8e-3 and 1e-3; weights are rounded to the narrow types too.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 5e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


# The grid on which every backend is compared with the reference: (query length, computed length)
# pairs, and what else varies.
PAIRS = tuple(itertools.product((1, 2, 3, 17, 130), (0, 1, 15, 16, 17, 255, 1000)))
HEAD_DIMS = (64, 80, 96, 128, 256)
GQA = (1, 3, 4, 8)
BLOCK_SIZES = (1, 16, 32, 256)
WINDOWS = (None, 5, 100, 5000)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One step: its inputs, the cache it works on, and what must come out."""

    spec: AttentionSpec
    cache: PagedKVCache
    metadata: AttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    tables: list[list[int]]

    def plan(self) -> AttentionPlan:
        return select_backend("torch", self.spec).plan(self.metadata)

    def run(
        self,
        layer: int = 0,
        plan: AttentionPlan | None = None,
        backend: AttentionBackend | None = None,
    ) -> torch.Tensor:
        """Run one layer with the torch backend, or with the one given."""
        backend = backend or select_backend("torch", self.spec)
        plan = plan or backend.plan(self.metadata)
        attend = BoundAttention(backend=backend, plan=plan, cache=self.cache)
        return attend(layer, self.query, self.key, self.value)

    def to(self, device: torch.device) -> Step:
        """The same step on another device."""
        fields = dataclasses.fields(AttentionMetadata)
        values = {field.name: getattr(self.metadata, field.name) for field in fields}
        moved = {k: v.to(device) for k, v in values.items() if isinstance(v, torch.Tensor)}
        return dataclasses.replace(
            self,
            spec=dataclasses.replace(self.spec, device=device),
            cache=PagedKVCache(
                keys=tuple(tensor.to(device) for tensor in self.cache.keys),
                values=tuple(tensor.to(device) for tensor in self.cache.values),
            ),
            metadata=dataclasses.replace(self.metadata, **moved),
            query=self.query.to(device),
            key=self.key.to(device),
            value=self.value.to(device),
        )

    def assert_right(
        self, result: torch.Tensor, layer: int = 0, *, tolerance: float | None = None
    ) -> None:
        """Compare with the naive result from what the cache holds after the run."""
        assert result.dtype == self.spec.dtype
        assert_close(result.cpu(), self._expected(layer), tolerance)

    def _expected(self, layer: int) -> torch.Tensor:
        """Padded rows are zero."""
        spec, meta = self.spec, self.metadata
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        bounds = meta.cu_seqlens_q_cpu.tolist()
        for sequence, context_len in enumerate(meta.context_lens_cpu.tolist()):
            if context_len == 0:
                continue
            blocks = torch.tensor(self.tables[sequence])
            keys = self.cache.keys[layer][blocks].flatten(0, 1)[:context_len].double()
            values = self.cache.values[layer][blocks].flatten(0, 1)[:context_len].double()
            rows = slice(bounds[sequence], bounds[sequence + 1])
            out[rows] = naive_attention(
                self.query[rows].double(), keys, values, spec.scale, spec.windows[layer]
            )
        return out

    def owned_slots(self) -> torch.Tensor:
        """[num_blocks, block_size] bool: slots of live tokens, and those the step writes."""
        blocks, size = self.cache.num_blocks, self.spec.block_size
        owned = torch.zeros(blocks * size, dtype=torch.bool)
        owned[self.metadata.slot_mapping] = True
        contexts = self.metadata.context_lens_cpu.tolist()
        for table, context_len in zip(self.tables, contexts, strict=True):
            for position in range(context_len):
                owned[table[position // size] * size + position % size] = True
        return owned.view(blocks, size)


def naive_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend the last len(query) tokens of one sequence, head by head, in float64."""
    num_rows, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    row = torch.arange(num_keys - num_rows, num_keys)[:, None]
    key = torch.arange(num_keys)
    hidden = key > row
    if window is not None:
        hidden |= key <= row - window
    out = torch.empty_like(query)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = query[:, head] @ keys[:, kv_head].T * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[:, head] = weights @ values[:, kv_head]
    return out


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None
) -> None:
    """Compare within a tolerance, by default that of actual's dtype; see TOLERANCES."""
    tolerance = tolerance or TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance)


def _make_spec(
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float64,
    block_size: int = 16,
    windows: tuple[int | None, ...] = (None,),
    scale: float | None = None,
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
        block_size=block_size,
        windows=windows,
        scale=head_dim**-0.5 if scale is None else scale,
    )


def _make_metadata(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    num_decodes: int = 0,
    padded_rows: int = 0,
    unused_columns: int = 0,
) -> AttentionMetadata:
    """Pack lists, one entry per sequence, as a runner would.

    Rows of sequences without context and padded_rows rows after the last sequence go to the
    null block; block tables get unused_columns more columns than the longest needs.
    """
    width = max(map(len, block_tables)) + unused_columns
    tables = np.zeros((len(block_tables), width), dtype=np.int32)
    slots: list[int] = []
    for row, (query_len, context_len, blocks) in enumerate(
        zip(query_lens, context_lens, block_tables, strict=True)
    ):
        tables[row, : len(blocks)] = blocks
        if context_len == 0:
            slots += [index % block_size for index in range(query_len)]
            continue
        for position in range(context_len - query_len, context_len):
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    slots += [index % block_size for index in range(padded_rows)]
    bounds = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    contexts = np.array(context_lens, dtype=np.int32)
    context_bounds = np.concatenate([[0], np.cumsum(context_lens)]).astype(np.int32)
    return AttentionMetadata(
        cu_seqlens_q=torch.from_numpy(bounds),
        cu_seqlens_k=torch.from_numpy(context_bounds),
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(context_lens),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        context_lens=torch.from_numpy(contexts),
        block_tables=torch.from_numpy(tables),
        num_decodes=num_decodes,
        block_size=block_size,
        cu_seqlens_q_cpu=bounds,
        context_lens_cpu=contexts,
        block_tables_cpu=tables,
    )


def _shuffled_tables(
    context_lens: Sequence[int], block_size: int, rng: np.random.Generator
) -> tuple[list[list[int]], int]:
    """Give each sequence its own blocks from a shuffled pool; also the pool's size."""
    counts = [-(-context_len // block_size) for context_len in context_lens]
    num_blocks = sum(counts) + 4
    pool = (rng.permutation(num_blocks - 1) + 1).tolist()
    ends = np.cumsum(counts).tolist()
    return [pool[end - n : end] for end, n in zip(ends, counts, strict=True)], num_blocks


def _poisoned_cache(spec: AttentionSpec, num_blocks: int, heads_outermost: bool) -> PagedKVCache:
    cache = PagedKVCache.allocate(spec, num_blocks, heads_outermost=heads_outermost)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    return cache


def _fill_computed(cache: PagedKVCache, tables: list[list[int]], computed: Sequence[int]) -> None:
    """Write random keys and values of the computed tokens, in every layer."""
    block_size = cache.keys[0].shape[1]
    for table, count in zip(tables, computed, strict=True):
        position = torch.arange(count)
        blocks = torch.tensor(table, dtype=torch.int64)[position // block_size]
        slots = blocks * block_size + position % block_size
        for tensor in (*cache.keys, *cache.values):
            rows = torch.randn(count, *tensor.shape[2:])
            tensor.flatten(0, 1)[slots] = rows.to(tensor.dtype)


def _make_step(
    spec: AttentionSpec,
    pairs: Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    tables: list[list[int]] | None = None,
    num_decodes: int = 0,
    padded_rows: int = 0,
    padded_seqs: Sequence[int] = (),
    unused_columns: int = 0,
    heads_outermost: bool = False,
) -> Step:
    """Make a Step from (query length, computed length) pairs.

    Each sequence gets blocks of its own and random computed tokens; with tables given, nothing
    is written beforehand. padded_seqs are query lengths of sequences without context.
    """
    torch.manual_seed(seed)
    query_lens = [query_len for query_len, _ in pairs] + list(padded_seqs)
    contexts = [sum(pair) for pair in pairs] + [0] * len(padded_seqs)
    if tables is None:
        rng = np.random.default_rng(seed)
        tables, num_blocks = _shuffled_tables(contexts, spec.block_size, rng)
        cache = _poisoned_cache(spec, num_blocks, heads_outermost)
        _fill_computed(cache, tables[: len(pairs)], [computed for _, computed in pairs])
    else:
        cache = _poisoned_cache(spec, 2 + max(map(max, tables)), heads_outermost)
    metadata = _make_metadata(
        query_lens,
        contexts,
        tables,
        block_size=spec.block_size,
        num_decodes=num_decodes,
        padded_rows=padded_rows,
        unused_columns=unused_columns,
    )
    # Slices of one projection, as in a model, so not contiguous.
    heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    rows = torch.randn(metadata.num_tokens, sum(heads), spec.head_dim).to(spec.dtype)
    query, key, value = torch.split(rows, heads, dim=1)
    return Step(
        spec=spec,
        cache=cache,
        metadata=metadata,
        query=query,
        key=key,
        value=value,
        tables=tables,
    )


def _make_grid_step(
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    block_size: int | None = None,
    heads_outermost: bool = False,
) -> Step:
    """Make a mixed batch of 12 pairs; two layers with different windows.

    Over all head sizes and groups, every two of head size, grouping, block size and window meet,
    unless the block size is given.
    """
    row, column = HEAD_DIMS.index(head_dim), GQA.index(group)
    seed = row * len(GQA) + column
    spec = _make_spec(
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        block_size=block_size or BLOCK_SIZES[(row + column) % len(BLOCK_SIZES)],
        windows=tuple(WINDOWS[(row + step * column) % len(WINDOWS)] for step in (2, 3)),
    )
    order = np.random.default_rng(seed).permutation(len(PAIRS))
    pairs = [PAIRS[index] for index in order[:12]]
    return _make_step(spec, pairs, seed=seed, heads_outermost=heads_outermost)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes grid_head_dim and grid_group on the whole grid."""
    if "grid_head_dim" in metafunc.fixturenames:
        metafunc.parametrize("grid_head_dim", HEAD_DIMS)
    if "grid_group" in metafunc.fixturenames:
        metafunc.parametrize("grid_group", GQA)


@pytest.fixture
def heads_outermost(request: pytest.FixtureRequest) -> bool:
    """The layout of the steps' caches: HEADS_OUTERMOST of a test's module, if it has one."""
    return getattr(request.module, "HEADS_OUTERMOST", False)


@pytest.fixture
def make_grid_step(heads_outermost: bool) -> Callable[..., Step]:
    """Make the Step of one point of the grid; see _make_grid_step."""
    return functools.partial(_make_grid_step, heads_outermost=heads_outermost)


@pytest.fixture
def make_spec() -> Callable[..., AttentionSpec]:
    """Make a small AttentionSpec; keywords override its fields."""
    return _make_spec


@pytest.fixture
def make_metadata() -> Callable[..., AttentionMetadata]:
    """Make AttentionMetadata from lists; see _make_metadata."""
    return _make_metadata


@pytest.fixture
def make_step(heads_outermost: bool) -> Callable[..., Step]:
    """Make a Step; see _make_step."""
    return functools.partial(_make_step, heads_outermost=heads_outermost)


@pytest.fixture(name="assert_close")
def assert_close_fixture() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Compare tensors; see assert_close."""
    return assert_close
