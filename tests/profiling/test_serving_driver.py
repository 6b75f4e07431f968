"""Requests come at their own times, and every latency counts from there."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from serving_driver import ServedRun, ServingDriver
from workload import uniform

from runtime.errors import InvalidRequestError


class SlowEngine:
    """Stands in for an engine: a step takes a second and gives one token to each request."""

    vocab_size = 100
    num_free_blocks = 7

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.added_at: list[float] = []
        self.on_step = None
        self.scheduler = SimpleNamespace(num_waiting=0, num_running=0)
        self._left: dict[str, int] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._left)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def add_request(self, prompt, params, *, request_id, arrival_time) -> None:
        if len(prompt) > 50:
            raise InvalidRequestError("too long")
        self.added_at.append(self.now)
        self._left[request_id] = params.max_tokens

    def step(self) -> SimpleNamespace:
        self.now += 1.0
        sequences = [SimpleNamespace(request_id=name) for name in self._left]
        self._left = {name: left - 1 for name, left in self._left.items() if left > 1}
        self.on_step(SimpleNamespace(num_decodes=1, num_tokens=len(sequences), bucket=8))
        return SimpleNamespace(sequences=sequences)


def serve(engine: SlowEngine, arrivals: list[float], outputs: list[int], **options) -> ServedRun:
    workload = dataclasses.replace(
        uniform(len(arrivals), (5, 5), (1, 1), 0),
        arrivals=np.array(arrivals),
        num_output_tokens=np.array(outputs, dtype=np.int32),
        **{name: options.pop(name) for name in ("num_prompt_tokens",) if name in options},
    )
    driver = ServingDriver(
        engine, workload, clock=lambda: engine.now, sleep=engine.sleep, **options
    )
    return driver.run()


def test_waiting_for_the_step_under_way_counts():
    engine = SlowEngine()
    run = serve(engine, [0.0, 0.1, 0.9], [4, 1, 1])
    assert engine.added_at == [100.0, 101.0, 101.0]
    assert run.times.ttft == pytest.approx([1.0, 1.9, 1.1])
    assert run.times.e2e == pytest.approx([4.0, 1.9, 1.1])
    assert run.times.num_output_tokens.tolist() == [4, 1, 1]


def test_an_engine_that_falls_behind_is_charged_for_all_that_wait():
    run = serve(SlowEngine(), [0.0, *np.linspace(0.01, 0.5, 9)], [1] * 10)
    assert run.times.ttft[1:] == pytest.approx(2.0 - np.linspace(0.01, 0.5, 9))


def test_an_idle_engine_sleeps_until_the_next_arrival():
    engine = SlowEngine()
    run = serve(engine, [2.0, 8.0], [1, 1])
    assert engine.slept == pytest.approx([2.0, 5.0])
    assert run.times.ttft == pytest.approx([1.0, 1.0])


def test_gaps_are_between_tokens_of_one_request_and_warmup_has_none():
    counted = serve(SlowEngine(), [0.0, 4.0], [3, 3]).gaps
    counted.flush()
    assert counted.counts.sum() == 4
    assert counted.percentiles((50.0,)) == pytest.approx([1.0], rel=1e-3)
    later = serve(SlowEngine(), [0.0, 4.0], [3, 3], num_warmup=1).gaps
    later.flush()
    assert later.counts.sum() == 2


def test_requests_that_are_refused_are_counted_and_the_others_served():
    lengths = np.array([5, 51, 5], dtype=np.int32)
    run = serve(SlowEngine(), [0.0, 0.0, 0.0], [1, 1, 1], num_prompt_tokens=lengths)
    assert run.num_refused == 1
    assert np.isfinite(run.times.finish).tolist() == [True, False, True]


def test_each_step_is_logged_with_its_batch():
    batches = []
    run = serve(SlowEngine(), [0.0, 0.5], [3, 1], on_batch=lambda b, s: batches.append((b, s)))
    assert [(s.start, s.end) for s in run.log] == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]
    assert [s.num_prompt_tokens for s in run.log] == [0, 1, 0]
    assert [s.num_padding for s in run.log] == [7, 6, 7]
    assert {s.num_free_blocks for s in run.log} == {7}
    assert [seconds for _, seconds in batches] == [1.0, 1.0, 1.0]
