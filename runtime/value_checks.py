"""Checks of the values that callers hand in; each error names the field, the value and the limit.

A wrong type is a TypeError, a wrong value an InvalidRequestError.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import cast

import numpy as np

from .errors import InvalidRequestError


def number(
    name: str, value: object, minimum: float, maximum: float, *, above_minimum: bool = False
) -> float:
    """A real number from minimum, or above it, to maximum. NaN is outside every range."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_type(name, value, "a real number")
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    is_high_enough = minimum < converted if above_minimum else minimum <= converted
    if not (is_high_enough and converted <= maximum):
        bounds = f"{'more than' if above_minimum else 'from'} {minimum:g} up to {maximum:g}"
        raise _out_of_range(name, value, f"a number {bounds}")
    return converted


def integer(name: str, value: object, minimum: int, maximum: int | None) -> int:
    """A whole number from minimum to maximum; None: no maximum."""
    if isinstance(value, bool):
        raise wrong_type(name, value, "an integer")
    try:
        converted = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong_type(name, value, "an integer") from None
    if converted < minimum or (maximum is not None and converted > maximum):
        bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise _out_of_range(name, value, f"an integer {bounds}")
    return converted


def flag(name: str, value: object) -> bool:
    """True or False, numpy's included."""
    if not isinstance(value, (bool, np.bool_)):
        raise wrong_type(name, value, "True or False")
    return bool(value)


def token_ids(name: str, value: object, limit: int) -> tuple[int, ...]:
    """At most `limit` ids that are not negative; None stands for none."""
    given = _items(name, value, limit, "a sequence of integers")
    return tuple(integer(f"{name}[{i}]", id_, 0, 2**63 - 1) for i, id_ in enumerate(given))


def texts(name: str, value: object, limit: int) -> tuple[str, ...]:
    """At most `limit` texts, none of them empty; a lone string is one, None stands for none."""
    listed = (value,) if isinstance(value, str) else value
    given = _items(name, listed, limit, "a string or a sequence of strings")
    for i, text in enumerate(given):
        if not isinstance(text, str):
            raise wrong_type(f"{name}[{i}]", text, "a string")
        if not text:
            raise InvalidRequestError(f"{name}[{i}]='' is empty: give at least one character")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidRequestError(
                f"{name}[{i}]={text!r} has half a surrogate pair, so it is not text: remove it"
            )
    return tuple(str(text) for text in given)


def functions(name: str, value: object, limit: int) -> tuple[Callable[..., object], ...]:
    """At most `limit` callables; None stands for none."""
    given = _items(name, value, limit, "a sequence of functions")
    for i, function in enumerate(given):
        if not callable(function):
            raise wrong_type(f"{name}[{i}]", function, "a function")
    return cast("tuple[Callable[..., object], ...]", given)


def biases(name: str, value: object, limit: int, most: float) -> tuple[tuple[int, float], ...]:
    """At most `limit` numbers from -most to most by token id, in ascending ids."""
    pairs = value.items() if isinstance(value, Mapping) else value
    given = _items(name, pairs, limit, "a mapping of token ids to numbers")
    found: dict[int, float] = {}
    for pair in given:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise wrong_type(name, value, "a mapping of token ids to numbers")
        token_id = integer(f"a token id of {name}", pair[0], 0, 2**63 - 1)
        found[token_id] = number(f"{name}[{token_id}]", pair[1], -most, most)
    return tuple(sorted(found.items()))


def _items(name: str, value: object, limit: int, expected: str) -> tuple[object, ...]:
    if value is None:
        return ()
    is_text = isinstance(value, (str, bytes, bytearray))
    if is_text or isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise wrong_type(name, value, expected)
    try:
        given = tuple(islice(value, limit + 1))  # some iterables never end
    except TypeError:  # as of an array without dimensions
        raise wrong_type(name, value, expected) from None
    if len(given) > limit:
        raise InvalidRequestError(f"{name} has more than {limit} entries: give at most {limit}")
    return given


def wrong_type(name: str, value: object, expected: str) -> TypeError:
    """The error for a value that is not `expected`."""
    return TypeError(f"{name}={_shown(value)} is of type {type(value).__name__}: give {expected}")


def _out_of_range(name: str, value: object, expected: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}={_shown(value)} is out of range: give {expected}")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out integers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 500 else f"{text[:500]}..."
