"""Captures that fail, captures at first use, and what captures take."""

from __future__ import annotations

import itertools

import pytest
import torch

from graphs import CaptureError, Launch, TrialCapture
from tests.graphs.runner_setup import (
    CPU,
    DECODE_SIZES,
    MIXED_SIZES,
    MODES,
    Setup,
    decode_traffic,
    kinds_of,
)
from tests.graphs.traffic import BUDGET, MAX_SEQS, Traffic, tiny_model

BUCKETS = [
    *(("full", size) for size in DECODE_SIZES),
    *(("piecewise", size) for size in MIXED_SIZES),
]
FAILURES = {
    "memory": torch.OutOfMemoryError("CUDA out of memory"),
    "host memory": MemoryError("no memory"),
    "capture": CaptureError("this can't be captured"),
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(CPU)


class Failing:
    """A model that raises at one size, in its n-th call there, from 0, and in all later ones."""

    def __init__(self, model, size: int, error: Exception, *, from_call: int = 0) -> None:
        self._model = model
        self._size = size
        self._error = error
        self._calls_left = from_call
        self.is_on = True

    def __call__(self, input_ids, positions, attend, rows=None):
        if self.is_on and len(input_ids) == self._size:
            self._calls_left -= 1
            if self._calls_left < 0:
                raise self._error
        return self._model(input_ids, positions, attend, rows=rows)


def all_traffic() -> list[Traffic]:
    """Every number of sequences and of tokens."""
    numbers = [decode_traffic(n, max_tokens=3) for n in range(1, MAX_SEQS + 1)]
    return numbers + [decode_traffic(1, length=n, max_tokens=1) for n in range(1, BUDGET + 1)]


# Failure


@pytest.mark.parametrize("from_call", [0, 1], ids=["warm-up", "recording"])
@pytest.mark.parametrize(
    ("size", "failure"),
    zip(sorted({size for _, size in BUCKETS}), itertools.cycle(FAILURES), strict=False),
)
def test_a_size_that_fails_is_dropped_by_name_and_its_steps_are_served(
    model, size, from_call, failure, caplog
):
    """At each size in turn; a size that both kinds have fails in both."""
    failing = Failing(model, size, FAILURES[failure], from_call=from_call)
    setup = Setup(model, "full_and_piecewise", model_to_capture=failing, captures=False)
    setup.runner.capture()
    dropped = setup.runner.dropped
    assert {bucket[1] for bucket in dropped} == {size}
    if from_call == 0:
        assert set(dropped) == {bucket for bucket in BUCKETS if bucket[1] == size}
    for (kind, _), reason in dropped.items():
        assert reason == str(FAILURES[failure])
        assert f"no {kind} graph for size {size}" in caplog.text
        ladder = setup.runner.ladders.decode if kind == "full" else setup.runner.ladders.mixed
        assert size not in ladder.sizes
        assert size not in setup.runner.captured_sizes(kind)
    failing.is_on = False  # the eager steps of that size
    setup.serve(decode_traffic(min(size, MAX_SEQS), max_tokens=3))
    launches = setup.serve(decode_traffic(1, length=size, max_tokens=1))
    assert not {(launch.mode, launch.size) for launch in launches} & set(dropped)


def test_without_any_graph_every_step_is_served_eagerly(model):
    def failing(input_ids, positions, attend, rows=None):
        raise torch.OutOfMemoryError("CUDA out of memory")

    setup = Setup(model, "full_and_piecewise", model_to_capture=failing, captures=False)
    setup.runner.capture()
    assert set(setup.runner.dropped) == set(BUCKETS)
    ladders = setup.runner.ladders
    assert (ladders.decode, ladders.mixed) == (None, None)
    setup.runner._model = model
    launches = setup.serve(decode_traffic(3))
    assert kinds_of(launches) == {"eager"}
    assert {launch.fall for launch in launches} == {"no graph captured"}


# At first use


@pytest.mark.parametrize("mode", MODES)
def test_lazily_captured_steps_equal_eager_ones_and_each_size_is_captured_once(model, mode):
    setup = Setup(model, mode, lazy=True)
    wanted = [b for b in BUCKETS if mode == "full_and_piecewise" or b[0] == mode]
    largest = {kind: max(size for k, size in wanted if k == kind) for kind, _ in wanted}
    at_start = [(c.mode, c.size) for c in setup.runner.statistics.captures]
    assert sorted(at_start) == sorted(largest.items())
    ladders = setup.runner.ladders
    launches = []
    for _ in range(2):
        for traffic in all_traffic():
            launches += setup.serve(traffic)
    assert setup.runner.ladders == ladders, "what is chosen doesn't depend on what is captured"
    captures = setup.runner.statistics.captures
    captured = [(c.mode, c.size) for c in captures]
    assert len(captured) == len(set(captured))
    used = {(launch.mode, launch.size) for launch in launches if launch.mode != "eager"}
    assert set(captured) == used | set(at_start)
    assert all(c.at_first_use == ((c.mode, c.size) not in at_start) for c in captures)
    assert all(c.seconds > 0 for c in captures)
    if mode != "full":
        assert kinds_of(launches) <= {"full", "piecewise"}


def test_nothing_is_in_flight_when_a_size_is_captured_late(model):
    setup = Setup(model, "full", lazy=True)
    order = []
    setup.pool.wait_idle = lambda: order.append("idle")
    capture = setup.runner._graphs.capture

    def spy(bucket):
        order.append(bucket)
        capture(bucket)

    setup.runner._graphs.capture = spy
    setup.serve(decode_traffic(2))
    setup.serve(decode_traffic(2))
    assert order == ["idle", ("full", 2)]


@pytest.mark.parametrize("kind", ["full", "piecewise"])
def test_a_late_capture_that_fails_drops_its_size_and_the_step_runs_eagerly(model, kind, caplog):
    failing = Failing(model, 4, torch.OutOfMemoryError("CUDA out of memory"))
    setup = Setup(model, kind, lazy=True, model_to_capture=failing)
    assert (kind, 4) not in setup.runner.dropped
    traffic = decode_traffic(4, length=1, max_tokens=4)
    step = traffic.schedule()
    launch = setup.runner.dispatch(4, 4, True)
    failing.is_on = False
    assert launch == Launch(mode="eager", size=4, fall="capture failed")
    assert set(setup.runner.dropped) == {(kind, 4)}
    assert f"no {kind} graph for size 4" in caplog.text
    traffic.update(step[0], setup.comparison.step(*step))
    following = {"full": MAX_SEQS, "piecewise": 8}[kind]
    assert set(setup.serve(traffic)) == {Launch(mode=kind, size=following)}


# Memory


def test_trial_captures_tell_what_each_kind_takes(model):
    trial = Setup(model, "full_and_piecewise", captures=False)
    before = trial.pool.num_bytes()
    full, piecewise = sorted(trial.runner.measure(), key=lambda t: t.kind)
    assert (full.kind, full.num_graphs) == ("full", len(DECODE_SIZES))
    assert (piecewise.kind, piecewise.num_graphs) == ("piecewise", len(MIXED_SIZES))
    for capture in (full, piecewise):
        assert 0 < capture.next_bytes < capture.first_bytes
    taken = full.first_bytes + full.next_bytes + piecewise.first_bytes + piecewise.next_bytes
    assert trial.pool.num_bytes() - before == taken
    assert trial.runner.captured_sizes("full") == (4, MAX_SEQS)
    assert trial.runner.captured_sizes("piecewise") == (12, BUDGET)


def test_a_trial_passes_over_sizes_that_fail_and_says_nothing_yet(model, caplog):
    failing = Failing(model, BUDGET, torch.OutOfMemoryError("CUDA out of memory"))
    trial = Setup(model, "piecewise", model_to_capture=failing, captures=False)
    (capture,) = trial.runner.measure()
    assert capture.num_graphs == len(MIXED_SIZES) - 1
    assert trial.runner.captured_sizes("piecewise") == (8, 12)
    assert not caplog.records

    def never(input_ids, positions, attend, rows=None):
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert Setup(model, "full", model_to_capture=never, captures=False).runner.measure() == []


def test_one_size_alone_needs_no_increment(model):
    trial = Setup(model, "full", captures=False, decode_sizes=(4,))
    (capture,) = trial.runner.measure()
    assert capture == TrialCapture(
        kind="full", num_graphs=1, first_bytes=capture.first_bytes, next_bytes=0
    )
