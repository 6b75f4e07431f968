"""The native backend's plan for full graphs: fixed buffers, refreshed for each decode step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from attention import AttentionMetadata, AttentionSpec
from attention.native_backend import NativeBackend
from attention.native_build import NativeBuildError, load_library, usable_levels
from attention.native_plan import CapturableNativePlan

MakeSpec = Callable[..., AttentionSpec]
MakeStep = Callable[..., Any]
HEADS_OUTERMOST = NativeBackend.heads_outermost

try:
    load_library(usable_levels()[0])
except NativeBuildError as error:
    pytest.skip(f"the native backend can't be built: {error}", allow_module_level=True)


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def in_static_tensors(metadata: AttentionMetadata, first: AttentionMetadata) -> AttentionMetadata:
    """The step copied into the tensors of the first one, as a graph runner does."""
    for name in ("slot_mapping", "context_lens", "block_tables"):
        getattr(first, name).copy_(getattr(metadata, name))
    return dataclasses.replace(
        metadata,
        slot_mapping=first.slot_mapping,
        context_lens=first.context_lens,
        block_tables=first.block_tables,
    )


def padded_decodes(make_step: MakeStep, spec: AttentionSpec, lengths: list[int], seed: int) -> Any:
    """A decode step over tables of 64 blocks; length 0 is a padded sequence."""
    pairs = [(1, length - 1) for length in lengths if length]
    width = max(-(-length // spec.block_size) for length in lengths)
    return make_step(
        spec,
        pairs,
        seed=seed,
        num_decodes=len(lengths),
        padded_seqs=[1] * (len(lengths) - len(pairs)),
        unused_columns=64 - width,
    )


def test_refreshed_steps_equal_freshly_planned_ones_bit_for_bit(
    make_spec: MakeSpec, make_step: MakeStep, num_threads: int
) -> None:
    """Lengths that jump, cross a block, end a sequence, and split over keys or don't."""
    spec = make_spec(dtype=torch.float32, windows=(None, 40, None))
    backend = NativeBackend(spec)
    first = padded_decodes(make_step, spec, [1, 1, 1, 1], 0).metadata
    captured = backend.capturable_plan(first)
    addresses = [work.data_ptr() for work in captured.plan.layers]
    for seed, lengths in enumerate(
        [[10, 10, 10, 10], [1000, 900, 3, 1], [16, 17, 15, 0], [1000, 0, 0, 0], [39, 40, 41, 42]]
    ):
        step = padded_decodes(make_step, spec, lengths, seed)
        metadata = in_static_tensors(step.metadata, first)
        assert captured.refresh(metadata)
        for layer in range(3):
            result = step.run(layer, captured.plan, backend)
            assert torch.equal(result, step.run(layer, backend.plan(metadata), backend))
            step.assert_right(result, layer)
    assert addresses == [work.data_ptr() for work in captured.plan.layers]


def test_the_buffers_hold_the_longest_list_of_work(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    """Whatever the lengths, of as many threads as a large host has."""
    rng = np.random.default_rng(0)
    spec = make_spec(dtype=torch.float32, num_heads=8, num_kv_heads=1, windows=(None, 300))
    for num_threads in (2, 7, 64):
        for num_seqs in (1, 2, 9):
            first = padded_decodes(make_step, spec, [1] * num_seqs, 0).metadata
            captured = CapturableNativePlan(spec, first, num_threads)
            for seed in range(6):
                lengths = sorted((rng.random(num_seqs) ** 4 * 1000).astype(int) + 1, reverse=True)
                step = padded_decodes(make_step, spec, [int(n) for n in lengths], seed)
                assert captured.refresh(in_static_tensors(step.metadata, first))


def test_tensors_that_are_not_the_first_steps_are_a_bug(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    spec = make_spec(dtype=torch.float32)
    step = padded_decodes(make_step, spec, [5, 6], 0)
    captured = NativeBackend(spec).capturable_plan(step.metadata)
    with pytest.raises(AssertionError, match="slot_mapping isn't the first step's"):
        captured.refresh(padded_decodes(make_step, spec, [5, 6], 0).metadata)
