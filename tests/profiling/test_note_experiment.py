"""The experiment of the note on mixed batches, with one seed, and on the CPU with a tiny model."""

from __future__ import annotations

import sys

import note_experiment
import pytest


def reserved() -> float:
    model = note_experiment.MODELS["qwen3-8b"]
    return note_experiment.LIBRARY_BYTES + note_experiment.warm_up_bytes(model)


def test_mixing_gains_at_least_what_the_note_measured_on_an_engine_bound_by_its_host():
    step_time = note_experiment.eager(note_experiment.HOSTS["published"])
    first = note_experiment.latencies(step_time, "prefill_first", 16384, reserved(), 1)
    mixed = note_experiment.latencies(step_time, "fcfs", 256, reserved(), 1)
    assert first.ttft > 2.22 * mixed.ttft
    assert first.tpot > 1.28 * mixed.tpot
    assert first.itl > 5.4 * mixed.itl
    assert mixed.rate_at_once > 1.07 * first.rate_at_once


def test_the_host_bounds_a_step_that_the_device_ends_sooner():
    hosts = note_experiment.HOSTS
    slow, fast = (note_experiment.eager(hosts[name]) for name in ("published", "Python alone"))
    assert slow.seconds(8, 8000, 8000) == pytest.approx(36 / 32 / 25.5 + slow.host_seconds)
    assert slow.seconds(2048, 2048, 2048) == pytest.approx(fast.seconds(2048, 2048, 2048))


def test_the_pool_is_what_weights_libraries_and_a_warm_up_leave():
    step_time = note_experiment.eager(0.0)
    num_bytes = 0.9 * 24 * 2**30 - 16.38e9 - reserved()
    num_blocks = step_time.num_kv_blocks(note_experiment.BLOCK_SIZE, reserved=reserved())
    assert num_blocks * 256 * 147456 == pytest.approx(num_bytes, rel=0.02)


def test_constants_come_before_the_results_and_ratios_beside_the_notes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["note_experiment.py", "--seeds", "1"])
    monkeypatch.setattr(note_experiment, "HOSTS", {"quick": 1e-4})
    note_experiment.main()
    out = capsys.readouterr().out
    assert out.index("flop_rate=165200000000000.0") < out.index("| the note |")
    assert out.index("seconds to launch a layer") < out.index("| the note |")
    assert "1189 to 536: 2.22x | 63.5 to 49.6: 1.28x | 337 to 62.6: 5.38x" in out
    assert "| host quick, K/V of 31232 tokens |" in out
    assert "| host quick, K/V of 41216 tokens |" in out


def test_the_engine_serves_both_policies_on_the_cpu(monkeypatch, capsys, checkpoint):
    model = str(checkpoint("llama"))
    options = ["--cpu", "--model", model, "--num-requests", "6", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["note_experiment.py", *options])
    monkeypatch.setattr(note_experiment, "SMALLER", 16)
    note_experiment.main()
    out = capsys.readouterr().out
    assert "6 requests, (8, 128) in and (4, 16) out" in out
    [row] = [line for line in out.splitlines() if line.startswith("| measured on this CPU")]
    assert row.count("x |") == 5 and "nan" not in row
