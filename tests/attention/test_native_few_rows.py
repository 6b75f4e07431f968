"""Few query rows per key/value head, which the native kernel attends without packing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attention import AttentionSpec
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

LEVELS = usable_levels()
# Around whole vectors of 4 to 16 keys, and around the 64 keys of a tile.
CONTEXTS = (1, 2, 7, 15, 16, 17, 31, 63, 64, 65, 81, 130)

try:
    usable_library(ATTENTION_SOURCE, LEVELS[0])
except NativeBuildError as error:
    pytest.skip(f"the native backend can't be built: {error}", allow_module_level=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(step: Any, layer: int = 0, level: str | None = None) -> torch.Tensor:
    result: torch.Tensor = step.run(layer, backend=NativeBackend(step.spec, level=level))
    return result


@pytest.mark.parametrize("group", range(1, 11))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_any_number_of_rows_and_keys_equals_the_reference(
    make_spec: MakeSpec, make_step: MakeStep, level: str, dtype: torch.dtype, group: int
) -> None:
    spec = make_spec(
        num_heads=3 * group, num_kv_heads=3, head_dim=48, dtype=dtype, windows=(None, 5, 64)
    )
    step = make_step(spec, [(1, context - 1) for context in CONTEXTS])
    for layer in range(3):
        step.assert_right(run(step, layer, level), layer)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_heads_of_one_item_equal_the_reference(
    make_spec: MakeSpec, make_step: MakeStep, level: str, dtype: torch.dtype
) -> None:
    spec = make_spec(num_heads=38, num_kv_heads=19, head_dim=64, dtype=dtype)
    step = make_step(spec, [(1, 70), (1, 127), (1, 3)])
    step.assert_right(run(step, level=level))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("query_len", [2, 3, 4, 8])
def test_rows_of_one_sequence_that_see_different_keys_equal_the_reference(
    make_spec: MakeSpec, make_step: MakeStep, level: str, query_len: int
) -> None:
    """With the third window, no key of a second tile is seen by the first row. With the last one,
    the last row doesn't see the first keys of a full tile."""
    windows = (None, 1, 64 - query_len, 80)
    spec = make_spec(num_heads=2, num_kv_heads=2, dtype=torch.float32, windows=windows)
    step = make_step(spec, [(query_len, 64 - query_len), (query_len, 200), (query_len, 0)])
    for layer in range(4):
        step.assert_right(run(step, layer, level), layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_row_is_the_same_alone_and_in_any_batch(
    make_spec: MakeSpec, make_step: MakeStep, level: str, dtype: torch.dtype
) -> None:
    spec = make_spec(num_heads=6, head_dim=40, dtype=dtype, windows=(50,))
    pairs = [(1, 130), (1, 47), (20, 90), (1, 300)]
    together = make_step(spec, pairs)
    expected = run(together, level=level)
    for sequence, row in ((0, 0), (1, 1), (3, 22)):
        alone = make_step(spec, [pairs[sequence]])
        for name in ("query", "key", "value"):
            getattr(alone, name)[:] = getattr(together, name)[row]
        past = pairs[sequence][1]
        for pages in ("keys", "values"):
            source, target = getattr(together.cache, pages)[0], getattr(alone.cache, pages)[0]
            for position in range(past):
                block, slot = divmod(position, spec.block_size)
                origin = together.metadata.block_tables_cpu[sequence, block]
                target[alone.metadata.block_tables_cpu[0, block], slot] = source[origin, slot]
        assert torch.equal(run(alone, level=level)[0], expected[row])


def test_one_sequence_is_shared_by_threads_once_it_is_long_enough(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    torch.set_num_threads(2)
    spec = make_spec(num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    for contexts, items, threads in (((191,), 1, 1), ((192,), 2, 2), ((200, 200), 2, 2)):
        step = make_step(spec, [(1, context - 1) for context in contexts])
        header = NativeBackend(spec).plan(step.metadata).layers[0][0].tolist()
        assert (header[0], header[3]) == (items, threads)
        step.assert_right(run(step))
