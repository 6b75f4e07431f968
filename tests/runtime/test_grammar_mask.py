"""The mask of a step: what it lets through, how it follows its outputs, and that nothing waits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from runtime import StructuredOutputsParams
from runtime.grammar import Grammar, GrammarCompiler, GrammarMatcher
from runtime.grammar_mask import GrammarWork, _apply_batched, apply_mask, prepare_mask
from runtime.tokenizer import load_tokenizer

VOCAB, END = 300, 257
FORMS = (
    StructuredOutputsParams(regex="[a-c]{2}x?"),
    StructuredOutputsParams(choice=["ab", "abc"]),
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "string"}}}),
    StructuredOutputsParams(grammar='root ::= "a" root | "b"'),
)


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return load_tokenizer(checkpoint("llama"))


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, (END,))


def make_work(matchers: list[GrammarMatcher], outputs: list[list[int]]) -> list[GrammarWork]:
    return [
        GrammarWork(place=place, row=10 + place, matcher=matcher, output_ids=output_ids)
        for place, (matcher, output_ids) in enumerate(zip(matchers, outputs, strict=True))
    ]


def bits_of(mask) -> np.ndarray:
    """[r, vocab] bool"""
    return np.unpackbits(mask.bits, axis=1, bitorder="little")[:, :VOCAB].astype(bool)


def allowed_slowly(grammar: Grammar, output_ids: list[int]) -> np.ndarray:
    """[vocab] bool, by asking for each token whether it could come next."""
    allowed = np.zeros(VOCAB, dtype=bool)
    for token_id in range(VOCAB):
        matcher = grammar.start().matcher
        matcher.consume_tokens(output_ids)
        if token_id == END:
            allowed[token_id] = matcher.is_accepting()
        else:
            allowed[token_id] = matcher.try_consume_tokens([token_id]) == 1
    return allowed


@pytest.mark.parametrize("text", ["", "a", "ab", "abc", "aab", '{"a":"'])
def test_the_mask_has_what_can_follow_alone_and_beside_others(compiler, tokenizer, text) -> None:
    output_ids = tokenizer.encode_piece(text)
    grammars = [compiler.compile(form) for form in FORMS]
    fitting = [g for g in grammars if g.start().matcher.try_consume_tokens(output_ids) == len(text)]
    assert fitting
    together = prepare_mask(
        make_work([g.start() for g in fitting], [list(output_ids) for _ in fitting])
    )
    assert together.row_errors == {}
    for place, grammar in enumerate(fitting):
        expected = allowed_slowly(grammar, output_ids)
        assert expected.any()
        assert np.array_equal(bits_of(together)[place], expected)
        alone = prepare_mask(make_work([grammar.start()], [list(output_ids)]))
        assert np.array_equal(bits_of(alone)[0], expected)


def test_a_matcher_follows_its_output_and_a_second_try_changes_nothing(compiler, tokenizer) -> None:
    matcher, output_ids = compiler.compile(FORMS[0]).start(), []
    letters = {letter: tokenizer.encode_piece(letter)[0] for letter in "abcx"}
    (work,) = make_work([matcher], [output_ids])
    for letter, next_letters in (("a", "abc"), ("b", "x"), ("x", "")):
        output_ids.append(letters[letter])
        masks = [bits_of(prepare_mask([work])) for _ in range(3)]
        assert all(np.array_equal(mask, masks[0]) for mask in masks)
        expected = {letters[following] for following in next_letters}
        expected |= {END} if letter != "a" else set()
        assert set(np.flatnonzero(masks[0][0]).tolist()) == expected
    assert matcher.num_consumed == 3


def test_matchers_of_one_grammar_are_apart(compiler, tokenizer) -> None:
    grammar = compiler.compile(FORMS[1])
    outputs = [tokenizer.encode_piece(text) for text in ("", "a", "ab", "abc")]
    masks = bits_of(prepare_mask(make_work([grammar.start() for _ in outputs], outputs)))
    for output_ids, mask in zip(outputs, masks, strict=True):
        assert np.array_equal(mask, allowed_slowly(grammar, output_ids))


def test_a_grammar_that_grows_too_complex_is_an_error_of_its_row(compiler, tokenizer) -> None:
    rules = [f'r{number}: "a" start "b{number}"' for number in range(40)]
    start = "start: " + " | ".join(f"r{number}" for number in range(40))
    grammar = compiler.compile(StructuredOutputsParams(grammar="\n".join([start, *rules])))
    good = compiler.compile(FORMS[1])
    work = make_work([good.start(), grammar.start()], [[], []])
    prepare_mask(work)
    work[1].output_ids.extend(tokenizer.encode_piece("a"))
    mask = prepare_mask(work)
    assert list(mask.row_errors) == [11]
    assert mask.row_errors[11].startswith("structured_outputs can't be followed any further: ")
    assert not bits_of(mask)[1].any()
    assert bits_of(mask)[0].any()


@pytest.mark.parametrize("apply", [apply_mask, _apply_batched])
@pytest.mark.parametrize("vocab", [VOCAB - 45, VOCAB, 256])
@pytest.mark.parametrize("places", [[0], [2, 4], [4, 1, 0]])
def test_applying_keeps_the_allowed_logits_and_no_others(compiler, vocab, places, apply) -> None:
    grammars = [compiler.compile(form) for form in FORMS[: len(places)]]
    mask = prepare_mask(make_work([g.start() for g in grammars], [[] for _ in places]))
    mask = dataclasses.replace(mask, places=np.array(places))
    logits = torch.randn((5, vocab), generator=torch.Generator().manual_seed(1))
    expected = logits.clone()
    for index, place in enumerate(places):
        for token_id in range(vocab):
            if not bits_of(mask)[index, token_id]:
                expected[place, token_id] = -torch.inf
    changed = logits.clone()
    apply(changed, mask)
    assert torch.equal(changed, expected)
    assert (changed.isfinite().sum(dim=-1) == vocab).sum() == 5 - len(places)


@pytest.mark.gpu
def test_applying_on_a_gpu_gives_the_same_and_waits_for_nothing(compiler) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    places = [3, 0, 2]
    mask = prepare_mask(make_work([compiler.compile(form).start() for form in FORMS[:3]], [[]] * 3))
    mask = dataclasses.replace(mask, places=np.array(places))
    logits = torch.randn((5, VOCAB))
    on_device = logits.cuda()
    apply_mask(logits, mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        apply_mask(on_device, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(on_device.cpu(), logits)
