"""A window of steps is recorded, and no step outside it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from nsys_report import read_torch
from range_report import summarise
from step_tracer import StepTracer, label, parse_label

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.sampling_params import SamplingParams


@pytest.fixture
def engine(checkpoint) -> Engine:
    config = EngineConfig(
        model=str(checkpoint("llama")),
        max_model_len=128,
        kv_cache_bytes=1_000_000,
        attention_backend="torch",
    )
    engine = Engine(config)
    for length in (5, 9):
        params = SamplingParams(max_tokens=12, ignore_eos=True, seed=0)
        engine.add_request(np.arange(length), params)
    return engine


def run(engine: Engine, tracer: StepTracer) -> None:
    engine.on_step = tracer.note_step
    while engine.has_unfinished:
        engine.step()
    tracer.close()


@pytest.mark.parametrize(("start", "first"), [(0, 14), (3, 2)])
def test_own_trace_holds_the_stages_and_counters_of_its_steps(engine, tmp_path, start, first):
    path = tmp_path / "steps.json"
    run(engine, StepTracer(engine, "steps", start_step=start, num_steps=4, path=path))
    events = json.loads(path.read_text())["traceEvents"]
    stages = Counter(event["name"] for event in events if event["ph"] == "X")
    names = ("schedule", "step", "pack", "plan", "forward", "sample", "update")
    assert stages == dict.fromkeys(names, 4)
    forward = [event for event in events if event["name"] == "forward"]
    assert [event["args"]["tokens"] for event in forward] == [first, 2, 2, 2]
    ends = [event["ts"] + event["dur"] for event in forward]
    assert all(a <= b["ts"] for a, b in zip(ends, forward[1:], strict=False))
    tokens = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "tokens"]
    assert [sum(values.values()) for values in tokens] == [first, 2, 2, 2]
    assert sum(event["name"] == "free blocks" for event in events) == 4
    assert engine.ranges.opener is None


def test_torch_profiler_sees_the_stages_of_the_same_steps(engine, tmp_path):
    path = tmp_path / "trace.json"
    run(engine, StepTracer(engine, "torch", start_step=2, num_steps=3, path=path))
    found = {s.name: s for s in summarise(read_torch(path))}
    assert {name: s.count for name, s in found.items()} == dict.fromkeys(
        ("schedule", "step", "pack", "plan", "forward", "sample", "update"), 3
    )
    assert found["forward"].num_tokens == 2
    assert found["forward"].host > found["schedule"].host / 100
    assert found["forward"].busy == 0  # no device here


def test_a_window_that_the_run_never_fills_is_written_when_closed(engine, tmp_path):
    path = tmp_path / "steps.json"
    run(engine, StepTracer(engine, "steps", start_step=5, num_steps=500, path=path))
    assert json.loads(path.read_text())["traceEvents"]
    late = tmp_path / "late.json"
    tracer = StepTracer(engine, "steps", start_step=900, num_steps=1, path=late)
    tracer.close()
    assert not late.exists()


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("steps", {"start_step": -1}, "start_step=-1"),
        ("steps", {"num_steps": 0}, "num_steps=0"),
        ("torch", {"path": None}, "needs a path"),
    ],
)
def test_windows_that_make_no_sense_are_refused(engine, tmp_path, kind, arguments, message):
    given = {"start_step": 0, "num_steps": 1, "path": Path(tmp_path / "a.json"), **arguments}
    with pytest.raises(ValueError, match=message):
        StepTracer(engine, kind, **given)


def test_the_cuda_window_needs_a_device(engine, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a CUDA device"):
        StepTracer(engine, "cuda", start_step=0, num_steps=1, path=None)


def test_the_cuda_window_starts_and_stops_the_profiler_around_its_steps(engine, monkeypatch):
    calls: list[str] = []
    steps = 0

    def called(name: str):
        return lambda: calls.append(f"{name} {steps}")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", called("synchronize"))
    monkeypatch.setattr("torch.cuda.profiler.start", called("start"))
    monkeypatch.setattr("torch.cuda.profiler.stop", called("stop"))
    tracer = StepTracer(engine, "cuda", start_step=2, num_steps=3, path=None)
    for steps in range(1, 8):  # noqa: B007 - read by the stand-ins
        tracer.note_step(None)
    assert calls == ["synchronize 2", "start 2", "synchronize 5", "stop 5"]


def test_labels_are_read_back():
    assert parse_label(label("forward", 12, 16)) == ("forward", 12, 16)
    assert parse_label("ProfilerStep#3") is None
