"""Checks of engine options: each raises a ConfigError that names the option and its value."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence

import torch

from graphs.capture_sizes import CaptureSizes, parse_capture_sizes

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
    if number >= 2**63:
        raise ConfigError(f"{name}={number} is above 2**63 - 1")
    return number


def texts(options: object, names: tuple[str, ...]) -> None:
    """Options of those names are texts that are not empty, or None."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not (isinstance(value, str) and value):
            raise ConfigError(f"{name}={value!r} is not a text of at least one character")


def whole(name: str, value: object, minimum: int, maximum: int, expected: str) -> int:
    """A whole number of that range, which `expected` says in words."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or not minimum <= value <= maximum:  # type: ignore[operator]
        raise ConfigError(f"{name}={value!r} is not {expected}")
    return int(value)  # type: ignore[call-overload,no-any-return]


def share(name: str, value: object) -> None:
    """A number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{name}={value!r} is not above 0 and at most 1")


def one_of(name: str, value: object, allowed: tuple[str | None, ...]) -> None:
    """One of the allowed texts."""
    if not isinstance(value, str | None) or value not in allowed:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(str, allowed))}")


def capture_sizes(value: str | Sequence[int]) -> tuple[int, ...]:
    """Sizes as text or as numbers, as EngineConfig takes them."""
    try:
        sizes = parse_capture_sizes(value) if isinstance(value, str) else tuple(value)
        return CaptureSizes(sizes).sizes
    except (TypeError, ValueError) as error:
        raise ConfigError(f"capture_sizes={value!r}: {error}") from None


def itl_target_ms(value: object, policy: str) -> None:
    """A number of milliseconds, under a policy that can keep it."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ConfigError(f"itl_target_ms={value!r} is not a number of milliseconds above 0")
    if policy == "prefill_first":
        raise ConfigError(
            f"itl_target_ms={value!r} can't be kept under policy='prefill_first', which stops "
            f"decodes while prompts run; use 'fcfs' or 'priority'"
        )


def resolve_device(name: str, reasons: dict[str, str]) -> torch.device:
    """The device of that name, of "auto" the one that is there."""
    if name == "auto":
        has_cuda = torch.cuda.is_available()
        reasons["device"] = "a CUDA device is there" if has_cuda else "no CUDA device is there"
        return torch.device("cuda" if has_cuda else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f'device={name!r} is not "auto", "cpu" or "cuda:N"') from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch finds no CUDA device; use cpu")
    return device
