"""Serve a load in virtual time, on hardware that needn't be here.

    python profiling/simulate.py --azure TRACE.csv --rate 6 --hardware h100
    python profiling/simulate.py --azure TRACE.csv --num-requests 1000000 --rate 6
    python profiling/simulate.py --inputs 128 2048 --outputs 64 256 --rate 2 inf \
        --policy mixed prefill_first --budget 512

The scheduler, the block manager and the ladders are the engine's own. What a step takes comes from
the model's shape and a data sheet (step_time.py), or from a table that calibrate.py fitted to the
engine (--step-time). Rates and policies given together are run one after the other, each on a
line. Decode steps that change nothing but lengths are skipped exactly.

--step-sizes writes what tune_capture_sizes.py reads: how often a step had how many tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import time
from pathlib import Path

from fitted_step_time import FittedStepTime
from latency_report import Latencies, LatencyReport, LatencyTarget, report, table
from plots import plot_runs
from simulation import ServerOptions, SimulationResult, simulate
from step_log import StepLog
from step_time import HARDWARE, MODELS, RooflineStepTime
from workload import POLICIES, Arrivals, Workload, add_workload_arguments, read_workload

from graphs.capture_sizes import CaptureLadders, CaptureSizes, parse_capture_sizes
from runtime.scheduler_config import SchedulerConfig

VLLM_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""vLLM's default sizes; larger steps run without a graph there."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_workload_arguments(parser)
    parser.add_argument("--rate", type=float, nargs="+", default=[1.0], help="req/s, or inf")
    parser.add_argument("--hardware", choices=HARDWARE, default="h100")
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--step-time", type=Path, help="fitted to the engine, JSON")
    parser.add_argument("--policy", choices=POLICIES, nargs="+", default=["mixed"])
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--prefill-first-budget", type=int, help="of that policy, if another")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--num-kv-blocks", type=int, help="else what the memory leaves")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--itl-target-ms", type=float)
    parser.add_argument(
        "--capture-sizes", default="exact", help='eager, exact, default, vllm, or "1,2,4,8-64:8"'
    )
    parser.add_argument("--bucket-fitting", action="store_true")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--router", choices=("round_robin", "least_loaded"), default="round_robin")
    parser.add_argument("--warmup", type=int, default=0, help="first requests that don't count")
    parser.add_argument("--ttft-target-ms", type=float, default=float("inf"), help="of goodput")
    parser.add_argument("--tpot-target-ms", type=float, default=float("inf"), help="of goodput")
    parser.add_argument("--no-skip", action="store_true", help="every step by itself, as a check")
    parser.add_argument("--step-sizes", type=Path, help="write them there, of the last run")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--plots", type=Path, help="a folder for PNG plots; for short runs")
    return parser


def known_ladders(*, max_num_seqs: int, budget: int, ridge: int) -> dict[str, CaptureLadders]:
    """The ladders that have a name."""
    default = CaptureLadders.default(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, ridge=ridge
    )
    vllm = CaptureLadders(
        decode=CaptureSizes.up_to(max_num_seqs, VLLM_SIZES),
        mixed=CaptureSizes(tuple(size for size in VLLM_SIZES if size <= budget)),
    )
    return {"default": default, "vllm": vllm}


def ladders_of(text: str, *, max_num_seqs: int, budget: int, ridge: int) -> CaptureLadders | None:
    """The ladders that a name or a list of sizes stands for; None: no padding."""
    if text in ("eager", "exact"):
        return None
    known = known_ladders(max_num_seqs=max_num_seqs, budget=budget, ridge=ridge)
    return known.get(text) or CaptureLadders.explicit(
        parse_capture_sizes(text), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )


def server_options(
    args: argparse.Namespace, policy: str, step_time: RooflineStepTime | FittedStepTime
) -> ServerOptions:
    """One replica as the command line describes it, under one policy."""
    budget = args.budget
    if policy == "prefill_first" and args.prefill_first_budget:
        budget = args.prefill_first_budget
    if args.num_kv_blocks:
        num_blocks = args.num_kv_blocks
    elif isinstance(step_time, RooflineStepTime):
        num_blocks = step_time.num_kv_blocks(args.block_size)
    else:
        raise SystemExit("--step-time says nothing of memory: give --num-kv-blocks")
    ridge = step_time.ridge if isinstance(step_time, RooflineStepTime) else args.max_num_seqs
    ladders = ladders_of(
        args.capture_sizes, max_num_seqs=args.max_num_seqs, budget=budget, ridge=ridge
    )
    scheduler = SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=args.max_model_len,
        policy=POLICIES[policy],
        ladders=ladders,
        bucket_fitting=args.bucket_fitting,
        itl_target_ms=None if policy == "prefill_first" else args.itl_target_ms,
    )
    return ServerOptions(
        scheduler=scheduler,
        num_blocks=num_blocks,
        block_size=args.block_size,
        enable_prefix_caching=args.prefix_caching,
        captures_all=args.capture_sizes == "exact",
        skips=not args.no_skip,
    )


def summary(
    result: SimulationResult, workload: Workload, args: argparse.Namespace
) -> LatencyReport:
    """The report of one run, with the totals of its steps."""
    target = LatencyTarget(ttft=args.ttft_target_ms / 1e3, tpot=args.tpot_target_ms / 1e3)
    found = report(
        result.times,
        result.gaps,
        workload.num_prompt_tokens,
        num_warmup=args.warmup,
        target=target,
    )
    return dataclasses.replace(found, extra=dataclasses.asdict(result.totals))


def describe(reports: dict[str, LatencyReport]) -> str:
    """What happened in the steps, a line for each run."""
    lines = []
    for name, item in reports.items():
        totals = item.extra
        ran = totals["num_tokens"] + totals["num_padding_tokens"]
        lines.append(
            f"{name}: {totals['num_steps']} steps, {totals['num_calls']} of them scheduled one by "
            f"one; {100 * totals['num_padding_tokens'] / ran:.1f}% of tokens padding; "
            f"{totals['num_preemptions']} preemptions; {totals['num_refused']} refused; "
            f"{totals['num_target_misses']} target misses"
        )
    return "\n".join(lines)


def main() -> None:
    """Print a table, a line for each rate and policy."""
    args = _parser().parse_args()
    step_time: RooflineStepTime | FittedStepTime
    if args.step_time:
        step_time = FittedStepTime.load(args.step_time)
    else:
        step_time = RooflineStepTime(model=MODELS[args.model], hardware=HARDWARE[args.hardware])
    print(f"step time: {step_time}")
    base = read_workload(args, args.max_model_len)
    reports: dict[str, LatencyReport] = {}
    lines: dict[str, dict[float, LatencyReport]] = {policy: {} for policy in args.policy}
    latencies: dict[str, dict[float, Latencies]] = {policy: {} for policy in args.policy}
    logs: dict[str, StepLog] = {}
    for rate in args.rate:
        kind: Arrivals = args.arrivals or "poisson"
        workload = base.arriving(kind, rate, args.seed, args.burst)
        for policy in args.policy:
            options = server_options(args, policy, step_time)
            start = time.process_time()
            result = simulate(
                workload,
                options,
                step_time,
                num_replicas=args.replicas,
                router=args.router,
                num_warmup=args.warmup,
                logs_steps=args.plots is not None,
            )
            name = f"{policy}, budget {options.scheduler.max_num_batched_tokens}, rate {rate:g}"
            reports[name] = summary(result, workload, args)
            lines[policy][rate] = reports[name]
            if args.plots:
                latencies[policy][rate] = Latencies(times=result.times, gaps=result.gaps)
                logs[name] = result.logs[0]
            seconds = time.process_time() - start
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{name}: {seconds:.1f} s of one core, at most {memory:.0f} MiB", flush=True)
            if args.step_sizes:
                sizes = {
                    "step_sizes": result.totals.step_sizes(),
                    "num_kv_tokens": result.totals.num_kv_tokens,
                }
                args.step_sizes.write_text(json.dumps(sizes) + "\n", encoding="utf-8")
    print(f"\n{options.num_blocks} KV blocks of {options.block_size} a replica\n")
    print(table(reports), end="\n\n")
    print(describe(reports))
    if args.json:
        found = {name: item.as_dict() for name, item in reports.items()}
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.plots:
        plot_runs(args.plots, latencies, lines, logs)


if __name__ == "__main__":
    main()
