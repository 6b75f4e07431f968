"""Counted blocks answer a scheduler as the engine's block manager does."""

from __future__ import annotations

import numpy as np
import pytest
from counted_blocks import CountedBlocks
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.block_manager import BlockManager
from runtime.sampling_params import SamplingParams
from runtime.scheduler import Scheduler
from runtime.scheduler_config import SchedulerConfig
from runtime.sequence import Sequence
from runtime.step import StepOutput

NUM_BLOCKS, BLOCK_SIZE = 20, 4


def sequence(index: int, num_prompt: int, num_output: int) -> Sequence:
    return Sequence(
        request_id=str(index),
        token_ids=np.zeros(num_prompt, dtype=np.int32),
        num_prompt_tokens=num_prompt,
        params=SamplingParams(ignore_eos=True),
        seed=0,
        max_total_tokens=num_prompt + num_output,
        arrival_index=index,
        arrival_time=0.0,
    )


def served(blocks: BlockManager, lengths: list[tuple[int, int]]) -> list[tuple[list[int], ...]]:
    """What every step held until all is done."""
    config = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=16, max_model_len=100)
    scheduler = Scheduler(config, blocks, clock=lambda: 0.0)
    for index, (num_prompt, num_output) in enumerate(lengths):
        scheduler.add(sequence(index, num_prompt, num_output))
    steps = []
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        scheduler.check_integrity()
        names = [int(s.request_id) for s in scheduler.running_sequences()]
        steps.append((names, batch.num_computed_tokens.tolist(), [blocks.num_free_blocks]))
        ids = np.zeros(len(batch.sampled), dtype=np.int64)
        scheduler.update(batch, StepOutput(token_ids=ids, is_valid=np.ones(len(ids), dtype=bool)))
    return steps


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12))
def test_every_step_is_the_same_as_with_named_blocks(lengths):
    named = BlockManager(NUM_BLOCKS + 1, BLOCK_SIZE, enable_prefix_caching=False)
    assert served(CountedBlocks(NUM_BLOCKS, BLOCK_SIZE), lengths) == served(named, lengths)


def test_nobody_gets_more_than_there_is_and_nothing_is_lost():
    blocks, one, other = CountedBlocks(5, BLOCK_SIZE), sequence(0, 9, 1), sequence(1, 9, 1)
    blocks.allocate(one, 3)
    assert (blocks.num_usable_blocks, blocks.num_free_blocks, len(one.blocks)) == (5, 2, 3)
    blocks.check_integrity([one, other])
    with pytest.raises(AssertionError, match="3 of 2 free blocks"):
        blocks.allocate(other, 3)
    with pytest.raises(AssertionError, match="lost or doubled"):
        blocks.check_integrity([other])
    blocks.free(one)
    assert blocks.num_free_blocks == 5 and not one.blocks
