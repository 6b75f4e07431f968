"""Buckets of steps, chunks that are shortened to fill one, and steps that keep to a target."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from graphs.capture_sizes import CaptureLadders, CaptureSizes
from runtime.budget_policy import BudgetPolicy
from runtime.scheduler_config import SchedulerConfig
from runtime.step_cost import RooflineCost, StepCost

COST = RooflineCost(
    flops_per_token=1.0,
    weight_bytes=100.0,
    kv_bytes_per_token=0.001,
    flop_rate=1.0,
    bandwidth=1.0,
)
"""One second a token from 100 tokens on, 100 seconds below."""


class CubicCost:
    """Makes large steps so dear that every chunk which can be shortened is."""

    def seconds(self, num_tokens: int, num_kv_tokens: int, num_pairs: int) -> float:
        return float(num_tokens**3)


def ladders(*mixed: int, decode: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> CaptureLadders:
    return CaptureLadders(decode=CaptureSizes(decode), mixed=CaptureSizes(mixed))


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    return [(first + 13 * i) % 97 for i in range(num_tokens)]


@pytest.fixture
def make_fitting_bench(make_bench):
    """A scheduler that fits steps to mixed sizes; room for 64 sequences and long prompts."""

    def make(*mixed: int, step_cost=COST, fits: bool = True, **options):
        return make_bench(
            **{
                "budget": 2048,
                "max_num_seqs": 64,
                "num_blocks": 2000,
                "ladders": ladders(*mixed),
                "bucket_fitting": fits,
                "step_cost": step_cost,
                **options,
            }
        )

    return make


# Buckets


def test_a_step_without_ladders_has_no_bucket(make_bench):
    bench = make_bench()
    bench.add(prompt(10))
    assert bench.schedule().bucket == 0


def test_the_bucket_is_of_the_ladder_of_the_steps_kind(make_bench):
    bench = make_bench(ladders=ladders(10, 20, 64, decode=(3, 8)))
    for first in range(5):
        bench.add(prompt(3, first))
    batch = bench.schedule()
    assert (batch.num_tokens, batch.bucket) == (15, 20)
    bench.scheduler.update(batch, bench.model.execute(batch))
    batch = bench.schedule()
    assert (batch.num_tokens, batch.bucket) == (5, 8)


def test_a_prompt_of_one_token_is_a_uniform_decode(make_bench):
    bench = make_bench(ladders=ladders(1, 10, decode=(2, 8)))
    bench.add([5])
    assert bench.schedule().bucket == 2


def test_a_step_above_the_top_runs_unpadded(make_bench):
    bench = make_bench(ladders=ladders(10, decode=(2,)))
    for first in range(4):
        bench.add(prompt(3, first))
    assert bench.step() and bench.num_steps == 1
    batch = bench.schedule()
    assert (batch.num_tokens, batch.bucket) == (4, 0)


def test_a_step_below_half_of_its_size_runs_unpadded(make_bench):
    bench = make_bench(ladders=ladders(10, decode=(2,)))
    bench.add(prompt(4))
    batch = bench.schedule()
    assert (batch.num_tokens, batch.bucket) == (4, 0)


def test_ladders_can_be_changed_between_two_steps(make_bench):
    bench = make_bench(ladders=ladders(4, 16))
    bench.add(prompt(4), 2)
    bench.add(prompt(60), 2)
    assert bench.scheduler.sizing.bucket(3, is_uniform_decode=False) == 4
    bench.scheduler.sizing.ladders = ladders(6, 16)
    assert bench.scheduler.sizing.bucket(3, is_uniform_decode=False) == 6


def test_without_piecewise_graphs_only_decode_steps_have_a_bucket(make_bench):
    only_full = ladders(10).without_piecewise_graphs()
    bench = make_bench(ladders=only_full, bucket_fitting=True, step_cost=COST)
    bench.add(prompt(4), 3)
    assert bench.schedule().bucket == 0
    bench = make_bench(ladders=only_full)
    bench.add(prompt(1), 3)
    assert bench.schedule().bucket == 1


# Fitting


def test_the_last_chunk_is_shortened_to_fill_a_smaller_size(make_fitting_bench):
    """1100 tokens: 1024 and then 76 take 1024 + 100 seconds, padded to 2048 they take 2048."""
    bench = make_fitting_bench(64, 128, 1024, 2048)
    sequence = bench.add(prompt(1100), 3)
    batch = bench.schedule()
    assert (batch.num_tokens, batch.bucket) == (1024, 1024)
    assert len(batch.sampled) == 0
    bench.scheduler.update(batch, bench.model.execute(batch))
    batch = bench.schedule()
    assert (batch.num_tokens, batch.bucket) == (76, 128)
    assert len(batch.sampled) == 1
    bench.scheduler.update(batch, bench.model.execute(batch))
    bench.run()
    assert len(bench.output(sequence)) == 3


def test_a_chunk_is_not_shortened_where_the_first_token_would_come_later(make_fitting_bench):
    """Padding 1100 to 1150 costs 50 seconds; another step would cost 100."""
    bench = make_fitting_bench(64, 128, 1024, 1150, 2048)
    bench.add(prompt(1100), 3)
    batch = bench.schedule()
    assert (batch.num_tokens, batch.bucket) == (1100, 1150)


def test_decodes_count_into_the_size_and_are_never_held_back(make_fitting_bench):
    bench = make_fitting_bench(64, 128, 1024, 2048)
    for first in range(10):
        bench.add(prompt(5, first), 50)
    bench.step()
    bench.add(prompt(1100), 3)
    batch = bench.schedule()
    assert (batch.num_decodes, batch.num_tokens, batch.bucket) == (10, 1024, 1024)
    assert batch.num_new_tokens[-1] == 1014


def test_only_the_last_of_several_prompts_is_shortened(make_fitting_bench):
    bench = make_fitting_bench(64, 256, 1024, 2048)
    for first in range(3):
        bench.add(prompt(400, first), 3)
    batch = bench.schedule()
    assert batch.num_new_tokens.tolist() == [400, 400, 224]
    assert batch.sampled.tolist() == [0, 1]


def test_a_prompt_that_cannot_be_admitted_yet_does_not_prevent_fitting(make_fitting_bench):
    """The second prompt finds no blocks, so the first one is the last of its step."""
    bench = make_fitting_bench(64, 256, 1024, 2048, num_blocks=100)
    bench.add(prompt(1100), 3)
    bench.add(prompt(1200, 5), 3)
    assert bench.schedule().num_new_tokens.tolist() == [1024]


def test_without_fitting_ladders_change_nothing_but_the_bucket(make_fitting_bench):
    def batches(**options):
        rng = random.Random(7)
        sizes = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
        bench = make_fitting_bench(*sizes, fits=False, **options)
        seen = []
        for step in range(60):
            for _ in range(rng.choice([0, 0, 1, 3])):
                bench.add(prompt(rng.randint(1, 900), step), rng.randint(1, 30))
            if bench.scheduler.has_unfinished:
                batch = bench.schedule()
                bench.scheduler.update(batch, bench.model.execute(batch))
                seen.append(batch)
        return seen

    padded, unpadded = batches(), batches(ladders=None)
    assert len(padded) == len(unpadded) > 30
    for one, other in zip(padded, unpadded, strict=True):
        assert (one.bucket > 0, other.bucket) == (True, 0)
        for name in ("rows", "num_computed_tokens", "num_new_tokens", "token_ids", "sampled"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("sizes", [(3, 5, 64), (2, 3, 64), (10, 64), (1, 64)])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefill_first"])
def test_a_prompt_that_is_always_worth_shortening_advances_in_every_step(make_bench, sizes, policy):
    """Even where each step may be shortened, the oldest prompt loses a token or more in each."""
    bench = make_bench(
        ladders=ladders(*sizes),
        bucket_fitting=True,
        step_cost=CubicCost(),
        budget=64,
        num_blocks=400,
        policy=policy,
    )
    rng = random.Random(3)
    for first in range(40):
        bench.add(prompt(rng.randint(1, 60), first), rng.randint(1, 20))
    while bench.scheduler.has_unfinished:
        under_way = list(bench.scheduler._prefilling)
        before = [int(bench.scheduler._table.num_computed[s.row]) for s in under_way]
        batch = bench.schedule()
        if under_way and (batch.num_seqs > batch.num_decodes or policy == "prefill_first"):
            table = bench.scheduler._table
            assert int(table.num_computed[under_way[0].row]) > before[0]
        bench.scheduler.update(batch, bench.model.execute(batch))
    bench.run()
    total = sum(s.num_prompt_tokens + len(s.output_token_ids) for s in bench.added)
    assert bench.num_steps <= total
    for sequence in bench.added:
        assert len(bench.output(sequence)) == sequence.params.max_tokens


def fitting_policy(*mixed: int, cost=COST) -> BudgetPolicy:
    config = SchedulerConfig(
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        ladders=ladders(*mixed),
        bucket_fitting=True,
    )
    return BudgetPolicy(config, cost)


def test_shortening_never_delays_any_token_of_the_two_steps():
    rng = random.Random(5)
    num_shortened = 0
    for _ in range(3000):
        sizes = sorted({rng.randint(2, 2047) for _ in range(rng.randint(1, 24))} | {2048})
        policy = fitting_policy(*sizes)
        num_before, num_next = rng.randint(0, 500), rng.randint(0, 60)
        num_new = rng.randint(1, 2048 - num_before)
        num_left = policy.num_beyond_size(num_new, num_before=num_before)
        if not num_left or not policy.shortening_pays(
            num_before + num_new,
            num_left,
            num_kv_tokens=3000,
            num_pairs=4000,
            num_left_pairs=1000,
            num_next_decodes=num_next,
        ):
            continue
        fitted = num_new - num_left
        num_shortened += 1
        assert fitted >= 2
        assert num_before + fitted in sizes
        rest = num_next + num_new - fitted
        padded = next(size for size in sizes if size >= num_before + num_new)
        kind = policy.bucket(rest, is_uniform_decode=num_new - fitted == 1)
        two_steps = COST.seconds(num_before + fitted, 3000, 0) + COST.seconds(kind or rest, 3100, 0)
        assert two_steps <= COST.seconds(padded, 3000, 0) + 0.2
    assert num_shortened > 100


# The latency target


def target_policy(target_ms: float, *, with_ladders: bool, cost: StepCost = COST) -> BudgetPolicy:
    config = SchedulerConfig(
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        ladders=ladders(64, 128, 512, 1024, 2048) if with_ladders else None,
        itl_target_ms=target_ms,
    )
    return BudgetPolicy(config, cost)


@pytest.mark.parametrize(
    ("seconds", "total"), [(5000, 2048), (1025, 1024), (1023, 512), (130, 128), (101, 64)]
)
def test_the_largest_bucket_within_the_target_is_the_budget(seconds, total):
    policy = target_policy(1000 * seconds, with_ladders=True)
    prompts = policy.prompt_tokens(10, 20, has_waiting=True)
    assert prompts == total - 10
    assert policy.num_target_misses == 0


@pytest.mark.parametrize(("seconds", "total"), [(5000, 2048), (1025.5, 1025), (333, 333)])
def test_without_ladders_the_largest_token_count_within_the_target_is_the_budget(seconds, total):
    policy = target_policy(1000 * seconds, with_ladders=False)
    assert policy.prompt_tokens(10, 20, has_waiting=True) == total - 10


def test_the_budget_counts_what_prompts_have_computed_already():
    cost = dataclasses.replace(COST, flops_per_pair=0.01)
    policy = target_policy(500_000, with_ladders=False, cost=cost)

    def pairs(*chunks):
        return sum(n * before + n * (n + 1) // 2 for before, n in chunks)

    for under_way, chunks_of in [
        ([], lambda n: [(0, n)]),
        ([(1000, 5000)], lambda n: [(1000, n)]),
        ([(1000, 20), (300, 30)], lambda n: [(1000, 20), (300, 30), (0, n - 50)]),
    ]:
        num_new = policy.prompt_tokens(10, 90, under_way, has_waiting=True)
        taken, more = (
            cost.seconds(10 + n, 0, 90 + pairs(*chunks_of(n))) for n in (num_new, num_new + 1)
        )
        assert taken <= 500 < more


def test_where_no_bucket_meets_the_target_prompts_get_a_share_now_and_then():
    policy = target_policy(50_000, with_ladders=True)
    shares = [policy.prompt_tokens(10, 20, has_waiting=True) for _ in range(12)]
    assert shares == [0, 0, 0, 128] * 3
    assert policy.num_target_misses == 12
    assert policy.prompt_tokens(10, 20, has_waiting=False) == 0
    assert policy.num_target_misses == 13, "the decodes alone are too slow"


def test_where_decodes_fill_the_largest_bucket_prompts_get_a_share_now_and_then():
    policy = target_policy(101_000, with_ladders=True)
    shares = [policy.prompt_tokens(60, 20, has_waiting=True) for _ in range(8)]
    assert shares == [4, 4, 4, 128] * 2
    assert policy.num_target_misses == 2, "only the steps that were made too large"


def test_a_step_without_decodes_has_no_target():
    policy = target_policy(1, with_ladders=True)
    assert policy.prompt_tokens(0, 0, has_waiting=True) == 2048
    assert policy.num_target_misses == 0


def test_a_chunk_is_not_shortened_where_the_target_may_hold_its_rest_back(make_bench):
    """Without a target 200 tokens and then 110, padded to 200, are as good as one step of 400."""

    def first_chunk(itl_target_ms):
        bench = make_bench(
            budget=400,
            max_num_seqs=64,
            num_blocks=400,
            ladders=ladders(10, 200, 400),
            bucket_fitting=True,
            itl_target_ms=itl_target_ms,
            step_cost=COST,
        )
        bench.add(prompt(310), 3)
        return bench.schedule().num_tokens

    assert first_chunk(None) == 200
    assert first_chunk(1000_000) == 200
    assert first_chunk(150_000) == 310


@pytest.mark.parametrize("with_ladders", [True, False])
def test_decodes_beside_a_long_prompt_keep_to_the_target(make_bench, with_ladders):
    """Steps of at most 300 seconds: buckets up to 256 tokens, or about 300 of them."""
    bench = make_bench(
        budget=2048,
        max_num_seqs=64,
        num_blocks=2000,
        ladders=ladders(64, 128, 256, 512, 2048) if with_ladders else None,
        itl_target_ms=300_000,
        step_cost=COST,
    )
    for first in range(4):
        bench.add(prompt(5, first), 40)
    bench.step()
    long = bench.add(prompt(4000), 3)
    num_steps = 0
    while long.first_token_time is None:
        batch = bench.schedule()
        assert batch.num_decodes == 4
        assert COST.seconds(batch.bucket or batch.num_tokens, batch.num_kv_tokens, 0) <= 300
        bench.scheduler.update(batch, bench.model.execute(batch))
        num_steps += 1
    assert num_steps == -(-4000 // (252 if with_ladders else 296))
    bench.run()
    assert bench.scheduler.sizing.num_target_misses == 0


def test_a_prompt_ends_beside_decodes_that_miss_the_target_in_every_step(make_bench):
    bench = make_bench(
        budget=512, max_num_seqs=64, num_blocks=2000, itl_target_ms=1, step_cost=COST
    )
    decoding = bench.add(prompt(5), 300)
    bench.step()
    long = bench.add(prompt(640), 3)
    for _ in range(4 * 640 // 32):
        bench.step()
    assert long.first_token_time is not None
    assert not decoding.is_finished
    assert bench.scheduler.sizing.num_target_misses == 80
    bench.run()
