"""Calibration: steps of the engine in, foretold latencies out."""

from __future__ import annotations

import sys

import calibrate
import numpy as np
import pytest
from fitted_step_time import FittedStepTime
from latency_report import GapHistogram, LatencyReport, RequestTimes, report
from step_log import LoggedStep


def step(start: float, end: float) -> LoggedStep:
    return LoggedStep(
        start=start,
        end=end,
        num_decodes=1,
        num_prompt_tokens=0,
        bucket=0,
        num_waiting=0,
        num_running=1,
        num_free_blocks=1,
    )


def test_handing_in_requests_belongs_to_the_next_step_and_a_pause_does_not():
    log = [step(1.0, 1.1), step(1.102, 1.2), step(3.0, 3.5)]
    assert calibrate.step_seconds(log) == pytest.approx([0.1, 0.1, 0.5])


def test_cpu_clock_goes_on_with_work_and_with_sleep():
    clock = calibrate.CpuClock()
    before = clock.now()
    clock.sleep(5.0)
    sum(range(100_000))
    assert before + 5.0 < clock.now() < before + 15.0


def test_errors_are_relative_to_what_was_measured():
    def with_p50(milliseconds: float) -> LatencyReport:
        times = RequestTimes.of(np.zeros(1))
        times.first_token[:] = times.finish[:] = milliseconds / 1000
        times.num_output_tokens[:] = 1
        return report(times, GapHistogram(), np.ones(1))

    [ttft, *_] = calibrate.lines("load", with_p50(100.0), with_p50(110.0))
    assert ttft == "| load | TTFT | 100.0 | 110.0 | +10.0% | 100.0 | 110.0 | +10.0% |"


def test_loads_are_served_and_foretold_with_one_fit(monkeypatch, capsys, tmp_path, checkpoint):
    loads = {
        name: calibrate.Load(inputs=inputs, outputs=(8, 20), share=share)
        for name, inputs, share in (("fitted", (10, 100), 0.8), ("other", (10, 50), 0.5))
    }
    monkeypatch.setattr(calibrate, "LOADS", loads)
    path = tmp_path / "times.json"
    arguments = ["--model", str(checkpoint("llama")), "--num-requests", "12", "--threads", "1"]
    command = ["calibrate.py", *arguments, "--budget", "64", "--save", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    calibrate.main()
    out = capsys.readouterr().out
    rows = [
        line.split(" | ") for line in out.splitlines() if line.startswith(("| fitted", "| other"))
    ]
    assert [(row[0], row[1]) for row in rows] == [
        (f"| {name}", kind) for name in loads for kind in ("TTFT", "TPOT", "ITL")
    ]
    for row in rows:
        measured, foretold = float(row[2]), float(row[3])
        assert measured > 0 and foretold > 0
    saved = FittedStepTime.load(path)
    assert saved.base >= 0 and np.isfinite(saved.seconds(10, 100, 100))
