"""Plots are drawn from what runs leave; without matplotlib nothing is."""

from __future__ import annotations

import math

import numpy as np
import plots
import pytest
from latency_report import GapHistogram, Latencies, RequestTimes, report
from step_log import LoggedStep


@pytest.fixture
def latencies() -> Latencies:
    times = RequestTimes.of(np.array([0.0, 1.0]))
    times.first_token[:], times.finish[:] = [0.5, 1.2], [2.0, 3.0]
    times.num_output_tokens[:] = 5
    gaps = GapHistogram()
    gaps.add(np.array([0.1, 0.2]))
    return Latencies(times=times, gaps=gaps)


def log() -> list[LoggedStep]:
    moments = [(0.0, 0.1), (0.1, 0.2), (0.5, 0.6)]
    return [
        LoggedStep(
            start=start,
            end=end,
            num_decodes=3,
            num_prompt_tokens=10,
            bucket=16,
            num_waiting=1,
            num_running=4,
            num_free_blocks=50,
        )
        for start, end in moments
    ]


def test_distributions_reach_all_of_each_kind(latencies):
    for kind in ("TTFT", "TPOT", "ITL", "E2E"):
        seconds, shares = latencies.distribution(kind)
        assert (np.diff(seconds) >= 0).all()
        assert shares.tolist() == [0.5, 1.0]


def test_all_plots_of_runs_are_written(tmp_path, latencies):
    pytest.importorskip("matplotlib", reason="matplotlib draws the plots")
    item = report(latencies.times, latencies.gaps, np.array([5, 5]))
    lines = {"mixed": {1.0: item, math.inf: item}}
    plots.plot_runs(tmp_path, {"mixed": {1.0: latencies}}, lines, {"mixed, rate 1": log()})
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["latencies.png", "rates.png", "steps_mixed__rate_1.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_nothing_is_written_without_matplotlib(tmp_path, latencies, monkeypatch):
    monkeypatch.setattr(plots, "pyplot", lambda: None)
    plots.plot_runs(tmp_path / "plots", {"a": {1.0: latencies}}, {"a": {}}, {"a": log()})
    assert not plots.plot_latencies(tmp_path / "a.png", {"a": {1.0: latencies}})
    assert not any(tmp_path.iterdir())
