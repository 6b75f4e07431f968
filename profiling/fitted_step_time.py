"""How long a step takes, fitted to steps that the engine ran."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from step_time import StepShape

_NUM_ROUNDS = 8
"""Fits, each weighted by the predictions of the one before."""
_ORDINARY_ERROR = 0.05
"""Share of the prediction beyond which an error counts less than by its square (Huber, 1964)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedStepTime:
    """A sum of what a step costs at all, and per token, per K/V row and per pair.

    The cost of a token changes at the knots; no cost is negative, so no prediction falls with
    anything. A sample has no cost of its own: every decode is sampled, so it is in the cost of
    the first tokens, and for a chunk it is nothing.
    """

    base: float
    """Seconds of any step."""
    knots: tuple[int, ...]
    """Tokens at which the cost of further ones changes, ascending."""
    per_token: tuple[float, ...]
    """Seconds of each token beyond the knot of that place and up to the next one."""
    per_kv_token: float
    per_pair: float

    def step_seconds(self, shape: StepShape) -> float | np.ndarray:
        """As `StepTime.step_seconds`."""
        seconds = self.base
        ends = (*self.knots[1:], 1 << 62)
        for start, end, cost in zip(self.knots, ends, self.per_token, strict=True):
            seconds += cost * min(max(shape.num_tokens - start, 0), end - start)
        return seconds + self.per_kv_token * shape.num_kv_tokens + self.per_pair * shape.num_pairs

    def seconds(self, num_tokens: int, num_kv_tokens: int, num_pairs: int) -> float:
        """As `StepTime.seconds`: as if every token were sampled."""
        shape = StepShape(
            num_tokens=num_tokens,
            num_sampled=num_tokens,
            num_kv_tokens=num_kv_tokens,
            num_pairs=num_pairs,
        )
        return float(self.step_seconds(shape))

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> FittedStepTime:
        """What `save` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["knots"], fields["per_token"] = tuple(fields["knots"]), tuple(fields["per_token"])
        return cls(**fields)


def fit(shapes: Sequence[StepShape], seconds: np.ndarray) -> FittedStepTime:
    """The least squares of the errors relative to the prediction, no coefficient below 0.

    Relative to what was measured, they would be least for predictions that are too short. Steps
    of few tokens, which are most, together count as much as those of a doubled number; and what
    disturbed single steps counts little.

    Args:
        shapes: of the steps that ran.
        seconds: [n] float64, what each took.
    """
    tokens = np.array([shape.num_tokens for shape in shapes])
    knots = [4**power for power in range(-(-int(tokens.max()).bit_length() // 2))]
    ramps = [
        np.clip(tokens - a, 0, b - a) for a, b in zip(knots, [*knots[1:], 1 << 62], strict=True)
    ]
    others = [[s.num_kv_tokens, s.num_pairs] for s in shapes]
    features = np.column_stack([np.ones(len(shapes)), *ramps, np.array(others, dtype=float)])
    octave = np.ceil(np.log2(tokens)).astype(int)
    balance = 1 / np.sqrt(np.bincount(octave)[octave])
    predicted, weight = seconds, balance
    for _ in range(_NUM_ROUNDS):
        scaled = features * (weight / predicted)[:, None]
        found = _non_negative_least_squares(scaled, weight * seconds / predicted)
        predicted = features @ np.array(found)
        errors = np.abs(seconds / predicted - 1)
        weight = balance * np.sqrt(_ORDINARY_ERROR / np.maximum(errors, _ORDINARY_ERROR))
    return FittedStepTime(
        base=found[0],
        knots=tuple(knots),
        per_token=tuple(found[1:-2]),
        per_kv_token=found[-2],
        per_pair=found[-1],
    )


def _non_negative_least_squares(features: np.ndarray, wanted: np.ndarray) -> list[float]:
    """[m] coefficients of [n, m] features (Lawson and Hanson, 1974)."""
    scale = np.linalg.norm(features, axis=0)
    scaled = features / np.where(scale > 0, scale, 1.0)
    num = scaled.shape[1]
    solution, used = np.zeros(num), np.zeros(num, dtype=bool)
    for _ in range(10 * num):
        gradient = np.where(used | (scale == 0), -np.inf, scaled.T @ (wanted - scaled @ solution))
        if gradient.max() < 1e-9:
            break
        used[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(num)
            trial[used] = np.linalg.lstsq(scaled[:, used], wanted, rcond=None)[0]
            if trial[used].min() > 0:
                break
            falls = used & (trial <= 0)
            step = (solution[falls] / (solution[falls] - trial[falls])).min()
            solution = solution + step * (trial - solution)
            used &= solution > 1e-15
            solution[~used] = 0
        solution = trial
    return [float(value) for value in solution / np.where(scale > 0, scale, 1.0)]
