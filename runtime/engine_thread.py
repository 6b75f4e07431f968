"""One thread that runs an engine's steps; all others send it commands."""

from __future__ import annotations

import atexit
import logging
import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

import torch

from .engine import Engine
from .errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    QueueFullError,
    StepFailedError,
)
from .sequence import Sequence
from .step import SequenceUpdates, StepFailure
from .step_recovery import StepRecovery
from .submission import StepNews, Submission

logger = logging.getLogger("stepgraph.runtime")
T = TypeVar("T")

EXIT_SECONDS = 10.0
"""How long the interpreter's exit waits for the step that runs."""


class EngineThread:
    """Runs the steps of an engine on a thread of its own while there are requests.

    Between two steps it takes commands in and ends what is past its deadline. News go out once a
    step. Only that thread touches the engine; public methods may be called from any.

    A step that raises ends the request at fault alone, with StepFailedError (`StepRecovery`). What
    can't be mended ends all requests, and every later call, with EngineDeadError.

    Args:
        engine: unused so far.
        max_waiting: most requests that wait beyond those that the next step can start, each counted
            as its n streams; None: any number.
    """

    def __init__(self, engine: Engine, *, max_waiting: int | None = None) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._recovery = StepRecovery(engine)
        # Unlike a lock, its put may be called while garbage is collected.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the next four, which all threads use
        self._open: dict[str, Submission] = {}
        self._num_open = 0  # streams of these
        self._end: EngineDeadError | None = None
        self._has_stopped = False  # nobody reads the inbox any more
        self._num_startable = engine.config.max_num_seqs
        self._submissions: dict[Sequence, Submission] = {}
        self._next_deadline = math.inf  # of the unfinished requests, or earlier
        self._drained: list[Future[None]] = []
        self._should_stop = False
        self._thread = threading.Thread(target=self._run, name="stepgraph-engine", daemon=True)
        # A daemon thread that runs a step while the interpreter is taken down could crash it.
        atexit.register(self._stop_at_exit)
        self._thread.start()

    # -- any thread ---------------------------------------------------------------------------

    @property
    def end(self) -> EngineDeadError | None:
        """Why no more requests are taken, as an error to raise; None while they are."""
        return None if self._end is None else self._dead()

    def open(self, submission: Submission) -> None:
        """Reserve a place for a request; `submit` or `fail` must follow.

        Raises:
            InvalidRequestError: the id is in use.
            QueueFullError: too many requests wait.
            EngineDeadError: none are taken any more.
        """
        with self._lock:
            if self._end is not None:
                raise self._dead()
            if submission.request_id in self._open:
                raise InvalidRequestError(
                    f"request_id={submission.request_id!r} is in use by an unfinished request; "
                    f"give another"
                )
            limit, num_waiting = self._max_waiting, self._num_open - self._num_startable
            if limit is not None and num_waiting >= limit:
                raise QueueFullError(
                    f"{num_waiting} requests wait and max_waiting={limit} allows no more; try "
                    f"again later, or make the engine with a larger max_waiting"
                )
            self._open[submission.request_id] = submission
            submission.num_open = submission.params.n
            self._num_open += submission.num_open

    def find(self, request_id: str) -> Submission | None:
        """The unfinished request of that id."""
        return self._open.get(request_id)

    def submit(self, submission: Submission) -> None:
        """Queue a request that was opened and has its prompt now."""
        if not self._send(lambda: self._add(submission)):
            self.fail(submission, self._dead())

    def fail(self, submission: Submission, error: Exception) -> None:
        """End a request that was opened and is not queued."""
        self._close([(submission, submission.params.n)])
        submission.outbox.post(StepNews(failed=[(submission, error)]))
        self._inbox.put(lambda: None)  # a drain may have waited for it

    def cancel(self, submission: Submission) -> None:
        """End a request and deliver what there is. Never blocks; a destructor may call it."""
        submission.is_cancelled = True
        self._inbox.put(lambda: self._end_request(submission))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Have the engine thread call `function(engine)` between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._has_stopped:
                future.set_exception(self._dead())
                return
            try:
                future.set_result(function(self._engine))
            except Exception as error:  # noqa: BLE001 - it is the caller's
                future.set_exception(error)

        if not self._send(run):
            run()
        return future

    def call_idle(self, purpose: str, function: Callable[[Engine], T]) -> Future[T]:
        """As `call`, but EngineStateError, which names `purpose`, if a request is unfinished."""

        def run(engine: Engine) -> T:
            if self._open:
                raise EngineStateError(
                    f"{len(self._open)} requests are unfinished; let them end, or abort them, "
                    f"before {purpose}()"
                )
            return function(engine)

        return self.call(run)

    def refuse(self, reason: str) -> None:
        """Take no more requests."""
        with self._lock:
            self._end = self._end or EngineDeadError(reason)

    def drain(self) -> Future[None]:
        """Done once no request is unfinished."""
        future: Future[None] = Future()
        if not self._send(lambda: self._drained.append(future)):
            future.set_result(None)
        return future

    def stop(self) -> None:
        """End all requests and the thread, after the step that runs. As `cancel`, never blocks."""
        self._inbox.put(self._note_stop)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end, at most `timeout` seconds."""
        self._thread.join(timeout)

    def _send(self, command: Callable[[], None]) -> bool:
        """Hand the engine thread something to do; False if it has stopped."""
        with self._lock:
            if not self._has_stopped:
                self._inbox.put(command)
            return not self._has_stopped

    def _dead(self) -> EngineDeadError:
        """A fresh one for each reader, since raising changes it."""
        error = EngineDeadError(str(self._end))
        error.__cause__ = None if self._end is None else self._end.__cause__
        return error

    def _close(self, ends: Iterable[tuple[Submission, int]]) -> None:
        """So many streams of each request have ended; one that has none left is closed."""
        with self._lock:
            for submission, num_ended in ends:
                num_ended = min(num_ended, submission.num_open)
                submission.num_open -= num_ended
                self._num_open -= num_ended
                is_open = self._open.get(submission.request_id) is submission
                if is_open and submission.num_open == 0:
                    del self._open[submission.request_id]

    def _stop_at_exit(self) -> None:
        self.stop()
        self.join(EXIT_SECONDS)

    # -- the engine thread: life ----------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._serve()
        except BaseException as error:
            logger.critical("the engine is dead", exc_info=error)
            traceback.clear_frames(error.__traceback__)  # they hold the engine
            failure = error
        self._finish(failure)

    def _serve(self) -> None:
        device, scheduler = self._engine.config.device, self._engine.scheduler
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own current device
        while True:
            self._take_commands()
            if self._should_stop:
                return
            self._end_late_requests()
            self._recovery.go_on()
            if self._engine.has_unfinished:
                self._step()
            self._num_startable = (
                scheduler.num_running if scheduler.num_waiting else scheduler.config.max_num_seqs
            )
            if self._drained and not self._open:
                self._end_drains()

    def _take_commands(self) -> None:
        may_wait = not (self._engine.has_unfinished or self._recovery.is_active)
        try:
            while not self._should_stop:
                self._inbox.get(may_wait)()
                may_wait = False
        except queue.Empty:
            return

    def _note_stop(self) -> None:
        self._should_stop = True

    def _finish(self, failure: BaseException | None) -> None:
        atexit.unregister(self._stop_at_exit)
        with self._lock:
            if failure is not None:
                self._end = EngineDeadError(f"the engine is dead: {failure}")
                self._end.__cause__ = failure.__cause__ or failure
            self._end = self._end or EngineDeadError("the engine was shut down; make a new one")
            self._has_stopped = True
            unfinished = list(self._open.values())
        if failure is not None:
            self._submissions.clear()  # nobody knows what state the engine is in
        while not self._inbox.empty():
            self._inbox.get()()
        self._end_drains()
        for submission in unfinished:
            if failure is None and submission.live is not None:
                self._end_request(submission, self._dead())
            else:
                self.fail(submission, self._dead())
        self._submissions.clear()
        del self._engine, self._recovery  # streams that are still read hold this thread's object

    def _end_drains(self) -> None:
        for future in self._drained:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
        self._drained = []

    # -- the engine thread: requests --------------------------------------------------------------

    def _add(self, submission: Submission) -> None:
        prompt, outputs = submission.prompt, self._engine.outputs
        assert prompt is not None and outputs is not None, "there is a tokenizer, and it ran"
        if self._has_stopped:
            return  # it ends with all others
        try:
            sequence = self._engine.add_request(
                prompt.token_ids,
                submission.params,
                request_id=submission.request_id,
                priority=submission.priority,
                arrival_time=submission.arrival_time,
                cache_salt=prompt.cache_salt,
            )
        except Exception as error:  # noqa: BLE001 - it is the caller's: nothing was queued
            self.fail(submission, error)
            return
        submission.prompt, submission.live = None, outputs.start(prompt, sequence)
        self._submissions.update(dict.fromkeys(sequence.streams, submission))
        self._next_deadline = min(self._next_deadline, submission.deadline)
        if self._recovery.is_active:
            self._recovery.hold(sequence.streams)
        if submission.is_cancelled:
            self._end_request(submission)

    def _end_late_requests(self) -> None:
        now = time.monotonic()
        if now < self._next_deadline:
            return
        for submission in dict.fromkeys(self._submissions.values()):
            if now >= submission.deadline:
                seconds = submission.deadline - submission.arrival_time
                error = f"request {submission.request_id} has reached its deadline of {seconds:g} s"
                self._end_request(submission, DeadlineExceededError(error))
        deadlines = (submission.deadline for submission in self._submissions.values())
        self._next_deadline = min(deadlines, default=math.inf)

    def _end_request(self, submission: Submission, error: Exception | None = None) -> None:
        """End what has not ended of a request, for the caller or for `error`."""
        ended = self._take_out(submission)
        if ended:
            self._engine.abort(submission.request_id, error=error)
            self._close([(submission, len(ended))])
            submission.outbox.post(StepNews(ended=ended))

    def _take_out(self, submission: Submission) -> list[tuple[Submission, Sequence]]:
        """Forget a request's streams; those that had not ended yet."""
        live = submission.live
        streams = () if live is None else live.sequences
        return [(submission, s) for s in streams if self._submissions.pop(s, None) is not None]

    # -- the engine thread: steps -----------------------------------------------------------------

    def _step(self) -> None:
        outcome = self._engine.try_step()
        if not isinstance(outcome, StepFailure):
            self._recovery.take_success(outcome)
            self._deliver(outcome)
            return
        sequence = self._recovery.take_failure(outcome)
        if sequence is None:
            return
        error = StepFailedError(
            f"request {sequence.request_id} made a step fail, also when it ran alone: "
            f"{outcome.error!r}"
        )
        error.__cause__ = outcome.error
        self._engine.abort(sequence.request_id, reason="error", error=error)
        submission = self._submissions[sequence]
        self._take_out(submission)
        self.fail(submission, error)

    def _deliver(self, updates: SequenceUpdates) -> None:
        submissions = [*map(self._submissions.get, updates.sequences)]
        ended = []
        for sequence in updates.finished:
            submission = self._submissions.pop(sequence, None)
            if submission is not None:
                ended.append((submission, sequence))
        self._close((submission, 1) for submission, _ in ended)
        news = StepNews(
            submissions=submissions,
            sequences=updates.sequences,
            token_ids=updates.token_ids.tolist(),
            ended=ended,
        )
        outboxes = {submission.outbox for submission in submissions if submission is not None}
        outboxes.update(submission.outbox for submission, _ in ended)
        for outbox in outboxes:
            if not outbox.post(news):
                for submission in dict.fromkeys(self._submissions.values()):
                    if submission.outbox is outbox:
                        self._end_request(submission)
