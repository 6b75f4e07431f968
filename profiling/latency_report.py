"""Latencies of served requests: percentiles, throughput, goodput, and their table.

TTFT runs from the intended arrival to the first token, TPOT is the mean time per output token
after the first, ITL each gap between two tokens, E2E from arrival to the last token. A server that
falls behind is charged for it, since arrivals don't wait for answers (no coordinated omission).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)
_BINS_PER_E_FOLD = 1000
_SHORTEST = 1e-7
_NUM_BINS = int(_BINS_PER_E_FOLD * math.log(1e6 / _SHORTEST)) + 1
_BUFFERED = 1 << 16


class GapHistogram:
    """Any number of gaps in constant memory: quantiles to a thousandth of their value."""

    def __init__(self) -> None:
        self.counts = np.zeros(_NUM_BINS, dtype=np.int64)
        """[bins] int64; complete after `flush`."""
        self._gaps = np.empty(_BUFFERED)
        self._weights = np.empty(_BUFFERED)
        self._num_buffered = 0

    def add(self, seconds: np.ndarray, weight: int = 1) -> None:
        """Count each of [n] float64 gaps `weight` times."""
        start, end = self._num_buffered, self._num_buffered + len(seconds)
        if end > _BUFFERED:
            self.flush()
            start, end = 0, len(seconds)
            if end > _BUFFERED:
                self._count(seconds, np.full(end, float(weight)))
                return
        self._gaps[start:end] = seconds
        self._weights[start:end] = weight
        self._num_buffered = end

    def flush(self) -> None:
        """Sort what is buffered into the bins."""
        num_buffered, self._num_buffered = self._num_buffered, 0
        self._count(self._gaps[:num_buffered], self._weights[:num_buffered])

    def _count(self, seconds: np.ndarray, weights: np.ndarray) -> None:
        gaps = np.maximum(seconds, _SHORTEST)
        bins = (np.log(gaps / _SHORTEST) * _BINS_PER_E_FOLD).astype(np.int64)
        bins = np.minimum(bins, _NUM_BINS - 1)
        self.counts += np.bincount(bins, weights, _NUM_BINS).astype(np.int64)

    def merge(self, other: GapHistogram) -> None:
        """Take in what another one counted."""
        self.flush()
        other.flush()
        self.counts += other.counts

    def distribution(self) -> tuple[np.ndarray, np.ndarray]:
        """[m] float64 seconds that occur, ascending, and the share of gaps up to each."""
        self.flush()
        places = np.flatnonzero(self.counts)
        seconds = _SHORTEST * np.exp((places + 0.5) / _BINS_PER_E_FOLD)
        return seconds, np.cumsum(self.counts[places]) / max(1, self.counts.sum())

    def percentiles(self, wanted: tuple[float, ...]) -> list[float]:
        """Seconds below which that many percent of the gaps lie; NaN without any."""
        self.flush()
        below = np.cumsum(self.counts)
        if below[-1] == 0:
            return [math.nan] * len(wanted)
        places = np.searchsorted(below, np.array(wanted) / 100 * below[-1])
        return [_SHORTEST * math.exp((place + 0.5) / _BINS_PER_E_FOLD) for place in places.tolist()]


@dataclass(slots=True, kw_only=True)
class RequestTimes:
    """What became of [n] requests, by their place in the workload; NaN where nothing did."""

    arrival: np.ndarray
    """[n] float64 seconds: when it was meant to arrive."""
    num_output_tokens: np.ndarray
    """[n] int32, generated."""
    first_token: np.ndarray
    """[n] float64 seconds."""
    finish: np.ndarray
    """[n] float64 seconds."""

    @classmethod
    def of(cls, arrival: np.ndarray) -> RequestTimes:
        """Of requests that have not begun."""
        return cls(
            arrival=arrival,
            num_output_tokens=np.zeros(len(arrival), dtype=np.int32),
            first_token=np.full(len(arrival), math.nan),
            finish=np.full(len(arrival), math.nan),
        )

    @property
    def ttft(self) -> np.ndarray:
        """[n] float64 seconds from arrival to first token."""
        ttft: np.ndarray = self.first_token - self.arrival
        return ttft

    @property
    def e2e(self) -> np.ndarray:
        """[n] float64 seconds from arrival to the last token."""
        e2e: np.ndarray = self.finish - self.arrival
        return e2e

    @property
    def tpot(self) -> np.ndarray:
        """[n] float64 seconds per token after the first; NaN for a single token."""
        after_first = np.where(self.num_output_tokens > 1, self.num_output_tokens - 1.0, math.nan)
        tpot: np.ndarray = (self.finish - self.first_token) / after_first
        return tpot


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """All latencies of a run, for a plot."""

    times: RequestTimes
    gaps: GapHistogram

    def distribution(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """[m] ascending seconds, and [m] the share of "TTFT", "TPOT", "ITL" or "E2E" up to each."""
        if kind == "ITL":
            return self.gaps.distribution()
        values: np.ndarray = getattr(self.times, kind.lower())
        values = np.sort(values[np.isfinite(values)])
        return values, np.arange(1, len(values) + 1) / max(1, len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTarget:
    """What a request must keep to count as goodput; seconds."""

    ttft: float = math.inf
    tpot: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyReport:
    """The numbers of one run. Percentiles are of PERCENTILES, in seconds."""

    num_requests: int
    """Finished ones, without those of the warm-up."""
    duration: float
    """Seconds from the first arrival that counts to the last token."""
    ttft: dict[str, float]
    tpot: dict[str, float]
    itl: dict[str, float]
    e2e: dict[str, float]
    request_rate: float
    """Finished requests a second."""
    output_rate: float
    """Output tokens a second."""
    total_rate: float
    """Prompt and output tokens a second."""
    goodput: float
    """Requests a second that keep the target."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else is known of the run."""

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return dataclasses.asdict(self)


def report(
    times: RequestTimes,
    gaps: GapHistogram,
    num_prompt_tokens: np.ndarray,
    *,
    num_warmup: int = 0,
    target: LatencyTarget | None = None,
) -> LatencyReport:
    """The report of a run.

    Args:
        times: of all requests.
        gaps: between tokens, those of the warm-up left out by whoever filled it.
        num_prompt_tokens: [n] int32.
        num_warmup: so many of the first requests don't count.
        target: of the goodput; None: every finished request keeps it.
    """
    target = target or LatencyTarget()
    counts = np.isfinite(times.finish)
    counts[:num_warmup] = False
    ttft, tpot, e2e = times.ttft[counts], times.tpot[counts], times.e2e[counts]
    num_requests = int(counts.sum())
    duration = math.nan
    if num_requests:
        duration = float(times.finish[counts].max() - times.arrival[counts].min())
    num_output = int(times.num_output_tokens[counts].sum())
    num_good = int(((ttft <= target.ttft) & ~(tpot > target.tpot)).sum())
    return LatencyReport(
        num_requests=num_requests,
        duration=duration,
        ttft=_percentiles(ttft),
        tpot=_percentiles(tpot[np.isfinite(tpot)]),
        itl=dict(zip(_NAMES, gaps.percentiles(PERCENTILES), strict=True)),
        e2e=_percentiles(e2e),
        request_rate=num_requests / duration,
        output_rate=num_output / duration,
        total_rate=(num_output + int(num_prompt_tokens[counts].sum())) / duration,
        goodput=num_good / duration,
    )


_NAMES = tuple(f"p{p}" for p in PERCENTILES)


def _percentiles(values: np.ndarray) -> dict[str, float]:
    found = np.percentile(values, PERCENTILES) if len(values) else [math.nan] * len(PERCENTILES)
    return {name: float(value) for name, value in zip(_NAMES, found, strict=True)}


def table(reports: Mapping[str, LatencyReport]) -> str:
    """A Markdown table, a line for each run; milliseconds."""
    kinds = ("TTFT", "TPOT", "ITL", "E2E")
    heads = [f"{kind} {name}" for kind in kinds for name in _NAMES]
    columns = ["run", "requests", *heads, "output tok/s", "total tok/s", "goodput req/s"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, item in reports.items():
        latencies = [
            f"{1e3 * values[p]:.4g}"
            for values in (item.ttft, item.tpot, item.itl, item.e2e)
            for p in _NAMES
        ]
        rates = [f"{item.output_rate:.1f}", f"{item.total_rate:.1f}", f"{item.goodput:.2f}"]
        lines.append(f"| {' | '.join([name, str(item.num_requests), *latencies, *rates])} |")
    return "\n".join(lines)
