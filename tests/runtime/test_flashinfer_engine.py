"""The whole engine on the FlashInfer backend, with every kind of graph: over its stand-in, and over
the package itself on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from attention import FlashInferOptions, selection
from runtime import LLM, SamplingParams
from tests.attention.flashinfer_double import make_backend_class, make_double
from tests.runtime.other_weights import other_weights

PROMPTS = [[(11 * i + j) % 250 for j in range(n)] for i, n in enumerate((1, 7, 16, 33, 60, 90))]
SIZES = "1,2,4,8,16,32"
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=(
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present"),
            pytest.mark.skipif(
                importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
            ),
        ),
    ),
]


@pytest.fixture
def on_double(monkeypatch):
    use_double(monkeypatch, "0.7.4")


def use_double(monkeypatch, version):
    backend = make_backend_class(make_double(version))
    monkeypatch.setitem(selection._LOADERS, "flashinfer", lambda: backend)


def run(path, prompts=PROMPTS, **options):
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1, seed=5, max_tokens=20, ignore_eos=True),
    ]
    params = [params[i % 2] for i in range(len(prompts))]
    options = {"dtype": "float32", "max_num_batched_tokens": 32} | options
    with LLM(path, max_model_len=128, **options) as llm:
        assert llm.engine.config.attention_backend == options.get("attention_backend", "auto")
        outputs = [*llm.generate(prompts, params, use_tqdm=False)]
        outputs += llm.generate(prompts, params, use_tqdm=False)
        llm.engine.check_integrity()
        return [output.outputs[0].token_ids for output in outputs], llm.engine.stats()


@pytest.mark.usefixtures("on_double")
@pytest.mark.parametrize("mode", ["none", "full", "piecewise", "full_and_piecewise"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_every_graph_mode_gives_the_tokens_of_the_reference_backend(checkpoint, family, mode):
    path = checkpoint(family)
    expected, _ = run(path, attention_backend="torch")
    tokens, stats = run(path, attention_backend="flashinfer", graph_mode=mode, capture_sizes=SIZES)
    assert tokens == expected
    assert stats["dropped"] == {}
    taken = {bucket["mode"] for bucket in stats["buckets"]}
    assert (
        taken
        == {
            "none": {"eager"},
            "full": {"full", "eager"},
            "piecewise": {"piecewise"},
            "full_and_piecewise": {"full", "piecewise"},
        }[mode]
    )
    assert "changed plan" not in stats["falls"]


def greedy(path, **options):
    """Ids and log-probabilities of twelve requests, half of them cached, and the statistics."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
    limits = {"max_model_len": 128, "max_num_batched_tokens": 32, "num_kv_blocks": 10}
    options |= {"dtype": "float16", "attention_backend": "flashinfer"}
    with LLM(path, **limits, **options) as llm:
        outputs = [o for _ in range(2) for o in llm.generate(PROMPTS, params, use_tqdm=False)]
        llm.engine.check_integrity()
        return [output.outputs[0] for output in outputs], llm.engine.stats()


def assert_same_but_for_ties(outputs, expected, tie=0.1):
    """In float16 two tokens that are nearly as likely may change places, and then all parts."""
    for output, wanted in zip(outputs, expected, strict=True):
        for place, pair in enumerate(zip(output.token_ids, wanted.token_ids, strict=True)):
            likeliest = sorted((p.logprob for p in wanted.logprobs[place].values()), reverse=True)
            if pair[0] != pair[1]:
                assert likeliest[0] - likeliest[1] < tie, f"{pair[0]} for {pair[1]} at {place}"
                break
            assert abs(output.logprobs[place][pair[0]].logprob - likeliest[0]) < tie


@pytest.mark.parametrize("mode", ["full", "piecewise", "full_and_piecewise"])
@pytest.mark.parametrize("device", DEVICES)
def test_graphs_of_a_devices_own_kernels_give_the_tokens_of_eager_steps(
    checkpoint, device, mode, request
):
    """With preemption and prefix hits; on a GPU over compiled layers, against plain ones."""
    if device == "cpu":
        request.getfixturevalue("on_double")
    path = checkpoint("wide_heads")
    expected, _ = greedy(path, device=device, graph_mode="none", compile=False)
    options = {"graph_mode": mode, "capture_sizes": SIZES, "compile": device != "cpu"}
    outputs, stats = greedy(path, device=device, **options)
    assert_same_but_for_ties(outputs, expected)
    assert (stats["dropped"], stats["falls"]) == ({}, {})
    assert stats["compile"]["enabled"] == (device != "cpu")
    assert stats["num_preemptions"] > 0
    taken = {bucket["mode"] for bucket in stats["buckets"]}
    assert taken == set(mode.split("_and_")) | ({"eager"} if mode == "full" else set())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("version", ["0.6.18", "0.7.4"])
def test_tokens_stay_the_same_while_sequences_are_preempted(
    checkpoint, monkeypatch, version, overlap
):
    use_double(monkeypatch, version)
    path = checkpoint("qwen3")
    expected, _ = run(path, attention_backend="torch")
    options = {"graph_mode": "full_and_piecewise", "capture_sizes": SIZES, "num_kv_blocks": 10}
    options |= {"attention_backend": "flashinfer", "overlap_scheduling": overlap}
    tokens, stats = run(path, **options)
    assert tokens == expected
    assert stats["num_preemptions"] > 0
    assert (stats["num_steps_ahead"] > 0) == overlap


@pytest.mark.usefixtures("on_double")
def test_it_is_the_first_choice_where_it_can_run(checkpoint, caplog):
    with caplog.at_level("INFO", logger="stepgraph.attention"):
        run(checkpoint("llama"), prompts=[[5, 6, 7]])
    assert "attention backend: flashinfer (auto)" in caplog.text


@pytest.mark.usefixtures("on_double")
def test_limits_of_the_engine_size_the_workspace(checkpoint, caplog):
    with caplog.at_level("INFO", logger="stepgraph.attention"):
        run(checkpoint("llama"), prompts=[[5, 6, 7]], max_num_seqs=7)
    assert "7 sequences (the limits of a step)" in caplog.text
    assert "a larger step" not in caplog.text


@pytest.mark.usefixtures("on_double")
def test_prompts_with_nothing_cached_may_skip_the_pages(checkpoint):
    path = checkpoint("llama")
    options = FlashInferOptions(ragged_prompts=True)
    expected, _ = run(path, attention_backend="torch")
    assert run(path, attention_backend="flashinfer", flashinfer_options=options)[0] == expected
    with pytest.raises(ValueError, match="'torch' doesn't take FlashInferOptions"):
        run(path, attention_backend="torch", flashinfer_options=options)


@pytest.mark.usefixtures("on_double")
@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_wakes_up_with_graphs_that_are_right(checkpoint, tmp_path, overlap):
    path, new = checkpoint("qwen3"), other_weights(checkpoint("qwen3"), tmp_path / "new")
    options = {"max_model_len": 128, "max_num_batched_tokens": 32, "dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = []
    for each in (path, new):
        with LLM(each, attention_backend="torch", **options) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            expected.append([output.outputs[0].token_ids for output in outputs])
    options |= {"graph_mode": "full_and_piecewise", "capture_sizes": SIZES}
    options |= {"overlap_scheduling": overlap, "attention_backend": "flashinfer"}
    with LLM(path, **options) as llm:
        for step, tokens in (
            (lambda: None, expected[0]),
            (lambda: llm.sleep(1), expected[0]),
            (lambda: llm.sleep(2), expected[0]),
            (lambda: llm.reload_weights(new), expected[1]),
        ):
            step()
            llm.wake_up()
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == tokens
        stats = llm.stats()
        assert (stats["dropped"], stats["falls"]) == ({}, {})
