"""From sampling parameters to token ids: what is made, and what is refused with the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.errors import InvalidRequestError
from runtime.logits_rules import LogitsRules, make_logits_rules
from runtime.sampling_params import SamplingParams

VOCAB = 100
PIECES = {"cat": [5], " cat": [6], "dog": [7, 8], " dog": [9, 8], "cow": [10], " cow": [11, 12]}


class Pieces:
    """A tokenizer that knows some words; like many, it has tokens that begin with a space."""

    def encode_piece(self, text: str) -> list[int]:
        return PIECES.get(text, [200] if text == "outside" else [])


def make(
    tokenizer: Any = None, ends: tuple[int, ...] = (1, 2), **options: Any
) -> LogitsRules | None:
    params = SamplingParams(**options)
    return make_logits_rules(params, vocab_size=VOCAB, end_token_ids=ends, tokenizer=tokenizer)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3},
        {"stop_token_ids": [5], "max_tokens": 3, "logprobs": 2, "stop": "x"},
        {"min_tokens": 3, "ignore_eos": True},
    ],
    ids=str,
)
def test_params_that_change_no_logit_make_no_rules(options: dict[str, Any]) -> None:
    assert make(**options) is None


def test_bad_words_are_encoded_at_the_start_and_after_a_space() -> None:
    rules = make(Pieces(), bad_words=["cat", "  cat", "dog", "cow"])
    assert rules is not None
    assert rules.bias_ids.tolist() == [5, 6, 10], "' cow' has more tokens: it only begins with one"
    assert np.isneginf(rules.bias_values).all()
    assert rules.phrases == ((7, 8), (9, 8))
    assert rules.needs_output_ids
    assert rules.forbids


def test_a_bad_word_wins_over_a_bias() -> None:
    rules = make(Pieces(), bad_words=["cat"], logit_bias={5: 10.0, 20: 1.0})
    assert rules is not None
    pairs = dict(zip(rules.bias_ids.tolist(), rules.bias_values.tolist(), strict=True))
    assert pairs == {5: -np.inf, 6: -np.inf, 20: 1.0}


def test_end_and_stop_tokens_are_held_back_for_min_tokens() -> None:
    rules = make(min_tokens=4, stop_token_ids=[30, 2], ends=(1, 2, 5000))
    assert rules is not None
    assert rules.early_ids.tolist() == [1, 2, 30], (
        "an id that the model lacks needs no holding back"
    )
    assert rules.min_tokens == 4
    ignoring = make(min_tokens=4, stop_token_ids=[30], ignore_eos=True)
    assert ignoring is not None
    assert ignoring.early_ids.tolist() == [30]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias 100 at place 0 .* 0 to 99"),
        ({"allowed_token_ids": [1, 2**40]}, "allowed_token_ids 1099511627776 at place 1"),
        ({"stop_token_ids": [5, 100]}, "stop_token_ids 100 at place 1"),
        ({"bad_words": ["outside"]}, "a token of bad_words 200 at place 0"),
        ({"bad_words": ["unknown"]}, "'unknown' has no token"),
        ({"bad_words": [" "]}, "' ' has no token"),
        ({"allowed_token_ids": [5, 6], "bad_words": ["cat"]}, "no token could be drawn"),
        ({"allowed_token_ids": [1, 2], "min_tokens": 1}, "no token could be drawn"),
    ],
)
def test_what_can_not_work_is_refused_by_field(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        make(Pieces(), **options)


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequestError, match=r"bad_words=\('cat',\) needs a tokenizer"):
        make(None, bad_words=["cat"])
