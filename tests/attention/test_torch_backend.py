"""The torch backend against a naive float64 reference, over a pool poisoned with NaN."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention import AttentionMetadata, AttentionSpec

MakeSpec = Callable[..., AttentionSpec]
MakeMetadata = Callable[..., AttentionMetadata]
MakeStep = Callable[..., Any]
AssertClose = Callable[[torch.Tensor, torch.Tensor], None]

QUERY_LENS = (1, 2, 3, 17, 130)
COMPUTED_LENS = (0, 1, 15, 16, 17, 255, 1000)
PAIRS = tuple(itertools.product(QUERY_LENS, COMPUTED_LENS))
BLOCK_SIZES = (1, 16, 32, 256)
WINDOWS = (None, 5, 100, 5000)


class OperatorNames(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operators are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


def test_mixed_batches_equal_the_reference(
    make_grid_step: MakeStep, grid_head_dim: int, grid_group: int
) -> None:
    step = make_grid_step(grid_head_dim, grid_group, torch.float64)
    for layer in range(step.spec.num_layers):
        step.assert_right(step.run(layer), layer)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_query_and_computed_length_in_one_batch_equals_the_reference(
    make_spec: MakeSpec, make_step: MakeStep, block_size: int, window: int | None
) -> None:
    spec = make_spec(num_heads=3, num_kv_heads=1, block_size=block_size, windows=(window,))
    pairs = [PAIRS[index] for index in np.random.default_rng(1).permutation(len(PAIRS))]
    step = make_step(spec, pairs)
    step.assert_right(step.run())


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_each_dtype_is_within_its_tolerance(
    make_spec: MakeSpec, make_step: MakeStep, dtype: torch.dtype, group: int
) -> None:
    spec = make_spec(
        num_heads=2 * group, num_kv_heads=2, head_dim=64, dtype=dtype, windows=(None, 40)
    )
    pairs = [(1, 0), (1, 31), (1, 255), (1, 260), (2, 15), (17, 255), (130, 0), (600, 20)]
    step = make_step(spec, pairs)
    for layer in range(2):
        step.assert_right(step.run(layer), layer)


@pytest.mark.parametrize("head_dim", [1, 7, 33, 100])
def test_odd_head_sizes_equal_the_reference(
    make_spec: MakeSpec, make_step: MakeStep, head_dim: int
) -> None:
    step = make_step(make_spec(head_dim=head_dim), [(1, 40), (1, 3), (9, 20), (30, 0)])
    step.assert_right(step.run())


def test_prompts_longer_than_a_query_tile_equal_the_reference(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    spec = make_spec(num_heads=8, num_kv_heads=1, windows=(None, 10, 64, 500))
    step = make_step(spec, [(200, 0), (129, 70), (64, 3), (65, 0)])
    assert all(len(prefill.tiles) > 1 for prefill in step.plan().layers[0].prefills)
    for layer in range(spec.num_layers):
        step.assert_right(step.run(layer), layer)


@pytest.mark.parametrize("head_dim", [64, 80, 7])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_a_cpu_attends_with_the_fused_kernel_alone(
    make_spec: MakeSpec, make_step: MakeStep, dtype: torch.dtype, head_dim: int
) -> None:
    """Neither scores nor repeated keys and values are ever written to memory."""
    spec = make_spec(num_heads=6, head_dim=head_dim, dtype=dtype, windows=(None, 7))
    step = make_step(spec, [(1, 40), (1, 33), (9, 20), (200, 0)], num_decodes=2)
    for layer in range(spec.num_layers):
        with OperatorNames() as called:
            step.run(layer)
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in called.names
        matrix_products = {"aten::bmm", "aten::mm", "aten::matmul", "aten::baddbmm"}
        assert not called.names & (matrix_products | {"aten::_softmax", "aten::repeat"})


def test_scale_of_the_spec_is_applied(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(scale=0.9), [(1, 40), (9, 20), (30, 0)])
    result = step.run()
    step.assert_right(result)
    other = make_step(make_spec(), [(1, 40), (9, 20), (30, 0)])
    assert not torch.allclose(result, other.run(), atol=1e-3)


def test_one_plan_serves_layers_with_different_windows(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    spec = make_spec(windows=(None, 4, 33, 4, None, 10_000))
    step = make_step(spec, [(1, 100), (1, 2), (20, 30), (40, 0)])
    plan = step.plan()
    for layer in range(spec.num_layers):
        step.assert_right(step.run(layer, plan), layer)


def test_windows_about_as_long_as_the_context_equal_the_reference(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    spec = make_spec(windows=(1, 19, 20, 21))
    step = make_step(spec, [(1, 19), (1, 18), (7, 13), (20, 0)])
    for layer in range(spec.num_layers):
        step.assert_right(step.run(layer), layer)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("window", [None, 7])
def test_slots_that_no_sequence_owns_are_neither_read_nor_written(
    make_spec: MakeSpec, make_step: MakeStep, block_size: int, window: int | None
) -> None:
    spec = make_spec(block_size=block_size, windows=(window,))
    pairs = [(1, 40), (1, 33), (9, 20), (30, 0)]
    step = make_step(spec, pairs, num_decodes=2, unused_columns=3)
    result = step.run()
    assert bool(result.isfinite().all())
    step.assert_right(result)
    owned = step.owned_slots()
    for tensor in (step.cache.keys[0], step.cache.values[0]):
        assert bool(tensor[owned].isfinite().all())
        assert bool(tensor[~owned].isnan().all())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_sequences_with_bad_values_leave_the_others_alone(
    make_spec: MakeSpec, make_step: MakeStep, poison: float
) -> None:
    step = make_step(make_spec(), [(1, 40), (1, 39), (1, 38), (9, 20), (8, 0)], num_decodes=3)
    expected = step.run()
    bad = torch.tensor([1, *range(3, 12)])  # the second decode, and the chunk
    for tensor in (step.query, step.key, step.value):
        tensor[bad] = poison
    result = step.run()
    good = torch.ones(len(result), dtype=torch.bool)
    good[bad] = False
    assert torch.equal(result[good], expected[good])
    assert not result[bad].isfinite().any()


@pytest.mark.parametrize("padded_seqs", [(), (0, 0), (1, 1), (3, 0, 1)])
@pytest.mark.parametrize("padded_rows", [0, 5])
def test_padding_gives_zeros_and_changes_no_other_row(
    make_spec: MakeSpec, make_step: MakeStep, padded_seqs: tuple[int, ...], padded_rows: int
) -> None:
    pairs = [(1, 40), (1, 7), (9, 20), (30, 0)]
    step = make_step(
        make_spec(), pairs, num_decodes=2, padded_seqs=padded_seqs, padded_rows=padded_rows
    )
    live = sum(query_len for query_len, _ in pairs)
    for tensor in (step.query, step.key, step.value):
        tensor[live:] = float("nan")
    result = step.run()
    assert len(result) == live + sum(padded_seqs) + padded_rows
    step.assert_right(result)
    assert not result[live:].any()


def test_uniform_decode_padded_with_empty_sequences_equals_the_reference(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    step = make_step(make_spec(), [(1, 40), (1, 7), (1, 0)], num_decodes=8, padded_seqs=[1] * 5)
    result = step.run()
    step.assert_right(result)
    assert not result[3:].any()


def test_step_of_padding_alone_gives_zeros(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(), [], padded_seqs=[1, 0], padded_rows=3, unused_columns=1)
    for tensor in (step.query, step.key, step.value):
        tensor.fill_(float("nan"))
    result = step.run()
    assert result.shape == (4, 4, 16)
    assert not result.any()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_sequence_reads_blocks_that_another_one_writes_in_the_same_step(
    make_spec: MakeSpec, make_step: MakeStep, order: tuple[int, ...]
) -> None:
    """Equal prompts: a fresh one fills the two blocks that a chunk and a decode hit."""
    pairs = [(40, 0), (6, 32), (1, 32)]
    tables = [[5, 2, 7], [5, 2, 3], [5, 2, 6]]
    step = make_step(make_spec(), [pairs[i] for i in order], tables=[tables[i] for i in order])
    result = step.run()
    assert bool(result.isfinite().all())
    step.assert_right(result)


def test_mixed_step_equals_its_sequences_run_one_by_one(
    make_spec: MakeSpec, make_step: MakeStep, make_metadata: MakeMetadata, assert_close: AssertClose
) -> None:
    """Three decodes, a middle chunk, and a fresh prompt with a prefix hit."""
    spec = make_spec(windows=(None, 24))
    pairs = [(1, 33), (1, 7), (1, 100), (20, 45), (9, 32)]
    step = make_step(spec, pairs, num_decodes=3)
    for layer in range(spec.num_layers):
        mixed = step.run(layer)
        first = 0
        for sequence, (query_len, computed) in enumerate(pairs):
            rows = slice(first, first + query_len)
            first += query_len
            metadata = make_metadata(
                [query_len],
                [query_len + computed],
                [step.tables[sequence]],
                block_size=16,
                num_decodes=int(sequence < 3),
            )
            alone = dataclasses.replace(
                step,
                metadata=metadata,
                query=step.query[rows],
                key=step.key[rows],
                value=step.value[rows],
            )
            assert_close(alone.run(layer), mixed[rows])


@pytest.mark.parametrize("window", [None, 19])
def test_prompt_cut_into_random_chunks_equals_the_prompt_in_one_step(
    make_spec: MakeSpec,
    make_step: MakeStep,
    make_metadata: MakeMetadata,
    assert_close: AssertClose,
    window: int | None,
) -> None:
    rng = np.random.default_rng(0)
    length = 150
    whole = make_step(make_spec(block_size=8, windows=(window,)), [(length, 0)])
    expected = whole.run()
    whole.assert_right(expected)
    for tensor in (*whole.cache.keys, *whole.cache.values):
        tensor.fill_(float("nan"))
    start = 0
    while start < length:
        end = min(length, start + int(rng.choice([1, 2, 5, 8, 31])))
        chunk = dataclasses.replace(
            whole,
            metadata=make_metadata([end - start], [end], whole.tables, block_size=8),
            query=whole.query[start:end],
            key=whole.key[start:end],
            value=whole.value[start:end],
        )
        assert_close(chunk.run(), expected[start:end])
        start = end


def test_one_token_chunks_behind_the_decodes_keep_their_rows(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    pairs = [(1, 20), (1, 60), (5, 9), (1, 130), (1, 0), (7, 0)]
    step = make_step(make_spec(), pairs, num_decodes=2)
    step.assert_right(step.run())


@pytest.mark.parametrize("lens", [[33] * 5, [90, 33, 8], [8, 33, 90], [33, 90, 33, 8]], ids=str)
@pytest.mark.parametrize("num_heads", [2, 6, 8])
def test_uniform_decode_in_any_order_of_lengths_equals_the_reference(
    make_spec: MakeSpec, make_step: MakeStep, lens: list[int], num_heads: int
) -> None:
    pairs = [(1, length) for length in lens]
    step = make_step(make_spec(num_heads=num_heads), pairs, num_decodes=len(lens))
    step.assert_right(step.run())


def test_skewed_context_lengths_equal_the_reference(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    rng = np.random.default_rng(3)
    lens = [*rng.integers(1, 60, 40).tolist(), 3000, 900, 899]
    rng.shuffle(lens)
    spec = make_spec(num_heads=6, num_kv_heads=2, windows=(None, 500))
    step = make_step(spec, [(1, length - 1) for length in lens], num_decodes=len(lens))
    for layer in range(spec.num_layers):
        step.assert_right(step.run(layer), layer)
