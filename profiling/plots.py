"""PNG plots of benchmarks and simulations; matplotlib is optional (the extra "bench")."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from latency_report import Latencies, LatencyReport
from step_log import StepLog

_SHORTEST_PAUSE = 0.02
"""Seconds between two steps from which a timeline shows nothing there."""


@cache
def pyplot() -> Any:
    """matplotlib.pyplot without a display; None, said once, where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as module

    return module


def plot_runs(
    folder: Path,
    latencies: Mapping[str, Latencies],
    lines: Mapping[str, Mapping[float, LatencyReport]],
    logs: Mapping[str, StepLog],
) -> None:
    """Latencies, rates, and a timeline of each run, as PNG files; nothing without matplotlib."""
    if pyplot() is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    plot_latencies(folder / "latencies.png", latencies)
    plot_rates(folder / "rates.png", lines)
    for name, log in logs.items():
        file = "".join(c if c.isalnum() or c in "._-" else "_" for c in f"steps {name}")
        plot_timeline(folder / f"{file}.png", log, name)


def plot_latencies(path: Path, runs: Mapping[str, Latencies]) -> bool:
    """How the latencies of each run are distributed; False where it can't be drawn."""
    plt = pyplot()
    if plt is None:
        return False
    figure, grid = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    for axes, name in zip(grid.flat, ("TTFT", "TPOT", "ITL", "E2E"), strict=True):
        for run, latencies in runs.items():
            seconds, shares = latencies.distribution(name)
            axes.plot(1e3 * seconds, 100 * shares, label=run)
        axes.axhline(99, color="grey", linestyle=":", linewidth=0.8)
        axes.set(title=name, xlabel="milliseconds", ylabel="percent at most", xscale="log")
        axes.xaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(plt.NullFormatter())
        axes.set_ylim(0, 101)
        axes.grid(alpha=0.3)
    grid[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def plot_rates(path: Path, lines: Mapping[str, Mapping[float, LatencyReport]]) -> bool:
    """Throughput, and p99 of the first token and of the gaps, against the request rate.

    Args:
        path: of the PNG.
        lines: name of a policy to its reports by rate; infinity is drawn beyond the others.
    """
    plt = pyplot()
    if plt is None:
        return False
    figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    rates = sorted({rate for reports in lines.values() for rate in reports})
    finite = [rate for rate in rates if not math.isinf(rate)]
    beyond = 1.25 * finite[-1] if finite else 1.0
    kinds: tuple[tuple[str, Callable[[LatencyReport], float]], ...] = (
        ("output tokens/s", lambda item: item.output_rate),
        ("TTFT p99, ms", lambda item: 1e3 * item.ttft["p99"]),
        ("ITL p99, ms", lambda item: 1e3 * item.itl["p99"]),
    )
    for axes, (label, value) in zip(panels, kinds, strict=True):
        for name, reports in lines.items():
            places = [beyond if math.isinf(rate) else rate for rate in sorted(reports)]
            axes.plot(places, [value(reports[r]) for r in sorted(reports)], "o-", label=name)
        axes.set(xlabel="requests/s", ylabel=label)
        axes.set_xticks([beyond if math.isinf(r) else r for r in rates])
        axes.set_xticklabels(["inf" if math.isinf(r) else f"{r:g}" for r in rates])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def plot_timeline(path: Path, log: StepLog, title: str) -> bool:
    """What each step held over time, and how full rows and blocks were."""
    plt = pyplot()
    if plt is None:
        return False
    figure, panels = plt.subplots(
        3, 1, figsize=(12, 8), sharex=True, height_ratios=(3, 2, 1.5), layout="constrained"
    )
    edges = np.array([(step.start, step.end) for step in log]).ravel()
    is_pause = np.append(edges[2::2] - edges[1:-1:2] > _SHORTEST_PAUSE, False)

    def values(name: str, in_pauses: float | None = 0.0) -> np.ndarray:
        """[edges - 1] one for each step and one for the time until the next."""
        of_steps = np.array([getattr(step, name) for step in log], dtype=float)
        after = of_steps if in_pauses is None else np.where(is_pause, in_pauses, of_steps)
        return np.column_stack([of_steps, after]).ravel()[:-1]

    bottom = np.zeros(len(edges) - 1)
    for label in ("num_decodes", "num_prompt_tokens", "num_padding"):
        tokens = values(label)
        name = label.removeprefix("num_").replace("_", " ")
        panels[0].stairs(bottom + tokens, edges, baseline=bottom, fill=True, label=name)
        bottom = bottom + tokens
    buckets = values("bucket", math.nan)
    if buckets[0::2].any():
        buckets[buckets == 0] = math.nan
        panels[0].plot(edges[:-1], buckets, ".", color="black", markersize=2, label="bucket")
    panels[0].set(ylabel="tokens of a step", title=title)
    panels[1].stairs(values("num_running"), edges, baseline=None, label="running")
    panels[1].stairs(values("num_waiting"), edges, baseline=None, label="waiting")
    panels[1].set(ylabel="sequences")
    panels[2].stairs(values("num_free_blocks", None), edges, baseline=None)
    panels[2].set(ylabel="free blocks", xlabel="seconds", ylim=(0, None))
    for axes in panels[:2]:
        axes.legend(loc="upper right", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def plot_ladder_costs(
    path: Path, curve: Mapping[int, float], points: Mapping[str, tuple[int, float]], bound: float
) -> bool:
    """Expected step time against the number of captures; False where it can't be drawn.

    Args:
        path: of the PNG.
        curve: of the best ladders, captures to milliseconds.
        points: other ladders, name to captures and milliseconds.
        bound: milliseconds if nothing were padded.
    """
    plt = pyplot()
    if plt is None:
        return False
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(list(curve), list(curve.values()), label="best ladder of that many captures")
    for name, (captures, milliseconds) in points.items():
        axes.plot(captures, milliseconds, "o", label=name)
    axes.axhline(bound, color="grey", linestyle=":", label="no padding, captures free")
    axes.set(xlabel="captures, both ladders together", ylabel="expected step time, ms")
    # Few captures leave most steps eager; the axis shows where the choice is.
    shown = [v for c, v in curve.items() if c >= 4] + [v for _, v in points.values()]
    top = max(shown, default=bound)
    axes.set_ylim(bound - 0.05 * (top - bound), top + 0.1 * (top - bound))
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
