"""The native backend against the naive float64 reference, over a pool poisoned with NaN."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attention import AttentionPlan, AttentionSpec, native_plan
from attention.native_backend import NativeBackend
from attention.native_build import (
    ATTENTION_SOURCE,
    NativeBuildError,
    usable_levels,
    usable_library,
)

MakeSpec = Callable[..., AttentionSpec]
MakeStep = Callable[..., Any]
HEADS_OUTERMOST = NativeBackend.heads_outermost
AssertClose = Callable[[torch.Tensor, torch.Tensor], None]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = usable_levels()

try:
    usable_library(ATTENTION_SOURCE, LEVELS[0])
except NativeBuildError as error:
    pytest.skip(f"the native backend can't be built: {error}", allow_module_level=True)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def run(step: Any, layer: int = 0, level: str | None = None) -> torch.Tensor:
    result: torch.Tensor = step.run(layer, backend=NativeBackend(step.spec, level=level))
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_batches_equal_the_reference(
    make_grid_step: MakeStep, grid_head_dim: int, grid_group: int, dtype: torch.dtype
) -> None:
    step = make_grid_step(grid_head_dim, grid_group, dtype)
    for layer in range(step.spec.num_layers):
        step.assert_right(run(step, layer), layer)


@pytest.mark.parametrize("head_dim", [1, 7, 33, 64, 80, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_each_level_of_instructions_equals_the_reference(
    make_spec: MakeSpec, make_step: MakeStep, level: str, dtype: torch.dtype, head_dim: int
) -> None:
    spec = make_spec(num_heads=6, head_dim=head_dim, dtype=dtype, windows=(None, 40))
    pairs = [(1, 0), (1, 31), (1, 255), (1, 260), (2, 15), (17, 255), (70, 0)]
    step = make_step(spec, pairs, padded_rows=2)
    for layer in range(2):
        step.assert_right(run(step, layer, level), layer)


@pytest.mark.parametrize("level", LEVELS)
def test_float16_keeps_subnormal_numbers_and_overflows_to_infinity(
    make_spec: MakeSpec, make_step: MakeStep, level: str
) -> None:
    """One key per query, so the result is the value itself."""
    step = make_step(make_spec(dtype=torch.float16, windows=(1,)), [(2, 0), (1, 4)])
    subnormal = torch.arange(16) * 2.0**-24
    step.value[:] = subnormal.half() * torch.tensor([1.0, -1.0])[:, None].half()
    step.value[2, 0, 0] = float("inf")
    result = run(step, level=level)
    assert torch.equal(result[:, ::2], step.value)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 700])
def test_sequences_split_over_keys_equal_the_reference(
    make_spec: MakeSpec, make_step: MakeStep, dtype: torch.dtype, window: int | None
) -> None:
    spec = make_spec(num_heads=6, head_dim=80, dtype=dtype, windows=(window,))
    step = make_step(spec, [(1, 2999), (5, 1500), (1, 40), (1, 0)], padded_rows=1)
    work = NativeBackend(spec).plan(step.metadata).layers[0]
    num_items, num_reductions = work[0, :2].tolist()
    items = work[1 : 1 + num_items]
    assert num_reductions > 0
    assert (items[:, 8] >= 0).any() and (items[:, 8] < 0).any()
    step.assert_right(run(step))


@pytest.mark.usefixtures("two_threads")
def test_a_row_split_into_parts_that_see_nothing_yet_equals_the_reference(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    """In a window's layer the first parts of a tile's keys are hidden from its last rows."""
    spec = make_spec(num_heads=2, num_kv_heads=1, dtype=torch.float32, windows=(200, 16))
    step = make_step(spec, [(48, 3000)])
    for layer in range(2):
        step.assert_right(run(step, layer), layer)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_and_two_threads_agree(
    make_spec: MakeSpec, make_step: MakeStep, assert_close: AssertClose, dtype: torch.dtype
) -> None:
    spec = make_spec(num_heads=6, head_dim=64, dtype=dtype)
    step = make_step(spec, [(1, 2000), (1, 300), (200, 500)])
    assert NativeBackend(spec).plan(step.metadata).layers[0][0, 3] == 2
    two = run(step)
    torch.set_num_threads(1)
    assert NativeBackend(spec).plan(step.metadata).layers[0][0, 3] == 1
    assert_close(run(step), two)


@pytest.mark.usefixtures("two_threads")
def test_a_repeated_run_gives_the_same_bits(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(dtype=torch.bfloat16), [(1, 2000), (1, 300), (200, 500)])
    first = run(step)
    assert all(torch.equal(run(step), first) for _ in range(5))


def test_scale_of_the_spec_is_applied(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(scale=0.9, dtype=torch.float32), [(1, 40), (9, 20), (30, 0)])
    step.assert_right(run(step))


def test_large_scores_do_not_overflow(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(scale=300.0, dtype=torch.float32), [(1, 400), (90, 20)])
    result = run(step)
    assert bool(result.isfinite().all())
    # Weights are all but one-hot, so what is left is the rounding of the scores.
    expected = step.run()
    assert float((result - expected).abs().max()) < 2e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("window", [None, 7])
def test_slots_that_no_sequence_owns_are_neither_read_nor_written(
    make_spec: MakeSpec,
    make_step: MakeStep,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    spec = make_spec(block_size=block_size, windows=(window,), dtype=dtype)
    step = make_step(spec, [(1, 40), (1, 33), (9, 20), (30, 0)], num_decodes=2, unused_columns=3)
    result = run(step)
    assert bool(result.isfinite().all())
    step.assert_right(result)
    owned = step.owned_slots()
    for tensor in (step.cache.keys[0], step.cache.values[0]):
        assert bool(tensor[owned].isfinite().all())
        assert bool(tensor[~owned].isnan().all())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences_with_bad_values_leave_the_others_alone(
    make_spec: MakeSpec, make_step: MakeStep, poison: float, dtype: torch.dtype
) -> None:
    pairs = [(1, 40), (1, 39), (1, 38), (9, 20), (8, 0)]
    step = make_step(make_spec(dtype=dtype), pairs, num_decodes=3)
    expected = run(step)
    bad = torch.tensor([1, *range(3, 12)])  # the second decode, and the chunk
    for tensor in (step.query, step.key, step.value):
        tensor[bad] = poison
    result = run(step)
    good = torch.ones(len(result), dtype=torch.bool)
    good[bad] = False
    assert torch.equal(result[good], expected[good])
    assert not result[bad].isfinite().any()


def test_a_bad_query_alone_is_not_hidden(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(dtype=torch.float32), [(1, 100), (20, 0)])
    step.query[[0, 7]] = float("nan")
    result = run(step)
    assert bool(result[[0, 7]].isnan().all())
    assert result.isnan().any(-1).any(-1).sum() == 2


@pytest.mark.parametrize("padded_seqs", [(), (0, 0), (1, 1), (3, 0, 1)])
@pytest.mark.parametrize("padded_rows", [0, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_gives_zeros_and_changes_no_other_row(
    make_spec: MakeSpec,
    make_step: MakeStep,
    padded_seqs: tuple[int, ...],
    padded_rows: int,
    dtype: torch.dtype,
) -> None:
    pairs = [(1, 40), (1, 7), (9, 20), (30, 0)]
    step = make_step(
        make_spec(dtype=dtype),
        pairs,
        num_decodes=2,
        padded_seqs=padded_seqs,
        padded_rows=padded_rows,
    )
    live = sum(query_len for query_len, _ in pairs)
    for tensor in (step.query, step.key, step.value):
        tensor[live:] = float("nan")
    result = run(step)
    assert len(result) == live + sum(padded_seqs) + padded_rows
    step.assert_right(result)
    assert not result[live:].any()


def test_step_of_padding_alone_gives_zeros(make_spec: MakeSpec, make_step: MakeStep) -> None:
    spec = make_spec(dtype=torch.bfloat16)
    step = make_step(spec, [], padded_seqs=[1, 0], padded_rows=3, unused_columns=1)
    for tensor in (step.query, step.key, step.value):
        tensor.fill_(float("nan"))
    result = run(step)
    assert result.shape == (4, 4, 16)
    assert not result.any()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_sequence_reads_blocks_that_another_one_writes_in_the_same_step(
    make_spec: MakeSpec,
    make_step: MakeStep,
    order: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal prompts: a fresh one fills the two blocks that a chunk and a decode hit."""
    monkeypatch.setattr(native_plan, "_MIN_THREAD_PRODUCTS", 1)
    pairs = [(40, 0), (6, 32), (1, 32)]
    tables = [[5, 2, 7], [5, 2, 3], [5, 2, 6]]
    spec = make_spec(dtype=torch.float32)
    step = make_step(spec, [pairs[i] for i in order], tables=[tables[i] for i in order])
    result = run(step)
    assert bool(result.isfinite().all())
    step.assert_right(result)


def test_both_layouts_of_the_cache_give_the_same_bits(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    spec = make_spec(num_heads=6, num_kv_heads=3, dtype=torch.bfloat16, windows=(None, 40))
    steps = [
        make_step(spec, [(1, 400), (70, 20), (3, 30)], padded_rows=1, heads_outermost=outermost)
        for outermost in (False, True)
    ]
    for layer in range(2):
        assert torch.equal(run(steps[0], layer), run(steps[1], layer))
    for one, other in zip(*(step.cache.keys + step.cache.values for step in steps), strict=True):
        assert one.stride() != other.stride()
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def test_strides_of_any_kind_are_read_right(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(dtype=torch.bfloat16), [(1, 40), (9, 20)])
    expected = run(step)
    odd = dataclasses.replace(
        step,
        query=step.query.transpose(0, 2).contiguous().transpose(0, 2),
        key=step.key.transpose(0, 1).contiguous().transpose(0, 1),
    )
    assert torch.equal(run(odd), expected)


def test_layers_with_the_same_window_share_a_work_list(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    spec = make_spec(windows=(None, 4, 4, None, 10_000), dtype=torch.float32)
    step = make_step(spec, [(1, 100), (20, 30)])
    plain, four, four_again, plain_again, wider = NativeBackend(spec).plan(step.metadata).layers
    assert four is four_again
    assert plain is plain_again is wider
    assert plain is not four


@pytest.mark.parametrize("num_threads", [1, 2, 7])
@pytest.mark.parametrize("window", [None, 100])
def test_items_of_work_cover_each_visible_key_of_each_row_and_head_once(
    make_spec: MakeSpec, make_step: MakeStep, window: int | None, num_threads: int
) -> None:
    spec = make_spec(num_heads=6, windows=(window,), dtype=torch.float32)
    pairs = [(1, 2999), (5, 1500), (1, 40), (1, 0), (200, 0), (130, 700)]
    step = make_step(spec, pairs, padded_rows=3, padded_seqs=[2])
    work = native_plan.make_plan(spec, step.metadata, num_threads).layers[0]
    items = work[1 : 1 + int(work[0, 0])].tolist()
    seen = torch.zeros((step.metadata.num_tokens, 2, 3000), dtype=torch.int32)
    for offset, sequence, first, last, first_head, last_head, start, end, _ in items:
        if start < end:
            bounds = step.metadata.cu_seqlens_q_cpu
            assert bounds[sequence] <= first < last <= bounds[sequence + 1]
            assert offset == step.metadata.context_lens_cpu[sequence] - bounds[sequence + 1]
        seen[first:last, first_head:last_head, start:end] += 1
    assert int(seen.max()) == 1
    row = 0
    for query_len, computed in pairs:
        for position in range(computed, computed + query_len):
            start = 0 if window is None else max(0, position - window + 1)
            assert bool((seen[row, :, start : position + 1] == 1).all())
            row += 1
    assert not seen[row:].any()


@pytest.mark.parametrize("window", [None, 1, 100])
def test_decoding_rows_make_the_items_that_any_rows_would(
    make_spec: MakeSpec, make_metadata: Any, window: int | None
) -> None:
    spec = make_spec(num_heads=6, windows=(window,), dtype=torch.float32)
    contexts = [1, 3000, 41, 100, 101]
    tables = [[1] * 200] * 5
    metadata = make_metadata([1] * 5, contexts, tables, block_size=16, num_decodes=5)
    items = native_plan._decode_items(spec, metadata, window)
    assert items.tolist() == native_plan._tile(spec, metadata, window).tolist()


@pytest.mark.parametrize("bad", [-1, 10_000])
def test_a_slot_outside_the_cache_is_an_error(
    make_spec: MakeSpec, make_step: MakeStep, bad: int
) -> None:
    step = make_step(make_spec(dtype=torch.float32), [(3, 5)])
    step.metadata.slot_mapping[1] = bad
    with pytest.raises(IndexError, match=rf"slot {bad} is outside the cache of \d+ blocks"):
        run(step)


@pytest.mark.parametrize("bad", [-3, 10_000])
def test_a_block_outside_the_cache_is_an_error(
    make_spec: MakeSpec, make_step: MakeStep, bad: int
) -> None:
    step = make_step(make_spec(dtype=torch.float32), [(1, 100)])
    step.metadata.block_tables[0, 2] = bad
    with pytest.raises(IndexError, match=rf"block {bad} is outside the cache"):
        run(step)


def test_metadata_of_another_block_size_is_a_bug(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(block_size=4, dtype=torch.float32), [(1, 5)])
    with pytest.raises(AssertionError, match="blocks of 4, the backend for 16"):
        NativeBackend(make_spec(dtype=torch.float32)).plan(step.metadata)


def test_a_plan_of_another_backend_is_a_bug(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(dtype=torch.float32), [(1, 5)])
    with pytest.raises(AssertionError, match="another backend"):
        step.run(0, AttentionPlan(), NativeBackend(step.spec))


@pytest.mark.parametrize(
    ("query_len", "context_len", "message"),
    [(6, 5, "must hold its query rows"), (1, 3300, "exceeds its block table")],
)
def test_contexts_that_contradict_rows_or_tables_are_a_bug(
    make_spec: MakeSpec, make_step: MakeStep, query_len: int, context_len: int, message: str
) -> None:
    step = make_step(make_spec(dtype=torch.float32), [(query_len, 0)])
    step.metadata.context_lens_cpu[0] = context_len
    with pytest.raises(AssertionError, match=message):
        NativeBackend(step.spec).plan(step.metadata)


def test_other_devices_and_dtypes_are_refused_with_every_reason(make_spec: MakeSpec) -> None:
    spec = make_spec(dtype=torch.float64, scale=0.0)
    spec = dataclasses.replace(spec, device=torch.device("meta"))
    assert NativeBackend.unsupported_reasons(spec) == [
        "device meta is not a CPU",
        "dtype torch.float64 is none of torch.float32, torch.bfloat16, torch.float16",
        "scale 0.0 is not positive",
    ]
