"""float32 greedy output equals transformers' token by token, however the batch is cut."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from runtime import LLM, SamplingParams

FAMILIES = ["llama", "llama3_rope", "mistral", "qwen2", "qwen3"]
NUM_TOKENS = 64

# Each cuts the same work differently. "pool" is in tokens; None: room for all.
TINY_CASES = {
    "default": {},
    "budget 7, block 1": {"max_num_batched_tokens": 7, "block_size": 1},
    "budget 16, block 16": {"max_num_batched_tokens": 16},
    "budget 64, block 256": {"max_num_batched_tokens": 64, "block_size": 256},
    "budget 16, block 4, no cache": {
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "enable_prefix_caching": False,
    },
    "budget 64, preempting": {"max_num_batched_tokens": 64, "num_kv_blocks": 16},
    "budget 7, preempting, no cache": {
        "max_num_batched_tokens": 7,
        "block_size": 1,
        "num_kv_blocks": 230,
        "enable_prefix_caching": False,
    },
    "prefill first": {"max_num_batched_tokens": 32, "policy": "prefill_first"},
}

SMOLLM2_QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "What is 12 times 12?",
    "Why is the sky blue?",
    "Who wrote Romeo and Juliet?",
    "Give me a synonym for happy.",
    "How many legs does a spider have?",
    "Translate 'good morning' into Spanish.",
    "What is the boiling point of water?",
    "List two uses of a paper clip.",
    "What does a thermometer measure?",
    "Explain gravity in one sentence.",
    "Tell me a short joke.",
    "What comes after Tuesday?",
    "Is the number 91 prime?",
]
SMOLLM2_CASES = {
    "default": {},
    "budget 7, block 1": {"max_num_batched_tokens": 7, "block_size": 1},
    "budget 64, preempting": {"max_num_batched_tokens": 64, "num_kv_blocks": 24},
}
SMOLLM2_SLOW_CASES = {
    "budget 16, block 16": {"max_num_batched_tokens": 16},
    "budget 64, block 256": {"max_num_batched_tokens": 64, "block_size": 256},
    "budget 16, no cache": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    "budget 7, preempting, no cache": {
        "max_num_batched_tokens": 7,
        "num_kv_blocks": 24,
        "enable_prefix_caching": False,
    },
}


def tiny_prompts() -> list[list[int]]:
    """Lengths around block borders, two with a long common start."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 256, n).tolist() for n in (1, 3, 15, 16, 17, 40, 90)]
    shared = rng.integers(0, 256, 70).tolist()
    return [*prompts, [*shared, 5], [*shared, 6, 7]]


@pytest.fixture(scope="module")
def tiny_references(checkpoint, transformers_reference):
    made = {}

    def make(family):
        if family not in made:
            model = transformers_reference(checkpoint(family))
            made[family] = [model.generate(p, NUM_TOKENS) for p in tiny_prompts()]
        return made[family]

    return make


def greedy(llm, prompts, *, together=True):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    calls = [prompts] if together else [[prompt] for prompt in prompts]
    outputs = [output for call in calls for output in llm.generate(call, params, use_tqdm=False)]
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("case", TINY_CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models(checkpoint, tiny_references, ties, family, case):
    with LLM(checkpoint(family), dtype="float32", max_model_len=256, **TINY_CASES[case]) as llm:
        references = tiny_references(family)
        assert ties(greedy(llm, tiny_prompts()), references) <= 1
        if "preempting" in case:
            assert llm.engine.scheduler.num_preemptions > 0
        # Once more, now against what the cache holds, and each prompt alone.
        assert ties(greedy(llm, tiny_prompts(), together=False), references) <= 1


def test_compiled_layers(checkpoint, compiled_once, tiny_references, ties):
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 32}
    with LLM(checkpoint("llama"), dtype="float32", compile=True, **sizes) as llm:
        assert llm.engine.stats()["compile"]["enabled"]
        assert ties(greedy(llm, tiny_prompts()), tiny_references("llama")) <= 1


@pytest.fixture
def all_threads():
    torch.set_num_threads(os.cpu_count() or 1)


@pytest.fixture(scope="module")
def smollm2_work(smollm2, transformers_reference):
    from runtime.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}])
        for question in SMOLLM2_QUESTIONS
    ]
    model = transformers_reference(smollm2)
    torch.set_num_threads(os.cpu_count() or 1)
    return prompts, [model.generate(prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    "case",
    [*SMOLLM2_CASES, *[pytest.param(case, marks=pytest.mark.slow) for case in SMOLLM2_SLOW_CASES]],
)
def test_smollm2(all_threads, smollm2, smollm2_work, ties, case):
    prompts, references = smollm2_work
    options = {**SMOLLM2_CASES, **SMOLLM2_SLOW_CASES}[case]
    with LLM(smollm2, dtype="float32", max_model_len=256, **options) as llm:
        assert ties(greedy(llm, prompts), references) <= 2
        if "preempting" in case:
            assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.slow
def test_smollm2_one_by_one(all_threads, smollm2, smollm2_work, ties):
    prompts, references = smollm2_work
    with LLM(smollm2, dtype="float32", max_model_len=256) as llm:
        assert ties(greedy(llm, prompts, together=False), references) <= 2
