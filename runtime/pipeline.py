"""Runs steps: one at a time, or one while the next is scheduled, packed and planned."""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .metrics import EngineCounters
from .model_runner import ModelRunner
from .pending_step import PendingStep
from .ranges import Ranges
from .scheduler import Scheduler
from .step import ScheduledBatch, SequenceUpdates, StepFailure, StepOutput
from .step_cost import MeasuredCost
from .steps_in_flight import MAX_IN_FLIGHT

logger = logging.getLogger("stepgraph.runtime")

Update = Callable[[ScheduledBatch, StepOutput], SequenceUpdates]
"""Takes in what a step gave; what it raises is not the step's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """A step whose tokens are in."""

    scheduled: ScheduledBatch
    """What ran."""
    updates: SequenceUpdates
    """What it brought."""


class StepPipeline:
    """Takes steps from the scheduler to the runner and back, and undoes those that fail.

    Where steps overlap, the device always has the next one:

        host    schedule 1, launch 1 | ids of 0, update 0, schedule 2, launch 2 | ids of 1, ...
        device  step 0               | step 1                                   | step 2

    Step 1 is launched with placeholders for what step 0 draws, which the device fills in. So an
    end that a token brings is seen one step late; the row that runs on is dropped. A step in which
    the host has to know all ids before it can draw is launched without its draw, which is queued
    once they are known. (Launching ahead with placeholders is SGLang's overlap scheduler, of
    version 0.4.)

    Args:
        scheduler: decides on the steps.
        runner: runs them.
        ranges: opens the NVTX ranges step, schedule, wait and update.
        counters: get the numbers of steps that failed and that were launched ahead.
        step_cost: is taught what steps take; None: nobody asks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        ranges: Ranges,
        counters: EngineCounters,
        step_cost: MeasuredCost | None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._ranges = ranges
        self._counters = counters
        self._step_cost = step_cost
        self._was_waited_for = True
        self._steps: deque[PendingStep] = deque()  # launched, oldest first

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._steps)

    def step_alone(self, update: Update) -> FinishedStep | StepFailure | None:
        """One step from end to end; None: there is nothing to do."""
        scheduled = self._schedule()
        if scheduled.num_seqs == 0:
            return None
        with self._ranges.step(scheduled.num_tokens, scheduled.num_seqs, scheduled.bucket):
            output = self._attempt(scheduled, lambda: self._execute(scheduled))
            if isinstance(output, StepFailure):
                return output
            with self._ranges("update", scheduled.num_tokens):
                updates = update(scheduled, output)
        return FinishedStep(scheduled=scheduled, updates=updates)

    def step_overlapped(self, update: Update, *, ahead: bool) -> FinishedStep | StepFailure | None:
        """Launch what can be launched, then bring the oldest step in; None: there was none.

        Args:
            update: see `Update`.
            ahead: False: launch none while another is in flight.
        """
        most = MAX_IN_FLIGHT if ahead else 1
        while len(self._steps) < most and self._launch():
            pass
        if not self._steps:
            return None
        pending = self._steps[0]
        scheduled = pending.scheduled
        with self._ranges("wait", scheduled.num_tokens):
            output = self._attempt(scheduled, lambda: self._outcome(pending))
        if isinstance(output, StepFailure):
            return output
        self._steps.popleft()
        with self._ranges("update", scheduled.num_tokens):
            updates = update(scheduled, output)
            if self._steps and self._steps[0].waits_for_ids:
                following = self._steps[0]
                self._runner.draw(following, self._scheduler.late_ids(following.scheduled))
        return FinishedStep(scheduled=scheduled, updates=updates)

    def _schedule(self) -> ScheduledBatch:
        self._scheduler.sizing.ladders = self._runner.ladders  # a graph may have been given up
        with self._ranges("schedule"):
            return self._scheduler.schedule()

    def _launch(self) -> bool:
        """Launch one step; False if there is none now."""
        if self._steps and self._steps[-1].has_failed:
            return False
        scheduled = self._schedule()
        if scheduled.num_seqs == 0:
            return False
        with self._ranges.step(scheduled.num_tokens, scheduled.num_seqs, scheduled.bucket):
            try:
                pending = self._runner.launch(scheduled)
            except BaseException:  # Ctrl-C: what goes wrong otherwise is raised by its result
                oldest = self._steps[0].scheduled if self._steps else scheduled
                self._drop()
                self._scheduler.rollback(oldest)
                raise
        self._counters.num_steps_ahead += bool(self._steps)
        self._steps.append(pending)
        return True

    def _attempt(
        self, scheduled: ScheduledBatch, outcome: Callable[[], StepOutput]
    ) -> StepOutput | StepFailure:
        """The outcome of the oldest step; if that fails, all that is in flight is undone."""
        try:
            return outcome()
        except Exception as error:  # noqa: BLE001 - it is handed on with what it hit
            self._counters.num_failed_steps += 1
            # The tensors of the failed step would stay alive with the error.
            traceback.clear_frames(error.__traceback__)
            self._drop()
            return StepFailure(error=error, sequences=self._scheduler.rollback(scheduled))
        except BaseException:
            self._drop()
            self._scheduler.rollback(scheduled)
            raise

    def _drop(self) -> None:
        """Forget all steps, once nothing of them runs any more."""
        while self._steps:
            self._steps[-1].discard()
            self._steps.pop()

    def _outcome(self, pending: PendingStep) -> StepOutput:
        output, drawn = pending.result()
        self._observe(pending.scheduled, self._runner.note_seconds(drawn))
        return output

    def _execute(self, scheduled: ScheduledBatch) -> StepOutput:
        captures = self._runner.statistics.captures
        start, num_captures = time.perf_counter(), len(captures)
        output = self._runner.execute(scheduled)
        # A step that samples nothing isn't waited for: on CUDA it runs on into the next one's time.
        is_waited_for = len(scheduled.sampled) > 0 or scheduled.scoring is not None
        was_waited_for, self._was_waited_for = self._was_waited_for, is_waited_for
        if len(captures) == num_captures and is_waited_for and was_waited_for:
            self._observe(scheduled, time.perf_counter() - start)
        return output

    def _observe(self, scheduled: ScheduledBatch, seconds: float) -> None:
        """Teach the cost model; the time is the step's own."""
        if self._step_cost is not None:
            self._step_cost.observe(
                scheduled.bucket or scheduled.num_tokens,
                scheduled.num_kv_tokens,
                scheduled.num_pairs,
                seconds,
            )
