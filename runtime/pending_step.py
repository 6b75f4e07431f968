"""A step between its launch and its outcome, and who runs it meanwhile."""

from __future__ import annotations

import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from graphs.capture_sizes import Launch

from .input_batch import InputBatch
from .step import ScheduledBatch, StepOutput
from .token_sampler import OutputCopy

T = TypeVar("T")


class StepQueue(Protocol):
    """Runs what it is given, one after another in that order."""

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Have `function` run; the future takes what it returns or raises."""
        ...


class InlineQueue:
    """Runs it at once, on the caller's thread: for CUDA, whose stream is the queue."""

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """See StepQueue.submit."""
        future: Future[T] = Future()
        _run(function, future)
        return future


class StepWorker:
    """Runs it on a thread of its own: for a CPU, where work would keep the host from going on."""

    def __init__(self) -> None:
        tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        tasks = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(tasks,), name="stepgraph-step", daemon=True)
        thread.start()
        self._tasks = tasks
        # Also at the interpreter's exit, which a thread that computes could crash.
        weakref.finalize(self, _stop, tasks, thread)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """See StepQueue.submit."""
        future: Future[T] = Future()
        self._tasks.put((function, future))
        return future


def _serve(tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (task := tasks.get()) is not None:
        _run(*task)
        del task  # what it holds may be large, and the next one may be long in coming


def _run(function: Callable[[], T], future: Future[T]) -> None:
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
        future.set_exception(error)
        del future  # else it would hold itself, by the error's traceback
    else:
        future.set_result(result)


def _stop(tasks: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join()


class StepTimer:
    """Times one step where it runs: by events on CUDA, where host and device go apart."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._start = self._end = time.perf_counter()
        if device.type == "cuda":
            self._events = [
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            ]
            self._events[0].record()

    def stop(self) -> None:
        """The step ends here."""
        self._end = time.perf_counter()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """What it took, once the device has finished it."""
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1])) / 1000
        return self._end - self._start


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardOutput:
    """A step after its forward, on the device."""

    hidden: torch.Tensor
    """[num_sampled + num_scored, hidden_size]."""
    batch: InputBatch
    """The step's inputs."""
    launch: Launch
    """How it was launched."""
    timer: StepTimer
    """Started before the forward."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnStep:
    """A step with all its work queued."""

    copy: OutputCopy
    """Its outcome, on the way to the host."""
    launch: Launch
    """How it was launched."""
    timer: StepTimer
    """Stopped after the draw."""


class PendingStep:
    """A step that was launched. What goes wrong in it is raised by `result` alone.

    Args:
        scheduled: the step.
        tasks: where its stages run.
    """

    def __init__(self, scheduled: ScheduledBatch, tasks: StepQueue) -> None:
        self.scheduled = scheduled
        self.has_failed = False
        """True if its launch failed, so that nothing need be launched after it."""
        self._tasks = tasks
        self._forward: Future[ForwardOutput] | None = None
        self._drawn: Future[DrawnStep] | None = None

    @property
    def waits_for_ids(self) -> bool:
        """True until its draw is queued."""
        return self._drawn is None

    def start(self, forward: Callable[[], ForwardOutput]) -> None:
        """Queue its forward."""
        self._forward = self._tasks.submit(forward)

    def draw(self, draw: Callable[[ForwardOutput], DrawnStep]) -> None:
        """Queue its draw, behind the forward."""
        forward = self._forward
        assert forward is not None, "a draw follows a forward"
        self._drawn = self._tasks.submit(lambda: draw(forward.result()))

    def fail(self, error: Exception) -> None:
        """It can't go on: `result` raises `error`."""
        self.has_failed = True
        self._drawn = Future()
        self._drawn.set_exception(error)

    def result(self) -> tuple[StepOutput, DrawnStep]:
        """Wait for the outcome, which comes with how the step was run."""
        assert self._drawn is not None, "its draw waits for ids"
        drawn = self._drawn.result()
        return drawn.copy.wait(), drawn

    def discard(self) -> None:
        """Wait until nothing of it runs on the host any more, and let go of its tensors."""
        stages: tuple[Future[Any] | None, ...] = (self._forward, self._drawn)
        for future in stages:
            if future is not None and (error := future.exception()) is not None:
                traceback.clear_frames(error.__traceback__)
