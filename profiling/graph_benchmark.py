"""What each graph mode costs at the start and saves in each step, by mode and size.

    python profiling/graph_benchmark.py FOLDER [--model smollm2-135m-instruct]
        [--modes none full piecewise full_and_piecewise] [--steps 30] [--context 512]

One engine per mode, one after the other. Decode steps: so many sequences, of about the given
context each. Mixed steps: prompts of so many tokens together, with nothing computed before. The
sizes are those that the ladders have by default, or what --capture-sizes, --decode and --mixed say,
the same ones for all modes. A step's time is that of Engine.step, scheduling and sampling included.

Prints a table, and writes FOLDER/graph_benchmark.json. On a CPU graphs are emulated: there it shows
that the script works, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphs.capture_sizes import CaptureLadders, parse_capture_sizes
from runtime import LLM, SamplingParams
from runtime.device_rates import device_rates
from runtime.engine import Engine
from runtime.models import load_decoder_config
from runtime.step_cost import estimated_cost

MODES = ("none", "full", "piecewise", "full_and_piecewise")
NUM_WARM_UPS = 2
"""Steps of each size that are not timed."""
ENGINE_OPTIONS = (
    *("device", "dtype", "load_format", "attention_backend", "capture_sizes"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all modes, write and print."""
    args = _parse(argv)
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "platform": platform.platform(),
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "modes": {mode: measure(mode, args) for mode in args.modes},
    }
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / "graph_benchmark.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print_report(report)
    print(f"\nwritten to {path}")


def measure(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine in one mode, and time its steps."""
    given = {name: getattr(args, name) for name in ENGINE_OPTIONS}
    options = {name: value for name, value in given.items() if value is not None}
    start = time.perf_counter()
    with LLM(args.model, graph_mode=mode, enable_prefix_caching=False, **options) as llm:
        start_seconds = time.perf_counter() - start
        engine, stats = llm.engine, llm.stats()
        device = engine.config.device
        ladders = default_ladders(engine, args.capture_sizes)
        assert ladders.decode is not None and ladders.mixed is not None
        timer = StepTimer(engine, args.steps)
        decode = args.decode or ladders.decode.sizes
        mixed = args.mixed or [size for size in ladders.mixed.sizes if size > 1]
        return {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "start_seconds": start_seconds,
            "capture_seconds": sum(capture["seconds"] for capture in stats["captures"]),
            **{name: stats[name] for name in ("graph_bytes", "estimated_graph_bytes")},
            **{name: stats[name] for name in ("num_kv_blocks", "captures", "dropped")},
            "steps": [
                *(timer.time_decodes(num_seqs, args.context) for num_seqs in decode),
                *(timer.time_prompts(num_tokens) for num_tokens in mixed),
            ],
        }


def default_ladders(engine: Engine, capture_sizes: str | None) -> CaptureLadders:
    """What full_and_piecewise captures under the engine's limits, whatever its mode is."""
    config = engine.config
    num_seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
    if capture_sizes is not None:
        return CaptureLadders.explicit(
            parse_capture_sizes(capture_sizes), max_num_seqs=num_seqs, max_num_batched_tokens=budget
        )
    cost = estimated_cost(
        load_decoder_config(config.model_path),
        bytes_per_value=config.dtype.itemsize,
        rates=device_rates(config.device),
    )
    return CaptureLadders.default(
        max_num_seqs=num_seqs, max_num_batched_tokens=budget, ridge=cost.ridge
    )


class StepTimer:
    """Times steps of one kind and size, of requests that are made for them.

    Args:
        engine: idle; it is idle again after each call.
        num_steps: timed steps of each size.
    """

    def __init__(self, engine: Engine, num_steps: int) -> None:
        self._engine = engine
        self._num_steps = num_steps
        stats, config = engine.stats(), engine.config
        self._num_slots = (stats["num_kv_blocks"] - 1) * config.block_size

    def time_decodes(self, num_seqs: int, context: int) -> dict[str, Any]:
        """Decode steps of so many sequences, their context shortened where it doesn't fit."""
        engine, config = self._engine, self._engine.config
        # The first sequences decode already while the last ones' prompts run.
        steps_per_prompt = context // (config.max_num_batched_tokens - num_seqs + 1) + 1
        num_outputs = NUM_WARM_UPS + self._num_steps + num_seqs * steps_per_prompt + 2
        room = self._num_slots // num_seqs - config.block_size
        length = min(context, min(config.max_model_len, room) - num_outputs)
        if length < 1:
            return {"kind": "decode", "num_tokens": num_seqs, "skipped": "too little KV memory"}
        params = SamplingParams(temperature=0, max_tokens=config.max_model_len, ignore_eos=True)
        sequences = [engine.add_request(_prompt(i, length), params) for i in range(num_seqs)]
        while any(sequence.first_token_time is None for sequence in sequences):
            engine.step()
        seconds, launch = self._time_steps()
        for sequence in sequences:
            engine.abort(sequence.request_id)
        return {"kind": "decode", "num_tokens": num_seqs, "context": length, **launch, **seconds}

    def time_prompts(self, num_tokens: int) -> dict[str, Any]:
        """Steps that hold whole prompts of so many tokens together."""
        engine, config = self._engine, self._engine.config
        longest = config.max_model_len - 1
        lengths = [longest] * (num_tokens // longest)
        lengths += [num_tokens % longest] if num_tokens % longest else []
        if num_tokens + config.block_size * len(lengths) > self._num_slots:
            return {"kind": "mixed", "num_tokens": num_tokens, "skipped": "too little KV memory"}
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

        def add() -> None:
            for i, length in enumerate(lengths):
                engine.add_request(_prompt(i, length), params)

        seconds, launch = self._time_steps(add)
        return {"kind": "mixed", "num_tokens": num_tokens, **launch, **seconds}

    def _time_steps(
        self, before_each: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Times, and the mode and size that the steps were launched in."""
        seconds, counts = [], self._counts()
        for index in range(NUM_WARM_UPS + self._num_steps):
            before_each()
            start = time.perf_counter()
            self._engine.step()  # its last act on the device is waited for: ids come to the host
            if index >= NUM_WARM_UPS:
                seconds.append(time.perf_counter() - start)
        taken = [key for key, steps in self._counts().items() if steps > counts.get(key, 0)]
        assert len(taken) == 1, f"steps of one size were launched as {taken}"
        milliseconds = 1e3 * np.array(seconds)
        (mode, size), times = taken[0], np.percentile(milliseconds, [50, 10, 90])
        names = ("median_ms", "p10_ms", "p90_ms")
        return dict(zip(names, times.tolist(), strict=True)), {"mode": mode, "size": size}

    def _counts(self) -> dict[tuple[str, int], int]:
        return {(b["mode"], b["size"]): b["steps"] for b in self._engine.stats()["buckets"]}


def _prompt(index: int, length: int) -> list[int]:
    return [(31 * index + place) % 97 for place in range(length)]


def print_report(report: dict[str, Any]) -> None:
    """A line per mode for the start, and one per size for the steps, times in milliseconds."""
    modes = report["modes"]
    print("mode                 start  capture  graphs    MiB  estimated  KV blocks")
    for mode, result in modes.items():
        estimate = result["estimated_graph_bytes"]
        print(
            f"{mode:<18}{result['start_seconds']:6.1f} s{result['capture_seconds']:7.1f} s"
            f"{len(result['captures']):8d}{result['graph_bytes'] / 2**20:7.1f}"
            + (f"{'-':>11}" if estimate is None else f"{estimate / 2**20:11.1f}")
            + f"{result['num_kv_blocks']:11d}"
        )
    print("\nkind     tokens" + "".join(f"{mode:>28}" for mode in modes))
    for steps in zip(*(result["steps"] for result in modes.values()), strict=True):
        columns = "".join(f"{_describe(step):>28}" for step in steps)
        print(f"{steps[0]['kind']:<8}{steps[0]['num_tokens']:>7}{columns}")


def _describe(step: dict[str, Any]) -> str:
    if "skipped" in step:
        return "skipped"
    size = f" {step['size']}" if step["size"] else ""
    return f"{step['median_ms']:.2f} ({step['mode']}{size})"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for the results, as JSON")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each size")
    parser.add_argument("--context", type=int, default=512, help="tokens of a decoding sequence")
    parser.add_argument("--decode", type=int, nargs="+", help="numbers of sequences")
    parser.add_argument("--mixed", type=int, nargs="+", help="numbers of tokens, from 2")
    numbers = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes")
    for name in ENGINE_OPTIONS:
        flag, kind = f"--{name.replace('_', '-')}", int if name in numbers else str
        parser.add_argument(flag, type=kind, help="as in the Python API")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
