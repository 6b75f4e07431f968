"""Skipped decode steps leave the scheduler and every block as single steps do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from skipping_scheduler import SkippingScheduler

from runtime.block_manager import BlockManager
from runtime.sampling_params import SamplingParams
from runtime.scheduler_config import SchedulerConfig
from runtime.sequence import Sequence
from runtime.step import StepOutput


class Bench:
    """A scheduler in which each request generates one id of its own."""

    def __init__(self, *, num_blocks: int = 60, block_size: int = 4, caching: bool, **limits):
        self.blocks = BlockManager(
            num_blocks + 1, block_size, enable_prefix_caching=caching, content_hash=hash
        )
        config = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": 200,
            **limits,
        }
        step_cost = config.pop("step_cost", None)
        self.scheduler = SkippingScheduler(
            SchedulerConfig(**config), self.blocks, clock=lambda: 0.0, step_cost=step_cost
        )
        self.sequences: list[Sequence] = []

    def add(self, num_prompt: int, num_output: int) -> None:
        index = len(self.sequences)
        sequence = Sequence(
            request_id=str(index),
            token_ids=np.arange(num_prompt, dtype=np.int32),  # all begin alike
            num_prompt_tokens=num_prompt,
            params=SamplingParams(ignore_eos=True),
            seed=0,
            max_total_tokens=num_prompt + num_output,
            arrival_index=index,
            arrival_time=0.0,
        )
        self.scheduler.add(sequence)
        self.sequences.append(sequence)

    def ids(self, rows: np.ndarray) -> np.ndarray:
        return np.array([-1 - s.arrival_index for s in self.scheduler.sequences_at(rows)])

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        ids = self.ids(scheduled.rows[scheduled.sampled])
        output = StepOutput(token_ids=ids, is_valid=np.ones(len(ids), dtype=bool))
        self.scheduler.update(scheduled, output)

    def state(self) -> dict[str, object]:
        """Everything that later steps depend on."""
        table = self.scheduler._table
        live = np.flatnonzero(table.is_live)
        # Without a cache nothing depends on ids, nor on which block is whose.
        known = range(len(live)) if self.blocks.enable_prefix_caching else ()
        return {
            "rows": [s.row for s in self.scheduler.running_sequences()],
            "counts": [
                counts[live].tolist()
                for counts in (table.num_tokens, table.num_computed, table.num_slots)
            ],
            "ids": [table.token_ids[live[i], : table.num_tokens[live[i]]].tolist() for i in known],
            "num_blocks": [len(s.blocks) for s in self.sequences],
            "statuses": [s.status for s in self.sequences],
            "free_rows": table._free_rows,
            "endings": self.scheduler._num_endings,
            "blocks": [[b.block_id for b in s.blocks] for s in self.sequences if known],
            "chains": [(s.num_chained_blocks, s.chain_uid) for s in self.sequences],
            "num_free": self.blocks.num_free_blocks,
            "free": [(b.block_id, b.uid) for b in self.blocks._free if known],
            "registered": {key: b.block_id for key, b in self.blocks._registered.items()},
            "pending": dict(self.blocks._pending),
            "step": self.scheduler._next_step,
            "misses": self.scheduler.sizing.num_target_misses,
        }


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_blocks", [25, 60])
def test_skipping_leaves_the_state_of_single_steps_after_any_number_of_them(caching, num_blocks):
    def started() -> Bench:
        bench = Bench(caching=caching, num_blocks=num_blocks)
        for num_prompt, num_output in ((9, 30), (9, 40), (3, 33), (14, 26)):
            bench.add(num_prompt, num_output)
        for _ in range(2):
            bench.step()
        return bench

    single = started()
    foreseen = single.scheduler.foresee()
    assert foreseen is not None and foreseen.num_steps > 9
    for num_steps in range(1, foreseen.num_steps + 1):
        single.step()
        skipping = started()
        run = skipping.scheduler.foresee()
        assert run is not None
        skipping.scheduler.skip(run, num_steps, skipping.ids(run.rows))
        skipping.scheduler.check_integrity()
        assert skipping.state() == single.state()
        is_last = num_steps == foreseen.num_steps
        assert single.scheduler.num_running == (3 if is_last and num_blocks == 60 else 4)
    single.step()  # where blocks run out, this one could not be skipped
    assert (single.scheduler.num_preemptions > 0) == (num_blocks == 25)


def test_a_run_ends_with_the_step_in_which_the_first_sequences_do():
    bench = Bench(caching=False)
    for num_output in (12, 9, 9):
        bench.add(5, num_output)
    bench.step()  # all have one token of theirs
    run = bench.scheduler.foresee()
    assert run is not None
    assert (run.num_steps, run.num_seqs, run.num_kv_tokens) == (8, 3, 18)
    assert bench.scheduler.skip(run, 7, bench.ids(run.rows)) == []
    run = bench.scheduler.foresee()
    assert run is not None and run.num_steps == 1
    assert bench.scheduler.skip(run, 1, bench.ids(run.rows)) == bench.sequences[1:]
    assert [s.is_finished for s in bench.sequences] == [False, True, True]
    assert [len(s.token_ids) for s in bench.sequences[1:]] == [14, 14]


def test_nothing_is_foreseen_while_a_prompt_is_under_way_or_may_start():
    bench = Bench(caching=False, max_num_seqs=2)
    bench.add(4, 30)
    assert bench.scheduler.foresee() is None
    bench.step()
    assert bench.scheduler.foresee() is not None
    bench.add(40, 30)
    assert bench.scheduler.foresee() is None  # it may start
    bench.step()
    assert bench.scheduler.foresee() is None  # it is under way
    bench.step()
    assert bench.scheduler.foresee() is not None
    bench.add(4, 30)
    assert bench.scheduler.foresee() is not None  # no row is free


def test_who_finds_too_few_blocks_bars_nothing_unless_it_may_hit_what_decodes_register():
    for caching in (False, True):
        bench = Bench(caching=caching, num_blocks=10)
        bench.add(9, 10)
        bench.step()
        bench.scheduler.add(
            Sequence(
                request_id="other",
                token_ids=np.full(39, 7, dtype=np.int32),
                num_prompt_tokens=39,
                params=SamplingParams(ignore_eos=True),
                seed=0,
                max_total_tokens=40,
                arrival_index=1,
                arrival_time=0.0,
            )
        )
        assert (bench.scheduler.foresee() is None) == caching


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(stop_token_ids=(5,))])
def test_sequences_that_tokens_may_end_are_refused(params):
    bench = Bench(caching=False, end_token_ids=(3,))
    bench.add(4, 30)
    sequence = dataclasses.replace(bench.sequences[0], params=params)
    with pytest.raises(AssertionError, match="tokens may end"):
        bench.scheduler.add(sequence)
