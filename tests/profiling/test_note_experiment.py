"""The experiment of the note on mixed batches, with one seed."""

from __future__ import annotations

import sys

import note_experiment
from step_time import HARDWARE, MODELS, RooflineStepTime

STEP_TIME = RooflineStepTime(model=MODELS["qwen3-8b"], hardware=HARDWARE["rtx4090"])


def test_mixing_shortens_gaps_and_time_per_token_and_raises_throughput():
    first = note_experiment.latencies(STEP_TIME, "prefill_first", 16384, 3.5e9, 1)
    mixed = note_experiment.latencies(STEP_TIME, "fcfs", 256, 3.5e9, 1)
    assert first.itl > 5.4 * mixed.itl
    assert first.tpot > 1.28 * mixed.tpot
    assert first.ttft > mixed.ttft
    assert mixed.rate_at_once > 1.07 * first.rate_at_once


def test_constants_come_before_the_results_and_ratios_beside_the_notes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["note_experiment.py", "--seeds", "1", "--reserved", "1e9"])
    note_experiment.main()
    out = capsys.readouterr().out
    assert out.index("flop_rate=165200000000000.0") < out.index("| the note |")
    assert "1189 to 536: 2.22x | 63.5 to 49.6: 1.28x | 337 to 62.6: 5.38x" in out
    assert "| simulated, K/V of 39168 tokens |" in out
