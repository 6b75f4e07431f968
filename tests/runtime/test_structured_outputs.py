"""The form of an output as a value, and compiled: what is taken, and what is refused by name."""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
from typing import Any

import pytest

from runtime import InvalidRequestError, SamplingParams, StructuredOutputsParams
from runtime.grammar import MAX_KEPT_GRAMMARS, Grammar, GrammarCompiler
from runtime.tokenizer import load_tokenizer

VOCAB, END = 300, 257


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return load_tokenizer(checkpoint("llama"))


@pytest.fixture
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, (END,))


def accepts(tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the text is a whole one of the grammar's."""
    matcher = grammar.start()
    matcher.follow(tokenizer.encode_piece(text))
    return matcher.error is None and matcher.matcher.is_accepting()


# Values


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({"json": {"type": "integer"}}, {"json": '{"type": "integer"}'}),
        ({"json": '{"type": "integer"}'}, {"json": '{"type": "integer"}'}),
        ({"json": {"b": {}, "a": {}}}, {"json": '{"b": {}, "a": {}}'}),
        ({"regex": ""}, {"regex": ""}),
        ({"choice": ["b", "a"]}, {"choice": ("b", "a")}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"json_object": True, "regex": None}, {"json_object": True}),
        ({"regex": "a", "json_object": False}, {"regex": "a"}),
    ],
)
def test_one_form_is_stored_as_plain_values(
    options: dict[str, Any], stored: dict[str, Any]
) -> None:
    form = StructuredOutputsParams(**options)
    assert {name: getattr(form, name) for name in stored} == stored
    assert form == dataclasses.replace(form)
    assert len({form, StructuredOutputsParams(**options)}) == 1


CIRCLE: dict[str, Any] = {}
CIRCLE["a"] = CIRCLE


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, InvalidRequestError, "structured_outputs has nothing; give exactly one of json,"),
        ({"json_object": False}, InvalidRequestError, "has nothing"),
        (
            {"regex": "a", "choice": ["a"]},
            InvalidRequestError,
            "has regex and choice; give exactly one",
        ),
        ({"json": 3}, TypeError, "json=3 is of type int: give a JSON schema"),
        ({"json": [1]}, TypeError, r"json=\[1\] is of type list"),
        ({"json": "[1]"}, InvalidRequestError, r"json='\[1\]' is not a JSON object"),
        ({"json": "{"}, InvalidRequestError, "json='{' is not a JSON schema"),
        ({"json": {"a": object()}}, TypeError, "json={.* can't be written as JSON"),
        ({"json": {"a": float("nan")}}, InvalidRequestError, "json=dict can't be written as JSON"),
        ({"json": CIRCLE}, InvalidRequestError, "json=dict can't be written as JSON: Circular"),
        ({"json": {"a": "\ud800"}}, InvalidRequestError, "json.* half a surrogate pair"),
        ({"regex": 5}, TypeError, "regex=5 is of type int: give a string"),
        ({"regex": "\ud800"}, InvalidRequestError, "regex.* half a surrogate pair"),
        ({"regex": "a" * (2**20 + 1)}, InvalidRequestError, "regex has 1048577 characters"),
        ({"choice": "abc"}, TypeError, "choice='abc' is of type str: give a sequence"),
        ({"choice": []}, InvalidRequestError, "leaves nothing to choose"),
        ({"choice": ["a", ""]}, InvalidRequestError, r"choice\[1\]='' is empty"),
        ({"choice": ["a", 3]}, TypeError, r"choice\[1\]=3"),
        ({"choice": ["a"] * (2**16 + 1)}, InvalidRequestError, "more than 65536 entries"),
        ({"grammar": b"a"}, TypeError, "grammar=b'a'"),
        ({"json_object": 1}, TypeError, "json_object=1 is of type int: give True or False"),
        ({"json_object": True, "disable_any_whitespace": 1}, TypeError, "disable_any_whitespace=1"),
        (
            {"regex": "a", "disable_any_whitespace": True},
            InvalidRequestError,
            "disable_any_whitespace=True has no effect on regex",
        ),
        (
            {"choice": ["a"], "whitespace_pattern": " ?"},
            InvalidRequestError,
            "whitespace_pattern=' \\?' has no effect on choice",
        ),
        (
            {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
            InvalidRequestError,
            "whitespace_pattern=' ' has no place under disable_any_whitespace=True",
        ),
        ({"structural_tag": "x"}, TypeError, "structural_tag"),
    ],
)
def test_a_bad_form_is_refused_by_field_and_value(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        StructuredOutputsParams(**options)


def test_params_take_a_form_and_nothing_else() -> None:
    form = StructuredOutputsParams(regex="a")
    assert SamplingParams(structured_outputs=form).structured_outputs is form
    with pytest.raises(TypeError, match=r"structured_outputs=\{'regex': 'a'\} is of type dict"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="ignore_eos=True would go on past the end"):
        SamplingParams(structured_outputs=form, ignore_eos=True)


# Compiled

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}

NESTED = {
    "type": "object",
    "properties": {
        "properties": {"type": "object", "properties": {"properties": {"type": "integer"}}}
    },
    "required": ["properties"],
}


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        (
            {"json": PERSON},
            ['{"name": "\N{SNOWMAN}", "age": 3}', '{ "name":"", "age":0, "more": [1] }'],
            ['{"name": "a"}', '{"name": "a", "age": -1}', '{"age": 1, "name": "a"}', "3"],
        ),
        (
            {"json": PERSON, "disable_any_whitespace": True},
            ['{"name":"a","age":3}'],
            ['{"name": "a","age":3}'],
        ),
        (
            {"json": PERSON, "disable_additional_properties": True},
            ['{"name": "a", "age": 3}'],
            ['{"name": "a", "age": 3, "more": 1}'],
        ),
        (
            {"json": NESTED, "disable_additional_properties": True},
            ['{"properties": {"properties": 1}}', '{"properties": {}}'],
            ['{"properties": {"more": 1}}', '{"properties": {}, "additionalProperties": 1}'],
        ),
        (
            {"json": PERSON, "whitespace_pattern": "_*"},
            ['{_"name":__"a","age":3}'],
            ['{ "name":"a","age":3}'],
        ),
        ({"json_object": True}, ["{}", '{"a": {"b": [null]}}'], ["[]", "1", "{"]),
        ({"regex": r"\d{2,3}-[a-c]+"}, ["12-a", "123-abc"], ["1-a", "12-", "12-d", " 12-a"]),
        ({"regex": r"[^\d]\d/\w\s\\"}, ["a1/b \\"], ["a\uff11/b \\", "a1/é \\"]),
        ({"regex": "^(yes|no)$"}, ["yes", "no"], ["yesno", "y"]),
        ({"choice": ["a", "ab", 'q"\\/\n\x01', "é\N{GRINNING FACE}"]}, None, ["b", "abc", ""]),
        (
            {"grammar": 'start: sum\nsum: NUMBER | sum "+" NUMBER\nNUMBER: /[0-9]+/'},
            ["1", "12+3+45"],
            ["+1", "1+", "a"],
        ),
        (
            {"grammar": 'root ::= item ("," item)*\nitem ::= [a-c]+'},
            ["a", "abc,b"],
            ["", "a,", "d"],
        ),
    ],
    ids=str,
)
def test_a_form_accepts_its_texts_and_no_others(
    compiler, tokenizer, options: dict[str, Any], good: list[str] | None, bad: list[str]
) -> None:
    grammar = compiler.compile(StructuredOutputsParams(**options))
    for text in options["choice"] if good is None else good:
        assert accepts(tokenizer, grammar, text), text
    for text in bad:
        assert not accepts(tokenizer, grammar, text), text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"json": {"type": "strin"}}, 'json=\'{"type": "strin"}\' can\'t be used: Invalid type'),
        ({"json": {"not": {"type": "string"}}}, r'Unimplemented keys: \["not"\]'),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json": {"$ref": "http://localhost/x"}}, "localhost.* not present"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json_object": True, "whitespace_pattern": "("}, "unclosed group"),
        ({"regex": "a\\"}, "lone backslash"),
        ({"regex": "(a"}, r"regex='\(a' can't be used: .*unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"grammar": "start: other"}, "grammar='start: other' can't be used: .*unknown name"),
        ({"grammar": 'start: "a'}, "lexer error"),
        ({"grammar": ""}, "grammar='' can't be used"),
        ({"grammar": "root ::= ("}, "grammar='root ::= ..? can't be used: Expected '\\)'"),
        ({"grammar": "root ::= other"}, "grammar"),
    ],
    ids=str,
)
def test_what_can_not_be_enforced_is_refused_by_name(
    compiler, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        compiler.compile(StructuredOutputsParams(**options))
    message = str(refusal.value)
    assert message.startswith("structured_outputs: ")
    assert re.search(text, message, re.DOTALL), message
    assert len(message) < 1500


def test_a_form_is_compiled_once_until_many_others_came(compiler) -> None:
    forms = [StructuredOutputsParams(regex=f"a{i}") for i in range(MAX_KEPT_GRAMMARS + 1)]
    first = compiler.compile(forms[0])
    assert compiler.compile(StructuredOutputsParams(regex="a0")) is first
    for form in forms[1:-1]:
        compiler.compile(form)
    assert compiler.compile(forms[0]) is first, "the limit is not passed yet, and it is recent now"
    compiler.compile(forms[-1])
    assert len(compiler._kept) == MAX_KEPT_GRAMMARS
    assert compiler.compile(forms[0]) is first
    assert forms[1] not in compiler._kept


def test_several_threads_may_compile_at_once(compiler, tokenizer) -> None:
    found: list[Grammar] = []
    threads = [
        threading.Thread(
            target=lambda i=i: found.append(
                compiler.compile(StructuredOutputsParams(regex=f"b{i % 3}"))
            )
        )
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 12
    assert len(compiler._kept) == 3


def test_without_the_package_one_error_names_it(compiler, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequestError, match=r"the package llguidance.*run: pip install"):
        compiler.compile(StructuredOutputsParams(regex="a"))


def test_an_engine_without_a_tokenizer_refuses(tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs needs a tokenizer"):
        GrammarCompiler(None, VOCAB, (END,)).compile(StructuredOutputsParams(regex="a"))


def test_a_model_without_an_end_token_is_refused(tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB, (VOCAB + 5,))
    with pytest.raises(InvalidRequestError, match="needs a model with an end token"):
        compiler.compile(StructuredOutputsParams(regex="a"))


def test_a_choice_that_reads_like_a_special_token_is_spelt_out(compiler, tokenizer) -> None:
    matcher = compiler.compile(StructuredOutputsParams(choice=["</s>"])).start()
    assert matcher.matcher.try_consume_tokens([END]) == 0
    letters = [tokenizer.backend.token_to_id(letter) for letter in "</s>"]
    assert matcher.matcher.try_consume_tokens(letters) == len(letters)
