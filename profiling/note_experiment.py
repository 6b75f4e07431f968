"""What mixing prompts into decode steps brings, beside a published measurement, in virtual time.

    python profiling/note_experiment.py [--budget 256] [--seeds 16]

The measurement is a note's on mixed batches in a small engine: Qwen3-8B on one RTX 4090, eager, 256
requests of 128 to 2048 prompt and 64 to 256 output tokens, two a second or all at once; whole
prompts first ("prefill_first") against one token budget for both kinds ("mixed"). Percentiles of
each seed's 256 requests are averaged, since a p99 of 256 requests is the third worst of them.

The hardware is the data sheet's. What the note leaves open is how much of the 24 GB its engine had
left for K/V, so there are two pools: what 90% of the memory leaves beside the weights and 1 GB,
and one that --reserved makes smaller, by default to where prefill_first has the throughput that the
note measured with all requests at once. Blocks of 256 tokens, as engines of that kind have.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
from latency_report import report
from simulation import ServerOptions, simulate
from step_time import HARDWARE, MODELS, RooflineStepTime
from workload import uniform

from runtime.scheduler_config import Policy, SchedulerConfig

NUM_REQUESTS, INPUTS, OUTPUTS = 256, (128, 2048), (64, 256)
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 256
WHOLE_PROMPTS = 16384
"""Budget of prefill_first: no prompt is cut, and those that wait run together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """p99 of each kind at two requests a second, in milliseconds, and output tokens a second."""

    ttft: float
    tpot: float
    itl: float
    rate: float
    """Output tokens a second at two requests a second..."""
    rate_at_once: float
    """...and with all requests at once."""


MEASURED = {
    "prefill_first": Latencies(ttft=1189, tpot=63.5, itl=337, rate=309, rate_at_once=448),
    "mixed": Latencies(ttft=536, tpot=49.6, itl=62.6, rate=309, rate_at_once=478),
}
"""The note's numbers."""


def latencies(
    step_time: RooflineStepTime, policy: Policy, budget: int, reserved: float, num_seeds: int
) -> Latencies:
    """The means over the seeds."""
    options = ServerOptions(
        scheduler=SchedulerConfig(
            max_num_seqs=NUM_REQUESTS,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            policy=policy,
        ),
        num_blocks=step_time.num_kv_blocks(BLOCK_SIZE, reserved=reserved),
        block_size=BLOCK_SIZE,
    )
    found = []
    for seed in range(num_seeds):
        numbers: list[float] = []
        for rate in (2.0, math.inf):
            workload = uniform(NUM_REQUESTS, INPUTS, OUTPUTS, seed).arriving("poisson", rate, seed)
            result = simulate(workload, options, step_time)
            item = report(result.times, result.gaps, workload.num_prompt_tokens)
            if not math.isinf(rate):
                numbers += [1e3 * kind["p99"] for kind in (item.ttft, item.tpot, item.itl)]
            numbers.append(item.output_rate)
        found.append(numbers)
    return Latencies(**dict(zip(Latencies.__slots__, np.mean(found, axis=0).tolist(), strict=True)))


def line(name: str, first: Latencies, mixed: Latencies) -> str:
    """One line of the table: prefill_first, mixed, and what mixing gains."""
    cells = []
    for kind in ("ttft", "tpot", "itl"):
        a, b = getattr(first, kind), getattr(mixed, kind)
        cells.append(f"{a:.4g} to {b:.4g}: {a / b:.2f}x")
    for kind in ("rate", "rate_at_once"):
        a, b = getattr(first, kind), getattr(mixed, kind)
        cells.append(f"{a:.0f} to {b:.0f}: {b / a:.2f}x")
    return f"| {' | '.join([name, *cells])} |"


def main() -> None:
    """Print the constants, then a line for each pool below the note's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=int, default=256, help="tokens of a mixed step")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--reserved", type=float, nargs="+", default=[1e9, 3.5e9], help="bytes")
    args = parser.parse_args()
    step_time = RooflineStepTime(model=MODELS["qwen3-8b"], hardware=HARDWARE["rtx4090"])
    print(f"{step_time}\n")
    print(f"mixed: budget {args.budget}; prefill_first: budget {WHOLE_PROMPTS}\n")
    columns = ["", "TTFT p99, ms", "TPOT p99, ms", "ITL p99, ms", "output tok/s", "at once"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    print(line("the note", MEASURED["prefill_first"], MEASURED["mixed"]), flush=True)
    for reserved in args.reserved:
        num_tokens = BLOCK_SIZE * step_time.num_kv_blocks(BLOCK_SIZE, reserved=reserved)
        first = latencies(step_time, "prefill_first", WHOLE_PROMPTS, reserved, args.seeds)
        mixed = latencies(step_time, "fcfs", args.budget, reserved, args.seeds)
        print(line(f"simulated, K/V of {num_tokens} tokens", first, mixed), flush=True)


if __name__ == "__main__":
    main()
