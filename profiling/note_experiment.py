"""What mixing prompts into decode steps brings, beside a published measurement.

    python profiling/note_experiment.py [--budget 256] [--seeds 16]
    python profiling/note_experiment.py --cpu [--threads 1]

The measurement is a note's on mixed batches in a small engine: Qwen3-8B on one RTX 4090, eager, 256
requests of 128 to 2048 prompt and 64 to 256 output tokens, two a second or all at once; whole
prompts first ("prefill_first") against one token budget for both kinds ("mixed"). All latencies
count from the intended arrival.

**In virtual time.** The hardware is the data sheet's. What the note leaves open is stated before
the results, and taken from elsewhere:

- How long the host takes to launch a layer eagerly: from `HOSTS`, two engines whose steps are
  known. While it takes longer than the device does, it is the time of the step.
- How much memory is left for K/V: what 90% leaves beside the weights, the libraries, and the
  activations of a warm-up with a whole budget of tokens, as engines of that kind reserve them;
  and, as the other end, without that warm-up. Blocks of 256 tokens.
- "prefill_first" is nano-vllm's (whole_prompts.py), under its budget.

Percentiles of each seed's 256 requests are averaged, since a p99 of 256 is the third worst of them.

**On a CPU** (--cpu) the engine itself serves a small model: a quarter of the lengths, a pool for as
many sequences, and the same share of what prefill_first serves at once. Only ratios compare: more
tokens in a step cost a CPU more time at once, where a GPU still reads its weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from calibrate import serve
from latency_report import LatencyReport, report
from serving_driver import warm_up
from simulation import ServerOptions, simulate
from step_time import HARDWARE, MODELS, ModelShape, RooflineStepTime
from workload import Workload, uniform

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.scheduler_config import Policy, SchedulerConfig

NUM_REQUESTS, INPUTS, OUTPUTS, RATE = 256, (128, 2048), (64, 256), 2.0
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 256
WHOLE_PROMPTS = 16384
"""nano-vllm's budget of a step, and of its warm-up."""
LIBRARY_BYTES = 0.7e9
"""An assumption: CUDA's context, workspaces of cuBLAS, NCCL."""
HOSTS = {
    # transformers' Qwen3 with 36 tiny layers took 22 ms a step on one core of an AMD EPYC (Zen 4):
    # Python and PyTorch without the launches.
    "Python alone": 22e-3 / 36,
    # Llama-7B, 32 layers, in plain PyTorch on an A100: 25.5 tokens/s, bound by the host, says
    # pytorch.org/blog/accelerating-generative-ai-2.
    "published": 1 / 25.5 / 32,
}
"""Seconds to launch one layer eagerly."""
SMALLER = 4
"""Lengths on a CPU are divided by it."""


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

    @classmethod
    def of(cls, in_turn: LatencyReport, at_once: LatencyReport) -> Latencies:
        """From the reports of the two runs."""
        p99 = [1e3 * kind["p99"] for kind in (in_turn.ttft, in_turn.tpot, in_turn.itl)]
        rates = (in_turn.output_rate, at_once.output_rate)
        return cls(ttft=p99[0], tpot=p99[1], itl=p99[2], rate=rates[0], rate_at_once=rates[1])


MEASURED = {
    "prefill_first": Latencies(ttft=1189, tpot=63.5, itl=337, rate=309, rate_at_once=448),
    "mixed": Latencies(ttft=536, tpot=49.6, itl=62.6, rate=309, rate_at_once=478),
}
"""The note's numbers."""


def eager(per_layer: float) -> RooflineStepTime:
    """The note's model and hardware, with so many seconds to launch a layer."""
    default = RooflineStepTime(model=MODELS["qwen3-8b"], hardware=HARDWARE["rtx4090"])
    return dataclasses.replace(default, launch_seconds=per_layer / default.launches_per_layer)


def warm_up_bytes(model: ModelShape) -> float:
    """Activations of a step of WHOLE_PROMPTS tokens where it is widest, in a layer's MLP."""
    # The gate and what it is multiplied with, their product, and the residual with its norm.
    return 2.0 * WHOLE_PROMPTS * (3 * model.intermediate_size + 2 * model.hidden_size)


def latencies(
    step_time: RooflineStepTime, policy: Policy, budget: int, reserved: float, num_seeds: int
) -> Latencies:
    """The means over the seeds, in virtual time."""
    options = ServerOptions(
        scheduler=SchedulerConfig(
            max_num_seqs=NUM_REQUESTS,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            policy=policy,
        ),
        num_blocks=step_time.num_kv_blocks(BLOCK_SIZE, reserved=reserved),
        block_size=BLOCK_SIZE,
        whole_prompts=policy == "prefill_first",
    )
    found = []
    for seed in range(num_seeds):
        lengths = uniform(NUM_REQUESTS, INPUTS, OUTPUTS, seed)
        reports = []
        for rate in (RATE, math.inf):
            workload = lengths.arriving("poisson", rate, seed)
            result = simulate(workload, options, step_time)
            reports.append(report(result.times, result.gaps, workload.num_prompt_tokens))
        found.append(dataclasses.astuple(Latencies.of(*reports)))
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


def in_virtual_time(args: argparse.Namespace) -> None:
    """Print the constants, then a line for each host and pool below the note's."""
    print(f"{RooflineStepTime(model=MODELS['qwen3-8b'], hardware=HARDWARE['rtx4090'])}\n")
    model = MODELS["qwen3-8b"]
    hosts = HOSTS
    if args.launch_ms:
        hosts = {f"{ms:g} ms a step": ms / 1e3 / model.num_layers for ms in args.launch_ms}
    without = LIBRARY_BYTES
    pools = {"after a warm-up": without + warm_up_bytes(model), "without one": without}
    print(f"but seconds to launch a layer: {hosts}; bytes reserved: {pools}")
    print(f"mixed: budget {args.budget}; prefill_first: budget {WHOLE_PROMPTS}\n")
    print_table_head()
    for reserved in pools.values():
        for host, per_layer in hosts.items():
            step_time = eager(per_layer)
            num_tokens = BLOCK_SIZE * step_time.num_kv_blocks(BLOCK_SIZE, reserved=reserved)
            first = latencies(step_time, "prefill_first", WHOLE_PROMPTS, reserved, args.seeds)
            mixed = latencies(step_time, "fcfs", args.budget, reserved, args.seeds)
            print(line(f"host {host}, K/V of {num_tokens} tokens", first, mixed), flush=True)


def print_table_head() -> None:
    """The columns, and what was measured."""
    columns = ["", "TTFT p99, ms", "TPOT p99, ms", "ITL p99, ms", "output tok/s", "at once"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    print(line("the note", MEASURED["prefill_first"], MEASURED["mixed"]), flush=True)


def served(engine: Engine, workload: Workload, args: argparse.Namespace) -> LatencyReport:
    """The report of an engine that serves a workload."""
    run = serve(engine, workload, by_cpu_time=args.threads == 1).run
    return report(run.times, run.gaps, workload.num_prompt_tokens)


def on_a_cpu(args: argparse.Namespace) -> None:
    """Print what was scaled, and a line below the note's."""
    if args.threads:
        torch.set_num_threads(args.threads)
    pool = eager(0.0).num_kv_blocks(
        BLOCK_SIZE, reserved=LIBRARY_BYTES + warm_up_bytes(MODELS["qwen3-8b"])
    )
    inputs, outputs = ((low // SMALLER, high // SMALLER) for low, high in (INPUTS, OUTPUTS))
    lengths = uniform(args.num_requests, inputs, outputs, 0)
    engines: dict[str, Engine] = {}
    for name, policy, budget in (
        ("prefill_first", "prefill_first", WHOLE_PROMPTS // SMALLER),
        ("mixed", "fcfs", args.cpu_budget),
    ):
        engines[name] = Engine(
            EngineConfig(
                model=args.model,
                max_model_len=MAX_MODEL_LEN // SMALLER,
                max_num_seqs=32,
                max_num_batched_tokens=budget,
                block_size=16,
                num_kv_blocks=pool * BLOCK_SIZE // SMALLER // 16,
                enable_prefix_caching=False,
                policy=policy,
                overlap_scheduling=False,  # as the engines of the measurement
            )
        )
        warm_up(engines[name], min(budget, inputs[1]))
    at_once = {name: served(engine, lengths, args) for name, engine in engines.items()}
    # The note's rate in parts of what its prefill_first served at once.
    share = RATE * sum(OUTPUTS) / 2 / MEASURED["prefill_first"].rate_at_once
    rate = share * at_once["prefill_first"].request_rate
    print(
        f"{args.model}: {args.num_requests} requests, {inputs} in and {outputs} out, "
        f"{rate:.2f} a second; mixed: budget {args.cpu_budget}\n"
    )
    workload = lengths.arriving("poisson", rate, 0)
    found = {
        name: Latencies.of(served(engine, workload, args), at_once[name])
        for name, engine in engines.items()
    }
    print_table_head()
    print(line("measured on this CPU", found["prefill_first"], found["mixed"]))


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=int, default=256, help="tokens of a mixed step")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--launch-ms", type=float, nargs="+", help="other hosts, ms of a step")
    parser.add_argument("--cpu", action="store_true", help="measure the engine, scaled down")
    parser.add_argument("--cpu-budget", type=int, default=128, help="tokens of a mixed step")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="on a CPU")
    parser.add_argument("--num-requests", type=int, default=96, help="on a CPU")
    parser.add_argument("--threads", type=int, help="of torch; 1: times are CPU time")
    args = parser.parse_args()
    if args.cpu:
        on_a_cpu(args)
    else:
        in_virtual_time(args)


if __name__ == "__main__":
    main()
