"""Counts of how steps were launched: what a tuner of capture sizes starts from."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from .capture_sizes import Launch, LaunchMode


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
    """Time of the timed steps."""
    num_timed_steps: int = 0
    """Steps that were waited for, so that their time is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStatistics:
    """One capture that succeeded."""

    mode: LaunchMode
    size: int
    seconds: float
    """The warm-up run included."""
    at_first_use: bool
    """False: before the first step."""


@dataclass(slots=True)
class StepStatistics:
    """Tables of all buckets that steps have used, of step sizes, of falls and of captures."""

    buckets: dict[tuple[LaunchMode, int], BucketStatistics] = field(default_factory=dict)
    falls: Counter[str] = field(default_factory=Counter)
    """Steps that ran eagerly though graphs are on, by reason."""
    decode_sizes: Counter[int] = field(default_factory=Counter)
    """Uniform decode steps by their number of sequences, before padding."""
    mixed_sizes: Counter[int] = field(default_factory=Counter)
    """Other steps by their number of tokens, before padding."""
    captures: list[CaptureStatistics] = field(default_factory=list)
    """In order."""

    def count(self, launch: Launch, num_tokens: int, *, is_uniform_decode: bool) -> None:
        """Count one step of num_tokens real tokens."""
        bucket = self._bucket(launch)
        bucket.steps += 1
        bucket.num_tokens += num_tokens
        bucket.num_padded_tokens += launch.size - num_tokens
        (self.decode_sizes if is_uniform_decode else self.mixed_sizes)[num_tokens] += 1
        if launch.fall:
            self.falls[launch.fall] += 1

    def add_seconds(self, launch: Launch, seconds: float) -> None:
        """Add one step's time, measured by who knows when the device had finished."""
        bucket = self._bucket(launch)
        bucket.seconds += seconds
        bucket.num_timed_steps += 1

    def as_dict(self) -> dict[str, Any]:
        """The tables in JSON's types, the largest size of each mode last.

        `step_sizes` holds, by kind of step, pairs of a size before padding and its steps.
        """
        return {
            "buckets": [asdict(self.buckets[key]) for key in sorted(self.buckets)],
            "falls": dict(self.falls),
            "step_sizes": {
                "decode": [list(pair) for pair in sorted(self.decode_sizes.items())],
                "mixed": [list(pair) for pair in sorted(self.mixed_sizes.items())],
            },
            "captures": [asdict(capture) for capture in self.captures],
        }

    def table(self) -> str:
        """All of it but the step sizes, to be read by people."""
        lines = [f"{'mode':<10}{'size':>7}{'steps':>9}{'tokens':>11}{'padding':>9}{'ms/step':>10}"]
        for key in sorted(self.buckets):
            bucket = self.buckets[key]
            total = bucket.num_tokens + bucket.num_padded_tokens
            milliseconds = "-"
            if bucket.num_timed_steps:
                milliseconds = f"{1e3 * bucket.seconds / bucket.num_timed_steps:.2f}"
            lines.append(
                f"{bucket.mode:<10}{bucket.size or '-':>7}{bucket.steps:>9}{bucket.num_tokens:>11}"
                f"{bucket.num_padded_tokens / total:>9.1%}{milliseconds:>10}"
            )
        for reason, steps in sorted(self.falls.items()):
            lines.append(f"{steps} steps without a graph: {reason}")
        if self.captures:
            num_late = sum(capture.at_first_use for capture in self.captures)
            seconds = sum(capture.seconds for capture in self.captures)
            lines.append(
                f"{len(self.captures)} captures took {seconds:.2f} s, {num_late} at first use"
            )
        return "\n".join(lines)

    def _bucket(self, launch: Launch) -> BucketStatistics:
        size = 0 if launch.mode == "eager" else launch.size
        key = (launch.mode, size)
        if key not in self.buckets:
            self.buckets[key] = BucketStatistics(mode=launch.mode, size=size)
        return self.buckets[key]
