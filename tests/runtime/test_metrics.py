"""Engine metrics: every number against what was made to happen, and Prometheus' view of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from runtime import LLM, SamplingParams
from runtime.metrics import LATENCY_BOUNDS, LatencyBins
from runtime.prometheus import MetricsCollector
from runtime.sequence import SequenceStatus


def greedy(max_tokens=5):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture
def llm(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=128, num_kv_blocks=40) as llm:
        yield llm


def test_a_fresh_engine_has_done_nothing(llm):
    metrics = llm.metrics()
    for field in dataclasses.fields(metrics):
        value = getattr(metrics, field.name)
        if field.name == "num_finished":
            assert value == {"stop": 0, "length": 0, "abort": 0, "error": 0}
        elif hasattr(value, "counts"):
            assert (value.count, value.sum) == (0, 0.0)
            assert len(value.counts) == len(value.bounds) + 1
        else:
            assert value == 0


def test_totals_and_gauges_follow_what_happens(llm, monkeypatch):
    prompts = [[1] * 40, [2] * 20, [1] * 40]
    llm.generate(prompts[:2], greedy(), use_tqdm=False)
    llm.generate(prompts[2], greedy(), use_tqdm=False)
    metrics = llm.metrics()
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (100, 32)
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens) == (68, 15)
    assert metrics.num_finished == {"stop": 0, "length": 3, "abort": 0, "error": 0}
    assert (metrics.num_running, metrics.num_waiting, metrics.kv_cache_usage) == (0, 0, 0.0)
    assert metrics.num_steps == 10
    engine = llm.engine
    engine.add_request([3] * 33, greedy(), request_id="a")
    assert llm.metrics().num_waiting == 1
    engine.step()
    metrics = llm.metrics()
    assert (metrics.num_running, metrics.num_waiting) == (1, 0)
    assert metrics.kv_cache_usage == 3 / 40
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "execute", lambda scheduled: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    metrics = llm.metrics()
    assert (metrics.num_steps, metrics.num_failed_steps, metrics.num_preemptions) == (11, 1, 1)
    assert (metrics.num_running, metrics.num_waiting) == (0, 1)
    engine.scheduler.hold(engine.unfinished_sequences())
    assert engine.unfinished_sequences()[0].status is SequenceStatus.HELD
    assert (engine.has_unfinished, llm.metrics().num_waiting) == (False, 1)
    engine.abort("a")
    assert llm.metrics().num_finished["abort"] == 1
    assert llm.metrics().prefix_cache_queries == 133, "a resumed sequence is not looked up twice"


def test_latencies_are_those_of_the_clock(llm):
    """A clock that the test sets: each gap, first token and end lands where it belongs."""
    engine, times = llm.engine, iter(np.cumsum([1.0, 0.5, 0.25, 0.25, 30.0]) + 100)
    now = [100.0]
    engine.scheduler._clock = lambda: now[0]
    engine.add_request([1] * 10, greedy(5), arrival_time=100.0)
    while engine.has_unfinished:
        now[0] = next(times)
        engine.step()
    metrics = engine.metrics()
    first, gaps, whole = (
        metrics.time_to_first_token,
        metrics.inter_token_latency,
        metrics.e2e_latency,
    )

    def place(seconds):
        return next(i for i, bound in enumerate([*first.bounds, np.inf]) if seconds <= bound)

    assert (first.count, first.counts[place(1.0)], first.sum) == (1, 1, 1.0)
    assert (gaps.count, gaps.counts[place(0.25)], gaps.counts[place(30.0)]) == (4, 3, 1)
    assert gaps.sum == 31.0
    assert (whole.count, whole.sum) == (1, 32.0)


def test_a_preempted_sequences_gap_counts_from_its_last_token(llm):
    engine, now = llm.engine, [0.0]
    engine.scheduler._clock = lambda: now[0]
    sequence = engine.add_request([1] * 10, greedy(3), arrival_time=0.0)
    engine.step()
    engine.scheduler.hold([sequence])
    now[0] = 7.0
    engine.scheduler.resume([sequence])
    engine.step()
    assert engine.metrics().inter_token_latency.sum == 7.0
    assert engine.metrics().time_to_first_token.count == 1
    engine.step()


def test_bins_hold_values_up_to_their_bound():
    bins = LatencyBins()
    assert list(LATENCY_BOUNDS) == sorted(LATENCY_BOUNDS)
    bins.add([0.0, LATENCY_BOUNDS[0], np.nextafter(LATENCY_BOUNDS[0], 1), 1e9])
    bins.add(np.empty(0))
    histogram = bins.snapshot()
    assert histogram.counts[:2] == (2, 1)
    assert histogram.counts[-1] == 1
    assert histogram.count == 4


def test_prometheus_reads_the_same_numbers_of_each_engine(llm, checkpoint):
    client = pytest.importorskip("prometheus_client")
    with LLM(checkpoint("qwen3"), max_model_len=64) as other:
        registry = client.CollectorRegistry()
        registry.register(MetricsCollector({"first": llm, "second": other}))
        llm.generate([[1] * 40, [1] * 40], greedy(), use_tqdm=False)
        metrics = llm.metrics()

        def value(name, **labels):
            return registry.get_sample_value(f"stepgraph:{name}", {"model_name": "first", **labels})

        assert value("prompt_tokens_total") == metrics.num_prompt_tokens
        assert value("generation_tokens_total") == 10
        assert value("prefix_cache_queries_total") == 80
        assert value("prefix_cache_hits_total") == metrics.prefix_cache_hits
        assert value("num_requests_running") == value("num_requests_waiting") == 0
        assert value("request_success_total", finished_reason="length") == 2
        assert value("time_to_first_token_seconds_count") == 2
        assert value("time_to_first_token_seconds_bucket", le="+Inf") == 2
        assert value("inter_token_latency_seconds_count") == 8
        assert value("e2e_request_latency_seconds_sum") == metrics.e2e_latency.sum
        for bound in metrics.time_to_first_token.bounds:
            below = value("time_to_first_token_seconds_bucket", le=str(bound))
            assert below <= 2
        second = {"model_name": "second"}
        assert registry.get_sample_value("stepgraph:generation_tokens_total", second) == 0
        text = client.generate_latest(registry).decode()
        assert text.count("# TYPE stepgraph:kv_cache_usage_perc gauge") == 1
    assert registry.get_sample_value("stepgraph:generation_tokens_total", second) is None
    assert value("generation_tokens_total") == 10
