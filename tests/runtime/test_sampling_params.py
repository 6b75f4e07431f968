"""Sampling parameters: what is accepted, how it is stored, what is refused and how it says so."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from runtime.errors import InvalidRequestError
from runtime.sampling_params import RequestOutputKind, SamplingParams


def test_defaults_sample_from_the_whole_distribution_for_256_tokens() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": (),
        "allowed_token_ids": None,
        "bad_words": (),
        "logits_processors": (),
        "structured_outputs": None,
        "seed": None,
        "max_tokens": 256,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "truncate_prompt_tokens": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "output_kind": RequestOutputKind.CUMULATIVE,
    }


@pytest.mark.parametrize(
    ("field", "given", "stored"),
    [
        ("temperature", 0, 0.0),
        ("temperature", 1e-7, 1e-7),
        ("temperature", 1e3, 1e3),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", Fraction(1, 4), 0.25),
        ("top_k", -1, 0),
        ("top_k", 0, 0),
        ("top_k", np.int64(5), 5),
        ("top_p", 1, 1.0),
        ("top_p", 1e-300, 1e-300),
        ("min_p", 1.0, 1.0),
        ("seed", None, None),
        ("seed", -(2**63), -(2**63)),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("max_tokens", 1, 1),
        ("max_tokens", 10**9, 10**9),
        ("max_tokens", sys.maxsize, sys.maxsize),
        ("min_tokens", np.int32(256), 256),
        ("ignore_eos", np.True_, True),
        ("stop_token_ids", [3, 1], (3, 1)),
        ("stop_token_ids", np.array([7, 8]), (7, 8)),
        ("stop_token_ids", range(2), (0, 1)),
        ("stop_token_ids", {4}, (4,)),
        ("stop_token_ids", None, ()),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", np.float64(2), 2.0),
        ("repetition_penalty", 100, 100.0),
        ("logit_bias", None, ()),
        ("logit_bias", {7: -100, np.int64(3): np.float32(0.5)}, ((3, 0.5), (7, -100.0))),
        ("logit_bias", ((3, 0.5),), ((3, 0.5),)),
        ("allowed_token_ids", [5, 5], (5, 5)),
        ("bad_words", "word", ("word",)),
        ("bad_words", None, ()),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", None, ()),
        ("logits_processors", [max], (max,)),
        ("logits_processors", None, ()),
        ("logprobs", -1, -1),
        ("logprobs", np.int32(5), 5),
        ("prompt_logprobs", 0, 0),
        ("truncate_prompt_tokens", -1, -1),
        ("detokenize", np.False_, False),
        ("n", 1, 1),
    ],
)
def test_valid_values_are_stored_as_plain_python_values(
    field: str, given: object, stored: object
) -> None:
    value = getattr(SamplingParams(**{field: given}), field)  # type: ignore[arg-type]
    assert value == stored
    assert type(value) is type(stored)


NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
OPTIONAL_INTEGERS = ("seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
INTEGERS = ("n", "top_k", "max_tokens", "min_tokens", *OPTIONAL_INTEGERS)
FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
IDS = ("stop_token_ids", "allowed_token_ids")


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in NUMBERS for value in (True, "0.5", None, 1j, [1.0])]
    + [(field, value) for field in INTEGERS for value in (True, "5", 1.5, 4.0, math.nan, [1])]
    + [(field, None) for field in INTEGERS if field not in OPTIONAL_INTEGERS]
    + [(field, value) for field in FLAGS for value in (0, 1, "yes", None)]
    + [(field, value) for field in IDS for value in (5, "5", b"5", {5: 1})]
    + [(field, value) for field in ("stop", "bad_words") for value in (5, b"END", {"a": 1})]
    + [("logits_processors", value) for value in (5, "f", max)]
    + [("logit_bias", value) for value in (5, "5", [3], [(1, 2, 3)])],
)
def test_a_wrong_type_is_refused_by_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(TypeError) as refusal:
        SamplingParams(**{field: value})
    assert f"{field}={value!r}" in str(refusal.value)
    assert type(value).__name__ in str(refusal.value)


@pytest.mark.parametrize("field", IDS)
@pytest.mark.parametrize("ids", [[True], [1.0], ["a"], [None]])
def test_an_id_of_the_wrong_type_is_refused_by_its_place(field: str, ids: list[Any]) -> None:
    with pytest.raises(TypeError, match=rf"{field}\[1\]"):
        SamplingParams(**{field: [0, *ids]})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop": ["a", 5]}, r"stop\[1\]=5 is of type int"),
        ({"bad_words": ["a", b"b"]}, r"bad_words\[1\]=b'b'"),
        ({"logits_processors": [max, 3]}, r"logits_processors\[1\]=3"),
        ({"logit_bias": {"5": 1.0}}, "a token id of logit_bias='5'"),
        ({"logit_bias": {5: "1"}}, r"logit_bias\[5\]='1'"),
    ],
)
def test_an_entry_of_the_wrong_type_is_refused_by_its_place(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError, match=text):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop": [""]}, r"stop\[0\]='' is empty"),
        ({"stop": ""}, r"stop\[0\]='' is empty"),
        ({"bad_words": ["a", ""]}, r"bad_words\[1\]='' is empty"),
        ({"stop": ["\ud800"]}, "half a surrogate pair"),
        ({"stop": ["a"] * 1025}, "stop has more than 1024 entries"),
        ({"bad_words": ["a"] * 1025}, "bad_words has more than 1024 entries"),
        ({"stop_token_ids": itertools.count()}, "stop_token_ids has more than 1024 entries"),
        ({"allowed_token_ids": itertools.repeat(1)}, "more than 1048576 entries"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has more than 1024"),
        ({"logit_bias": {5: 100.5}}, r"logit_bias\[5\]=100.5 .* from -100 up to 100"),
        ({"logit_bias": {5: math.nan}}, r"logit_bias\[5\]=nan"),
        ({"logit_bias": {-1: 1.0}}, "a token id of logit_bias=-1"),
        ({"allowed_token_ids": []}, "allows no token"),
        ({"truncate_prompt_tokens": 0}, "leaves nothing of the prompt"),
        ({"stop": "END", "detokenize": False}, r"detokenize=False .* give stop_token_ids"),
        ({"n": 2, "temperature": 0}, "n=2 with temperature=0 would give 2 equal outputs"),
        ({"n": 16385}, "n=16385 is out of range"),
        ({"n": 0}, "n=0 is out of range"),
        ({"top_k": 10**5000}, "top_k=a number of thousands of digits is out of range"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_the_remedy(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("field", "value", "bounds"),
    [
        ("temperature", -1, "from 0 up to 3.40282e+38"),
        ("temperature", -1e-9, "from 0 up to"),
        ("temperature", math.nan, "from 0 up to"),
        ("temperature", math.inf, "from 0 up to"),
        ("temperature", 1e300, "from 0 up to"),
        ("temperature", 10**400, "from 0 up to"),
        ("top_p", 0.0, "more than 0 up to 1"),
        ("top_p", 1.0000001, "more than 0 up to 1"),
        ("top_p", math.nan, "more than 0 up to 1"),
        ("top_p", np.float32(-0.5), "more than 0 up to 1"),
        ("min_p", -0.1, "from 0 up to 1"),
        ("min_p", 1.5, "from 0 up to 1"),
        ("min_p", math.inf, "from 0 up to 1"),
        ("top_k", -2, "from -1 to 2147483647"),
        ("top_k", 2**31, "from -1 to 2147483647"),
        ("seed", 2**64, f"to {2**64 - 1}"),
        ("seed", -(2**63) - 1, f"from {-(2**63)}"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -5, "at least 1"),
        ("min_tokens", -1, "from 0"),
        ("min_tokens", 2**31, "to 2147483647"),
        ("presence_penalty", 2.1, "from -2 up to 2"),
        ("frequency_penalty", -2.1, "from -2 up to 2"),
        ("frequency_penalty", math.nan, "from -2 up to 2"),
        ("repetition_penalty", 0, "from 0.01 up to 100"),
        ("repetition_penalty", math.inf, "from 0.01 up to 100"),
        ("logprobs", -2, "from -1 to 2147483647"),
        ("prompt_logprobs", -2, "from -1 to 2147483647"),
        ("truncate_prompt_tokens", -2, "from -1 to 2147483647"),
    ],
)
def test_a_value_out_of_range_is_refused_by_field_value_and_range(
    field: str, value: Any, bounds: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**{field: value})
    assert f"{field}={value!r}" in str(refusal.value)
    assert bounds in str(refusal.value)


@pytest.mark.parametrize("bad", [-1, 2**63])
def test_a_stop_token_out_of_range_is_refused_by_its_place(bad: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"stop_token_ids\[1\]={bad} .*from 0 to"):
        SamplingParams(stop_token_ids=(0, bad))


def test_min_tokens_above_max_tokens_is_refused_with_both() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_tokens=11 .*max_tokens=10"):
        SamplingParams(min_tokens=11, max_tokens=10)


def test_unknown_options_and_positional_values_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(1.0)  # type: ignore[call-arg]


def test_params_are_immutable_hashable_and_replaceable() -> None:
    params = SamplingParams(top_k=5, stop_token_ids=[1, 2], logit_bias={3: 1.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 6  # type: ignore[misc]
    same = SamplingParams(top_k=5, stop_token_ids=(1, 2), logit_bias=((3, 1.0),))
    assert params == same
    assert hash(params) == hash(same)
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, top_k=7).stop_token_ids == (1, 2)
    with pytest.raises(InvalidRequestError):
        dataclasses.replace(params, top_p=2.0)
