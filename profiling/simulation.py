"""Serving on a virtual clock: the real scheduler and block manager, and a step-time model.

A replica takes in requests at their arrivals, schedules, and lets as much time pass as the model
says a step takes. Steps that change nothing but lengths are run in one go, to the same clock and
the same state, bit for bit, as one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from counted_blocks import CountedBlocks
from latency_report import GapHistogram, RequestTimes
from skipping_scheduler import DecodeRun, SkippingScheduler
from step_log import LoggedStep, StepLog
from step_time import StepShape, StepTime
from whole_prompts import WholePromptScheduler
from workload import PREFIX_TOKENS, Workload

from runtime.block_manager import BlockManager
from runtime.errors import InvalidRequestError
from runtime.sampling_params import SamplingParams
from runtime.scheduler_config import SchedulerConfig
from runtime.sequence import Sequence
from runtime.step import ScheduledBatch, StepOutput

Router = Literal["round_robin", "least_loaded"]
_PARAMS = SamplingParams(ignore_eos=True)  # lengths are in Sequence.max_total_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How one replica is set up."""

    scheduler: SchedulerConfig
    num_blocks: int
    """KV blocks that sequences can own."""
    block_size: int = 16
    enable_prefix_caching: bool = False
    whole_prompts: bool = False
    """Under "prefill_first": admit and preempt as engines do that never cut a prompt."""
    captures_all: bool = False
    """Without ladders: every step runs under a graph of its own size, not eagerly."""
    skips: bool = True
    """Run decode steps that are alike in one go, and count blocks where nothing is cached; False:
    every step by itself, with the engine's block manager, as a check."""


@dataclass(slots=True, kw_only=True)
class StepTotals:
    """Sums over the steps of all replicas."""

    num_steps: int = 0
    num_calls: int = 0
    """Steps that were scheduled one by one; the others were skipped."""
    num_tokens: int = 0
    num_padding_tokens: int = 0
    num_kv_tokens: int = 0
    """K/V rows that attention read."""
    idle_seconds: float = 0.0
    """Of all replicas, between two arrivals."""
    num_preemptions: int = 0
    num_target_misses: int = 0
    num_refused: int = 0
    """Requests that could never be served."""
    decode_sizes: dict[int, int] = field(default_factory=dict)
    """Steps of decodes alone, by their tokens before padding."""
    mixed_sizes: dict[int, int] = field(default_factory=dict)
    """All other steps, by their tokens before padding."""

    def step_sizes(self) -> dict[str, list[list[int]]]:
        """As the engine's statistics have them: by kind, pairs of a size and its steps."""
        kinds = {"decode": self.decode_sizes, "mixed": self.mixed_sizes}
        return {
            kind: [list(pair) for pair in sorted(sizes.items())] for kind, sizes in kinds.items()
        }


@dataclass(slots=True, kw_only=True)
class SimulationResult:
    """What a simulation gave."""

    times: RequestTimes
    gaps: GapHistogram
    totals: StepTotals
    logs: list[StepLog]
    """One for each replica if steps were logged."""


class Replica:
    """One engine without a device: a scheduler, a KV pool, and a clock of its own.

    Args:
        options: limits and policy.
        step_time: how long steps take, and what the scheduler predicts with.
        times: filled as requests get their tokens, at their place in the workload.
        totals: filled step by step.
        gaps_from: gaps that end before this moment are not counted.
        log: filled step by step if given.
    """

    def __init__(
        self,
        options: ServerOptions,
        step_time: StepTime,
        times: RequestTimes,
        totals: StepTotals,
        *,
        gaps_from: float = 0.0,
        log: StepLog | None = None,
    ) -> None:
        self.now = 0.0
        """The virtual clock: when the last step ended, or the last idle time."""
        self.gaps = GapHistogram()
        self._options = options
        self._step_time = step_time
        self._blocks = _block_manager(options)
        kind = WholePromptScheduler if options.whole_prompts else SkippingScheduler
        self.scheduler = kind(
            options.scheduler, self._blocks, clock=lambda: self.now, step_cost=step_time
        )
        self._times = times
        self._totals = totals
        self._gaps_from = gaps_from
        self._log = log
        max_num_seqs = options.scheduler.max_num_seqs
        self._request_of_row = np.zeros(max_num_seqs, dtype=np.int64)
        self._is_valid = np.ones(max_num_seqs, dtype=bool)
        self._run: DecodeRun | None = None  # foreseen, not yet done
        self._ends = np.empty(0)  # of its steps
        self._num_unfinished = 0
        self._num_before_step = 0

    def load_at(self, time: float) -> int:
        """Unfinished requests at a moment that `run_until` has reached."""
        is_under_way = self._run is None and self.now > time
        return self._num_before_step if is_under_way else self._num_unfinished

    def add(self, sequence: Sequence) -> None:
        """Take in a request at its arrival, up to which `run_until` has come.

        Raises:
            InvalidRequestError: it can never be served.
        """
        if self._run is not None:
            num_steps = int(np.searchsorted(self._ends, sequence.arrival_time)) + 1
            self._skip(min(num_steps, self._run.num_steps))
        self._totals.idle_seconds += max(0.0, sequence.arrival_time - self.now)
        self.now = max(self.now, sequence.arrival_time)
        self.scheduler.add(sequence)
        self._num_unfinished += 1
        self._num_before_step += 1

    def run_until(self, time: float) -> None:
        """Run steps until one ends at or after `time`, or nothing is left to do.

        Steps that are foreseen to change nothing before `time` may be left undone.
        """
        while self.scheduler.has_unfinished and self.now < time:
            if self._run is None and self._options.skips:
                self._run = self.scheduler.foresee()
                if self._run is not None:
                    self._ends = self._foreseen_ends(self._run)
            if self._run is None:
                self._step()
            elif self._ends[-1] <= time:
                self._skip(self._run.num_steps)
            else:
                return

    def _step(self) -> None:
        scheduler, start = self.scheduler, self.now
        scheduled = scheduler.schedule()
        for sequence in scheduler.sequences_at(scheduled.admitted_rows):
            self._request_of_row[sequence.row] = sequence.arrival_index
        is_captured = scheduled.bucket > 0 or self._options.captures_all
        shape = shape_of(scheduled, is_captured=is_captured)
        self.now = start + float(self._step_time.step_seconds(shape))
        requests = self._request_of_row[scheduled.rows[scheduled.sampled]]
        output = StepOutput(token_ids=_token_of(requests), is_valid=self._is_valid[: len(requests)])
        finished = scheduler.update(scheduled, output).finished
        self._note_tokens(requests)
        self._note_finished(finished)
        self._totals.num_calls += 1
        self._totals.num_kv_tokens += scheduled.num_kv_tokens
        self._count(scheduled.num_tokens, scheduled.bucket, scheduled.is_uniform_decode, 1)
        if self._log is not None:
            num_prompt = scheduled.num_tokens - scheduled.num_decodes
            self._log_steps(start, 1, scheduled.num_decodes, num_prompt, scheduled.bucket)

    def _skip(self, num_steps: int) -> None:
        run, self._run = self._run, None
        assert run is not None, "nothing was foreseen"
        start, ends = self.now, self._ends[:num_steps]
        requests = self._request_of_row[run.rows]
        self.now = float(ends[-1])
        finished = self.scheduler.skip(run, num_steps, _token_of(requests))
        self._note_run(requests, ends)
        self._note_finished(finished)
        bucket = self.scheduler.sizing.bucket(run.num_seqs, is_uniform_decode=True)
        growth = run.num_seqs * num_steps * (num_steps - 1) // 2
        self._totals.num_kv_tokens += run.num_kv_tokens * num_steps + growth
        self._count(run.num_seqs, bucket, True, num_steps)
        if self._log is not None:
            self._log_steps(start, num_steps, run.num_seqs, 0, bucket)

    def _foreseen_ends(self, run: DecodeRun) -> np.ndarray:
        """[num_steps] float64: the clock after each step, as single steps would set it."""
        num_kv_tokens = run.num_kv_tokens + run.num_seqs * np.arange(run.num_steps)
        bucket = self.scheduler.sizing.bucket(run.num_seqs, is_uniform_decode=True)
        shape = StepShape(
            num_tokens=bucket or run.num_seqs,
            num_sampled=run.num_seqs,
            num_kv_tokens=num_kv_tokens,
            num_pairs=num_kv_tokens,
            is_uniform_decode=True,
            is_captured=bucket > 0 or self._options.captures_all,
        )
        clock = np.empty(run.num_steps + 1)
        clock[0] = self.now
        clock[1:] = self._step_time.step_seconds(shape)
        return np.add.accumulate(clock)[1:]  # one addition after the other

    def _note_tokens(self, requests: np.ndarray) -> None:
        """Each request got a token now."""
        times, now = self._times, self.now
        last = times.finish[requests]
        is_first = np.isnan(last)
        if is_first.any():
            times.first_token[requests[is_first]] = now
            last = last[~is_first]
        times.finish[requests] = now
        if now >= self._gaps_from:
            self.gaps.add(now - last)

    def _note_run(self, requests: np.ndarray, ends: np.ndarray) -> None:
        """Each request, none of them new, got a token at each moment of `ends`."""
        finish = self._times.finish
        last = finish[requests]
        finish[requests] = ends[-1]
        if ends[0] >= self._gaps_from:
            self.gaps.add(ends[0] - last)
        gaps = ends[1:] - ends[:-1]
        if ends[0] < self._gaps_from:
            gaps = gaps[ends[1:] >= self._gaps_from]
        self.gaps.add(gaps, len(requests))

    def _note_finished(self, sequences: list[Sequence]) -> None:
        """The step that just ran ended them."""
        self._num_before_step = self._num_unfinished
        self._num_unfinished -= len(sequences)
        for sequence in sequences:
            num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
            self._times.num_output_tokens[sequence.arrival_index] = num_output

    def _count(self, num_tokens: int, bucket: int, is_decode: bool, num_steps: int) -> None:
        totals = self._totals
        totals.num_steps += num_steps
        totals.num_tokens += num_tokens * num_steps
        totals.num_padding_tokens += (bucket - num_tokens) * num_steps if bucket else 0
        sizes = totals.decode_sizes if is_decode else totals.mixed_sizes
        sizes[num_tokens] = sizes.get(num_tokens, 0) + num_steps

    def _log_steps(
        self, start: float, num_steps: int, num_decodes: int, num_prompt_tokens: int, bucket: int
    ) -> None:
        assert self._log is not None, "steps are not logged"
        self._log.append(
            LoggedStep(
                start=start,
                end=self.now,
                num_steps=num_steps,
                num_decodes=num_decodes,
                num_prompt_tokens=num_prompt_tokens,
                bucket=bucket,
                num_waiting=self.scheduler.num_waiting,
                num_running=self.scheduler.num_running,
                num_free_blocks=self._blocks.num_free_blocks,
            )
        )


def shape_of(scheduled: ScheduledBatch, *, is_captured: bool) -> StepShape:
    """What of a batch decides its time."""
    return StepShape(
        num_tokens=scheduled.bucket or scheduled.num_tokens,
        num_sampled=len(scheduled.sampled),
        num_kv_tokens=scheduled.num_kv_tokens,
        num_pairs=scheduled.num_pairs,
        is_uniform_decode=scheduled.is_uniform_decode,
        is_captured=is_captured,
    )


def simulate(
    workload: Workload,
    options: ServerOptions,
    step_time: StepTime,
    *,
    num_replicas: int = 1,
    router: Router = "round_robin",
    num_warmup: int = 0,
    logs_steps: bool = False,
) -> SimulationResult:
    """Serve a workload to its end.

    Args:
        workload: arrivals and lengths.
        options: of each replica.
        step_time: of each replica's hardware.
        num_replicas: equal ones, each with a queue of its own.
        router: who gets a request: each in turn, or the one with the fewest unfinished requests,
            the first of them if several have as few.
        num_warmup: gaps before the arrival of request `num_warmup` are not counted.
        logs_steps: keep a `StepLog` for each replica.
    """
    times, totals = RequestTimes.of(workload.arrivals), StepTotals()
    gaps_from = float(workload.arrivals[num_warmup]) if num_warmup else 0.0
    logs: list[StepLog] = [[] for _ in range(num_replicas if logs_steps else 0)]
    replicas = [
        Replica(
            options,
            step_time,
            times,
            totals,
            gaps_from=gaps_from,
            log=logs[number] if logs_steps else None,
        )
        for number in range(num_replicas)
    ]
    for index in range(len(workload)):
        arrival = float(workload.arrivals[index])
        if router == "round_robin" or num_replicas == 1:
            replica = replicas[index % num_replicas]
            replica.run_until(arrival)
        else:
            for replica in replicas:
                replica.run_until(arrival)
            replica = min(replicas, key=lambda r: r.load_at(arrival))
        try:
            replica.add(_sequence(workload, index, options))
        except InvalidRequestError:
            totals.num_refused += 1
    gaps = GapHistogram()
    for replica in replicas:
        replica.run_until(math.inf)
        gaps.merge(replica.gaps)
        totals.num_preemptions += replica.scheduler.num_preemptions
        totals.num_target_misses += replica.scheduler.sizing.num_target_misses
    return SimulationResult(times=times, gaps=gaps, totals=totals, logs=logs)


def _block_manager(options: ServerOptions) -> BlockManager:
    if options.skips and not options.enable_prefix_caching:
        return CountedBlocks(options.num_blocks, options.block_size)
    return BlockManager(
        options.num_blocks + 1,
        options.block_size,
        enable_prefix_caching=options.enable_prefix_caching,
    )


def _token_of(requests: np.ndarray) -> np.ndarray:
    """What requests generate: each always the same id, which no prompt has."""
    return -1 - requests


def _sequence(workload: Workload, index: int, options: ServerOptions) -> Sequence:
    num_prompt = int(workload.num_prompt_tokens[index])
    token_ids: np.ndarray
    if not options.enable_prefix_caching:
        token_ids = np.zeros(num_prompt, dtype=np.int32)  # nobody reads them
    elif workload.prefix_ids is None:
        token_ids = np.full(num_prompt, _token_of(np.int32(index)), dtype=np.int32)
    else:
        starts = PREFIX_TOKENS * np.array(workload.prefix_ids[index], dtype=np.int32)
        token_ids = (starts[:, None] + np.arange(PREFIX_TOKENS, dtype=np.int32)).ravel()
        token_ids = token_ids[:num_prompt]
    return Sequence(
        request_id=str(index),
        token_ids=token_ids,
        num_prompt_tokens=num_prompt,
        params=_PARAMS,
        seed=0,
        max_total_tokens=num_prompt + int(workload.num_output_tokens[index]),
        arrival_index=index,
        arrival_time=float(workload.arrivals[index]),
    )
