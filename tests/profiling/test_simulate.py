"""The simulator's command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import simulate

TRACE = Path(__file__).parents[1] / "data" / "azure_conversation_head200.csv"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate.py", *arguments])
    simulate.main()


def test_rates_and_policies_are_run_side_by_side(monkeypatch, capsys, tmp_path):
    path, sizes = tmp_path / "results.json", tmp_path / "sizes.json"
    run(
        monkeypatch,
        *("--azure", str(TRACE), "--rate", "4", "inf", "--policy", "mixed", "prefill_first"),
        *("--budget", "512", "--prefill-first-budget", "8192", "--capture-sizes", "default"),
        *("--json", str(path), "--step-sizes", str(sizes)),
    )
    out = capsys.readouterr().out
    results = json.loads(path.read_text())
    assert list(results) == [
        f"{policy}, budget {budget}, rate {rate}"
        for rate in ("4", "inf")
        for policy, budget in (("mixed", 512), ("prefill_first", 8192))
    ]
    for name, result in results.items():
        assert f"| {name} |" in out
        assert result["num_requests"] == 200
        assert result["extra"]["num_padding_tokens"] > 0
    counts = json.loads(sizes.read_text())["step_sizes"]
    num_steps = sum(count for kind in ("decode", "mixed") for _, count in counts[kind])
    assert num_steps == results["prefill_first, budget 8192, rate inf"]["extra"]["num_steps"]


def test_more_requests_than_the_trace_has_are_drawn_from_it(monkeypatch, capsys):
    run(monkeypatch, "--azure", str(TRACE), "--num-requests", "300", "--rate", "50")
    assert "| 300 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="200 arrivals, not 300"):
        run(monkeypatch, "--azure", str(TRACE), "--num-requests", "300", "--arrivals", "trace")


def test_a_fitted_step_time_needs_a_pool(monkeypatch, capsys, tmp_path):
    path = tmp_path / "times.json"
    times = {
        "base": 1e-3,
        "knots": [1],
        "per_token": [1e-4],
        "per_kv_token": 0.0,
        "per_pair": 0.0,
    }
    path.write_text(json.dumps(times))
    arguments = ("--step-time", str(path), "--num-requests", "5", "--outputs", "2", "2")
    with pytest.raises(SystemExit, match="give --num-kv-blocks"):
        run(monkeypatch, *arguments)
    run(monkeypatch, *arguments, "--num-kv-blocks", "1000")
    assert "| 5 |" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["default", "vllm", "1,2,4,8-64:8"])
def test_ladders_keep_to_the_limits(name):
    ladders = simulate.ladders_of(name, max_num_seqs=48, budget=300, ridge=100)
    assert ladders is not None
    assert ladders.decode.largest == 48
    assert ladders.mixed.largest == {"default": 300, "vllm": 288}.get(name, 64)
