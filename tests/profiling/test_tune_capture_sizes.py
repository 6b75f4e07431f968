"""The tuner's ladders are the best there are, and its times are what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import simulate
import tune_capture_sizes
from ladder_search import LadderCost, StepSizes, choose, search

from graphs.capture_sizes import CaptureLadders, parse_capture_sizes
from runtime import LLM, SamplingParams

TRACE = Path(__file__).parents[1] / "data" / "azure_conversation_head200.csv"


def random_case(seed: int) -> tuple[StepSizes, LadderCost]:
    """Few sizes, times that rise by uneven steps, and a price that matters in some cases."""
    rng = np.random.default_rng(seed)
    max_num_seqs = int(rng.integers(2, 7))

    def counts(limit: int) -> dict[int, int]:
        sizes = rng.choice(np.arange(1, limit + 1), min(limit, 4), replace=False)
        return {int(size): int(rng.integers(1, 50)) for size in sizes}

    def times() -> list[float]:
        return np.cumsum(rng.choice([0.0, 0.0, 1.0, 5.0], 12) + 1e-3).tolist()

    decode, mixed, late = times(), times(), float(rng.choice([0.5, 3.0, 20.0]))
    cost = LadderCost(
        decode=lambda n: decode[n],
        mixed=lambda n: mixed[n],
        decode_eagerly=lambda n: decode[n] + late,
        mixed_eagerly=lambda n: mixed[n] + late,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=10,
        per_capture=float(rng.choice([0.0, 0.1, 1.0])),
    )
    return StepSizes(decode=counts(max_num_seqs), mixed=counts(10)), cost


@pytest.mark.parametrize("seed", range(60))
def test_no_list_of_sizes_that_steps_had_is_better(seed):
    sizes, cost = random_case(seed)
    found = {choice.num_captures: choice for choice in search(sizes, cost, 20)}
    best: dict[int, float] = {}
    had = sorted(sizes.decode.keys() | sizes.mixed.keys())
    for count in range(1, len(had) + 1):
        for listed in itertools.combinations(had, count):
            ladders = cost.ladders(listed)
            seconds = cost.of(ladders, sizes)
            best[ladders.num_graphs] = min(best.get(ladders.num_graphs, np.inf), seconds)
    for limit in range(2, 21):
        brute = min(seconds for captures, seconds in best.items() if captures <= limit)
        assert choose(list(found.values()), limit).seconds == pytest.approx(brute)
    for choice in found.values():
        ladders = cost.ladders(choice.sizes)
        assert choice.num_captures == ladders.num_graphs
        assert choice.seconds == pytest.approx(cost.of(ladders, sizes))


def test_a_price_on_captures_leaves_fewer():
    sizes, cost = random_case(3)
    free, dear = (dataclasses.replace(cost, per_capture=price) for price in (0.0, 3.0))
    many, few = (choose(search(sizes, c, 20), 20) for c in (free, dear))
    assert few.num_captures < many.num_captures
    assert free.of(free.ladders(many.sizes), sizes) < free.of(free.ladders(few.sizes), sizes)


def test_decode_steps_above_the_limit_are_refused():
    sizes, cost = random_case(0)
    sizes = StepSizes(decode={cost.max_num_seqs + 1: 1}, mixed=sizes.mixed)
    with pytest.raises(ValueError, match="more than max_num_seqs"):
        search(sizes, cost, 4)
    with pytest.raises(ValueError, match="two are the least"):
        choose([], 1)


def test_measured_times_are_means_and_linear_between_sizes():
    buckets = [
        {"mode": "full", "size": 8, "steps": 9, "num_timed_steps": 4, "seconds": 0.040},
        {"mode": "piecewise", "size": 8, "steps": 4, "num_timed_steps": 4, "seconds": 0.080},
        {"mode": "full", "size": 16, "steps": 2, "num_timed_steps": 2, "seconds": 0.040},
        {"mode": "eager", "size": 0, "steps": 5, "num_timed_steps": 5, "seconds": 9.0},
        {"mode": "full", "size": 32, "steps": 2, "num_timed_steps": 0, "seconds": 0.0},
    ]
    seconds = tune_capture_sizes.measured_seconds(buckets, ("full",))
    assert seconds is not None
    assert [seconds(n) for n in (4, 8, 12, 16)] == pytest.approx([0.01, 0.01, 0.015, 0.02])
    assert seconds(24) == pytest.approx(0.03)
    both = tune_capture_sizes.measured_seconds(buckets, ("full", "piecewise"))
    assert both is not None and both(8) == pytest.approx(0.015)
    assert tune_capture_sizes.measured_seconds(buckets, ("piecewise",)) is None


def test_measured_times_never_fall_with_the_size():
    buckets = [
        {"mode": "full", "size": size, "steps": 1, "seconds": seconds}
        for size, seconds in ((1, 0.02), (2, 0.01), (4, 0.03))
    ]
    seconds = tune_capture_sizes.measured_seconds(buckets, ("full",))
    assert seconds is not None
    times = [seconds(n) for n in range(1, 9)]
    assert times == sorted(times)


def test_statistics_without_step_sizes_are_refused(tmp_path):
    path = tmp_path / "stats.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="has no step_sizes"):
        StepSizes.read(path)


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The step sizes of a small model under the trace."""
    path = tmp_path_factory.mktemp("steps") / "stats.json"
    arguments = ["--azure", str(TRACE), "--rate", "8", "--model", "qwen3-0.6b"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["simulate.py", *arguments, "--step-sizes", str(path)])
        simulate.main()
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["tune_capture_sizes.py", *arguments])
    tune_capture_sizes.main()


def test_the_line_to_export_is_a_list_that_the_engine_reads(monkeypatch, capsys, stats):
    run(monkeypatch, str(stats), "--model", "qwen3-0.6b", "--max-captures", "12")
    out = capsys.readouterr().out
    [line] = re.findall(r"^export STEPGRAPH_CAPTURE_SIZES=(.+)$", out, re.MULTILINE)
    ladders = CaptureLadders.explicit(
        parse_capture_sizes(line), max_num_seqs=256, max_num_batched_tokens=2048
    )
    assert ladders.num_graphs <= 12


def test_found_ladders_beat_the_default_and_vllms_at_as_many_captures(monkeypatch, capsys, stats):
    run(monkeypatch, str(stats), "--model", "qwen3-0.6b", "--test", str(stats))
    out = capsys.readouterr().out
    saved = re.findall(r"^\| (?:default|vllm) \|.*\| ([-\d.]+)% \| \d+% \|$", out, re.MULTILINE)
    assert len(saved) == 4
    assert all(float(value) > 0 for value in saved)


def test_measured_captures_and_steps_are_used_where_they_are_there(
    monkeypatch, capsys, stats, tmp_path
):
    run_stats = json.loads(stats.read_text())
    run_stats["buckets"] = [
        {"mode": mode, "size": size, "steps": 3, "num_timed_steps": 3, "seconds": 3e-3 * size}
        for mode, size in (("full", 1), ("full", 64), ("piecewise", 64), ("piecewise", 2048))
    ]
    run_stats["captures"] = [{"mode": "full", "size": 1, "seconds": 2.0}]
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run_stats))
    run(monkeypatch, str(path), "--steps", "1000", "--graph-mib", "0")
    out = capsys.readouterr().out
    assert "step times measured; 3 ms more without a graph" in out
    assert "a capture costs 2000.00 us a step" in out


def test_an_engines_own_statistics_are_read(monkeypatch, capsys, checkpoint, tmp_path):
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(checkpoint("llama"), device="cpu", graph_mode="full_and_piecewise", **sizes) as llm:
        llm.generate([[5] * n for n in (3, 9, 20, 30)], params, use_tqdm=False)
        stats = llm.stats()
    path = tmp_path / "stats.json"
    path.write_text(json.dumps(stats))
    limits = ("--max-num-seqs", "4", "--budget", "32", "--max-captures", "6")
    run(monkeypatch, str(path), *limits, "--steps", "100")
    out = capsys.readouterr().out
    num_steps = stats["num_steps"]
    assert f"{num_steps} steps; step times measured" in out
    [line] = re.findall(r"^export STEPGRAPH_CAPTURE_SIZES=(.+)$", out, re.MULTILINE)
    assert max(parse_capture_sizes(line)) <= 32


def test_a_plot_is_drawn_or_its_absence_said_once(monkeypatch, capsys, stats, tmp_path):
    import plots

    plots.pyplot.cache_clear()
    path = tmp_path / "cost.png"
    has_matplotlib = plots.pyplot() is not None
    run(monkeypatch, str(stats), "--plot", str(path))
    assert path.exists() == has_matplotlib
    plots.pyplot.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path.unlink(missing_ok=True)
    capsys.readouterr()
    run(monkeypatch, str(stats), "--plot", str(path))
    run(monkeypatch, str(stats), "--plot", str(path))
    assert capsys.readouterr().err.count("matplotlib is not installed") == 1
    assert not path.exists()
    plots.pyplot.cache_clear()
