"""The capture sizes that pad a given distribution of steps at the least cost.

A step is padded to the smallest size of its kind that holds it, and runs eagerly above the top.
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

from graphs.capture_sizes import CaptureLadders

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
        for counts, ladder, captured, eager in (
            (sizes.decode, ladders.decode, self.decode, self.decode_eagerly),
            (sizes.mixed, ladders.mixed, self.mixed, self.mixed_eagerly),
        ):
            for num_tokens, count in counts.items():
                size = ladder.lookup(num_tokens)
                total += count * (eager(num_tokens) if size is None else captured(size))
        return total / sizes.num_steps + ladders.num_sizes * self.per_capture

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
    """Sizes of both ladders together, as `CaptureLadders.num_sizes` counts them."""
    sizes: tuple[int, ...]
    seconds: float
    """Expected time of a step, captures included."""


class _Steps:
    """The steps and costs as arrays over the candidate sizes; place 0 stands for no size."""

    def __init__(self, sizes: StepSizes, cost: LadderCost) -> None:
        values = sorted(sizes.decode.keys() | sizes.mixed.keys())
        self.values = np.array([0, *values])
        limit = cost.max_num_seqs
        of_decode = [cost.decode(min(v, limit)) for v in values]
        of_mixed = [cost.mixed(v) for v in values]
        decode, mixed = (
            [counts.get(v, 0) for v in values] for counts in (sizes.decode, sizes.mixed)
        )
        self.decode_seconds = np.array([0.0, *of_decode])
        self.mixed_seconds = np.array([0.0, *of_mixed])
        self.decode_below = np.cumsum([0, *decode])  # steps of at most that size
        self.mixed_below = np.cumsum([0, *mixed])
        eagerly = [
            num_decode * (cost.decode_eagerly(v) if num_decode else 0.0)
            + num_mixed * (cost.mixed_eagerly(v) if num_mixed else 0.0)
            for v, num_decode, num_mixed in zip(values, decode, mixed, strict=True)
        ]
        total = np.cumsum([0.0, *eagerly])
        self.eager_above = total[-1] - total

    def padded(self, place: int) -> np.ndarray:
        """[place] seconds of all steps above each smaller size and up to this one, run at it."""
        decode = self.decode_below[place] - self.decode_below[:place]
        mixed = self.mixed_below[place] - self.mixed_below[:place]
        seconds: np.ndarray = decode * self.decode_seconds[place]
        seconds += mixed * self.mixed_seconds[place]
        return seconds


def search(sizes: StepSizes, cost: LadderCost, max_captures: int) -> list[LadderChoice]:
    """The best list for each number of captures up to `max_captures`.

    Dynamic programming over the sizes that steps had: since no step time falls with the size, a
    best list needs no others. Time is O(max_captures * n**2) for n different sizes.
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
