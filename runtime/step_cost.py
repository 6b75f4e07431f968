"""How long a step takes: a prediction for the scheduler. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from .device_rates import DeviceRates
    from .models import DecoderConfig

_REACHED = 0.7
"""Of a device's limits, by large products and by long reads."""
_DECAY = 0.995
"""Weight of an observation relative to the next one, so that about the last 200 count."""
_MIN_OBSERVATIONS = 16
"""Steps seen before a fit is believed: four unknowns, and the first steps are slow."""
_MIN_BUCKET_OBSERVATIONS = 4
"""Steps of one size seen before their own mean is believed."""
_MAX_SURPRISE = 4.0
"""A step that took that many times its prediction counts as that many times only."""


class StepCost(Protocol):
    """Predicts the time of a step."""

    def seconds(self, num_tokens: int, num_kv_tokens: int, num_pairs: int) -> float:
        """Time of a step.

        Args:
            num_tokens: tokens that run, padding included.
            num_kv_tokens: K/V rows that its attention reads: the context of each sequence after
                the step, summed.
            num_pairs: pairs of a query and a key that attention looks at; see `chunk_pairs`.
        """
        ...


Counts = TypeVar("Counts", int, np.ndarray)
"""Of one chunk, or of [n]."""


def chunk_pairs(num_computed: Counts, num_new: Counts) -> Counts:
    """Pairs of a query and a key of `num_new` tokens that follow `num_computed` others."""
    pairs: Counts = num_new * num_computed + num_new * (num_new + 1) // 2
    return pairs


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
    flops_per_pair: float = 0.0
    """Operations for a query and a key, in all layers."""
    overhead: float = 0.0
    """Seconds of a step that depend on nothing."""

    @property
    def ridge(self) -> int:
        """Tokens from which a step without context is bound by computation."""
        reading = self.weight_bytes / self.bandwidth
        return max(1, round(reading * self.flop_rate / self.flops_per_token))

    def seconds(self, num_tokens: int, num_kv_tokens: int, num_pairs: int) -> float:
        """As `StepCost.seconds`."""
        flops = self.flops_per_token * num_tokens + self.flops_per_pair * num_pairs
        computing = flops / self.flop_rate
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
        flops_per_pair=4.0 * decoder.num_layers * heads * decoder.head_dim,
    )


class Coefficients(NamedTuple):
    """Of a fit, all in seconds."""

    step: float
    token: float
    kv_token: float
    pair: float


class MeasuredCost:
    """Step time as a + b * tokens + c * kv_tokens + d * pairs, fitted while the engine runs.

    Each new step counts fully and older ones ever less. A size that ran often enough is predicted
    by its own mean, moved by what the fit gives for other K/V and pairs than its mean ones; other
    sizes by the fit; all by `fallback` until enough steps of differing sizes were seen. Under the
    fit no prediction falls with anything: a coefficient that comes out negative is held at zero.

    Args:
        fallback: predicts before there is a fit.
    """

    def __init__(self, fallback: StepCost) -> None:
        self._fallback = fallback
        self._num_observations = 0
        self._moments = np.zeros((4, 4))  # of (1, tokens, kv, pairs)
        self._products = np.zeros(4)  # of (1, tokens, kv, pairs) with the seconds
        self._fit: Coefficients | None = None
        self._is_stale = False
        self._buckets: dict[int, _BucketMean] = {}

    @property
    def coefficients(self) -> Coefficients | None:
        """None while the fallback predicts."""
        if self._is_stale:
            self._is_stale = False
            self._fit = self._solve()
        return self._fit

    def observe(self, num_tokens: int, num_kv_tokens: int, num_pairs: int, seconds: float) -> None:
        """Learn from a step that ran; arguments as of `seconds`, and the time it took.

        A step that took far longer than predicted, as one that compiled something, counts with
        a bounded time.
        """
        if self._num_observations >= _MIN_OBSERVATIONS:
            predicted = self.seconds(num_tokens, num_kv_tokens, num_pairs)
            seconds = min(seconds, _MAX_SURPRISE * predicted)
        features = np.array([1.0, num_tokens, num_kv_tokens, num_pairs])
        self._moments = _DECAY * self._moments + np.outer(features, features)
        self._products = _DECAY * self._products + seconds * features
        self._num_observations += 1
        self._is_stale = True
        bucket = self._buckets.setdefault(num_tokens, _BucketMean())
        bucket.add(num_kv_tokens, num_pairs, seconds)

    def seconds(self, num_tokens: int, num_kv_tokens: int, num_pairs: int) -> float:
        """As `StepCost.seconds`."""
        fit = self.coefficients
        if fit is None:
            return self._fallback.seconds(num_tokens, num_kv_tokens, num_pairs)
        a, b, c, d = fit
        bucket = self._buckets.get(num_tokens)
        if bucket is None or bucket.count < _MIN_BUCKET_OBSERVATIONS:
            return a + b * num_tokens + c * num_kv_tokens + d * num_pairs
        more_kv_tokens, more_pairs = num_kv_tokens - bucket.kv_tokens, num_pairs - bucket.pairs
        return max(0.0, bucket.seconds + c * more_kv_tokens + d * more_pairs)

    def _solve(self) -> Coefficients | None:
        """The least-squares coefficients of what was seen; None if it doesn't determine them."""
        if self._num_observations < _MIN_OBSERVATIONS:
            return None
        scale = np.sqrt(np.diag(self._moments))
        used = [i for i in range(4) if scale[i] > 0]
        while used:
            moments = self._moments[np.ix_(used, used)] / np.outer(scale[used], scale[used])
            if np.linalg.eigvalsh(moments)[0] < 1e-9:
                # Steps all alike say nothing of tokens. What never varied, or only with what stands
                # before it, as pairs do with K/V while all sequences decode, can be left out.
                if used[-1] < 2:
                    return None
                used.pop()
                continue
            solution = np.linalg.solve(moments, self._products[used] / scale[used]) / scale[used]
            if solution.min() >= 0:
                coefficients = [0.0] * 4
                for i, value in zip(used, solution.tolist(), strict=True):
                    coefficients[i] = value
                return Coefficients(*coefficients)
            del used[int(solution.argmin())]
        return None


class _BucketMean:
    """Decaying means of one size's steps."""

    __slots__ = ("count", "kv_tokens", "pairs", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.kv_tokens = self.pairs = self.seconds = 0.0

    def add(self, num_kv_tokens: int, num_pairs: int, seconds: float) -> None:
        self.count += 1
        weight = max(1 / self.count, 1 - _DECAY)
        self.kv_tokens += weight * (num_kv_tokens - self.kv_tokens)
        self.pairs += weight * (num_pairs - self.pairs)
        self.seconds += weight * (seconds - self.seconds)
