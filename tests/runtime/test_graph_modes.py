"""Steps under captured graphs, through the whole engine, on the CPU's emulation of graphs."""

from __future__ import annotations

import json

import pytest

from attention.native_build import usable_levels
from runtime import LLM, ConfigError, SamplingParams

PROMPTS = [[(11 * i + j) % 250 for j in range(n)] for i, n in enumerate((1, 7, 16, 33, 60, 90))]
SIZES = "1,2,4,8,16,32"


def run(path, **options):
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1, seed=5, max_tokens=20, ignore_eos=True),
    ] * 3
    with LLM(path, max_model_len=128, max_num_batched_tokens=32, **options) as llm:
        outputs = [*llm.generate(PROMPTS, params, use_tqdm=False)]
        outputs += llm.generate(PROMPTS, params, use_tqdm=False)
        llm.engine.check_integrity()
        return [output.outputs[0].token_ids for output in outputs], llm.engine.stats()


@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 10}], ids=["roomy", "preempting"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_piecewise_graphs_give_the_tokens_of_eager_steps(checkpoint, family, options):
    eager, _ = run(checkpoint(family), dtype="float32", **options)
    graphs, stats = run(
        checkpoint(family),
        dtype="float32",
        graph_mode="piecewise",
        capture_sizes=SIZES,
        **options,
    )
    assert graphs == eager
    assert stats["dropped"] == {}
    assert stats["falls"] == {}, "the ladder's top is the budget, so no step leaves it"
    assert {bucket["mode"] for bucket in stats["buckets"]} == {"piecewise"}
    assert len(stats["buckets"]) >= 4
    assert (stats["num_preemptions"] > 0) == bool(options)


def test_steps_off_the_ladder_run_eagerly_and_are_counted(checkpoint):
    eager, _ = run(checkpoint("llama"), dtype="float32")
    graphs, stats = run(
        checkpoint("llama"), dtype="float32", graph_mode="piecewise", capture_sizes=[1, 2, 8]
    )
    assert graphs == eager
    assert stats["falls"]["above the largest size"] > 0
    assert stats["falls"]["padding above 2x"] > 0
    assert sum(bucket["steps"] for bucket in stats["buckets"]) == stats["num_steps"]


def test_bfloat16_steps_under_graphs_use_packed_weights_too(checkpoint, caplog):
    caplog.set_level("INFO", logger="stepgraph.runtime")
    eager, _ = run(checkpoint("llama"), dtype="bfloat16")
    graphs, stats = run(
        checkpoint("llama"), dtype="bfloat16", graph_mode="piecewise", capture_sizes=SIZES
    )
    assert (stats["dropped"], stats["falls"]) == ({}, {})
    assert len({line for line in caplog.messages if line.startswith("weights packed")}) == 1
    if "weights packed: yes" in caplog.messages and usable_levels()[0] != "amx":
        # Neither padding nor what shares a step changes a row's products.
        assert graphs == eager


def test_the_default_ladder_covers_every_step(checkpoint):
    _, stats = run(checkpoint("llama"), graph_mode="piecewise")
    assert "above the largest size" not in stats["falls"]


def test_statistics_add_up_and_are_json(checkpoint):
    _, stats = run(checkpoint("llama"))
    assert json.loads(json.dumps(stats)) == stats
    (bucket,) = stats["buckets"]
    assert (bucket["mode"], bucket["steps"]) == ("eager", stats["num_steps"])
    assert bucket["num_padded_tokens"] == 0
    assert bucket["num_tokens"] >= stats["num_prompt_tokens"]
    assert bucket["seconds"] > 0


def test_full_graphs_are_left_out_where_the_backend_has_none(checkpoint, caplog):
    eager, _ = run(checkpoint("llama"), dtype="float32", attention_backend="torch")
    with caplog.at_level("WARNING", logger="stepgraph.graphs"):
        graphs, stats = run(
            checkpoint("llama"),
            dtype="float32",
            graph_mode="full_and_piecewise",
            attention_backend="torch",
            capture_sizes=SIZES,
        )
    assert graphs == eager
    assert "goes without full graphs" in caplog.text
    assert {bucket["mode"] for bucket in stats["buckets"]} == {"piecewise"}


def test_the_mode_comes_from_argument_environment_or_device(checkpoint, monkeypatch):
    def mode(**options):
        with LLM(checkpoint("llama"), max_model_len=64, max_num_seqs=2, **options) as llm:
            return llm.engine.config.graph_mode

    assert mode() == "none"
    monkeypatch.setenv("STEPGRAPH_GRAPH_MODE", "piecewise")
    monkeypatch.setenv("STEPGRAPH_CAPTURE_SIZES", "1,2")
    assert mode() == "piecewise"
    assert mode(graph_mode="none") == "none"
    with pytest.raises(ConfigError, match="graph_mode='all' is not one of none, full"):
        mode(graph_mode="all")
