"""The benchmark of graph modes: on a CPU with the emulation of graphs, on a GPU as it is meant."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = ROOT / "profiling" / "graph_benchmark.py"
    spec = importlib.util.spec_from_file_location("graph_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


OPTIONS = (
    *("--device", "cpu", "--dtype", "float32", "--steps", "2", "--context", "20"),
    *("--max-model-len", "40", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"),
)


def steps_of(report, mode, kind):
    steps = [step for step in report["modes"][mode]["steps"] if step["kind"] == kind]
    return {step["num_tokens"]: step for step in steps}


def test_every_mode_is_measured_at_every_size(benchmark, checkpoint, tmp_path, capsys):
    folder = tmp_path / "results" / "graphs"
    model = str(checkpoint("llama"))
    benchmark.main([str(folder), "--model", model, *OPTIONS, "--capture-sizes", "2,4,32,64"])
    report = json.loads((folder / "graph_benchmark.json").read_text(encoding="utf-8"))
    assert list(report["modes"]) == ["none", "full", "piecewise", "full_and_piecewise"]
    launched = {
        (mode, kind, tokens): (step["mode"], step["size"])
        for mode in report["modes"]
        for kind in ("decode", "mixed")
        for tokens, step in steps_of(report, mode, kind).items()
    }
    for mode in report["modes"]:
        decode = {"none": "eager", "piecewise": "piecewise"}.get(mode, "full")
        mixed = "piecewise" if "piecewise" in mode else "eager"
        for kind, name, sizes in (("decode", decode, (2, 4)), ("mixed", mixed, (2, 4, 32, 64))):
            for size in sizes:
                expected = (name, 0 if name == "eager" else size)
                assert launched.pop((mode, kind, size)) == expected
        result = report["modes"][mode]
        assert (result["graph_bytes"] > 0) == (mode != "none") == (len(result["captures"]) > 0)
        assert all(0 < s["p10_ms"] <= s["median_ms"] <= s["p90_ms"] for s in result["steps"])
    assert launched == {}
    shown = capsys.readouterr().out
    assert "full_and_piecewise" in shown
    assert str(folder / "graph_benchmark.json") in shown


def test_sizes_can_be_chosen_and_what_finds_no_memory_is_skipped(
    benchmark, checkpoint, tmp_path, capsys
):
    arguments = ["--modes", "none", "--decode", "3", "--mixed", "50", "64"]
    arguments += [
        "--kv-cache-bytes",
        str(8192 * 8),
    ]  # seven blocks of 16 tokens besides the null one
    benchmark.main([str(tmp_path), "--model", str(checkpoint("llama")), *OPTIONS, *arguments])
    report = json.loads((tmp_path / "graph_benchmark.json").read_text(encoding="utf-8"))
    assert set(steps_of(report, "none", "decode")) == {3}
    assert "skipped" not in steps_of(report, "none", "mixed")[64]
    assert steps_of(report, "none", "decode")[3]["context"] < 20
    arguments[-1] = str(8192 * 3)
    benchmark.main([str(tmp_path), "--model", str(checkpoint("llama")), *OPTIONS, *arguments])
    report = json.loads((tmp_path / "graph_benchmark.json").read_text(encoding="utf-8"))
    assert steps_of(report, "none", "decode")[3]["skipped"] == "too little KV memory"
    assert steps_of(report, "none", "mixed")[50]["skipped"] == "too little KV memory"
    assert "skipped" in capsys.readouterr().out


# What a GPU should run, the shape of Qwen3-0.6B but for the vocabulary, with random weights.
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present")
@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
def test_a_gpus_captures_memory_and_steps_are_measured(
    benchmark, checkpoint, tmp_path, capsys, monkeypatch
):
    """With compiled layers and without; the tables are printed past pytest's capture."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3"), model)
    config = json.loads((model / "config.json").read_text()) | SHAPE
    (model / "config.json").write_text(json.dumps(config | {"layer_types": None}))
    arguments = ["--model", str(model), "--load-format", "dummy", "--dtype", "bfloat16"]
    arguments += ["--max-num-seqs", "256", "--max-num-batched-tokens", "2048"]
    for compiled in ("1", "0"):
        monkeypatch.setenv("STEPGRAPH_COMPILE", compiled)
        with capsys.disabled():
            print(f"\nSTEPGRAPH_COMPILE={compiled}")
            benchmark.main([str(tmp_path / compiled), *arguments])
        report = json.loads((tmp_path / compiled / "graph_benchmark.json").read_text())
        for mode, result in report["modes"].items():
            assert result["dropped"] == {}
            assert (result["graph_bytes"] > 0) == (mode != "none") == bool(result["captures"])
            assert {step["kind"] for step in result["steps"]} == {"decode", "mixed"}
            assert not any("skipped" in step for step in result["steps"])
