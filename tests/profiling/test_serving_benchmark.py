"""The serving benchmark on a tiny model, from the command line to its files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import plots
import pytest
import serving_benchmark

OPTIONS = (
    "attention_backend=torch",
    "max_model_len=256",
    "kv_cache_bytes=1000000",
    "max_num_batched_tokens=64",
    "max_num_seqs=8",
    "prefill_first:max_num_batched_tokens=256",
)


def run(monkeypatch: pytest.MonkeyPatch, model: Path, *arguments: str) -> None:
    options = [part for option in OPTIONS for part in ("--option", option)]
    command = ["serving_benchmark.py", "--model", str(model), *options, *arguments]
    monkeypatch.setattr(sys, "argv", command)
    serving_benchmark.main()


def test_policies_and_rates_side_by_side(monkeypatch, capsys, tmp_path, checkpoint):
    path, folder = tmp_path / "results.json", tmp_path / "plots"
    run(
        monkeypatch,
        checkpoint("llama"),
        *("--num-requests", "6", "--inputs", "20", "90", "--outputs", "2", "6"),
        *("--rate", "200", "inf", "--compare", "mixed,prefill_first", "--warmup", "1"),
        *("--json", str(path), "--plots", str(folder)),
    )
    out = capsys.readouterr().out
    results = json.loads(path.read_text())
    names = [f"{p}, rate {r}" for r in ("200", "inf") for p in ("mixed", "prefill_first")]
    assert list(results["runs"]) == names
    assert results["command"][0] == "serving_benchmark.py"
    for name, result in results["runs"].items():
        assert f"| {name} | 5 |" in out
        assert 0 < result["ttft"]["p50"] <= result["ttft"]["p99"]
        steps = result["steps"]
        tokens = sum(steps["num_decodes"]) + sum(steps["num_prompt_tokens"])
        # Each token but a request's last one is computed, beside the prompts.
        stats = result["extra"]["stats"]
        assert tokens <= stats["num_prompt_tokens"] + stats["num_output_tokens"]
        budget = 256 if name.startswith("prefill_first") else 64
        assert max(steps["num_prompt_tokens"]) <= budget
        assert steps["num_running"][-1] == 0
        assert "samples" in result["extra"]["device"]
    prefill = results["runs"]["prefill_first, rate inf"]["steps"]
    pairs = zip(prefill["num_decodes"], prefill["num_prompt_tokens"], strict=True)
    assert not any(decodes and prompts for decodes, prompts in pairs)
    assert (folder / "latencies.png").exists() == (plots.pyplot() is not None)


def test_sharegpt_prompts_are_real_text(monkeypatch, capsys, tmp_path, checkpoint):
    path = tmp_path / "conversations.json"
    turns = [{"from": "human", "value": "Hello there"}, {"from": "gpt", "value": "Hi"}]
    path.write_text(json.dumps([{"conversations": turns}] * 3))
    run(monkeypatch, checkpoint("llama"), "--sharegpt", str(path), "--rate", "inf")
    assert "| mixed, rate inf | 3 |" in capsys.readouterr().out


def test_wrong_policies_and_options_are_named(monkeypatch, checkpoint):
    with pytest.raises(SystemExit, match="'fifo' is none of mixed, priority, prefill_first"):
        run(monkeypatch, checkpoint("llama"), "--compare", "mixed,fifo")
    for text, message in (("block_size", "not name=value"), ("fifo:a=1", "'fifo' is none of")):
        with pytest.raises(ValueError, match=message):
            serving_benchmark.parse_options([text], "mixed")


def test_options_of_a_policy_win_over_common_ones():
    texts = ["a=1", "b=word", "prefill_first:a=[2]", 'mixed:c="x=y"']
    assert serving_benchmark.parse_options(texts, "prefill_first") == {"a": [2], "b": "word"}
    assert serving_benchmark.parse_options(texts, "mixed") == {"a": 1, "b": "word", "c": "x=y"}
