"""The real model's answers in the form that was asked for, every single time."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest

from runtime import LLM, SamplingParams, StructuredOutputsParams
from runtime.grammar import GrammarCompiler
from runtime.grammar_mask import GrammarWork, prepare_mask
from runtime.tokenizer import load_end_token_ids, load_tokenizer

CITIES = ("Paris", "Oslo", "Lima", "Cairo", "Delhi", "Kyoto", "Quito", "Dakar")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 24},
        "country": {"type": "string", "pattern": "^[A-Z][a-z]{2,14}$"},
        "population": {"type": "integer", "minimum": 1000, "maximum": 40000000},
        "coast": {"type": "boolean"},
        "climate": {"enum": ["hot", "mild", "cold"]},
        "sights": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 1,
            "maxItems": 3,
        },
        "mayor": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]},
    },
    "required": ["city", "country", "population", "coast", "climate", "sights", "mayor"],
    "additionalProperties": False,
}


def check(text: str) -> None:
    """All that the schema says, by hand: no package is asked twice."""
    place = json.loads(text)
    assert list(place) == SCHEMA["required"]
    assert isinstance(place["city"], str)
    assert 1 <= len(place["city"]) <= 24
    assert re.fullmatch("[A-Z][a-z]{2,14}", place["country"])
    assert type(place["population"]) is int
    assert 1000 <= place["population"] <= 40_000_000
    assert isinstance(place["coast"], bool)
    assert place["climate"] in ("hot", "mild", "cold")
    assert 1 <= len(place["sights"]) <= 3
    assert all(isinstance(sight, str) and len(sight) <= 20 for sight in place["sights"])
    assert place["mayor"] is None or len(place["mayor"]) <= 20


@pytest.mark.slow
def test_two_hundred_of_two_hundred_answers_follow_the_schema(smollm2):
    form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    conversations = [
        [{"role": "user", "content": f"Describe {CITIES[i % len(CITIES)]} in JSON."}]
        for i in range(200)
    ]
    params = [
        # Each is bounded: a character takes at most four tokens, and each text some of them.
        SamplingParams(
            structured_outputs=form, max_tokens=800, seed=i, temperature=(0.0, 0.7, 1.0, 1.5)[i % 4]
        )
        for i in range(200)
    ]
    with LLM(smollm2, max_model_len=1024, max_num_seqs=64) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop", output.outputs[0].text
        check(output.outputs[0].text)
    assert len({output.outputs[0].text for output in outputs}) > 100


@pytest.mark.slow
def test_the_other_forms_are_followed_too(smollm2):
    forms = {
        "regex": (StructuredOutputsParams(regex=r"\d{1,2} [A-Z][a-z]{2,8} \d{4}"), "When?"),
        "choice": (StructuredOutputsParams(choice=["positive", "negative"]), "I love it."),
        "grammar": (StructuredOutputsParams(grammar='root ::= "- " [^\\n]{1,40} "\\n"'), "List."),
    }
    prompts = [prompt for _, prompt in forms.values()] * 10
    params = [
        SamplingParams(structured_outputs=form, seed=i, max_tokens=200)
        for i, (form, _) in enumerate([*forms.values()] * 10)
    ]
    with LLM(smollm2, max_model_len=512) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    patterns = [r"\d{1,2} [A-Z][a-z]{2,8} \d{4}", "positive|negative", "- [^\n]{1,40}\n"]
    for i, output in enumerate(outputs):
        assert re.fullmatch(patterns[i % 3], output.outputs[0].text), output.outputs[0].text
        assert output.outputs[0].finish_reason == "stop"


def test_any_walk_through_the_masks_of_a_real_tokenizer_has_the_form(smollm2):
    """Tokens of several characters, and of parts of one, drawn at random from what is allowed."""
    tokenizer = load_tokenizer(smollm2)
    end_ids = load_end_token_ids(smollm2, tokenizer)
    compiler = GrammarCompiler(tokenizer, 49152, end_ids)
    grammar = compiler.compile(StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True))
    rng = random.Random(0)
    outputs: list[list[int]] = [[] for _ in range(40)]
    matchers, unfinished = [grammar.start() for _ in outputs], list(range(len(outputs)))
    while unfinished:
        work = [
            GrammarWork(place=i, row=i, matcher=matchers[i], output_ids=outputs[i])
            for i in unfinished
        ]
        mask = prepare_mask(work)
        assert mask.row_errors == {}
        for i, bits in zip(list(unfinished), mask.bits, strict=True):
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            token_id = int(rng.choice(allowed.tolist()))
            if token_id in end_ids:
                unfinished.remove(i)
            else:
                outputs[i].append(token_id)
                assert len(outputs[i]) < 500
    for output_ids in outputs:
        check(tokenizer.decode(output_ids))
