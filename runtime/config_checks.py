"""Checks of engine options: each raises a ConfigError that names the option and its value."""

from __future__ import annotations

import numbers
import operator

from .errors import ConfigError


def positive(name: str, value: object) -> int:
    """A whole number from 1."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name}={value!r} is not a whole number") from None
    if number < 1:
        raise ConfigError(f"{name}={number} is below 1")
    return number


def max_logprobs(value: object) -> int:
    """A whole number from 0, or -1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < -1:
        raise ConfigError(f"max_logprobs={value!r} is not a whole number of at least 0, or -1")
    return int(value)


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """One of the allowed texts."""
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(allowed)}")
