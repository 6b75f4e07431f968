"""Requests for benchmarks and simulations: when they arrive and how long they are.

Lengths come from public traces, from ShareGPT conversations or from a uniform distribution;
arrivals from a process or from the trace.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from sharegpt import first_turns

from runtime.scheduler_config import Policy

Arrivals = Literal["poisson", "fixed", "burst", "trace"]
Item = TypeVar("Item")
POLICIES: dict[str, Policy] = {
    "mixed": "fcfs",
    "priority": "priority",
    "prefill_first": "prefill_first",
}
"""Names of the command lines, and what the scheduler calls them."""
PREFIX_TOKENS = 512
"""Tokens that one prefix id stands for, as in Mooncake's traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A number of requests, ordered by arrival."""

    name: str
    arrivals: np.ndarray
    """[n] float64 seconds from the start, ascending."""
    num_prompt_tokens: np.ndarray
    """[n] int32, at least 1."""
    num_output_tokens: np.ndarray
    """[n] int32, at least 1."""
    prefix_ids: tuple[tuple[int, ...], ...] | None = None
    """[n] ids of each prompt's pieces of PREFIX_TOKENS tokens, the last one shorter: equal ids
    are equal tokens. None: no prompt shares anything."""
    prompts: tuple[np.ndarray, ...] | None = None
    """[n] int32 token ids where the prompts are real ones."""

    def __len__(self) -> int:
        return len(self.arrivals)

    def prompt(self, index: int, vocab_size: int) -> np.ndarray:
        """The [num_prompt_tokens] int32 ids of a prompt: real, or random and always the same."""
        if self.prompts is not None:
            return self.prompts[index]
        num_tokens = int(self.num_prompt_tokens[index])
        if self.prefix_ids is None:
            return random_tokens((index,), num_tokens, vocab_size)
        pieces = [random_tokens((1, i), PREFIX_TOKENS, vocab_size) for i in self.prefix_ids[index]]
        return np.concatenate(pieces)[:num_tokens]

    def part(self, first: int, count: int) -> Workload:
        """At most `count` requests from number `first` on, the first of them arriving at 0."""
        if not 0 <= first < len(self):
            raise ValueError(f"there is no request {first}: the workload has {len(self)}")
        part = self._take(np.arange(first, min(first + count, len(self))))
        return dataclasses.replace(part, arrivals=part.arrivals - part.arrivals[0])

    def limited(self, max_tokens: int) -> Workload:
        """Those of at most `max_tokens` tokens, prompt and output together."""
        total = self.num_prompt_tokens.astype(np.int64) + self.num_output_tokens
        return self._take(np.flatnonzero(total <= max_tokens))

    def scaled(self, factor: float) -> Workload:
        """The same requests with all lengths times `factor`, at least one token each."""
        if factor == 1.0:
            return self
        if self.prefix_ids is not None or self.prompts is not None:
            raise ValueError("prompts with contents can't be scaled; leave --length-scale at 1")
        lengths = {
            name: np.maximum(1, np.rint(factor * getattr(self, name))).astype(np.int32)
            for name in ("num_prompt_tokens", "num_output_tokens")
        }
        return dataclasses.replace(self, **lengths)

    def resampled(self, count: int, seed: int) -> Workload:
        """`count` requests whose pairs of lengths are drawn from these; arrivals all at 0."""
        drawn = np.random.default_rng(seed).integers(0, len(self), count)
        return dataclasses.replace(self._take(drawn), arrivals=np.zeros(count))

    def arriving(self, kind: Arrivals, rate: float, seed: int = 0, burst: int = 16) -> Workload:
        """The same requests under another arrival process.

        Args:
            kind: "trace" keeps the own times, faster by `rate`; "burst" brings `burst` at once.
            rate: requests a second, or the factor of "trace"; infinity: all at time 0.
            seed: of "poisson".
            burst: requests of one burst.
        """
        if not rate > 0:
            raise ValueError(f"rate={rate} is not above 0")
        index = np.arange(len(self))
        arrivals: np.ndarray
        if math.isinf(rate):
            arrivals = np.zeros(len(self))
        elif kind == "poisson":
            gaps = np.random.default_rng(seed).exponential(1 / rate, len(self))
            arrivals = np.cumsum(gaps)
        elif kind == "fixed":
            arrivals = index / rate
        elif kind == "burst":
            arrivals = (index // burst) * (burst / rate)
        else:
            arrivals = self.arrivals / rate
        return dataclasses.replace(self, arrivals=arrivals)

    def _take(self, places: np.ndarray) -> Workload:
        return Workload(
            name=self.name,
            arrivals=self.arrivals[places],
            num_prompt_tokens=self.num_prompt_tokens[places],
            num_output_tokens=self.num_output_tokens[places],
            prefix_ids=_picked(self.prefix_ids, places),
            prompts=_picked(self.prompts, places),
        )


def _picked(values: tuple[Item, ...] | None, places: np.ndarray) -> tuple[Item, ...] | None:
    return None if values is None else tuple(values[i] for i in places.tolist())


def random_tokens(key: tuple[int, ...], num_tokens: int, vocab_size: int) -> np.ndarray:
    """[num_tokens] int32 ids below vocab_size, the same for the same key."""
    return np.random.default_rng(key).integers(0, vocab_size, num_tokens, dtype=np.int32)


def uniform(count: int, inputs: tuple[int, int], outputs: tuple[int, int], seed: int) -> Workload:
    """Lengths drawn evenly from two ranges, both ends included; arrivals all at 0."""
    rng = np.random.default_rng(seed)
    return Workload(
        name=f"{inputs[0]} to {inputs[1]} in, {outputs[0]} to {outputs[1]} out",
        arrivals=np.zeros(count),
        num_prompt_tokens=rng.integers(inputs[0], inputs[1] + 1, count, dtype=np.int32),
        num_output_tokens=rng.integers(outputs[0], outputs[1] + 1, count, dtype=np.int32),
    )


def read_azure(path: Path) -> Workload:
    """An Azure LLM inference trace: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

    Lines that start with # are comments. (github.com/Azure/AzurePublicDataset)
    """
    times, prompts, outputs = [], [], []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            # The fraction has seven digits, which fromisoformat takes only since Python 3.11.
            times.append(datetime.fromisoformat(row["TIMESTAMP"][:26]))
            prompts.append(int(row["ContextTokens"]))
            outputs.append(int(row["GeneratedTokens"]))
    seconds = [(time - times[0]).total_seconds() for time in times]
    return _from_lists(path, seconds, prompts, outputs)


def read_mooncake(path: Path) -> Workload:
    """A Mooncake trace: JSON lines with timestamp in ms, input_length, output_length, hash_ids.

    Lines that start with # are comments. (github.com/kvcache-ai/Mooncake)
    """
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip() and not line.startswith("#")]
    for number, row in enumerate(rows):
        if len(row["hash_ids"]) != -(-row["input_length"] // PREFIX_TOKENS):
            raise ValueError(
                f"{path}, request {number}: {len(row['hash_ids'])} hash_ids don't cover "
                f"{row['input_length']} tokens in pieces of {PREFIX_TOKENS}"
            )
    workload = _from_lists(
        path,
        [row["timestamp"] / 1000 for row in rows],
        [row["input_length"] for row in rows],
        [row["output_length"] for row in rows],
    )
    return dataclasses.replace(workload, prefix_ids=tuple(tuple(r["hash_ids"]) for r in rows))


def read_sharegpt(path: Path, encode: Callable[[str], list[int]], count: int) -> Workload:
    """The first `count` conversations of a ShareGPT file that have a question and an answer.

    The first question is the prompt, and the first answer is as long as the output shall be.

    Args:
        path: JSON; see sharegpt.py.
        encode: text to token ids.
        count: most requests.
    """
    prompts, outputs = [], []
    for question, answer in first_turns(path):
        ids, num_output = encode(question), len(encode(answer))
        if ids and num_output:
            prompts.append(np.array(ids, dtype=np.int32))
            outputs.append(num_output)
        if len(prompts) == count:
            break
    workload = _from_lists(path, [0.0] * len(prompts), [len(p) for p in prompts], outputs)
    return dataclasses.replace(workload, prompts=tuple(prompts))


def _from_lists(
    path: Path, seconds: list[float], prompts: list[int], outputs: list[int]
) -> Workload:
    if not prompts:
        raise ValueError(f"{path} holds no request")
    arrivals = np.array(seconds, dtype=np.float64)
    if (np.diff(arrivals) < 0).any():
        raise ValueError(f"{path} is not ordered by time; sort its requests")
    return Workload(
        name=path.stem,
        arrivals=arrivals,
        num_prompt_tokens=np.maximum(np.array(prompts, dtype=np.int32), 1),
        num_output_tokens=np.maximum(np.array(outputs, dtype=np.int32), 1),
    )


def add_workload_arguments(
    parser: argparse.ArgumentParser,
) -> argparse._MutuallyExclusiveGroup:
    """Add the options that `read_workload` reads; the group of sources, for further ones."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--azure", type=Path, help="an Azure LLM trace, CSV")
    source.add_argument("--mooncake", type=Path, help="a Mooncake trace, JSON lines")
    parser.add_argument("--inputs", type=int, nargs=2, default=(128, 2048), metavar="TOKENS")
    parser.add_argument("--outputs", type=int, nargs=2, default=(64, 256), metavar="TOKENS")
    parser.add_argument("--num-requests", type=int, help="drawn from the trace if it has fewer")
    parser.add_argument("--first-request", type=int, default=0, help="where in the trace to begin")
    parser.add_argument("--arrivals", choices=("poisson", "fixed", "burst", "trace"))
    parser.add_argument("--burst", type=int, default=16, help="requests of a burst")
    parser.add_argument("--seed", type=int, default=0)
    return source


def read_workload(
    args: argparse.Namespace, max_tokens: int | None, *, scale: float = 1.0
) -> Workload:
    """The requests of the command line, arrivals as they are.

    Args:
        args: with the options of `add_workload_arguments`.
        max_tokens: longer requests are left out, with a note.
        scale: of all lengths of a trace.
    """
    if not (args.azure or args.mooncake):
        return uniform(args.num_requests or 256, tuple(args.inputs), tuple(args.outputs), args.seed)
    workload = read_azure(args.azure) if args.azure else read_mooncake(args.mooncake)
    workload = workload.scaled(scale)
    if max_tokens is not None:
        before, workload = len(workload), workload.limited(max_tokens)
        if len(workload) < before:
            print(f"{before - len(workload)} requests over {max_tokens} tokens left out")
    count = args.num_requests or len(workload) - args.first_request
    if count <= len(workload):
        return workload.part(args.first_request, count)
    if args.arrivals == "trace":
        raise SystemExit(f"the trace has {len(workload)} arrivals, not {count}: drop one option")
    return workload.resampled(count, args.seed)
