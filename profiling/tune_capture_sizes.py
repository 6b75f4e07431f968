"""Find the capture sizes that suit the steps of a run, and print the line to export.

    python profiling/tune_capture_sizes.py STATS.json [--max-captures 24] [--plot COST.png]

STATS.json holds `step_sizes`, how often a step of either kind had how many tokens before padding:
the statistics of an engine, or what simulate.py --step-sizes wrote. What a step of a size takes is
measured where the statistics have timed steps under graphs, linear between those sizes; else it is
modelled (--model, --hardware). --test gives the cost on other steps than those tuned to.

A capture has a price: its time, spread over the steps of one start of the engine, and its memory,
as if each byte less for K/V slowed the engine by its share of the pool.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ladder_search import LadderChoice, LadderCost, Seconds, StepSizes, choose, search
from plots import plot_ladder_costs
from simulate import known_ladders
from step_time import HARDWARE, MODELS, RooflineStepTime, StepShape

from graphs.capture_sizes import CaptureLadders

CURVE_LENGTH = 96
"""Captures up to which the plot goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePrice:
    """What a capture costs besides the padding that it saves."""

    seconds: float
    """To capture one size."""
    num_bytes: float
    """Memory of one graph."""
    kv_bytes: float
    """Memory of the KV pool."""
    num_steps: float
    """Steps between two starts of the engine."""

    def per_step(self, mean_step: float) -> float:
        """Seconds a step, for steps of that mean length."""
        return self.seconds / self.num_steps + mean_step * self.num_bytes / self.kv_bytes


def modelled_seconds(
    step_time: RooflineStepTime, num_kv_tokens: int, *, is_decode: bool, is_captured: bool
) -> Seconds:
    """Time of a step by its size, at the same context for all."""

    def seconds(num_tokens: int) -> float:
        shape = StepShape(
            num_tokens=num_tokens,
            num_sampled=1,
            num_kv_tokens=num_kv_tokens,
            num_pairs=num_kv_tokens,
            is_uniform_decode=is_decode,
            is_captured=is_captured,
        )
        return float(step_time.step_seconds(shape))

    return seconds


def measured_seconds(buckets: list[Mapping[str, Any]], modes: tuple[str, ...]) -> Seconds | None:
    """Mean time of timed steps by size, linear between sizes; None if fewer than two were timed.

    Args:
        buckets: of an engine's statistics.
        modes: of those that count.
    """
    points: dict[int, list[float]] = {}
    for bucket in buckets:
        count = bucket.get("num_timed_steps", bucket["steps"])
        if bucket["mode"] in modes and count and bucket["seconds"] > 0:
            point = points.setdefault(bucket["size"], [0.0, 0.0])
            point[0] += bucket["seconds"]
            point[1] += count
    if len(points) < 2:
        return None
    sizes = sorted(points)
    means = np.maximum.accumulate([points[size][0] / points[size][1] for size in sizes])
    slope = (means[-1] - means[0]) / (sizes[-1] - sizes[0])

    def seconds(num_tokens: int) -> float:
        beyond = max(0, num_tokens - sizes[-1])
        return float(np.interp(num_tokens, sizes, means) + slope * beyond)

    return seconds


def ladder_cost(
    stats: Mapping[str, Any], args: argparse.Namespace, step_time: RooflineStepTime
) -> tuple[LadderCost, str]:
    """The cost without a price of captures, and where its times come from."""
    sizes = stats["step_sizes"]
    num_steps = sum(count for kind in sizes.values() for _, count in kind)
    num_kv_tokens = stats.get("num_kv_tokens", 0) // num_steps
    limits = {"max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": args.budget}
    buckets = stats.get("buckets", [])
    decode = measured_seconds(buckets, ("full", "piecewise"))
    mixed = measured_seconds(buckets, ("piecewise",)) or decode
    if decode is not None and mixed is not None:
        late = args.eager_ms / 1e3
        cost = LadderCost(
            decode=decode,
            mixed=mixed,
            decode_eagerly=lambda n: decode(n) + late,
            mixed_eagerly=lambda n: mixed(n) + late,
            **limits,
        )
        return cost, f"measured; {args.eager_ms:g} ms more without a graph"

    def modelled(is_decode: bool, is_captured: bool) -> Seconds:
        return modelled_seconds(
            step_time, num_kv_tokens, is_decode=is_decode, is_captured=is_captured
        )

    cost = LadderCost(
        decode=modelled(True, True),
        mixed=modelled(False, True),
        decode_eagerly=modelled(True, False),
        mixed_eagerly=modelled(False, False),
        **limits,
    )
    where = f"modelled, {step_time.model.name} on {step_time.hardware.name}"
    launch = f"{1e6 * step_time.launch_seconds:g} us to launch a kernel"
    return cost, f"{where}, {launch}, {num_kv_tokens} K/V tokens a step"


def compare(
    choices: list[LadderChoice],
    cost: LadderCost,
    sizes: StepSizes,
    others: Mapping[str, CaptureLadders],
) -> str:
    """A table: each other ladder, and the best one of as many captures."""
    lines = [
        "| ladder | captures | step | best of as many | saved | padding saved |",
        "|---|---|---|---|---|---|",
    ]
    bound = cost.unpadded(sizes)
    for name, ladders in others.items():
        theirs = cost.of(ladders, sizes)
        best = choose(choices, ladders.num_graphs)
        ours = cost.of(cost.ladders(best.sizes), sizes)
        over = [value - bound for value in (theirs, ours)]
        lines.append(
            f"| {name} | {ladders.num_graphs} | {1e3 * theirs:.4f} ms | {1e3 * ours:.4f} ms "
            f"({best.num_captures} captures) | {100 * (1 - ours / theirs):.2f}% "
            f"| {100 * (1 - over[1] / over[0]):.0f}% |"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stats", type=Path)
    parser.add_argument("--test", type=Path, help="other statistics, to judge the sizes by")
    parser.add_argument("--max-captures", type=int, default=24, help="both ladders together")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--hardware", choices=HARDWARE, default="h100")
    parser.add_argument(
        "--launch-us", type=float, default=12.0, help="of a kernel without graph, if modelled"
    )
    parser.add_argument(
        "--eager-ms", type=float, default=3.0, help="a step without graph, if measured"
    )
    parser.add_argument("--capture-seconds", type=float, help="else what was measured, or 0.5")
    parser.add_argument("--graph-mib", type=float, default=8.0, help="memory of a graph")
    parser.add_argument("--kv-gib", type=float, default=40.0, help="memory of the KV pool")
    parser.add_argument("--steps", type=float, default=1e7, help="between two starts")
    parser.add_argument("--plot", type=Path, help="write step time against captures there, PNG")
    return parser


def main() -> None:
    """Print the sizes, what they save, and the line to export."""
    args = _parser().parse_args()
    stats = json.loads(args.stats.read_text(encoding="utf-8"))
    sizes = StepSizes.read(args.stats)
    step_time = RooflineStepTime(
        model=MODELS[args.model],
        hardware=HARDWARE[args.hardware],
        launch_seconds=1e-6 * args.launch_us,
    )
    free, where = ladder_cost(stats, args, step_time)
    captures = [capture["seconds"] for capture in stats.get("captures", [])]
    measured = sum(captures) / len(captures) if captures else 0.5
    price = CapturePrice(
        seconds=measured if args.capture_seconds is None else args.capture_seconds,
        num_bytes=args.graph_mib * 2**20,
        kv_bytes=args.kv_gib * 2**30,
        num_steps=args.steps,
    )
    per_capture = price.per_step(free.unpadded(sizes))
    cost = dataclasses.replace(free, per_capture=per_capture)
    others = known_ladders(
        max_num_seqs=args.max_num_seqs, budget=args.budget, ridge=step_time.ridge
    )
    longest = max(CURVE_LENGTH, args.max_captures, *(o.num_graphs for o in others.values()))
    choices = search(sizes, cost, longest)
    best = choose(choices, args.max_captures)
    print(
        f"{sizes.num_steps} steps; step times {where}; "
        f"a capture costs {1e6 * per_capture:.2f} us a step"
    )
    print(f"unpadded: {1e3 * cost.unpadded(sizes):.4f} ms a step\n")
    print(compare(choices, cost, sizes, others))
    if args.test:
        tested = StepSizes.read(args.test)
        print(f"\non {args.test}:\n\n{compare(choices, cost, tested, others)}")
    print(f"\n{best.num_captures} captures, {1e3 * best.seconds:.4f} ms a step:\n")
    print(f"export STEPGRAPH_CAPTURE_SIZES={','.join(map(str, best.sizes))}")
    if args.plot:
        plot_ladder_costs(
            args.plot,
            {choice.num_captures: 1e3 * choice.seconds for choice in choices},
            {name: (o.num_graphs, 1e3 * cost.of(o, sizes)) for name, o in others.items()},
            1e3 * cost.unpadded(sizes),
        )


if __name__ == "__main__":
    main()
