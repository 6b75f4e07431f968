"""The tokenizer of a converted GGUF file must give the ids that the model was trained on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizersTokenizer
from transformers import AutoTokenizer

from tests.runtime.tiny_gguf import (
    CONTROL,
    END,
    HIDDEN,
    NORMAL,
    START,
    TOKENS,
    TOOL,
    TURN,
    TYPES,
    USER_DEFINED,
    VOCAB,
    convert_tiny_gguf,
    random_weights,
    tiny_metadata,
)


def test_digits_of_smollm_are_split_one_by_one(tmp_path: Path) -> None:
    target = convert_tiny_gguf(tmp_path, tiny_metadata(), random_weights())
    tokenizer = AutoTokenizer.from_pretrained(target)
    one_by_one = [TOKENS.index(digit) for digit in "12345"]  # though "12" and "123" are tokens
    assert tokenizer.encode("12345") == one_by_one
    assert tokenizer.encode("hi") == [TOKENS.index("hi")]


@pytest.mark.parametrize(
    ("architecture", "pre", "pieces"),
    [
        ("llama", "smollm", ["I", "'ll", "Ġhi", ",", "Ġ", "1", "2", "3", "4", "ĠĠ", "ĠX", "Ċ"]),
        ("llama", "gpt-2", ["I", "'ll", "Ġhi", ",", "Ġ1234", "ĠĠ", "ĠX", "Ċ"]),
        ("llama", "default", ["I", "'", "ll", "Ġhi", ",", "Ġ", "123", "4", "ĠĠ", "ĠX", "Ċ"]),
        ("llama", "llama-bpe", ["I", "'ll", "Ġhi", ",", "Ġ", "123", "4", "ĠĠ", "ĠX", "Ċ"]),
        ("qwen2", "qwen2", ["I", "'ll", "Ġhi", ",", "Ġ", "1", "2", "3", "4", "ĠĠ", "ĠX", "Ċ"]),
        ("qwen3", "qwen2", ["I", "'ll", "Ġhi", ",", "Ġ", "1", "2", "3", "4", "ĠĠ", "ĠX", "Ċ"]),
    ],
)
def test_text_is_split_as_the_pre_tokenizer_says(
    tmp_path: Path, architecture: str, pre: str, pieces: list[str]
) -> None:
    weights = random_weights(architecture)
    target = convert_tiny_gguf(
        tmp_path, tiny_metadata(architecture, pre), weights, architecture=architecture
    )
    split = AutoTokenizer.from_pretrained(target).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in split.pre_tokenize_str("I'll hi, 1234   X\n")] == pieces


@pytest.mark.parametrize(
    ("architecture", "pre"),
    [
        ("llama", "smollm"),
        ("llama", "gpt-2"),
        ("llama", "default"),
        ("llama", "llama-bpe"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen2"),
    ],
)
def test_byte_level_text_round_trips_exactly(tmp_path: Path, architecture: str, pre: str) -> None:
    weights = random_weights(architecture)
    target = convert_tiny_gguf(
        tmp_path, tiny_metadata(architecture, pre), weights, architecture=architecture
    )
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert len(tokenizer) == VOCAB - 1, "the unused token at the end is left out"
    for text in (
        "   hi",
        "\thi\n\n",
        "a ,b .",
        "👩‍🚀🎉",
        "漢字かな",
        "café\u00a0\r\n",
        f"x{TOOL}y{END}",
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    target = convert_tiny_gguf(tmp_path, tiny_metadata(), random_weights())
    added = AutoTokenizer.from_pretrained(target).backend_tokenizer.get_added_tokens_decoder()
    expected = {START: True, END: True, TURN: True, TOOL: False}
    assert {token.content: token.special for token in added.values()} == expected
    assert {i: token.content for i, token in added.items()} == {
        TOKENS.index(content): content for content in expected
    }


def test_qwen2_composes_characters_and_the_others_keep_them(tmp_path: Path) -> None:
    for architecture, pre, kept in (("llama", "smollm", True), ("qwen2", "qwen2", False)):
        weights = random_weights(architecture)
        target = convert_tiny_gguf(
            tmp_path, tiny_metadata(architecture, pre), weights, architecture=architecture
        )
        tokenizer = AutoTokenizer.from_pretrained(target)
        decoded = tokenizer.decode(tokenizer.encode("e\u0301"))
        assert decoded == ("e\u0301" if kept else "\u00e9")


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("smollm", False)])
def test_only_llama3_takes_tokens_that_no_merges_make(
    tmp_path: Path, pre: str, whole: bool
) -> None:
    metadata = tiny_metadata(pre=pre) | {
        "tokenizer.ggml.tokens": [*TOKENS[:-1], "zzz"],
        "tokenizer.ggml.token_type": [*TYPES[:-1], NORMAL],
    }
    tokenizer = AutoTokenizer.from_pretrained(
        convert_tiny_gguf(tmp_path, metadata, random_weights())
    )
    ids = tokenizer.encode("zzz", add_special_tokens=False)
    assert ids == ([VOCAB - 1] if whole else [TOKENS.index("z")] * 3)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [0, 1]),
        ({"tokenizer.ggml.add_bos_token": False}, [1]),
        ({"tokenizer.ggml.add_eos_token": True}, [0, 1, 1]),
    ],
)
def test_llama3_texts_begin_with_bos_unless_told_otherwise(
    tmp_path: Path, change: dict[str, Any], expected: list[int]
) -> None:
    target = convert_tiny_gguf(tmp_path, tiny_metadata(pre="llama-bpe") | change, random_weights())
    assert AutoTokenizer.from_pretrained(target).encode(END) == expected


def test_smollm_texts_begin_without_bos(tmp_path: Path) -> None:
    target = convert_tiny_gguf(tmp_path, tiny_metadata(), random_weights())
    assert AutoTokenizer.from_pretrained(target).encode("hi") == [TOKENS.index("hi")]


def test_chat_template_and_names_are_kept(tmp_path: Path) -> None:
    template = "{{ bos_token }}\n{% for m in messages %}{{ m.content }}é{% endfor %}"
    metadata = tiny_metadata() | {"tokenizer.chat_template": template}
    tokenizer = AutoTokenizer.from_pretrained(
        convert_tiny_gguf(tmp_path, metadata, random_weights())
    )
    assert tokenizer.chat_template == template
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (START, END, END)
    assert tokenizer.clean_up_tokenization_spaces is False
    assert tokenizer.model_max_length == 128


def test_a_model_without_a_chat_template_gets_none(tmp_path: Path) -> None:
    metadata = tiny_metadata()
    del metadata["tokenizer.chat_template"]
    target = convert_tiny_gguf(tmp_path, metadata, random_weights())
    assert AutoTokenizer.from_pretrained(target).chat_template is None


# SentencePiece vocabularies

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "a", "b", "c", "d", "ab", "▁a", "cd", "▁ab", "abcd", "▁▁", "▁abcd", "bc", "dab"]
SP_TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "<tool>"]
SP_TYPES = [2, CONTROL, CONTROL, *[6] * 256, *[NORMAL] * len(PIECES), USER_DEFINED]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> TokenizersTokenizer:
    metadata = tiny_metadata() | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SP_TOKENS,
        "tokenizer.ggml.token_type": SP_TYPES,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))] + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    weights = random_weights()
    rows = np.zeros((len(SP_TOKENS), HIDDEN), np.float32)
    weights["model.embed_tokens.weight"] = rows
    target = convert_tiny_gguf(tmp_path_factory.mktemp("sentencepiece"), metadata, weights)
    backend: TokenizersTokenizer = AutoTokenizer.from_pretrained(target).backend_tokenizer
    return backend


def merge_as_sentencepiece(text: str) -> list[int]:
    """SentencePiece's algorithm: join the neighbours that make the best piece, leftmost first."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [left + right for left, right in itertools.pairwise(symbols)]
        ranks = [PIECES.index(pair) if pair in PIECES else len(PIECES) for pair in pairs]
        if not ranks or min(ranks) == len(PIECES):
            break
        best = ranks.index(min(ranks))
        symbols[best : best + 2] = [pairs[best]]
    pieces: list[str] = []
    for symbol in symbols:
        pieces += [symbol] if symbol in PIECES else [BYTES[byte] for byte in symbol.encode()]
    return [SP_TOKENS.index(piece) for piece in pieces]


@settings(deadline=None, max_examples=300)
@given(text=st.text(alphabet="abcd éx漢😀\n", min_size=1))
def test_sentencepiece_text_is_merged_by_score(
    sentencepiece: TokenizersTokenizer, text: str
) -> None:
    ids = sentencepiece.encode(text).ids
    assert ids == [1, *merge_as_sentencepiece(text)]
    assert sentencepiece.decode(ids) == text


def test_sentencepiece_special_tokens(sentencepiece: TokenizersTokenizer) -> None:
    added = sentencepiece.get_added_tokens_decoder()
    special = {token.content: token.special for token in added.values()}
    assert special == {"<unk>": True, "<s>": True, "</s>": True, "<tool>": False}
    assert sentencepiece.encode("</s>", add_special_tokens=False).ids == [2]


def test_sentencepiece_without_a_space_prefix(tmp_path: Path) -> None:
    metadata = tiny_metadata() | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SP_TOKENS,
        "tokenizer.ggml.token_type": SP_TYPES,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(SP_TOKENS))],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    weights = random_weights()
    weights["model.embed_tokens.weight"] = np.zeros((len(SP_TOKENS), HIDDEN), np.float32)
    tokenizer = AutoTokenizer.from_pretrained(convert_tiny_gguf(tmp_path, metadata, weights))
    assert tokenizer.encode("a b") == [SP_TOKENS.index(p) for p in ("a", "▁", "b")]
    assert tokenizer.decode(tokenizer.encode(" a b")) == " a b"
