"""What one request asks of the sampler, and when it stops."""

from __future__ import annotations

import enum
import math
import numbers
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from .errors import InvalidRequestError

_MAX_INT32 = 2**31 - 1
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


class RequestOutputKind(enum.Enum):
    """What the outputs of one request tell while it is streamed."""

    CUMULATIVE = 0
    """Each output has everything so far."""
    DELTA = 1
    """Each output has what came since the last one. A slow reader gets fewer, longer ones."""
    FINAL_ONLY = 2
    """One output, when all is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Checked when built, immutable after that.

    Filters apply in the order temperature, top_k, top_p, min_p, each to what the one before it
    left, with the meaning that transformers' logits processors give them.

    Numbers may be numpy scalars; they are stored as plain Python values.

    Raises:
        TypeError: a field is of the wrong type.
        InvalidRequestError: a field is out of range; a ValueError.
    """

    temperature: float = 1.0
    """0 to 3.4e38; logits are divided by it. 0 is exactly greedy, whatever the filters say."""

    top_k: int = 0
    """Keep the k likeliest tokens and those equal to the k-th; 0 or -1 (stored as 0) keeps all."""

    top_p: float = 1.0
    """0 < top_p <= 1: keep the fewest likeliest tokens that hold this much probability."""

    min_p: float = 0.0
    """0 to 1: drop tokens less likely than this fraction of the likeliest one's probability."""

    seed: int | None = None
    """-2**63 to 2**64 - 1: equal seeds draw equal tokens, whatever else is in the batch. Negative
    seeds stand for themselves plus 2**64. None: the engine picks one."""

    max_tokens: int = 256
    """At least 1: most tokens to generate."""

    min_tokens: int = 0
    """0 to max_tokens: end and stop tokens are not drawn before this many tokens."""

    ignore_eos: bool = False
    """Go on past the model's end tokens. `stop_token_ids` still stop."""

    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request besides the model's end tokens. Any iterable of integers that are
    not negative; stored as a tuple."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of a stream has. `LLM.generate` and `chat` give final outputs always."""

    def __post_init__(self) -> None:
        normalised = {
            "temperature": _number("temperature", self.temperature, 0.0, _MAX_FLOAT32),
            "top_k": max(_integer("top_k", self.top_k, -1, _MAX_INT32), 0),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0, above_minimum=True),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "max_tokens": _integer("max_tokens", self.max_tokens, 1, None),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, _MAX_INT32),
            "ignore_eos": _flag("ignore_eos", self.ignore_eos),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "skip_special_tokens": _flag("skip_special_tokens", self.skip_special_tokens),
        }
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _wrong_type("output_kind", self.output_kind, "a RequestOutputKind")
        if self.seed is not None:
            normalised["seed"] = _integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name, value in normalised.items():
            object.__setattr__(self, name, value)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                "lower the first or raise the second"
            )


def _number(
    name: str, value: object, minimum: float, maximum: float, *, above_minimum: bool = False
) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _wrong_type(name, value, "a real number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    # NaN fails every comparison, so it is refused here as well.
    if not (minimum < number <= maximum if above_minimum else minimum <= number <= maximum):
        bounds = f"{'more than' if above_minimum else 'from'} {minimum:g} up to {maximum:g}"
        raise InvalidRequestError(f"{name}={value!r} is out of range: give a number {bounds}")
    return number


def _integer(name: str, value: object, minimum: int, maximum: int | None) -> int:
    if isinstance(value, bool):
        raise _wrong_type(name, value, "an integer")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _wrong_type(name, value, "an integer") from None
    if number < minimum or (maximum is not None and number > maximum):
        bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise InvalidRequestError(f"{name}={value!r} is out of range: give an integer {bounds}")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise _wrong_type(name, value, "True or False")
    return bool(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    expected = "a sequence of integers"
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        raise _wrong_type(name, value, expected)
    return tuple(_integer(f"{name}[{i}]", id_, 0, 2**63 - 1) for i, id_ in enumerate(value))


def _wrong_type(name: str, value: object, expected: str) -> TypeError:
    return TypeError(f"{name}={value!r} is of type {type(value).__name__}: give {expected}")
