"""What padding to captured sizes costs, and whether bucket fitting wins it back.

    python profiling/bucket_fitting_study.py TRACE.csv [--seconds 900] [--rates 1 2 3]
        [--budget 2048] [--policies exact even ...]

Drives the real scheduler with a virtual clock and no model: arrivals and lengths come from a trace
with the columns TIMESTAMP, ContextTokens, GeneratedTokens, and a step takes what a roofline says.
The trace's rate is raised by dividing its times. Requests that arrive within the given seconds
count, and the run goes on until all of them have ended.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from graphs.capture_sizes import CaptureLadders, CaptureSizes
from runtime.block_manager import BlockManager
from runtime.sampling_params import SamplingParams
from runtime.scheduler import Scheduler
from runtime.scheduler_config import SchedulerConfig
from runtime.sequence import Sequence
from runtime.step import StepOutput
from runtime.step_cost import RooflineCost

BUDGET = 2048
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 16384
BLOCK_SIZE = 256
"""Large, for speed: the pool holds all rows at full length, so blocks decide nothing."""
NUM_SIZES = 24
"""Of the ladders that the default is compared with."""
COST = RooflineCost(
    flops_per_token=2 * 8.2e9,
    weight_bytes=16.4e9,
    kv_bytes_per_token=147456,
    flop_rate=700e12,
    bandwidth=4e12,
    overhead=50e-6,
)
"""A model of 8 billion parameters in bfloat16 on an H100-class device."""
PERCENTILES = np.arange(1, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One line of the trace."""

    arrival: float
    """Virtual seconds."""
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One line of the result."""

    ladders: CaptureLadders | None
    """None: every step runs at its own size."""
    fits: bool = False
    budget: int = BUDGET


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one policy gave at one rate."""

    ttft: np.ndarray
    """[requests] seconds from arrival to first token."""
    gaps: np.ndarray
    """[output tokens after the first] seconds between tokens of one request."""
    num_steps: int
    num_off_ladder: int
    """Steps that ran unpadded because no size held them, or only one above twice their tokens."""
    num_shortened: int
    """Steps that left the rest of a prompt to the next one."""
    token_padding: float
    """Share of padding in the tokens that ran."""
    time_padding: float
    """Share of the time that the same steps would not take unpadded."""


def read_trace(path: Path, rate: float, seconds: float) -> list[Request]:
    """The requests that arrive within `seconds` when the trace runs `rate` times as fast."""
    requests: list[Request] = []
    start: datetime | None = None
    with path.open(newline="", encoding="utf-8") as file:
        lines = (line for line in file if not line.startswith("#"))
        for row in csv.DictReader(lines):
            # The fraction has seven digits, which fromisoformat takes only since Python 3.11.
            time = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or time
            arrival = (time - start).total_seconds() / rate
            if arrival > seconds:
                break
            requests.append(
                Request(
                    arrival=arrival,
                    num_prompt_tokens=int(row["ContextTokens"]),
                    num_output_tokens=int(row["GeneratedTokens"]),
                )
            )
    return requests


def policies(budget: int = BUDGET) -> dict[str, Policy]:
    """All that are compared, by name."""

    def shared(sizes: tuple[int, ...]) -> CaptureLadders:
        return CaptureLadders.explicit(
            sizes, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=budget
        )

    even = tuple(round(budget * (i + 1) / NUM_SIZES) for i in range(NUM_SIZES))
    ratio = budget ** (1 / (NUM_SIZES - 1))
    geometric = tuple(round(ratio**i) for i in range(NUM_SIZES))
    vllm = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    default = CaptureLadders.default(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=budget, ridge=COST.ridge
    )
    ladders = {"even": shared(even), "geometric": shared(geometric), "default": default}
    found = {"exact": Policy(ladders=None, budget=budget)}
    for name, value in ladders.items():
        found[name] = Policy(ladders=value, budget=budget)
        found[f"{name}+fitting"] = Policy(ladders=value, fits=True, budget=budget)
    # Its sizes end at 512; what is larger runs without a graph.
    mixed = CaptureSizes(vllm)
    decode = CaptureSizes.up_to(MAX_NUM_SEQS, vllm)
    found["vllm 51"] = Policy(ladders=CaptureLadders(decode=decode, mixed=mixed), budget=budget)
    return found


class Simulation:
    """One scheduler under one policy; time passes by `COST` alone."""

    def __init__(self, policy: Policy) -> None:
        self.now = 0.0
        self._is_padded = policy.ladders is not None
        self._budget = policy.budget
        config = SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=policy.budget,
            max_model_len=MAX_MODEL_LEN,
            ladders=policy.ladders,
            bucket_fitting=policy.fits,
        )
        num_blocks = 1 + MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE
        blocks = BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=False)
        self.scheduler = Scheduler(config, blocks, clock=lambda: self.now, step_cost=COST)
        self._last_token = np.zeros(MAX_NUM_SEQS)  # by row
        self._gaps: list[np.ndarray] = []
        self._steps: list[tuple[int, int, float, float]] = []  # tokens, bucket, seconds, unpadded
        self._num_shortened = 0

    def run(self, requests: list[Request]) -> Result:
        """Serve all requests to their end."""
        sequences = [_sequence(index, request) for index, request in enumerate(requests)]
        arriving: Iterator[Sequence] = iter(sequences)
        following = next(arriving, None)
        while following is not None or self.scheduler.has_unfinished:
            if following is not None and not self.scheduler.has_unfinished:
                self.now = max(self.now, following.arrival_time)
            while following is not None and following.arrival_time <= self.now:
                self.scheduler.add(following)
                following = next(arriving, None)
            self._step()
        assert self.scheduler.num_preemptions == 0, "the pool was too small"
        return self._result(sequences)

    def _step(self) -> None:
        scheduled = self.scheduler.schedule()
        num_tokens, attended = scheduled.num_tokens, (scheduled.num_kv_tokens, scheduled.num_pairs)
        seconds = COST.seconds(scheduled.bucket or num_tokens, *attended)
        unpadded = COST.seconds(num_tokens, *attended)
        self._steps.append((num_tokens, scheduled.bucket, seconds, unpadded))
        num_partial = scheduled.num_seqs - len(scheduled.sampled)
        self._num_shortened += num_partial > 0 and num_tokens < self._budget
        self.now += seconds
        num_sampled = len(scheduled.sampled)
        output = StepOutput(
            token_ids=np.zeros(num_sampled, dtype=np.int64),
            is_valid=np.ones(num_sampled, dtype=bool),
        )
        rows = scheduled.rows[scheduled.sampled]
        self.scheduler.update(scheduled, output)
        self._gaps.append(self.now - self._last_token[rows[: scheduled.num_decodes]])
        self._last_token[rows] = self.now

    def _result(self, sequences: list[Sequence]) -> Result:
        tokens, buckets, seconds, unpadded = map(np.array, zip(*self._steps, strict=True))
        ran = np.where(buckets > 0, buckets, tokens)
        first = [s.first_token_time for s in sequences]
        arrivals = [s.arrival_time for s in sequences]
        return Result(
            ttft=np.array(first, dtype=float) - np.array(arrivals),
            gaps=np.concatenate(self._gaps),
            num_steps=len(tokens),
            num_off_ladder=int((buckets == 0).sum()) if self._is_padded else 0,
            num_shortened=self._num_shortened,
            token_padding=float(1 - tokens.sum() / ran.sum()),
            time_padding=float(1 - unpadded.sum() / seconds.sum()),
        )


def _sequence(index: int, request: Request) -> Sequence:
    return Sequence(
        request_id=str(index),
        token_ids=np.zeros(request.num_prompt_tokens, dtype=np.int32),
        num_prompt_tokens=request.num_prompt_tokens,
        params=SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True),
        seed=0,
        max_total_tokens=request.num_prompt_tokens + request.num_output_tokens,
        arrival_index=index,
        arrival_time=request.arrival,
    )


def worse_percentiles(fitted: np.ndarray, plain: np.ndarray) -> tuple[int, float]:
    """How many of the 99 percentiles grew, and by how many seconds at most."""
    change = np.percentile(fitted, PERCENTILES) - np.percentile(plain, PERCENTILES)
    return int((change > 1e-9).sum()), float(change.max())


def report(rate: float, results: dict[str, Result]) -> None:
    """Print the table of one rate, times in milliseconds."""
    print(f"\nrate {rate:g}: {len(next(iter(results.values())).ttft)} requests\n")
    print(
        "| policy | TTFT p50 | TTFT p99 | gap p50 | gap p99 | padding, tokens | padding, time "
        "| steps | off the ladder | shortened |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for name, result in results.items():
        ttft = 1e3 * np.percentile(result.ttft, [50, 99])
        gaps = 1e3 * np.percentile(result.gaps, [50, 99])
        print(
            f"| {name} | {ttft[0]:.1f} | {ttft[1]:.1f} | {gaps[0]:.2f} | {gaps[1]:.2f} "
            f"| {100 * result.token_padding:.1f}% | {100 * result.time_padding:.2f}% "
            f"| {result.num_steps} | {100 * result.num_off_ladder / result.num_steps:.2f}% "
            f"| {result.num_shortened} |",
            flush=True,
        )
    for name, result in results.items():
        plain = results.get(name.removesuffix("+fitting"))
        if plain is result or plain is None:
            continue
        num_ttft, by_ttft = worse_percentiles(result.ttft, plain.ttft)
        num_gaps, by_gaps = worse_percentiles(result.gaps, plain.gaps)
        print(
            f"\n{name}: of 99 percentiles of TTFT {num_ttft} grew (largest change "
            f"{1e3 * by_ttft:+.3f} ms), of the gaps {num_gaps} ({1e3 * by_gaps:+.4f} ms)",
            flush=True,
        )


def main() -> None:
    """Print one table per rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--seconds", type=float, default=900.0, help="virtual, of arrivals")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 3.0])
    parser.add_argument("--budget", type=int, default=BUDGET, help="token budget of a step")
    parser.add_argument("--policies", nargs="+", choices=list(policies()))
    args = parser.parse_args()
    known = policies(args.budget)
    names = args.policies or list(known)
    for rate in args.rates:
        requests = read_trace(args.trace, rate, args.seconds)
        report(rate, {name: Simulation(known[name]).run(requests) for name in names})


if __name__ == "__main__":
    main()
