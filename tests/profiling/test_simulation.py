"""The simulator: skipping changes nothing, and the clock is what the step times say."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from latency_report import report
from simulation import ServerOptions, SimulationResult, simulate
from skipping_scheduler import SkippingScheduler
from step_time import HARDWARE, MODELS, RooflineStepTime, StepShape
from workload import Workload, read_azure, uniform

from graphs.capture_sizes import CaptureLadders
from runtime.scheduler_config import SchedulerConfig
from runtime.sequence import Sequence

TRACE = Path(__file__).parents[1] / "data" / "azure_conversation_head200.csv"
STEP_TIME = RooflineStepTime(model=MODELS["qwen3-8b"], hardware=HARDWARE["h100"])


@pytest.fixture(autouse=True)
def check_after_each_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recount all rows and blocks after everything that is skipped."""
    skip = SkippingScheduler.skip

    def checked(self, *arguments) -> list[Sequence]:
        finished = skip(self, *arguments)
        self.check_integrity()
        return finished

    monkeypatch.setattr(SkippingScheduler, "skip", checked)


def options(**changes) -> ServerOptions:
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 400}
    server = {"num_blocks": 60, "block_size": 4}
    for name, value in changes.items():
        of_server = name in ServerOptions.__dataclass_fields__
        (server if of_server else config)[name] = value
    return ServerOptions(scheduler=SchedulerConfig(**config), **server)


def assert_same(one: SimulationResult, other: SimulationResult) -> None:
    """Every time to the last bit."""
    for name in ("first_token", "finish", "num_output_tokens"):
        a, b = (getattr(result.times, name) for result in (one, other))
        assert np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), name
    assert np.array_equal(one.gaps.counts, other.gaps.counts)
    totals = [dataclasses.replace(result.totals, num_calls=0) for result in (one, other)]
    assert totals[0] == totals[1]


def with_and_without_skipping(
    workload: Workload, server: ServerOptions, **arguments
) -> tuple[SimulationResult, SimulationResult]:
    single = dataclasses.replace(server, skips=False)
    results = [simulate(workload, o, STEP_TIME, **arguments) for o in (server, single)]
    assert results[1].totals.num_calls == results[1].totals.num_steps
    assert_same(*results)
    return results[0], results[1]


LADDERS = CaptureLadders.explicit((2, 8, 30, 64), max_num_seqs=8, max_num_batched_tokens=64)


@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    seed=st.integers(0, 2**32 - 1),
    rate=st.sampled_from([3.0, 20.0, 100.0, 1000.0, np.inf]),
    arrivals=st.sampled_from(["poisson", "fixed", "burst"]),
    num_blocks=st.integers(30, 200),
    policy=st.sampled_from(["fcfs", "prefill_first"]),
    caching=st.booleans(),
    shared=st.booleans(),
    sized=st.booleans(),
    target_ms=st.sampled_from([None, 6.5, 9.0]),
    replicas=st.sampled_from([1, 2, 3]),
    router=st.sampled_from(["round_robin", "least_loaded"]),
)
@example(  # skipped steps, then another request at the same moment
    seed=81,
    rate=100.0,
    arrivals="burst",
    num_blocks=179,
    policy="prefill_first",
    caching=False,
    shared=True,
    sized=False,
    target_ms=None,
    replicas=3,
    router="least_loaded",
)
def test_random_traffic_is_the_same_with_and_without_skipping(
    seed, rate, arrivals, num_blocks, policy, caching, shared, sized, target_ms, replicas, router
):
    workload = uniform(25, (1, 90), (1, 60), seed).arriving(arrivals, rate, seed)
    if shared:
        prefixes = tuple((index % 3,) for index in range(len(workload)))
        workload = dataclasses.replace(workload, prefix_ids=prefixes)
    server = options(
        num_blocks=num_blocks,
        policy=policy,
        enable_prefix_caching=caching,
        captures_all=not sized,
        ladders=LADDERS if sized else None,
        bucket_fitting=sized,
        itl_target_ms=target_ms if policy == "fcfs" else None,
    )
    skipping, _ = with_and_without_skipping(
        workload, server, num_replicas=replicas, router=router, num_warmup=3
    )
    num_tokens = workload.num_prompt_tokens + workload.num_output_tokens
    num_output = np.minimum(num_tokens, 4 * num_blocks) - workload.num_prompt_tokens
    assert (skipping.times.num_output_tokens == num_output).all()
    assert np.isfinite(skipping.times.finish).all()


@pytest.mark.parametrize("policy", ["fcfs", "prefill_first"])
def test_a_trace_is_the_same_with_most_steps_skipped(policy):
    workload = read_azure(TRACE).arriving("trace", 2.0)
    server = options(
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=16384,
        num_blocks=4000,
        block_size=16,
        policy=policy,
    )
    skipping, _ = with_and_without_skipping(workload, server)
    assert skipping.totals.num_calls < 0.1 * skipping.totals.num_steps


def test_traffic_that_preempts_is_the_same():
    workload = uniform(60, (1, 100), (40, 100), 3).arriving("poisson", 200.0)
    skipping, single = with_and_without_skipping(workload, options(num_blocks=70))
    assert skipping.totals.num_preemptions > 0
    assert skipping.totals.num_calls < single.totals.num_calls


@pytest.mark.parametrize("num_blocks", [35, 60, 200])
def test_whole_prompts_are_the_same_with_and_without_skipping(num_blocks):
    workload = uniform(60, (1, 100), (20, 30), 3).arriving("poisson", 100.0)
    server = options(
        policy="prefill_first",
        whole_prompts=True,
        num_blocks=num_blocks,
        max_num_batched_tokens=150,
    )
    skipping, single = with_and_without_skipping(workload, server, logs_steps=True)
    assert (skipping.totals.num_preemptions > 0) == (num_blocks < 200)
    assert skipping.totals.num_calls < single.totals.num_calls
    assert all(0 in (s.num_decodes, s.num_prompt_tokens) for s in skipping.logs[0])


def test_no_prompt_is_cut_and_nothing_is_set_aside_under_whole_prompts():
    # Four prompts of 40 tokens: three fit a step of 150 tokens, and two fit the pool of 100.
    workload = dataclasses.replace(uniform(4, (40, 40), (9, 9), 0), arrivals=np.zeros(4))
    server = options(policy="prefill_first", max_num_batched_tokens=150, num_blocks=25)
    cutting, whole = (
        simulate(workload, dataclasses.replace(server, whole_prompts=w), STEP_TIME, logs_steps=True)
        for w in (False, True)
    )
    large = dataclasses.replace(server, whole_prompts=True, num_blocks=200)
    roomy = simulate(workload, large, STEP_TIME, logs_steps=True)
    assert [s.num_prompt_tokens for s in roomy.logs[0] if s.num_prompt_tokens] == [120, 40]
    assert [s.num_prompt_tokens for s in whole.logs[0] if s.num_prompt_tokens] == [80, 80]
    assert cutting.logs[0][0].num_prompt_tokens == 80


def test_one_request_takes_the_sum_of_its_steps():
    workload = dataclasses.replace(uniform(1, (100, 100), (3, 3), 0), arrivals=np.array([5.0]))
    result = simulate(workload, options(), STEP_TIME)
    chunks = [
        StepShape(num_tokens=64, num_sampled=0, num_kv_tokens=64, num_pairs=64 * 65 // 2),
        StepShape(
            num_tokens=36, num_sampled=1, num_kv_tokens=100, num_pairs=36 * 64 + 36 * 37 // 2
        ),
    ]
    decodes = [
        StepShape(num_tokens=1, num_sampled=1, num_kv_tokens=n, num_pairs=n, is_uniform_decode=True)
        for n in (101, 102)
    ]
    first, last = (sum(float(STEP_TIME.step_seconds(s)) for s in c) for c in (chunks, decodes))
    assert result.times.ttft[0] == pytest.approx(first)
    assert result.times.e2e[0] == pytest.approx(first + last)
    assert result.totals.idle_seconds == 5.0
    assert result.totals.num_steps == 4
    assert (result.totals.mixed_sizes, result.totals.decode_sizes) == ({64: 1, 36: 1}, {1: 2})


def test_requests_that_can_never_be_served_are_counted_and_the_others_are_served():
    workload = dataclasses.replace(
        uniform(3, (50, 50), (5, 5), 0), num_prompt_tokens=np.array([50, 400, 50], dtype=np.int32)
    )
    result = simulate(workload, options(), STEP_TIME)
    assert result.totals.num_refused == 1
    assert np.isfinite(result.times.finish).tolist() == [True, False, True]
    assert report(result.times, result.gaps, workload.num_prompt_tokens).num_requests == 2


def test_shared_prefixes_are_computed_once():
    workload = uniform(20, (90, 90), (4, 4), 0).arriving("fixed", 2.0)
    shared = dataclasses.replace(workload, prefix_ids=((7,),) * len(workload))
    server = options(enable_prefix_caching=True)
    alone, together = (simulate(w, server, STEP_TIME) for w in (workload, shared))
    assert sum(alone.totals.mixed_sizes.values()) == 40
    assert together.totals.num_tokens < 0.2 * alone.totals.num_tokens


def test_least_loaded_sends_each_request_where_fewest_are_unfinished():
    # Two long requests and then short ones: the third finds both busy, the others the one that
    # is done first.
    workload = dataclasses.replace(
        uniform(4, (10, 10), (1, 1), 0),
        arrivals=np.array([0.0, 0.0, 1.0, 1.5]),
        num_output_tokens=np.array([300, 100, 1, 300], dtype=np.int32),
    )
    server = options(max_model_len=400, num_blocks=200)
    turns, loads = (
        simulate(workload, server, STEP_TIME, num_replicas=2, router=router, logs_steps=True)
        for router in ("round_robin", "least_loaded")
    )
    assert [max(s.num_decodes for s in log) for log in turns.logs] == [1, 1]
    assert [sum(s.num_prompt_tokens for s in log) for log in turns.logs] == [20, 20]
    assert [sum(s.num_prompt_tokens for s in log) for log in loads.logs] == [10, 30]


def test_logged_steps_cover_all_steps_and_all_time():
    workload = uniform(30, (1, 90), (1, 60), 5)
    for skips in (True, False):
        result = simulate(workload, options(skips=skips), STEP_TIME, logs_steps=True)
        [log] = result.logs
        assert sum(s.num_steps for s in log) == result.totals.num_steps
        assert log[0].start == 0 and log[-1].end == result.times.finish.max()
        assert all(a.end == b.start for a, b in itertools.pairwise(log))
        tokens = sum(s.num_steps * (s.num_decodes + s.num_prompt_tokens) for s in log)
        assert tokens == result.totals.num_tokens
        assert log[-1].num_running == 0 and log[-1].num_free_blocks == 60
