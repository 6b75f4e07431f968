"""Serves a workload with the engine, in one process, and notes when every token came.

Requests are handed in at the first step border after their intended arrival, however far behind
the engine is, and all latencies count from the intended arrival: what a request waits for the
step under way is part of its latency (no coordinated omission).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from latency_report import GapHistogram, RequestTimes
from step_log import LoggedStep, StepLog
from workload import Workload

from runtime.engine import Engine
from runtime.errors import InvalidRequestError
from runtime.sampling_params import SamplingParams
from runtime.step import ScheduledBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """What serving a workload gave."""

    times: RequestTimes
    gaps: GapHistogram
    log: StepLog
    num_refused: int
    """Requests that could never be served."""


class ServingDriver:
    """Feeds an engine by the clock.

    Args:
        engine: idle.
        workload: what arrives when.
        num_warmup: gaps that end before the arrival of request `num_warmup` are not counted.
        temperature: of all requests.
        on_batch: called after each step with its batch, and the seconds of the whole step.
        clock: seconds.
        sleep: passes the time until the next arrival while nothing is to do.
    """

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        *,
        num_warmup: int = 0,
        temperature: float = 0.0,
        on_batch: Callable[[ScheduledBatch, float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine = engine
        self._workload = workload
        self._clock, self._sleep = clock, sleep
        self._on_batch = on_batch
        self._gaps_from = float(workload.arrivals[num_warmup]) if num_warmup else 0.0
        self._prompts = [workload.prompt(i, engine.vocab_size) for i in range(len(workload))]
        self._params = [
            SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, seed=index)
            for index, count in enumerate(workload.num_output_tokens.tolist())
        ]
        self._times = RequestTimes.of(workload.arrivals)
        self._gaps = GapHistogram()
        self._log: StepLog = []
        self._batch: ScheduledBatch | None = None
        self._num_refused = 0

    def run(self) -> ServedRun:
        """Serve all of it."""
        arrivals, start, following = self._workload.arrivals, self._clock(), 0
        self._engine.on_step = self._keep_batch
        try:
            while following < len(arrivals) or self._engine.has_unfinished:
                now = self._clock() - start
                while following < len(arrivals) and arrivals[following] <= now:
                    self._add(following, start)
                    following += 1
                if self._engine.has_unfinished:
                    self._step(start)
                elif following < len(arrivals):
                    self._sleep(max(0.0, float(arrivals[following]) - (self._clock() - start)))
        finally:
            self._engine.on_step = None
        return ServedRun(
            times=self._times, gaps=self._gaps, log=self._log, num_refused=self._num_refused
        )

    def _add(self, index: int, start: float) -> None:
        try:
            self._engine.add_request(
                self._prompts[index],
                self._params[index],
                request_id=str(index),
                arrival_time=start + float(self._workload.arrivals[index]),
            )
        except InvalidRequestError:
            self._num_refused += 1

    def _step(self, start: float) -> None:
        began = self._clock() - start
        updates = self._engine.step()
        ended = self._clock() - start
        requests = np.array([int(s.request_id) for s in updates.sequences], dtype=np.int64)
        times = self._times
        last = times.finish[requests]
        is_first = np.isnan(last)
        times.first_token[requests[is_first]] = ended
        times.finish[requests] = ended
        times.num_output_tokens[requests] += 1
        if ended >= self._gaps_from:
            self._gaps.add(ended - last[~is_first])
        assert self._batch is not None, "the engine ran no step"
        self._note_step(self._batch, began, ended)

    def _keep_batch(self, scheduled: ScheduledBatch) -> None:
        self._batch = scheduled

    def _note_step(self, batch: ScheduledBatch, began: float, ended: float) -> None:
        scheduler = self._engine.scheduler
        self._log.append(
            LoggedStep(
                start=began,
                end=ended,
                num_decodes=batch.num_decodes,
                num_prompt_tokens=batch.num_tokens - batch.num_decodes,
                bucket=batch.bucket,
                num_waiting=scheduler.num_waiting,
                num_running=scheduler.num_running,
                num_free_blocks=self._engine.num_free_blocks,
            )
        )
        if self._on_batch is not None:
            self._on_batch(batch, ended - began)


def warm_up(engine: Engine, num_tokens: int) -> None:
    """Run prompts and decodes once before anything is measured, so that kernels are built.

    Args:
        engine: idle, and left so.
        num_tokens: of the longest prompt; the token budget shows every size of step.
    """
    longest = min(num_tokens, engine.scheduler.max_sequence_tokens - 8)
    rng = np.random.default_rng(0)
    for length in sorted({1, min(16, longest), longest // 2 or 1, longest}):
        prompt = rng.integers(0, engine.vocab_size, length)
        engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True, seed=0))
    while engine.has_unfinished:
        engine.step()
