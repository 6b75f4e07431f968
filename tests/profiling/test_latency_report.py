"""Percentiles, rates and goodput."""

from __future__ import annotations

import math

import numpy as np
import pytest
from latency_report import GapHistogram, LatencyTarget, RequestTimes, report, table


@pytest.fixture
def times() -> RequestTimes:
    """Four requests; the last never began."""
    found = RequestTimes.of(np.array([0.0, 1.0, 2.0, 3.0]))
    found.first_token[:3] = [0.5, 1.1, 4.0]
    found.finish[:3] = [2.5, 1.1, 5.0]
    found.num_output_tokens[:3] = [5, 1, 3]
    return found


def test_histogram_gives_percentiles_to_a_thousandth():
    rng = np.random.default_rng(0)
    gaps = np.concatenate([rng.lognormal(-4, 1, 100_000), rng.exponential(0.3, 5_000)])
    histogram = GapHistogram()
    for part in np.array_split(gaps, 300):
        histogram.add(part)
    wanted = (1.0, 50.0, 90.0, 99.0, 99.9)
    assert histogram.percentiles(wanted) == pytest.approx(np.percentile(gaps, wanted), rel=2e-3)


def test_weights_count_as_repetitions_and_histograms_merge():
    weighted, repeated, other = GapHistogram(), GapHistogram(), GapHistogram()
    weighted.add(np.array([0.01, 0.02]), 3)
    repeated.add(np.repeat([0.01, 0.02], 3))
    other.add(np.array([5.0]))
    weighted.merge(other)
    repeated.add(np.array([5.0]))
    repeated.flush()
    assert (weighted.counts == repeated.counts).all()
    assert weighted.counts.sum() == 7


def test_gaps_of_no_length_and_of_days_have_a_place():
    histogram = GapHistogram()
    histogram.add(np.array([0.0, 1e9]))
    assert np.isfinite(histogram.percentiles((10.0, 90.0))).all()
    assert math.isnan(GapHistogram().percentiles((50.0,))[0])


def test_latencies_run_from_arrival_and_tpot_leaves_the_first_token_out(times):
    assert times.ttft[:3] == pytest.approx([0.5, 0.1, 2.0])
    assert times.e2e[:3] == pytest.approx([2.5, 0.1, 3.0])
    assert times.tpot[[0, 2]] == pytest.approx([0.5, 0.5])
    assert np.isnan(times.tpot[[1, 3]]).all()


def test_report_counts_finished_requests_and_their_tokens(times):
    found = report(times, GapHistogram(), np.array([10, 20, 30, 40]))
    assert (found.num_requests, found.duration) == (3, 5.0)
    assert found.output_rate == pytest.approx(9 / 5)
    assert found.total_rate == pytest.approx(69 / 5)
    assert found.request_rate == found.goodput == pytest.approx(3 / 5)
    assert found.ttft["p50"] == pytest.approx(0.5)


def test_warmup_leaves_out_requests_and_their_time(times):
    found = report(times, GapHistogram(), np.array([10, 20, 30, 40]), num_warmup=1)
    assert (found.num_requests, found.duration) == (2, 4.0)
    assert found.output_rate == 1.0


def test_goodput_needs_every_target_and_one_token_has_no_tpot_to_miss(times):
    def goodput(**target: float) -> float:
        prompt = np.array([10, 20, 30, 40])
        return 5 * report(times, GapHistogram(), prompt, target=LatencyTarget(**target)).goodput

    assert goodput(ttft=0.5) == pytest.approx(2)
    assert goodput(tpot=0.4) == pytest.approx(1)
    assert goodput(ttft=0.05) == 0


def test_table_has_a_line_for_each_run_in_milliseconds(times):
    gaps = GapHistogram()
    gaps.add(np.array([0.25]))
    lines = table({"a": report(times, gaps, np.array([10, 20, 30, 40]))}).splitlines()
    assert len(lines) == 3
    columns = dict(zip(lines[0].split(" | "), lines[2].split(" | "), strict=True))
    assert columns["TTFT p50"] == "500"
    assert float(columns["ITL p99"]) == pytest.approx(250, rel=1e-3)
