"""What the engine makes of its attention options: block size, graphs."""

from __future__ import annotations

import sys

import pytest
from torch.nn.attention import varlen

from attention.flash_attn_backend import FlashAttnBackend
from graphs.host_graph import leaf
from runtime import LLM, SamplingParams
from tests.attention import flash_attn_doubles as doubles

PROMPTS = [[(11 * i + j) % 250 for j in range(n)] for i, n in enumerate((1, 250, 255, 300))]


@pytest.fixture
def flash_attn_on_a_cpu(monkeypatch):
    """The backend with torch's double, and nothing against it."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(varlen, "varlen_attn", leaf(doubles.varlen_attn))
    monkeypatch.setattr(FlashAttnBackend, "unsupported_reasons", lambda spec, **_: [])


def run(path, **options):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(path, dtype="float16", max_model_len=320, max_num_seqs=4, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.engine.check_integrity()
        tokens = [output.outputs[0].token_ids for output in outputs]
        return tokens, llm.engine.stats(), llm.engine.config


@pytest.mark.usefixtures("flash_attn_on_a_cpu")
def test_flash_attn_gets_its_block_size_and_full_graphs_of_decode(checkpoint):
    eager, _, config = run(checkpoint("llama"), attention_backend="flash_attn")
    assert config.block_size == 256
    graphs, stats, _ = run(
        checkpoint("llama"),
        attention_backend="flash_attn",
        graph_mode="full_and_piecewise",
        max_num_batched_tokens=128,
        capture_sizes=[1, 2, 4, 8, 16, 32, 64, 128],
    )
    assert (stats["dropped"], stats["falls"]) == ({}, {})
    assert {bucket["mode"] for bucket in stats["buckets"]} == {"full", "piecewise"}
    torch_tokens, _, _ = run(checkpoint("llama"), attention_backend="torch")
    # float16 sums in another order: tokens may part ways later, but not at once.
    assert [ids[0] for ids in graphs] == [ids[0] for ids in eager]
    assert [ids[0] for ids in graphs] == [ids[0] for ids in torch_tokens]
