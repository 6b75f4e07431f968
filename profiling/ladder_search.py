"""The capture sizes that pad a given distribution of steps at the least cost.

A step is padded to the smallest size of its kind that holds it, and runs eagerly above the top and
where that would pad it to more than MAX_PADDING times its tokens, as the engine's ladders choose.
One list serves both kinds, as STEPGRAPH_CAPTURE_SIZES does: decode steps use what is at most
max_num_seqs, and max_num_seqs itself if the list goes further; so a size costs two captures up to
there and one above.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphs.capture_sizes import MAX_PADDING, CaptureLadders

Seconds = Callable[[int], float]
"""Time of a step by its tokens; it must not fall with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """How many steps had how many tokens before padding."""

    decode: Mapping[int, int]
    """Steps that only decode."""
    mixed: Mapping[int, int]
    """All others."""

    @classmethod
    def read(cls, path: Path) -> StepSizes:
        """From the statistics of a run, in JSON: "step_sizes" with pairs of a size and its steps.

        Raises:
            ValueError: there are none.
        """
        table = json.loads(path.read_text(encoding="utf-8")).get("step_sizes")
        if not table or not (table["decode"] or table["mixed"]):
            raise ValueError(f"{path} has no step_sizes; write it with engine statistics on")
        return cls(decode=dict(table["decode"]), mixed=dict(table["mixed"]))

    @property
    def num_steps(self) -> int:
        """Of both kinds."""
        return sum(self.decode.values()) + sum(self.mixed.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderCost:
    """What steps and captures cost, and the limits of the engine."""

    decode: Seconds
    """Of a decode step under its graph."""
    mixed: Seconds
    """Of any other step under its graph."""
    decode_eagerly: Seconds
    mixed_eagerly: Seconds
    max_num_seqs: int
    max_num_batched_tokens: int
    per_capture: float = 0.0
    """Price of a capture in seconds a step: its own time and memory, spread over all steps."""

    def of(self, ladders: CaptureLadders, sizes: StepSizes) -> float:
        """Expected seconds of a step, captures included."""
        total = 0.0
        for counts, is_decode, eager in (
            (sizes.decode, True, self.decode_eagerly),
            (sizes.mixed, False, self.mixed_eagerly),
        ):
            seconds = {"eager": eager, "full": self.decode, "piecewise": self.mixed}
            for num_tokens, count in counts.items():
                launch = ladders.choose(num_tokens, is_uniform_decode=is_decode)
                total += count * seconds[launch.mode](launch.size)
        return total / sizes.num_steps + ladders.num_graphs * self.per_capture

    def unpadded(self, sizes: StepSizes) -> float:
        """Expected seconds of a step if each had a graph of its own size, at no price."""
        decode = sum(count * self.decode(size) for size, count in sizes.decode.items())
        mixed = sum(count * self.mixed(size) for size, count in sizes.mixed.items())
        return (decode + mixed) / sizes.num_steps

    def ladders(self, sizes: Sequence[int]) -> CaptureLadders:
        """What the engine makes of a list."""
        return CaptureLadders.explicit(
            sizes,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderChoice:
    """The best list for a number of captures."""

    num_captures: int
    """As `CaptureLadders.num_graphs` counts them."""
    sizes: tuple[int, ...]
    seconds: float
    """Expected time of a step, captures included."""


class _KindOfStep:
    """Steps of one kind and their costs as arrays over the candidate sizes, from place 1."""

    def __init__(
        self, counts: Mapping[int, int], values: list[int], captured: list[float], eager: Seconds
    ) -> None:
        listed = [counts.get(value, 0) for value in values]
        self.captured = np.array([0.0, *captured])
        self.below = np.cumsum([0, *listed])  # steps of at most that size
        costs = [n * eager(v) if n else 0.0 for v, n in zip(values, listed, strict=True)]
        self.eager_below = np.cumsum([0.0, *costs])

    def padded(self, place: int, smallest: int) -> np.ndarray:
        """[place] seconds of all steps above each smaller place and up to this one.

        Those from place `smallest` on are padded to this one, the others run eagerly.
        """
        first = np.maximum(np.arange(place), smallest - 1)
        seconds: np.ndarray = (self.below[place] - self.below[first]) * self.captured[place]
        return seconds + self.eager_below[first] - self.eager_below[:place]


class _Steps:
    """Both kinds of steps over the candidate sizes; place 0 stands for no size."""

    def __init__(self, sizes: StepSizes, cost: LadderCost) -> None:
        values = sorted(sizes.decode.keys() | sizes.mixed.keys())
        self.values = np.array([0, *values])
        self._limit = cost.max_num_seqs
        decode = [cost.decode(min(v, self._limit)) for v in values]
        mixed = [cost.mixed(v) for v in values]
        self._decode = _KindOfStep(sizes.decode, values, decode, cost.decode_eagerly)
        self._mixed = _KindOfStep(sizes.mixed, values, mixed, cost.mixed_eagerly)
        total = self._decode.eager_below + self._mixed.eager_below
        self.eager_above = total[-1] - total

    def padded(self, place: int) -> np.ndarray:
        """[place] seconds of all steps above each smaller size and up to this one, run at it."""
        size = int(self.values[place])
        decode = self._decode.padded(place, self._smallest(min(size, self._limit)))
        return decode + self._mixed.padded(place, self._smallest(size))

    def _smallest(self, size: int) -> int:
        """Place of the smallest step that may be padded to a size."""
        return int(np.searchsorted(self.values, -(-size // MAX_PADDING)))


def search(sizes: StepSizes, cost: LadderCost, max_captures: int) -> list[LadderChoice]:
    """The best list for each number of captures up to `max_captures`.

    Dynamic programming over the sizes that steps had: since no step time falls with the size,
    another size only adds padding, or makes a step too small for its graph. Time is
    O(max_captures * n**2) for n different sizes.
    """
    if max(sizes.decode, default=0) > cost.max_num_seqs:
        raise ValueError(f"a decode step had more than max_num_seqs={cost.max_num_seqs} sequences")
    steps = _Steps(sizes, cost)
    num_places = len(steps.values)
    # best[m, j]: all steps up to size j, under m captures of which the largest is j.
    best = np.full((max_captures + 1, num_places), math.inf)
    before = np.zeros((max_captures + 1, num_places), dtype=np.int64)
    best[0, 0] = 0.0
    # From the first size at max_num_seqs or above it, a further one is captured once only.
    first_single = int(np.searchsorted(steps.values, cost.max_num_seqs))
    for place in range(1, num_places):
        padded = steps.padded(place)
        num_twice = place if steps.values[place] <= cost.max_num_seqs else min(place, first_single)
        for captures, start, stop in ((2, 0, num_twice), (1, num_twice, place)):
            if start == stop or captures > max_captures:
                continue
            totals = best[: max_captures + 1 - captures, start:stop] + padded[start:stop]
            found = totals.argmin(axis=1)
            values = np.take_along_axis(totals, found[:, None], axis=1)[:, 0]
            is_better = values < best[captures:, place]
            best[captures:, place] = np.where(is_better, values, best[captures:, place])
            before[captures:, place] = np.where(is_better, found + start, before[captures:, place])
    choices = []
    for captures in range(1, max_captures + 1):
        totals = best[captures] + steps.eager_above
        place = int(totals.argmin())
        if math.isinf(totals[place]):
            continue
        seconds = float(totals[place]) / sizes.num_steps + captures * cost.per_capture
        listed = _walk_back(steps, cost, best, before, captures, place)
        choices.append(LadderChoice(num_captures=captures, sizes=listed, seconds=seconds))
    return choices


def _walk_back(
    steps: _Steps,
    cost: LadderCost,
    best: np.ndarray,
    before: np.ndarray,
    captures: int,
    place: int,
) -> tuple[int, ...]:
    listed = []
    while place:
        value, previous = int(steps.values[place]), int(before[captures, place])
        listed.append(value)
        is_twice = value <= cost.max_num_seqs or steps.values[previous] < cost.max_num_seqs
        captures -= 2 if is_twice else 1
        place = previous
    return tuple(reversed(listed))


def choose(choices: Sequence[LadderChoice], max_captures: int) -> LadderChoice:
    """The cheapest list of at most that many captures."""
    allowed = [choice for choice in choices if choice.num_captures <= max_captures]
    if not allowed:
        raise ValueError(f"no list has at most {max_captures} captures; two are the least")
    return min(allowed, key=lambda choice: choice.seconds)
