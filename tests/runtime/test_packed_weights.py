"""Which weights and regions an engine chooses, that it says so, and where it keeps libraries."""

from __future__ import annotations

import statistics

import pytest

from attention import native_backend
from attention.native_build import NativeBuildError, find_compiler
from runtime import LLM, ConfigError, SamplingParams, native_sampler
from runtime.models import linear

SIZES = {"max_model_len": 64, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
try:
    find_compiler()
except NativeBuildError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"dtype": "bfloat16"}, {"weights packed: yes, in bfloat16", "native regions: yes"}),
        (
            {"dtype": "bfloat16", "quantization": "int8"},
            {"weights packed: yes, in int8", "native regions: yes"},
        ),
        (
            {"dtype": "float32"},
            {
                "weights packed: no, dtype torch.float32 is not bfloat16",
                "native regions: no, dtype torch.float32 is not bfloat16",
            },
        ),
    ],
)
def test_the_choice_is_logged_with_its_reason(checkpoint, caplog, options, messages):
    caplog.set_level("INFO", logger="stepgraph.runtime")
    with LLM(checkpoint("llama"), **options, **SIZES):
        assert messages <= set(caplog.messages)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_without_a_compiler_steps_run_with_plain_weights_after_one_warning(
    checkpoint, tmp_path, monkeypatch, caplog
):
    prompt = [[5, 6, 7, 8]]
    with LLM(checkpoint("llama"), dtype="bfloat16", **SIZES) as llm:
        (expected,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    monkeypatch.setenv("STEPGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with LLM(checkpoint("llama"), dtype="bfloat16", **SIZES) as llm:
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    warnings = [r.getMessage() for r in caplog.records if r.name == "stepgraph.runtime"]
    (warning,) = [text for text in warnings if "weights" in text]
    assert "can't be packed for this CPU: the C++ compiler that CXX names" in warning
    assert output.outputs[0].token_ids[0] == expected.outputs[0].token_ids[0]
    with pytest.raises(ConfigError, match=r"quantization='int8' can't be done: the C\+\+ compiler"):
        LLM(checkpoint("llama"), dtype="bfloat16", quantization="int8", **SIZES)


def test_every_native_library_is_kept_in_the_cache_directory(checkpoint, tmp_path, monkeypatch):
    kept, usable_library = {}, native_backend.usable_library

    def recording(source, level, cache_dir=None):
        kept.setdefault(source.name, set()).add(cache_dir)
        return usable_library(source, level)  # the one there is already: building takes seconds

    for module in (native_backend, linear, native_sampler):
        monkeypatch.setattr(module, "usable_library", recording)
    monkeypatch.setenv("STEPGRAPH_CACHE_DIR", str(tmp_path))
    with LLM(checkpoint("llama"), dtype="bfloat16", **SIZES) as llm:
        assert llm.engine.config.cache_dir == tmp_path
        llm.sleep(2)
        llm.wake_up()
        llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert kept == {name: {tmp_path} for name in ("attention", "layers", "sampler")}


@pytest.mark.parametrize("compile_layers", [False, True])
def test_int8_weights_give_nearly_the_logprobs_of_bfloat16(checkpoint, compile_layers):
    prompts = [[(7 * i + j) % 250 for j in range(n)] for i, n in enumerate((3, 20, 41))]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)

    def logprobs(**options):
        with LLM(checkpoint("llama"), dtype="bfloat16", **SIZES, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            regions = llm.stats()["compile"]["regions"].values()
            assert sum(region["num_recompilations"] for region in regions) == 0
        return [
            next(iter(entry.values())).logprob for o in outputs for entry in o.prompt_logprobs[1:]
        ]

    plain = logprobs()
    int8 = logprobs(quantization="int8", compile=compile_layers)
    assert int8 != plain
    # Random weights give logits that differ by several between tokens.
    assert statistics.fmean(abs(a - b) for a, b in zip(int8, plain, strict=True)) < 0.1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "float32"}, "is for bfloat16 on a CPU, not for torch.float32 on cpu"),
        ({"quantization": "int7"}, "quantization='int7' is not one of None, int8"),
    ],
)
def test_what_can_not_be_quantized_is_refused(checkpoint, options, text):
    with pytest.raises(ConfigError, match=text):
        LLM(checkpoint("llama"), **{"quantization": "int8", **options}, **SIZES)
