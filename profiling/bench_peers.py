"""Our engine beside its peers on a CPU: one run, one process each, rounds interleaved.

    python profiling/bench_peers.py stepgraph vllm \
        --python vllm=/path/to/venv/bin/python [--workloads W1 W2 W3 W4 W5] [--rounds 3]

An engine is a name and its options: stepgraph, stepgraph:quantization=int8, vllm,
transformers, transformers:continuous=true, openvino:gguf=FILE, llama:gguf=FILE (llama-cpp-python;
the same weights as a GGUF), memory (in W1: the limit of reading all weights for each token). All
processes start and load first, then take turns, one at work at a time. Prompts are random token ids
from 17 to 9,999, new in each round and the same for all engines; temperature 0.6, end tokens
ignored, bfloat16 (llama: what the file has). Printed: medians over the rounds, and their ratio to
the first engine.

W1  one sequence: prompt 128, output 128; output tokens/s
W2  32 sequences at once: prompts 128..1024, outputs 32..128, uniform; output tokens/s
W3  16 requests that share 512 tokens and have 32 of their own, output 32; seconds, prefix cache
    cold and warm
W4  W2's shapes, 200 requests, Poisson arrivals, by default at 0.7 times the request rate that vllm
    reached in W2 (so W4 needs W2, or --rate); TTFT, TPOT and ITL in ms. Not for transformers'
    generate, which shows its tokens at the end
W5  64 ShareGPT conversations' first turns, others in each round, greedy, the model's own stops,
    256 tokens at most; output tokens/s
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sharegpt import first_turns

WORKER = Path(__file__).with_name("peer_worker.py")
MAX_MODEL_LEN = 2048
DEFAULTS: dict[str, dict[str, Any]] = {
    "stepgraph": {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, "kv_cache_bytes": 2 << 30},
    "vllm": {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN},
    "transformers": {"continuous": False, "max_num_batched_tokens": 512, "cache_tokens": 90_000},
    "openvino": {"max_num_batched_tokens": 512, "cache_gib": 2, "precision": "bf16"},
    "llama": {"sequences": 32, "context": MAX_MODEL_LEN, "max_num_batched_tokens": 512},
    "memory": {"threads": len(os.sched_getaffinity(0))},
}
Requests = list[dict[str, Any]]
Times = list[list[float]]


class Worker:
    """One engine's process."""

    def __init__(self, spec: str, python: str, model: str) -> None:
        self.spec = spec
        name, _, text = spec.partition(":")
        if name not in DEFAULTS:
            raise SystemExit(f"there is no engine {name!r}; use one of {', '.join(DEFAULTS)}")
        options = DEFAULTS[name] | dict(_parse_option(item) for item in text.split(",") if item)
        self.serves_many = name != "memory"
        self.has_latencies = self.serves_many and (name != "transformers" or options["continuous"])
        self._process = subprocess.Popen(
            [python, str(WORKER), name, model, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(name, python),
        )
        self.start_seconds: float = self._answer()["start_seconds"]

    def run(self, requests: Requests) -> Times:
        """Arrival times of every request's tokens, seconds from the start."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        times: Times = self._answer()["times"]
        return times

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.spec} ended with status {self._process.wait()}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _environment(name: str, python: str) -> dict[str, str]:
    environ = dict(os.environ)
    environ.pop("OMP_NUM_THREADS", None)  # Each engine shall choose for itself.
    if name in ("stepgraph", "memory"):
        environ["PYTHONPATH"] = str(WORKER.parents[1])
    if name == "vllm":
        environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{len(os.sched_getaffinity(0)) - 1}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        library = next(Path(python).parents[1].glob("lib/libiomp5.so"), None)
        if library is not None:
            environ["LD_PRELOAD"] = str(library)
        print(f"vllm: Intel OpenMP {'not found' if library is None else 'preloaded'}")
    return environ


def _parse_option(item: str) -> tuple[str, Any]:
    key, _, text = item.partition("=")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text


def request(
    prompt: list[int], max_tokens: int, *, arrival: float = 0.0, greedy: bool = False
) -> dict[str, Any]:
    """A request as the workers read it; greedy ones stop at the model's own end tokens."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "arrival": arrival,
        "temperature": 0.0 if greedy else 0.6,
        "ignore_eos": not greedy,
    }


def _ids(rng: np.random.Generator, count: int) -> list[int]:
    ids: list[int] = rng.integers(17, 10_000, count).tolist()
    return ids


def single(seed: int) -> Requests:
    """W1."""
    return [request(_ids(np.random.default_rng(seed), 128), 128)]


def many(seed: int, count: int = 32) -> Requests:
    """W2. Lengths are the same in all rounds, ids are not."""
    shapes, rng = np.random.default_rng(0), np.random.default_rng(seed)
    inputs, outputs = shapes.integers(128, 1025, count), shapes.integers(32, 129, count)
    return [
        request(_ids(rng, length), out)
        for length, out in zip(inputs.tolist(), outputs.tolist(), strict=True)
    ]


def shared_prefix(seed: int) -> Requests:
    """W3."""
    rng = np.random.default_rng(seed)
    prefix = _ids(rng, 512)
    return [request(prefix + _ids(rng, 32), 32) for _ in range(16)]


def poisson(seed: int, rate: float, count: int) -> Requests:
    """W4."""
    arrivals = np.random.default_rng(1).exponential(1 / rate, count).cumsum().tolist()
    requests = many(seed, count)
    return [r | {"arrival": arrival} for r, arrival in zip(requests, arrivals, strict=True)]


def conversations(path: Path, tokenize: Callable[[list[Any]], list[int]], count: int) -> Requests:
    """W5: the first questions of a ShareGPT file, short enough for the model."""
    requests: Requests = []
    for question, _ in first_turns(path):
        ids = tokenize([{"role": "user", "content": question}])
        if 4 <= len(ids) <= MAX_MODEL_LEN - 256:
            requests.append(request(ids, 256, greedy=True))
        if len(requests) == count:
            return requests
    raise SystemExit(f"{path} has only {len(requests)} conversations that fit, {count} are needed")


def tokens_per_second(times: Times) -> float:
    """Output tokens over the time to the last one."""
    return sum(map(len, times)) / max(t[-1] for t in times)


def latencies(requests: Requests, times: Times) -> dict[str, float]:
    """p50 and p99 of TTFT, TPOT and ITL in ms, TTFT from the intended arrival."""
    ttft = [t[0] - r["arrival"] for r, t in zip(requests, times, strict=True)]
    tpot = [(t[-1] - t[0]) / (len(t) - 1) for t in times if len(t) > 1]
    itl = np.concatenate([np.diff(t) for t in times])
    return {
        f"{name} p{q}": float(np.percentile(values, q)) * 1e3
        for name, values in (("TTFT", ttft), ("TPOT", tpot), ("ITL", itl))
        for q in (50, 99)
    }


class Report:
    """Collects figures by engine and prints medians beside ratios."""

    def __init__(self, engines: list[str]) -> None:
        self._engines = engines
        self._figures: dict[str, dict[str, list[float]]] = {}

    def add(self, figure: str, engine: str, value: float) -> None:
        """One round's value."""
        self._figures.setdefault(figure, {}).setdefault(engine, []).append(value)

    def median(self, figure: str, engine: str) -> float:
        """Over the rounds so far."""
        return statistics.median(self._figures[figure][engine])

    def print(self) -> None:
        """A line per figure and engine."""
        for figure, values in self._figures.items():
            first = statistics.median(next(iter(values.values())))
            for engine in self._engines:
                if engine in values:
                    median = statistics.median(values[engine])
                    spread = f"{min(values[engine]):.4g}..{max(values[engine]):.4g}"
                    print(
                        f"{figure:16s} {engine:44s} {median:9.4g} {median / first:6.2f}x {spread}"
                    )

    def as_dict(self) -> dict[str, dict[str, list[float]]]:
        """All values, by figure and engine."""
        return self._figures


def run_rounds(args: argparse.Namespace, workers: list[Worker], report: Report) -> None:
    """W1, W2, W3 and W5, engines taking turns."""
    for number in range(args.rounds):
        shift = number % len(workers)
        for worker in workers[shift:] + workers[:shift]:
            run_round(args, worker, report, number)
        print(f"round {number + 1} of {args.rounds} done", file=sys.stderr)


def run_round(args: argparse.Namespace, worker: Worker, report: Report, number: int) -> None:
    """One engine's turn in round `number`."""
    seed = 1000 * (number + 1)
    if "W1" in args.workloads:
        report.add("W1 tok/s", worker.spec, tokens_per_second(worker.run(single(seed))))
    if not worker.serves_many:
        return
    if "W2" in args.workloads:
        report.add("W2 tok/s", worker.spec, tokens_per_second(worker.run(many(seed + 1))))
    if "W3" in args.workloads:
        for figure in ("W3 cold s", "W3 warm s"):
            times = worker.run(shared_prefix(seed + 2))
            report.add(figure, worker.spec, max(t[-1] for t in times))
    if "W5" in args.workloads:
        first = number * args.num_conversations
        times = worker.run(args.conversations[first : first + args.num_conversations])
        report.add("W5 tok/s", worker.spec, tokens_per_second(times))


def run_arrivals(args: argparse.Namespace, workers: list[Worker], report: Report) -> None:
    """W4, for engines that have latencies."""
    rate = args.rate
    if rate is None:
        peer = next((w.spec for w in workers if w.spec.startswith("vllm")), workers[0].spec)
        tokens = sum(r["max_tokens"] for r in many(0))
        rate = 0.7 * 32 * report.median("W2 tok/s", peer) / tokens
    print(f"W4: {rate:.2f} requests/s")
    for number in range(args.rounds):
        for worker in workers:
            if not worker.has_latencies:
                continue
            requests = poisson(7000 + number, rate, args.num_requests)
            for figure, value in latencies(requests, worker.run(requests)).items():
                report.add(f"W4 {figure} ms", worker.spec, value)


def main() -> None:
    """Run it and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", nargs="+", help="name[:option=value,...]; the first is the base")
    parser.add_argument("--python", nargs="*", default=[], metavar="NAME=PATH")
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, help="of W4; default: 0.7 times vllm's rate in W2")
    parser.add_argument("--num-requests", type=int, default=200, help="of W4")
    parser.add_argument("--num-conversations", type=int, default=64, help="of W5, in each round")
    parser.add_argument("--sharegpt", type=Path, help="JSON file of conversations, for W5")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--json", type=Path, help="write all values there")
    args = parser.parse_args()
    sys.path.insert(0, str(WORKER.parents[1]))
    from runtime.config import EngineConfig
    from runtime.tokenizer import load_tokenizer

    model = str(EngineConfig(model=args.model).resolve_model())
    if "W5" in args.workloads:
        if args.sharegpt is None:
            parser.error("W5 needs --sharegpt FILE")
        tokenizer = load_tokenizer(Path(model))
        count = args.rounds * args.num_conversations
        args.conversations = conversations(args.sharegpt, tokenizer.apply_chat_template, count)
    pythons = dict(item.split("=", 1) for item in args.python)
    workers = [Worker(s, pythons.get(s.split(":")[0], sys.executable), model) for s in args.engines]
    report = Report(args.engines)
    for worker in workers:
        print(f"{worker.spec}: ready after {worker.start_seconds:.1f} s")
        worker.run([request(list(range(17, 81)), 8)])  # warm up
    try:
        run_rounds(args, workers, report)
        if "W4" in args.workloads:
            run_arrivals(args, workers, report)
    finally:
        report.print()
        if args.json:
            args.json.write_text(json.dumps(report.as_dict(), indent=1))
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    main()
