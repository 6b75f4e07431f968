"""What the torch backend's plans hold: how much is gathered, masked and shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attention import AttentionMetadata, AttentionPlan, AttentionSpec
from attention.torch_backend import TorchBackend

MakeSpec = Callable[..., AttentionSpec]
MakeMetadata = Callable[..., AttentionMetadata]
MakeStep = Callable[..., Any]


def test_a_long_sequence_does_not_pad_short_ones(
    make_spec: MakeSpec, make_metadata: MakeMetadata
) -> None:
    spec = make_spec(num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    contexts = [*[50] * 128, 8000, *[50] * 127]
    tables = [[1] * -(-length // 16) for length in contexts]
    plan = TorchBackend(spec).plan(
        make_metadata([1] * 256, contexts, tables, block_size=16, num_decodes=256)
    )
    groups = plan.layers[0].groups
    assert sum(group.slots.numel() for group in groups) == sum(contexts)
    assert (groups[0].first, groups[0].last) == (0, 1)
    assert len(groups) < 5


def test_similar_context_lengths_share_a_group(
    make_spec: MakeSpec, make_metadata: MakeMetadata
) -> None:
    contexts = [97, 100, 99, 98]
    metadata = make_metadata([1] * 4, contexts, [[1] * 7] * 4, block_size=16, num_decodes=4)
    (group,) = TorchBackend(make_spec()).plan(metadata).layers[0].groups
    assert group.slots.numel() == 400
    assert group.mask is not None
    assert (group.mask == 0).sum(-1).flatten().tolist() == [100, 99, 98, 97]


def test_equal_context_lengths_are_attended_without_a_mask(
    make_spec: MakeSpec, make_metadata: MakeMetadata
) -> None:
    metadata = make_metadata([1] * 4, [40] * 4, [[1, 2, 3]] * 4, block_size=16, num_decodes=4)
    plan = TorchBackend(make_spec()).plan(metadata)
    assert [group.mask for group in plan.layers[0].groups] == [None]


def test_a_group_gathers_no_more_than_stays_in_a_cpu_cache(
    make_spec: MakeSpec, make_metadata: MakeMetadata
) -> None:
    spec = make_spec(num_heads=8, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    tables = [[1] * 64] * 20
    metadata = make_metadata([1] * 20, [1024] * 20, tables, block_size=16, num_decodes=20)
    groups = TorchBackend(spec).plan(metadata).layers[0].groups
    assert [(group.first, group.last) for group in groups] == [
        (first, first + 2) for first in range(0, 20, 2)
    ]


def test_a_window_bounds_what_is_gathered(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(windows=(16,)), [(1, 999), (10, 990)], num_decodes=1)
    (group,) = step.plan().layers[0].groups
    (prefill,) = step.plan().layers[0].prefills
    assert group.slots.numel() == 16
    assert prefill.slots.numel() == 25  # the first row sees 15 computed tokens, then 10 rows


def test_layers_with_the_same_window_share_a_plan(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(windows=(None, 4, 4, None, 10_000)), [(1, 100), (20, 30)])
    plain, four, four_again, plain_again, wider_than_all = step.plan().layers
    assert four is four_again
    assert plain is plain_again is wider_than_all
    assert plain is not four


def test_padding_is_not_planned_as_a_sequence(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(), [(1, 20), (3, 5)], padded_seqs=[1, 4, 0], padded_rows=2)
    plan = step.plan()
    assert plan.single_rows.tolist() == [0]
    assert plan.idle_rows.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert [group.slots.numel() for group in plan.layers[0].groups] == [21]
    assert len(plan.layers[0].prefills) == 1


def test_fresh_prompts_read_their_own_rows_in_place_of_pages(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    fresh, chunk = make_step(make_spec(), [(10, 0), (10, 5)]).plan().layers[0].prefills
    assert fresh.slots is None
    assert chunk.slots is not None


def test_masks_of_one_window_are_cut_from_one_tensor(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    step = make_step(make_spec(), [(300, 0), (10, 5), (400, 70)])
    masks = [tile.mask for prefill in step.plan().layers[0].prefills for tile in prefill.tiles]
    assert len(masks) > 3
    assert len({mask.untyped_storage().data_ptr() for mask in masks}) == 1


def test_metadata_of_another_block_size_is_a_bug(
    make_spec: MakeSpec, make_metadata: MakeMetadata
) -> None:
    metadata = make_metadata([1], [5], [[4, 2]], block_size=4)
    with pytest.raises(AssertionError, match="blocks of 4, the backend for 16"):
        TorchBackend(make_spec()).plan(metadata)


def test_a_plan_of_another_backend_is_a_bug(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(), [(1, 5)])
    with pytest.raises(AssertionError, match="another backend"):
        step.run(0, AttentionPlan())


@pytest.mark.parametrize(
    ("query_len", "context_len", "message"),
    [(6, 5, "must hold its query rows"), (1, 33, "exceeds its block table")],
)
def test_contexts_that_contradict_rows_or_tables_are_a_bug(
    make_spec: MakeSpec,
    make_metadata: MakeMetadata,
    query_len: int,
    context_len: int,
    message: str,
) -> None:
    metadata = make_metadata([query_len], [query_len], [[1, 2]], block_size=16)
    metadata.context_lens_cpu[0] = context_len
    with pytest.raises(AssertionError, match=message):
        TorchBackend(make_spec()).plan(metadata)


def test_dtype_that_is_not_floating_is_refused_with_its_name(make_spec: MakeSpec) -> None:
    (reason,) = TorchBackend.unsupported_reasons(make_spec(dtype=torch.int8))
    assert reason.startswith("dtype torch.int8 is none of torch.float64")
