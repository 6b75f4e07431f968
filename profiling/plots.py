"""PNG plots of benchmarks and simulations; matplotlib is optional (the extra "bench")."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


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
