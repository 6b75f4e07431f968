"""How long a step takes: a prediction for the scheduler. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from .device_rates import DeviceRates
    from .models import DecoderConfig

_REACHED = 0.7
"""Of a device's limits, by large products and by long reads."""
_DECAY = 0.995
"""Weight of an observation relative to the next one, so that about the last 200 count."""
_MIN_OBSERVATIONS = 16
"""Steps seen before a fit is believed: three unknowns, and the first steps are slow."""
_MIN_BUCKET_OBSERVATIONS = 4
"""Steps of one size seen before their own mean is believed."""
_MAX_SURPRISE = 4.0
"""A step that took that many times its prediction counts as that many times only."""


class StepCost(Protocol):
    """Predicts the time of a step."""

    def seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        """Time of a step.

        Args:
            num_tokens: tokens that run, padding included.
            num_kv_tokens: K/V rows that its attention reads: the context of each sequence after
                the step, summed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    """The longer one of computing and of reading memory (Williams et al., 2009)."""

    flops_per_token: float
    """Twice the number of weights that a token is multiplied with."""
    weight_bytes: float
    """Read once a step."""
    kv_bytes_per_token: float
    """Of one token's keys and values in all layers."""
    flop_rate: float
    """Operations a second that the device reaches."""
    bandwidth: float
    """Bytes a second that the device reads."""
    overhead: float = 0.0
    """Seconds of a step that depend on nothing."""

    @property
    def ridge(self) -> int:
        """Tokens from which a step without context is bound by computation."""
        reading = self.weight_bytes / self.bandwidth
        return max(1, round(reading * self.flop_rate / self.flops_per_token))

    def seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        """As `StepCost.seconds`."""
        computing = self.flops_per_token * num_tokens / self.flop_rate
        num_bytes = self.weight_bytes + self.kv_bytes_per_token * num_kv_tokens
        return max(computing, num_bytes / self.bandwidth) + self.overhead


def estimated_cost(
    decoder: DecoderConfig, *, bytes_per_value: int, rates: DeviceRates
) -> RooflineCost:
    """A roofline of a model on a device: a start for `MeasuredCost`.

    Args:
        decoder: the model's shape.
        bytes_per_value: of weights, keys and values.
        rates: the device's limits, of which steps are taken to reach a good part.
    """
    heads, kv_heads = decoder.num_heads, decoder.num_kv_heads
    projections = decoder.hidden_size * decoder.head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * decoder.hidden_size * decoder.intermediate_size
    in_layers = decoder.num_layers * (projections + mlp)
    head = decoder.vocab_size * decoder.hidden_size
    return RooflineCost(
        flops_per_token=2.0 * in_layers,
        weight_bytes=float((in_layers + head) * bytes_per_value),
        kv_bytes_per_token=2.0 * decoder.num_layers * kv_heads * decoder.head_dim * bytes_per_value,
        flop_rate=_REACHED * rates.flop_rate,
        bandwidth=_REACHED * rates.bandwidth,
    )


class MeasuredCost:
    """Step time as a + b * tokens + c * kv_tokens, fitted while the engine runs.

    Each new step counts fully and older ones ever less. A size that ran often enough is
    predicted by its own mean, moved by c times what the K/V differs; other sizes by the fit; all
    by `fallback` until enough steps of differing sizes were seen. No prediction falls with
    tokens or K/V under the fit: a coefficient that comes out negative is held at zero.

    Args:
        fallback: predicts before there is a fit.
    """

    def __init__(self, fallback: StepCost) -> None:
        self._fallback = fallback
        self._num_observations = 0
        self._moments = np.zeros((3, 3))  # of (1, tokens, kv)
        self._products = np.zeros(3)  # of (1, tokens, kv) with the seconds
        self._fit: tuple[float, float, float] | None = None
        self._is_stale = False
        self._buckets: dict[int, _BucketMean] = {}

    @property
    def coefficients(self) -> tuple[float, float, float] | None:
        """Seconds a step, a token and a K/V token; None while the fallback predicts."""
        if self._is_stale:
            self._is_stale = False
            self._fit = self._solve()
        return self._fit

    def observe(self, num_tokens: int, num_kv_tokens: int, seconds: float) -> None:
        """Learn from a step that ran; arguments as of `seconds`, and the time it took.

        A step that took far longer than predicted, as one that compiled something, counts with
        a bounded time.
        """
        if self._num_observations >= _MIN_OBSERVATIONS:
            seconds = min(seconds, _MAX_SURPRISE * self.seconds(num_tokens, num_kv_tokens))
        features = np.array([1.0, num_tokens, num_kv_tokens])
        self._moments = _DECAY * self._moments + np.outer(features, features)
        self._products = _DECAY * self._products + seconds * features
        self._num_observations += 1
        self._is_stale = True
        self._buckets.setdefault(num_tokens, _BucketMean()).add(num_kv_tokens, seconds)

    def seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        """As `StepCost.seconds`."""
        fit = self.coefficients
        if fit is None:
            return self._fallback.seconds(num_tokens, num_kv_tokens)
        a, b, c = fit
        bucket = self._buckets.get(num_tokens)
        if bucket is None or bucket.count < _MIN_BUCKET_OBSERVATIONS:
            return a + b * num_tokens + c * num_kv_tokens
        return max(0.0, bucket.seconds + c * (num_kv_tokens - bucket.num_kv_tokens))

    def _solve(self) -> tuple[float, float, float] | None:
        """The least-squares coefficients of what was seen; None if it doesn't determine them."""
        if self._num_observations < _MIN_OBSERVATIONS:
            return None
        scale = np.sqrt(np.diag(self._moments))
        used = [i for i in range(3) if scale[i] > 0]
        while used:
            moments = self._moments[np.ix_(used, used)] / np.outer(scale[used], scale[used])
            if np.linalg.eigvalsh(moments)[0] < 1e-9:
                # Steps all alike say nothing of tokens; K/V that never varied can be left out.
                if used[-1] != 2:
                    return None
                used.pop()
                continue
            solution = np.linalg.solve(moments, self._products[used] / scale[used]) / scale[used]
            if solution.min() >= 0:
                coefficients = np.zeros(3)
                coefficients[used] = solution
                return (float(coefficients[0]), float(coefficients[1]), float(coefficients[2]))
            del used[int(solution.argmin())]
        return None


class _BucketMean:
    """Decaying means of one size's steps."""

    __slots__ = ("count", "num_kv_tokens", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.num_kv_tokens = 0.0
        self.seconds = 0.0

    def add(self, num_kv_tokens: int, seconds: float) -> None:
        self.count += 1
        weight = max(1 / self.count, 1 - _DECAY)
        self.num_kv_tokens += weight * (num_kv_tokens - self.num_kv_tokens)
        self.seconds += weight * (seconds - self.seconds)
