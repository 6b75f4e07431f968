"""What the host and the device did in each range of a trace, by the step's bucket.

A range is a stage of a step (schedule, pack, plan, forward, ...). The device's work belongs to the
range in which the host launched it, whenever it ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeEvent:
    """One time that a range was open; nanoseconds."""

    name: str
    start: int
    end: int
    thread: int
    num_tokens: int = 0
    bucket: int = 0
    """Size that the step was padded to; 0: not padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One call of the CUDA API; nanoseconds."""

    start: int
    end: int
    thread: int
    correlation: int
    """Names the device's work that it launched."""
    is_graph: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """One thing that ran on the device; nanoseconds."""

    start: int
    end: int
    correlation: int
    name: str
    is_kernel: bool
    """A kernel, or a graph that was traced as a whole; not a copy or a fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All events of a trace, in any order."""

    ranges: Sequence[RangeEvent]
    launches: Sequence[Launch]
    work: Sequence[DeviceWork]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSummary:
    """Means over all times that a range was open for steps of one bucket; microseconds."""

    name: str
    bucket: int
    count: int
    num_tokens: float
    host: float
    """Time that the range was open."""
    num_launches: float
    """Calls that launched something, those of graphs among them."""
    launching: float
    """Time within those calls..."""
    launching_graphs: float
    """...and in those of graphs."""
    busy: float
    """Time that the device ran anything of it."""
    gaps: float
    """Time between its first and last work that the device ran nothing of it."""
    kernel_share: float
    """Of kernels in the time of all its work; NaN where nothing ran."""


def summarise(trace: Trace) -> list[RangeSummary]:
    """A summary for each range and bucket, in order of first appearance and bucket."""
    launches_of = _launches_by_range(trace)
    work_of = defaultdict(list)
    for item in trace.work:
        work_of[item.correlation].append(item)
    order: dict[str, int] = {}
    measured: dict[tuple[int, str, int], list[tuple[float, ...]]] = defaultdict(list)
    for place in sorted(range(len(trace.ranges)), key=lambda i: trace.ranges[i].start):
        event = trace.ranges[place]
        launches = launches_of[place]
        work = [item for launch in launches for item in work_of[launch.correlation]]
        busy, gaps = _busy_and_gaps(work)
        total = sum(item.end - item.start for item in work)
        kernels = sum(item.end - item.start for item in work if item.is_kernel)
        effective = [launch for launch in launches if work_of[launch.correlation]]
        key = (order.setdefault(event.name, len(order)), event.name, event.bucket)
        measured[key].append(
            (
                event.num_tokens,
                event.end - event.start,
                len(effective),
                sum(launch.end - launch.start for launch in effective),
                sum(launch.end - launch.start for launch in effective if launch.is_graph),
                busy,
                gaps,
                kernels,
                total,
            )
        )
    return [_mean(name, bucket, rows) for (_, name, bucket), rows in sorted(measured.items())]


def _mean(name: str, bucket: int, rows: list[tuple[float, ...]]) -> RangeSummary:
    tokens, host, launches, launching, graphs, busy, gaps, kernels, total = np.mean(rows, axis=0)
    return RangeSummary(
        name=name,
        bucket=bucket,
        count=len(rows),
        num_tokens=float(tokens),
        host=host / 1e3,
        num_launches=float(launches),
        launching=launching / 1e3,
        launching_graphs=graphs / 1e3,
        busy=busy / 1e3,
        gaps=gaps / 1e3,
        kernel_share=float(kernels / total) if total else float("nan"),
    )


def _launches_by_range(trace: Trace) -> list[list[Launch]]:
    """For each range the launches of its thread while it was open; ranges may be nested."""
    found: list[list[Launch]] = [[] for _ in trace.ranges]
    places: dict[tuple[int, str], list[int]] = defaultdict(list)
    for place, event in enumerate(trace.ranges):
        places[event.thread, event.name].append(place)
    starts = {}
    for key, listed in places.items():  # of one name and thread no two overlap
        listed.sort(key=lambda place: trace.ranges[place].start)
        starts[key] = np.array([trace.ranges[place].start for place in listed])
    for launch in trace.launches:
        for key, listed in places.items():
            if key[0] != launch.thread:
                continue
            before = int(np.searchsorted(starts[key], launch.start, side="right")) - 1
            if before >= 0 and launch.start < trace.ranges[listed[before]].end:
                found[listed[before]].append(launch)
    return found


def _busy_and_gaps(work: list[DeviceWork]) -> tuple[int, int]:
    """Nanoseconds in which at least one of them ran, and in which none did in between."""
    busy, end = 0, 0
    for item in sorted(work, key=lambda item: item.start):
        busy += max(0, item.end - max(item.start, end))
        end = max(end, item.end)
    return busy, (end - min(item.start for item in work) - busy) if work else 0


def heaviest_kernels(trace: Trace, count: int) -> list[tuple[str, int, float]]:
    """The kernels that took most of the device's time: name, how often, milliseconds in all."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for item in trace.work:
        if item.is_kernel:
            totals[item.name][0] += 1
            totals[item.name][1] += item.end - item.start
    listed = sorted(totals.items(), key=lambda pair: -pair[1][1])
    return [(name, number, time / 1e6) for name, (number, time) in listed[:count]]


def table(summaries: Sequence[RangeSummary]) -> str:
    """A Markdown table, microseconds."""
    columns = [
        *("range", "bucket", "times", "tokens", "host", "launches", "launching", "of graphs"),
        *("device busy", "gaps", "kernels"),
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for item in summaries:
        share = "-" if np.isnan(item.kernel_share) else f"{100 * item.kernel_share:.1f}%"
        numbers = (item.host, item.num_launches, item.launching, item.launching_graphs)
        cells = [
            *(item.name, str(item.bucket or "-"), str(item.count), f"{item.num_tokens:.1f}"),
            *(f"{number:.1f}" for number in (*numbers, item.busy, item.gaps)),
            share,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
