"""Latency and throughput of the engine under a load that comes at its own times.

    python profiling/serving_benchmark.py --num-requests 64 --inputs 32 512 --outputs 16 64 \
        --rate 1 2 inf --compare mixed,prefill_first --plots PLOTS --json RESULTS.json
    python profiling/serving_benchmark.py --azure TRACE.csv --arrivals trace --length-scale 0.1
    python profiling/serving_benchmark.py --sharegpt CONVERSATIONS.json --num-requests 100

One process, no server: the engine takes one step after the other, and requests are handed in
between them. Latencies count from the intended arrival. Each policy and rate has an engine of its
own, warmed up with a few prompts; besides, the first --warmup requests don't count.

--trace records the steps from --start-step on, of a run of one policy and rate: see step_tracer.py.

--option max_num_seqs=64 sets an option of EngineConfig for all policies, and
--option prefill_first:max_num_batched_tokens=4096 for one of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from device_facts import DeviceSampler, software_facts
from latency_report import Latencies, LatencyReport, LatencyTarget, report, table
from plots import plot_runs
from serving_driver import ServedRun, ServingDriver, warm_up
from step_tracer import Kind, StepTracer
from workload import (
    POLICIES,
    Arrivals,
    Workload,
    add_workload_arguments,
    read_sharegpt,
    read_workload,
)

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.tokenizer import load_tokenizer


def parse_options(texts: list[str], policy: str) -> dict[str, Any]:
    """The options of one policy from "name=value" and "policy:name=value", values in JSON.

    Raises:
        ValueError: a text is of neither form, or names an unknown policy.
    """
    common: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ValueError(f"--option {text!r} is not name=value or policy:name=value")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value  # a plain word
        owner, colon, option = name.partition(":")
        if not colon:
            common[name] = parsed
        elif owner not in POLICIES:
            raise ValueError(f"--option {text!r}: {owner!r} is none of {', '.join(POLICIES)}")
        elif owner == policy:
            own[option] = parsed
    return {**common, **own}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = add_workload_arguments(parser)
    source.add_argument("--sharegpt", type=Path, help="conversations, JSON")
    parser.add_argument("--length-scale", type=float, default=1.0, help="of prompts and outputs")
    parser.add_argument("--rate", type=float, nargs="+", default=[1.0], help="req/s, or inf")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--compare", default="mixed", help="policies, with commas between")
    parser.add_argument("--option", action="append", default=[], help="[policy:]name=value")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--warmup", type=int, default=0, help="first requests that don't count")
    parser.add_argument("--ttft-target-ms", type=float, default=float("inf"), help="of goodput")
    parser.add_argument("--tpot-target-ms", type=float, default=float("inf"), help="of goodput")
    parser.add_argument("--trace", choices=get_args(Kind), help="record some steps")
    parser.add_argument("--start-step", type=int, default=100, help="first one recorded")
    parser.add_argument("--num-steps", type=int, default=20, help="how many are recorded")
    parser.add_argument("--trace-file", type=Path, help="of torch or steps: written there, JSON")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--plots", type=Path, help="a folder for PNG plots")
    return parser


def make_engine(args: argparse.Namespace, policy: str) -> Engine:
    """An engine under one policy, warmed up."""
    options = {"policy": POLICIES[policy], **parse_options(args.option, policy)}
    engine = Engine(EngineConfig(model=args.model, **options))
    warm_up(engine, engine.config.max_num_batched_tokens)
    return engine


def load_workload(args: argparse.Namespace) -> Workload:
    """The requests of the command line; arrivals as they are."""
    config = EngineConfig(model=args.model, **parse_options(args.option, ""))
    if args.sharegpt:
        tokenizer = load_tokenizer(config.resolve_tokenizer())
        encode: Callable[[str], list[int]] = tokenizer.encode
        return read_sharegpt(args.sharegpt, encode, args.num_requests or 256)
    return read_workload(args, config.max_model_len, scale=args.length_scale)


def serve_once(
    args: argparse.Namespace, workload: Workload, policy: str
) -> tuple[ServedRun, LatencyReport]:
    """Make an engine, serve the workload, and let the engine go."""
    start = time.monotonic()
    engine = make_engine(args, policy)
    start_seconds = time.monotonic() - start
    tracer = None
    if args.trace:
        tracer = StepTracer(
            engine,
            args.trace,
            start_step=args.start_step,
            num_steps=args.num_steps,
            path=args.trace_file,
        )
    driver = ServingDriver(
        engine,
        workload,
        num_warmup=args.warmup,
        temperature=args.temperature,
        on_batch=None if tracer is None else lambda batch, _: tracer.note_step(batch),
    )
    with DeviceSampler() as sampler:
        run = driver.run()
    if tracer is not None:
        tracer.close()
    target = LatencyTarget(ttft=args.ttft_target_ms / 1e3, tpot=args.tpot_target_ms / 1e3)
    found = report(
        run.times, run.gaps, workload.num_prompt_tokens, num_warmup=args.warmup, target=target
    )
    extra = {
        "start_seconds": start_seconds,
        "num_refused": run.num_refused,
        "config": engine.config.describe(),
        "stats": engine.stats(),
        "device": sampler.facts(),
    }
    del driver, engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return run, dataclasses.replace(found, extra=extra)


def as_columns(run: ServedRun) -> dict[str, list[Any]]:
    """The steps of a run, a list for each number."""
    rows = [step.as_dict() for step in run.log]
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}


def main() -> None:
    """Print a table, a line for each rate and policy."""
    args = _parser().parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    policies = args.compare.split(",")
    if unknown := [policy for policy in policies if policy not in POLICIES]:
        raise SystemExit(f"--compare: {unknown[0]!r} is none of {', '.join(POLICIES)}")
    if args.trace and len(policies) * len(args.rate) > 1:
        raise SystemExit("--trace records one run: give one policy and one rate")
    base = load_workload(args)
    kind: Arrivals = args.arrivals or "poisson"
    runs: dict[str, ServedRun] = {}
    reports: dict[str, LatencyReport] = {}
    lines: dict[str, dict[float, LatencyReport]] = {policy: {} for policy in policies}
    latencies: dict[str, dict[float, Latencies]] = {policy: {} for policy in policies}
    for rate in args.rate:
        workload = base.arriving(kind, rate, args.seed, args.burst)
        for policy in policies:
            name = f"{policy}, rate {rate:g}"
            run, reports[name] = serve_once(args, workload, policy)
            runs[name], lines[policy][rate] = run, reports[name]
            latencies[policy][rate] = Latencies(times=run.times, gaps=run.gaps)
            print(f"{name}: done in {reports[name].duration:.1f} s", flush=True)
    print(f"\n{base.name}, {len(base)} requests\n\n{table(reports)}")
    problem = next(iter(reports.values())).extra["device"]["problem"]
    if problem:
        print(f"\nno device facts: {problem}")
    if args.json:
        found = {
            **software_facts(),
            "workload": base.name,
            "runs": {
                name: {**reports[name].as_dict(), "steps": as_columns(run)}
                for name, run in runs.items()
            },
        }
        args.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    if args.plots:
        plot_runs(args.plots, latencies, lines, {name: run.log for name, run in runs.items()})


if __name__ == "__main__":
    main()
