from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attention import AttentionSpec, PagedKVCache, write_kv


@pytest.mark.parametrize("heads_outermost", [False, True])
def test_cache_is_one_zeroed_allocation_seen_through_views_of_each_layer(
    make_spec: Callable[..., AttentionSpec], heads_outermost: bool
) -> None:
    spec = make_spec(windows=(None,) * 3, dtype=torch.bfloat16)
    cache = PagedKVCache.allocate(spec, 5, heads_outermost=heads_outermost)
    views = [*cache.keys, *cache.values]
    assert cache.num_blocks == 5
    assert len(cache.keys) == len(cache.values) == 3
    for view in views:
        assert view.shape == (5, 16, 2, 16)
        assert view.dtype == torch.bfloat16
        in_memory = view.movedim(2, 0) if heads_outermost else view
        assert in_memory.is_contiguous()
        assert not view.any()
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    for number, view in enumerate(views):
        view.fill_(number + 1)
    for number, view in enumerate(views):
        assert bool((view == number + 1).all())


def test_bytes_per_block_is_what_a_block_adds_to_the_allocation(
    make_spec: Callable[..., AttentionSpec],
) -> None:
    spec = make_spec(windows=(None,) * 3, dtype=torch.float32, block_size=4)
    sizes = [
        PagedKVCache.allocate(spec, num_blocks).keys[0].untyped_storage().nbytes()
        for num_blocks in (6, 7)
    ]
    assert sizes[1] - sizes[0] == PagedKVCache.bytes_per_block(spec)
    assert sizes[0] == 6 * PagedKVCache.bytes_per_block(spec)


def test_cache_without_a_usable_block_is_refused(make_spec: Callable[..., AttentionSpec]) -> None:
    with pytest.raises(ValueError, match=r"num_blocks must be at least 2 .*, got 1"):
        PagedKVCache.allocate(make_spec(), 1)


def test_write_kv_puts_each_row_into_its_slot_and_nothing_elsewhere() -> None:
    keys, values = torch.full((2, 4, 4, 2, 3), -1.0)
    # Rows as a model makes them: slices of one projection.
    key, value = torch.split(torch.arange(3 * 4 * 3.0).view(3, 4, 3), 2, dim=1)
    write_kv(key, value, keys, values, torch.tensor([6, 13, 4]))
    for cache, rows in ((keys, key), (values, value)):
        assert torch.equal(cache[1, 2], rows[0])
        assert torch.equal(cache[3, 1], rows[1])
        assert torch.equal(cache[1, 0], rows[2])
        assert int((cache == -1).all(-1).all(-1).sum()) == 16 - 3


def test_padded_rows_may_share_slots_of_the_null_block() -> None:
    keys, values = torch.zeros(2, 3, 4, 2, 3)
    key, value = torch.randn(2, 6, 2, 3)
    write_kv(key, value, keys, values, torch.tensor([7, 0, 0, 0, 3, 3]))
    assert torch.equal(keys[1, 3], key[0])
    assert torch.equal(values[1, 3], value[0])
    assert any(torch.equal(keys[0, 0], row) for row in key[1:4])
    assert not keys[1, :3].any()
    assert not keys[2].any()


@pytest.mark.parametrize("heads_outermost", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copied_blocks_are_equal_in_every_layer_and_nothing_else_changes(
    make_spec: Callable[..., AttentionSpec], dtype: torch.dtype, heads_outermost: bool
) -> None:
    spec = make_spec(windows=(None,) * 3, dtype=dtype)
    cache = PagedKVCache.allocate(spec, 8, heads_outermost=heads_outermost)
    for view in (*cache.keys, *cache.values):
        view.copy_(torch.randn(view.shape))
    before = [view.clone() for view in (*cache.keys, *cache.values)]
    cache.copy_blocks(torch.tensor([5, 2, 5]), torch.tensor([1, 7, 3]))
    for view, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(view, old[[0, 5, 2, 5, 4, 5, 6, 2]])
