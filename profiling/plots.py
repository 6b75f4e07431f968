"""PNG plots of benchmarks and simulations; matplotlib is optional (the extra "bench")."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from latency_report import Latencies, LatencyReport
from step_log import StepLog

_SHORTEST_PAUSE = 0.02
"""Seconds between two steps from which a timeline shows nothing there."""
_SHOWN_STEPS = 100
"""Steps, or runs of like ones, of which a timeline shows the tokens."""


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
    latencies: Mapping[str, Mapping[float, Latencies]],
    lines: Mapping[str, Mapping[float, LatencyReport]],
    logs: Mapping[str, StepLog],
) -> None:
    """Latencies, rates, and a timeline of each run, as PNG files; nothing without matplotlib.

    Args:
        folder: made if need be.
        latencies: name of a policy to those of its runs by rate.
        lines: name of a policy to its reports by rate.
        logs: name of a run to its steps.
    """
    if pyplot() is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    plot_latencies(folder / "latencies.png", latencies)
    plot_rates(folder / "rates.png", lines)
    for name, log in logs.items():
        file = "".join(c if c.isalnum() or c in "._-" else "_" for c in f"steps {name}")
        plot_timeline(folder / f"{file}.png", log, name)


def plot_latencies(path: Path, runs: Mapping[str, Mapping[float, Latencies]]) -> bool:
    """How the latencies of each run are distributed; False where it can't be drawn.

    A rate has a colour, a policy a kind of line.
    """
    plt = pyplot()
    if plt is None:
        return False
    rates = sorted({rate for of_policy in runs.values() for rate in of_policy})
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(rates)))
    figure, grid = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    for axes, kind in zip(grid.flat, ("TTFT", "TPOT", "ITL", "E2E"), strict=True):
        for style, (policy, of_policy) in zip(cycle(("-", "--", ":", "-.")), runs.items()):
            for rate, latencies in of_policy.items():
                seconds, shares = latencies.distribution(kind)
                label = f"{policy}, {_rate_label(rate)}"
                colour = colours[rates.index(rate)]
                axes.plot(1e3 * seconds, 100 * shares, style, color=colour, label=label)
        axes.axhline(99, color="grey", linestyle=":", linewidth=0.8)
        axes.set(title=kind, xlabel="milliseconds", ylabel="percent at most", ylim=(0, 101))
        _scale_by_decades(axes)
        axes.grid(alpha=0.3)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(runs)), fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _scale_by_decades(axes: Any) -> None:
    """A logarithmic x-axis with as many numbers as there is room for."""
    plt = pyplot()
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    subs = (1, 2, 5) if high < 100 * low else (1, 3) if high < 1000 * low else (1,)
    axes.xaxis.set_major_locator(plt.LogLocator(subs=subs))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(plt.NullFormatter())


def _rate_label(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:g}/s"


def plot_rates(path: Path, lines: Mapping[str, Mapping[float, LatencyReport]]) -> bool:
    """Throughput, and p99 of the first token and of the gaps, against the request rate.

    Args:
        path: of the PNG.
        lines: name of a policy to its reports by rate; "all at once" is drawn apart.
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
        for number, (name, reports) in enumerate(lines.items()):
            mine = sorted(rate for rate in reports if not math.isinf(rate))
            values = [value(reports[rate]) for rate in mine]
            axes.plot(mine, values, "o-", color=f"C{number}", label=name)
            if math.inf in reports:
                axes.plot(beyond, value(reports[math.inf]), "s", color=f"C{number}")
        axes.set(xlabel="requests", title=label)
        axes.set_xticks([beyond if math.isinf(rate) else rate for rate in rates])
        axes.set_xticklabels([_rate_label(rate) for rate in rates])
        if label.startswith("TTFT"):  # a queue makes it a thousand times as long
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def plot_timeline(path: Path, log: StepLog, title: str) -> bool:
    """How full rows and blocks were, and what each step held while most sequences were there."""
    plt = pyplot()
    if plt is None:
        return False
    figure, panels = plt.subplots(
        3, 1, figsize=(12, 9), height_ratios=(3, 2, 1.5), layout="constrained"
    )
    panels[2].sharex(panels[1])
    busiest = int(np.argmax([step.num_running + step.num_waiting for step in log]))
    first = max(0, min(busiest - _SHOWN_STEPS // 2, len(log) - _SHOWN_STEPS))
    shown = log[first : first + _SHOWN_STEPS]
    _draw_steps(panels[0], shown)
    panels[0].set_title(f"{title}: steps where it is busiest", loc="left")
    panels[0].set_xlabel("seconds")
    edges = _edges(log)
    for name in ("running", "waiting"):
        panels[1].stairs(_values(log, f"num_{name}", 0.0), edges, baseline=None, label=name)
    panels[1].set(ylabel="sequences", ylim=(0, None))
    panels[1].legend(loc="upper right", fontsize=8)
    panels[2].stairs(_values(log, "num_free_blocks", None), edges, baseline=None)
    panels[2].set(ylabel="free blocks", xlabel="seconds", ylim=(0, None))
    for axes in panels[1:]:
        axes.set_xlim(edges[0], edges[-1])
        if len(shown) < len(log):
            axes.axvspan(shown[0].start, shown[-1].end, color="grey", alpha=0.3, linewidth=0)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _draw_steps(axes: Any, log: StepLog) -> None:
    """Tokens of each step, stacked, and the sizes that they were padded to."""
    edges = _edges(log)
    bottom = np.zeros(len(edges) - 1)
    for label in ("num_decodes", "num_prompt_tokens", "num_padding"):
        tokens = _values(log, label, 0.0)
        if tokens.any():
            name = label.removeprefix("num_").replace("_", " ")
            axes.stairs(bottom + tokens, edges, baseline=bottom, fill=True, label=name)
        bottom = bottom + tokens
    axes.vlines(edges[0::2], 0, bottom[0::2], color="white", linewidth=0.5)  # where steps begin
    axes.set(ylabel="tokens of a step", xlim=(edges[0], edges[-1]), ylim=(0, None))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8)


def _edges(log: StepLog) -> np.ndarray:
    """[2 * steps] float64 seconds: begin and end of each."""
    return np.array([(step.start, step.end) for step in log]).ravel()


def _values(log: StepLog, name: str, in_pauses: float | None) -> np.ndarray:
    """[edges - 1] one for each step and one for the time until the next; None: as in the step."""
    edges = _edges(log)
    is_pause = np.append(edges[2::2] - edges[1:-1:2] > _SHORTEST_PAUSE, False)
    of_steps = np.array([getattr(step, name) for step in log], dtype=float)
    after = of_steps if in_pauses is None else np.where(is_pause, in_pauses, of_steps)
    found: np.ndarray = np.column_stack([of_steps, after]).ravel()[:-1]
    return found


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

    def percent(milliseconds: np.ndarray) -> np.ndarray:
        return 100 * (milliseconds / bound - 1)

    best = np.minimum.accumulate(list(curve.values()))  # of at most so many
    axes.plot(list(curve), percent(best), label="best ladder of at most that many")
    for name, (captures, milliseconds) in points.items():
        axes.plot(captures, percent(np.array(milliseconds)), "o", label=name)
    axes.set(
        xlabel="captures, both ladders together",
        ylabel="percent above no padding",
        title=f"expected time of a step; {bound:.2f} ms without padding",
        yscale="log",
    )
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
