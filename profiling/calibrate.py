"""How well the simulator foretells the engine: fitted on one load, compared on others.

    python profiling/calibrate.py [--num-requests 64] [--save TIMES.json]

The engine serves requests of the first load, all at once and then at a share of the rate at which
it served those, and a step-time model is fitted to the steps that it ran (fitted_step_time.py).
Then each load is served by the engine and simulated with the same arrivals, lengths and limits;
nothing is fitted again. The other loads differ in their rate and in their lengths. All are well
below saturation, where a queue would make much of every small error. The table has measured and
simulated p50 and p99 beside each other.

The machine should have nothing else to do: a simulated step takes what such a step takes on
average, so what disturbs single steps is only in the measured tail, and a machine that is slower
in one load than in another is an error of that size. "Together" says how far all steps of a load
were off. With --threads 1 times are CPU time, which other programs disturb less; pauses between
arrivals then pass at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fitted_step_time import FittedStepTime, fit
from latency_report import LatencyReport, report
from serving_driver import ServedRun, ServingDriver, warm_up
from simulation import ServerOptions, shape_of, simulate
from step_log import StepLog
from step_time import StepShape
from workload import Workload, uniform

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.step import ScheduledBatch

KINDS, PERCENTILES = ("ttft", "tpot", "itl"), ("p50", "p99")
LONGEST_BORDER = 0.005
"""Seconds between two steps up to which the engine was busy handing in requests, not idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Lengths, both ends included, and how much of the engine they keep busy."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    share: float
    """Rate of arrivals, in parts of the rate at which requests that come at once are served."""

    def workload(self, num_requests: int, seed: int, rate: float = math.inf) -> Workload:
        """Its requests, `rate` a second."""
        lengths = uniform(num_requests, self.inputs, self.outputs, seed)
        return lengths.arriving("poisson", rate, seed)


LOADS = {
    # Wide lengths tell what a sequence costs from what its context costs.
    "fitted": Load(inputs=(16, 768), outputs=(16, 96), share=0.5),
    "another rate": Load(inputs=(16, 768), outputs=(16, 96), share=0.3),
    "other lengths": Load(inputs=(32, 256), outputs=(32, 128), share=0.5),
}
"""The first one is fitted to."""
NUM_AT_ONCE = 24
"""Requests that show the capacity."""
LEAST_REQUESTS = 8
"""Of a load, however slow the machine is."""


def make_engine(args: argparse.Namespace) -> Engine:
    """The engine, warmed up."""
    engine = Engine(
        EngineConfig(
            model=args.model,
            max_model_len=2048,
            max_num_batched_tokens=args.budget,
            kv_cache_bytes=1 << 30,
            enable_prefix_caching=False,
            policy=args.policy,
            overlap_scheduling=False,  # the simulator runs one step at a time
        )
    )
    warm_up(engine, args.budget)
    return engine


def step_seconds(log: StepLog) -> np.ndarray:
    """[steps] float64: the time of each step, what lies between it and the one before included."""
    starts = np.array([step.start for step in log])
    ends = np.array([step.end for step in log])
    borders = np.append(np.inf, starts[1:] - ends[:-1])
    found: np.ndarray = ends - starts + np.where(borders < LONGEST_BORDER, borders, 0.0)
    return found


class CpuClock:
    """The CPU time of this process, and the pauses that it was told to make."""

    def __init__(self) -> None:
        self._slept = 0.0

    def now(self) -> float:
        """Seconds."""
        return time.process_time() + self._slept

    def sleep(self, seconds: float) -> None:
        """Let time pass at once."""
        self._slept += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSteps:
    """A run, and the shape of each of its steps."""

    run: ServedRun
    shapes: list[StepShape]

    @property
    def seconds(self) -> np.ndarray:
        """[steps] float64, see `step_seconds`."""
        return step_seconds(self.run.log)

    def described(self, step_time: FittedStepTime) -> str:
        """How its step times relate to foretold ones."""
        foretold = np.array([float(step_time.step_seconds(shape)) for shape in self.shapes])
        low, middle, high = np.percentile(self.seconds / foretold, [5, 50, 95])
        together = self.seconds.sum() / foretold.sum()
        return (
            f"{len(foretold)} steps; measured over foretold step times: 5% {low:.2f}, "
            f"50% {middle:.2f}, 95% {high:.2f}, together {together:.3f}"
        )


def serve(engine: Engine, workload: Workload, *, by_cpu_time: bool) -> ServedSteps:
    """Serve a workload, and keep the shape of every step."""
    shapes: list[StepShape] = []

    def keep(batch: ScheduledBatch, _: float) -> None:
        shapes.append(shape_of(batch, is_captured=batch.bucket > 0))

    clock = CpuClock()
    now, sleep = (clock.now, clock.sleep) if by_cpu_time else (time.monotonic, time.sleep)
    driver = ServingDriver(engine, workload, on_batch=keep, clock=now, sleep=sleep)
    return ServedSteps(run=driver.run(), shapes=shapes)


def simulated(engine: Engine, workload: Workload, step_time: FittedStepTime) -> LatencyReport:
    """The report of the same workload in the simulator."""
    options = ServerOptions(
        # The requests ignore end tokens, so that their lengths are known.
        scheduler=dataclasses.replace(engine.scheduler.config, end_token_ids=()),
        num_blocks=engine.num_free_blocks,
        block_size=engine.config.block_size,
    )
    result = simulate(workload, options, step_time)
    return report(result.times, result.gaps, workload.num_prompt_tokens)


def lines(name: str, measured: LatencyReport, foretold: LatencyReport) -> list[str]:
    """A line of the table for each kind of latency."""
    found = []
    for kind in KINDS:
        cells = []
        for percentile in PERCENTILES:
            a, b = getattr(measured, kind)[percentile], getattr(foretold, kind)[percentile]
            cells.append(f"{1e3 * a:.1f} | {1e3 * b:.1f} | {100 * (b / a - 1):+.1f}%")
        found.append(f"| {name} | {kind.upper()} | {' | '.join(cells)} |")
    return found


def main() -> None:
    """Print the fit and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--budget", type=int, default=256, help="tokens of a step")
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--num-requests", type=int, default=64, help="of each load")
    parser.add_argument(
        "--max-seconds", type=float, default=80.0, help="of a load: else fewer requests"
    )
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write the step times there, JSON")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    engine = make_engine(args)
    by_cpu_time = args.threads == 1
    capacities: dict[tuple[tuple[int, int], ...], float] = {}
    step_time: FittedStepTime | None = None
    rows: list[str] = []
    for number, (name, load) in enumerate(LOADS.items()):
        lengths = (load.inputs, load.outputs)
        fitted: list[ServedSteps] = []
        if lengths not in capacities:
            burst = load.workload(NUM_AT_ONCE, args.seed + len(LOADS) + number)
            served = serve(engine, burst, by_cpu_time=by_cpu_time)
            capacities[lengths] = NUM_AT_ONCE / float(served.run.times.finish.max())
            fitted.append(served)
        rate = load.share * capacities[lengths]
        count = max(LEAST_REQUESTS, min(args.num_requests, int(rate * args.max_seconds)))
        workload = load.workload(count, args.seed + number, rate)
        served = serve(engine, workload, by_cpu_time=by_cpu_time)
        if step_time is None:
            fitted.append(served)
            step_time = fit(
                [shape for part in fitted for shape in part.shapes],
                np.concatenate([part.seconds for part in fitted]),
            )
            print(f"{step_time}\n")
        print(
            f"{name}: {load}, {count} requests, {rate:.2f} a second; {served.described(step_time)}",
            flush=True,
        )
        measured = report(served.run.times, served.run.gaps, workload.num_prompt_tokens)
        rows += lines(name, measured, simulated(engine, workload, step_time))
    columns = [f"{p}, {what}" for p in PERCENTILES for what in ("measured", "simulated", "error")]
    print(f"\n| load | ms | {' | '.join(columns)} |\n{'|---' * (2 + len(columns))}|")
    print("\n".join(rows))
    if args.save and step_time is not None:
        step_time.save(args.save)


if __name__ == "__main__":
    main()
