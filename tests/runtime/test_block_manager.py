"""Block ownership, the prefix cache's matching rules, and the order of reuse."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from runtime.block import Block, FreeBlockQueue
from runtime.block_manager import NULL_BLOCK_ID, BlockManager
from runtime.sampling_params import SamplingParams
from runtime.sequence import BROKEN_CHAIN, Sequence

B = 4


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def make_sequence(token_ids: np.ndarray, extra_key: bytes = b"") -> Sequence:
    return Sequence(
        request_id="r",
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(),
        seed=0,
        max_total_tokens=1000,
        arrival_index=0,
        arrival_time=0.0,
        extra_key=extra_key,
    )


def fill(manager: BlockManager, token_ids: np.ndarray, step: int = 0, extra: bytes = b""):
    """A sequence whose tokens all sit in blocks, as a finished step leaves it."""
    sequence = make_sequence(token_ids, extra)
    hits = manager.find_prefix(token_ids, extra)
    manager.claim(sequence, hits)
    manager.allocate(sequence, manager.blocks_for(len(token_ids)) - len(hits))
    manager.register(sequence, token_ids, len(token_ids), step)
    manager.commit(step)
    return sequence


def block_ids(sequence: Sequence) -> list[int]:
    return [block.block_id for block in sequence.blocks]


def test_free_queue_takes_from_the_middle_and_keeps_the_order_of_the_rest():
    queue, blocks = FreeBlockQueue(), [Block(i) for i in range(5)]
    for block in blocks:
        queue.append(block)
    queue.remove(blocks[2])
    queue.append_left(blocks[2])
    queue.remove(blocks[4])
    assert [block.block_id for block in queue] == [2, 0, 1, 3]
    assert queue.pop_left() is blocks[2]
    assert len(queue) == 3


def test_blocks_come_in_order_and_the_null_block_never():
    manager = BlockManager(5, B)
    sequence = make_sequence(ids(*range(16)))
    manager.allocate(sequence, 4)
    assert block_ids(sequence) == [1, 2, 3, 4]
    assert NULL_BLOCK_ID not in block_ids(sequence)
    assert manager.num_free_blocks == 0
    manager.free(sequence)
    assert manager.num_free_blocks == 4
    manager.check_integrity([])


def test_a_block_is_registered_only_when_its_last_slot_is_scheduled():
    manager = BlockManager(10, B)
    tokens = ids(*range(10))
    sequence = make_sequence(tokens)
    manager.claim(sequence, [])
    manager.allocate(sequence, 3)
    for num_scheduled, registered in [(3, 0), (4, 1), (7, 1), (8, 2), (10, 2)]:
        manager.register(sequence, tokens, num_scheduled, step=0)
        assert manager.num_registered_blocks == registered, num_scheduled
    manager.check_integrity([sequence])


def test_a_hit_leaves_at_least_one_token_to_compute():
    manager = BlockManager(10, B)
    fill(manager, ids(*range(8)))
    assert len(manager.find_prefix(ids(*range(8)))) == 1
    assert len(manager.find_prefix(ids(*range(9)))) == 2


@pytest.mark.parametrize("content_hash", [None, lambda content: 7])
def test_equal_tokens_at_another_place_or_after_another_parent_miss(content_hash):
    """X+Y, then Y alone, then Z+Y, then X+Y again: 0, 0, 0 and 2 blocks are hit."""
    manager = BlockManager(30, B, content_hash=content_hash)
    x, y, z = [1] * B, [2] * B, [3] * B
    hits = []
    for tokens in ([*x, *y, 9], [*y, 9], [*z, *y, 9], [*x, *y, 9]):
        found = manager.find_prefix(ids(*tokens))
        hits.append(len(found))
        fill(manager, ids(*tokens))
    assert hits == [0, 0, 0, 2]


def test_colliding_hashes_cost_a_miss_and_never_serve_other_tokens():
    manager = BlockManager(30, B, content_hash=lambda content: 7)
    fill(manager, ids(*[1] * B, *[2] * B, 9))
    assert manager.find_prefix(ids(*[2] * B, *[5] * 10)) == []
    broken = fill(manager, ids(*[2] * B, *[5] * 10))
    assert broken.chain_uid == BROKEN_CHAIN
    # The first content is still found; what came after the collision is not registered.
    assert len(manager.find_prefix(ids(*[1] * B, *[2] * B, 9))) == 2
    assert manager.num_registered_blocks == 2


def test_extra_keys_keep_tenants_apart():
    manager = BlockManager(30, B)
    tokens = ids(*range(9))
    fill(manager, tokens, extra=b"a")
    assert len(manager.find_prefix(tokens, b"a")) == 2
    assert manager.find_prefix(tokens, b"b") == []
    assert manager.find_prefix(tokens) == []


def test_the_tail_of_a_prefix_is_reused_before_its_head():
    """Five blocks: 64 tokens run, 20 strange ones take two blocks, three leading ones are left."""
    manager = BlockManager(6, 16)
    first = fill(manager, np.arange(64, dtype=np.int32))
    assert block_ids(first) == [1, 2, 3, 4]
    manager.free(first)
    stranger = fill(manager, np.arange(100, 120, dtype=np.int32))
    assert block_ids(stranger) == [5, 4]
    found = manager.find_prefix(np.arange(70, dtype=np.int32))
    assert [block.block_id for block in found] == [1, 2, 3]


def test_least_recently_freed_contents_go_first():
    manager = BlockManager(5, B)
    old, new = fill(manager, ids(1, 1, 1, 1)), fill(manager, ids(2, 2, 2, 2))
    manager.free(old)
    manager.free(new)
    sequence = make_sequence(ids(*range(20)))
    manager.allocate(sequence, 3)  # two empty blocks, then the oldest content
    assert block_ids(sequence)[:2] == [3, 4]
    assert manager.find_prefix(ids(1, 1, 1, 1, 0)) == []
    assert len(manager.find_prefix(ids(2, 2, 2, 2, 0))) == 1


def test_a_duplicate_does_not_take_over_the_first_copys_place():
    """While the first copy lives, recycling a duplicate's blocks costs no hit."""
    manager = BlockManager(6, 256)
    tokens = np.arange(512, dtype=np.int32)
    first = fill(manager, tokens)
    duplicate = fill(manager, tokens)  # its last block is computed again: one token must be
    assert block_ids(first) == [1, 2]
    assert block_ids(duplicate) == [1, 3]
    manager.free(duplicate)
    stranger = fill(manager, np.arange(1000, 1700, dtype=np.int32))
    assert 3 in block_ids(stranger)
    found = manager.find_prefix(np.append(tokens, [7, 8, 9]).astype(np.int32))
    assert [block.block_id for block in found] == [1, 2]
    manager.check_integrity([first, stranger])


def test_a_chain_goes_on_past_a_duplicate_block():
    manager = BlockManager(10, B)
    first = fill(manager, ids(*range(8)))
    longer = fill(manager, ids(*range(8)))
    tokens = ids(*range(12))
    manager.allocate(longer, 1)
    manager.register(longer, tokens, 12, step=1)
    found = manager.find_prefix(ids(*range(13)))
    assert [block.block_id for block in found] == [*block_ids(first), block_ids(longer)[2]]


def test_hits_on_free_blocks_take_them_out_of_the_queue():
    manager = BlockManager(10, B)
    tokens = ids(*range(9))
    manager.free(fill(manager, tokens))
    found = manager.find_prefix(tokens)
    assert manager.num_free_hits(found) == 2
    before = manager.num_free_blocks
    sequence = make_sequence(tokens)
    manager.claim(sequence, found)
    assert manager.num_free_blocks == before - 2
    assert manager.num_free_hits(manager.find_prefix(tokens)) == 0
    manager.check_integrity([sequence])


def test_rollback_takes_back_what_the_step_registered_and_only_that():
    manager = BlockManager(10, B)
    kept = fill(manager, ids(*range(4)), step=0)
    lost = make_sequence(ids(*range(50, 58)))
    manager.allocate(lost, 2)
    manager.register(lost, lost.token_ids, 8, step=1)
    assert len(manager.find_prefix(ids(*range(50, 59)))) == 2
    manager.free(lost)
    manager.rollback(1)
    assert manager.find_prefix(ids(*range(50, 59))) == []
    assert len(manager.find_prefix(ids(*range(5)))) == 1
    manager.check_integrity([kept])


def test_rollback_leaves_a_pending_block_that_was_reused_meanwhile_alone():
    manager = BlockManager(3, B)
    first = make_sequence(ids(*range(8)))
    manager.allocate(first, 2)
    manager.register(first, first.token_ids, 8, step=0)
    manager.free(first)
    second = make_sequence(ids(*range(20, 28)))
    manager.allocate(second, 2)
    manager.rollback(0)
    manager.check_integrity([second])


def test_forgotten_blocks_are_not_found_and_stay_owned():
    manager = BlockManager(10, B)
    sequence = fill(manager, ids(*range(9)))
    manager.forget(sequence)
    assert manager.find_prefix(ids(*range(9))) == []
    manager.check_integrity([sequence])


def test_reset_forgets_everything_and_takes_nothing_from_its_owner():
    manager = BlockManager(10, B)
    sequence = fill(manager, ids(*range(9)))
    manager.reset_prefix_cache()
    assert manager.num_registered_blocks == 0
    manager.check_integrity([sequence])


def test_nothing_is_found_with_the_prefix_cache_off():
    manager = BlockManager(10, B, enable_prefix_caching=False)
    manager.free(fill(manager, ids(*range(9))))
    assert manager.find_prefix(ids(*range(9))) == []
    assert manager.num_registered_blocks == 0


@pytest.mark.parametrize("damage", ["leak", "double", "misfiled"])
def test_check_integrity_notices(damage):
    manager = BlockManager(10, B)
    sequence = fill(manager, ids(*range(9)))
    if damage == "leak":
        sequence.blocks.pop()
    elif damage == "double":
        sequence.blocks.append(sequence.blocks[0])
    else:
        sequence.blocks[0].content = b"other"
    with pytest.raises(AssertionError):
        manager.check_integrity([sequence])


def test_claiming_from_the_middle_touches_a_constant_number_of_blocks():
    """The cost of a claim may not grow with the pool: compare instructions, not seconds."""
    costs = []
    for num_blocks in (2_000, 200_000):
        manager = BlockManager(num_blocks + 1, 1)
        tokens = np.arange(1_001, dtype=np.int32)
        manager.free(fill(manager, tokens))
        filler = make_sequence(ids(0))
        manager.allocate(filler, num_blocks // 2 - 1_000)
        manager.free(filler)
        sequence = make_sequence(tokens)
        calls = 0

        def count(frame, event, arg):
            nonlocal calls
            calls += event == "line"
            return count

        sys.settrace(count)
        try:
            manager.claim(sequence, manager.find_prefix(tokens))
        finally:
            sys.settrace(None)
        assert len(sequence.blocks) == 1_000
        costs.append(calls)
    assert costs[0] == costs[1], costs


@pytest.mark.parametrize("forgotten", [(2,), (0, 2), (0, 1, 2)])
def test_a_siblings_blocks_are_registered_again_where_they_can_be_found(forgotten):
    """Also the one in the middle, which is registered under a parent that is gone."""
    manager, tokens = BlockManager(8, B), np.arange(3 * B, dtype=np.int32)
    first = fill(manager, tokens)
    for index in forgotten:
        manager._forget(first.blocks[index])
    second = make_sequence(tokens)
    manager.claim(second, first.blocks)
    manager.register(second, tokens, 3 * B, 1)
    manager.check_integrity([first, second])
    assert manager.find_prefix(np.append(tokens, [1]).astype(np.int32)) == first.blocks
    assert manager.find_prefix(np.append(tokens[2 * B :], [1]).astype(np.int32)) == []
    manager.rollback(1)
    manager.free(second)
    manager.check_integrity([first])
    manager.free(first)
    manager.check_integrity([])
    assert manager.num_free_blocks == 7
