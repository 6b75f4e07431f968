"""Which weights and regions an engine chooses, and that it says so."""

from __future__ import annotations

import pytest

from attention.native_build import NativeBuildError, find_compiler
from runtime import LLM, SamplingParams

SIZES = {"max_model_len": 64, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
try:
    find_compiler()
except NativeBuildError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize(
    ("dtype", "messages"),
    [
        ("bfloat16", {"weights packed: yes", "native regions: yes"}),
        (
            "float32",
            {
                "weights packed: no, dtype torch.float32 is not bfloat16",
                "native regions: no, dtype torch.float32 is not bfloat16",
            },
        ),
    ],
)
def test_the_choice_is_logged_with_its_reason(checkpoint, caplog, dtype, messages):
    caplog.set_level("INFO", logger="stepgraph.runtime")
    with LLM(checkpoint("llama"), dtype=dtype, **SIZES):
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
