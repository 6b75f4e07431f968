"""Counts of how steps were launched: what a tuner of capture sizes starts from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

LaunchMode = Literal["eager", "full", "piecewise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How one step runs."""

    mode: LaunchMode
    """full: one graph; piecewise: graph segments around attention; eager: no graph."""
    size: int
    """Tokens that run: the captured size, or the batch's own count when eager."""
    fall: str = ""
    """Why no graph was used where graphs are on; empty otherwise."""


@dataclass(slots=True, kw_only=True)
class BucketStatistics:
    """Totals of the steps of one mode and size. Eager steps share one bucket of size 0."""

    mode: LaunchMode
    size: int
    steps: int = 0
    num_tokens: int = 0
    """Real tokens."""
    num_padded_tokens: int = 0
    """Tokens that padding added."""
    seconds: float = 0.0
    """Whatever was handed to `add_seconds`."""


@dataclass(slots=True)
class StepStatistics:
    """A table of all buckets that steps have used, and of the steps that fell back to eager."""

    buckets: dict[tuple[LaunchMode, int], BucketStatistics] = field(default_factory=dict)
    falls: dict[str, int] = field(default_factory=dict)
    """Reason to number of steps."""

    def count(self, launch: Launch, num_tokens: int) -> None:
        """Count one step of num_tokens real tokens."""
        bucket = self._bucket(launch)
        bucket.steps += 1
        bucket.num_tokens += num_tokens
        bucket.num_padded_tokens += launch.size - num_tokens
        if launch.fall:
            self.falls[launch.fall] = self.falls.get(launch.fall, 0) + 1

    def add_seconds(self, launch: Launch, seconds: float) -> None:
        """Add one step's time, measured by who knows when the device had finished."""
        self._bucket(launch).seconds += seconds

    def as_dict(self) -> dict[str, Any]:
        """The table in JSON's types, the largest size of each mode last."""
        keys = sorted(self.buckets)
        return {"buckets": [asdict(self.buckets[key]) for key in keys], "falls": dict(self.falls)}

    def _bucket(self, launch: Launch) -> BucketStatistics:
        size = 0 if launch.mode == "eager" else launch.size
        key = (launch.mode, size)
        if key not in self.buckets:
            self.buckets[key] = BucketStatistics(mode=launch.mode, size=size)
        return self.buckets[key]
