"""Sampling parameters: what is accepted, how it is stored, what is refused and how it says so."""

from __future__ import annotations

import dataclasses
import math
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
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "max_tokens": 256,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop_token_ids": (),
        "skip_special_tokens": True,
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
    ],
)
def test_valid_values_are_stored_as_plain_python_values(
    field: str, given: object, stored: object
) -> None:
    value = getattr(SamplingParams(**{field: given}), field)  # type: ignore[arg-type]
    assert value == stored
    assert type(value) is type(stored)


NUMBERS = ("temperature", "top_p", "min_p")
INTEGERS = ("top_k", "seed", "max_tokens", "min_tokens")
FLAGS = ("ignore_eos", "skip_special_tokens")


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in NUMBERS for value in (True, "0.5", None, 1j, [1.0])]
    + [(field, value) for field in INTEGERS for value in (True, "5", 1.5, 4.0, math.nan, [1])]
    + [(field, None) for field in INTEGERS if field != "seed"]
    + [(field, value) for field in FLAGS for value in (0, 1, "yes", None)]
    + [("stop_token_ids", value) for value in (5, "5", b"5", {5: 1}, None)],
)
def test_a_wrong_type_is_refused_by_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(TypeError) as refusal:
        SamplingParams(**{field: value})
    assert f"{field}={value!r}" in str(refusal.value)
    assert type(value).__name__ in str(refusal.value)


@pytest.mark.parametrize("ids", [[True], [1.0], ["a"], [None]])
def test_a_stop_token_of_the_wrong_type_is_refused_by_its_place(ids: list[Any]) -> None:
    with pytest.raises(TypeError, match=r"stop_token_ids\[1\]"):
        SamplingParams(stop_token_ids=[0, *ids])  # type: ignore[arg-type]


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
    params = SamplingParams(top_k=5, stop_token_ids=[1, 2])  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 6  # type: ignore[misc]
    assert params == SamplingParams(top_k=5, stop_token_ids=(1, 2))
    assert hash(params) == hash(SamplingParams(top_k=5, stop_token_ids=(1, 2)))
    assert dataclasses.replace(params, top_k=7).stop_token_ids == (1, 2)
    with pytest.raises(InvalidRequestError):
        dataclasses.replace(params, top_p=2.0)
