"""The outputs of one request, as an event loop reads them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

from .engine_thread import EngineThread
from .live_request import LiveRequest
from .outputs import RequestOutput
from .submission import StepNews, Submission

MAX_TOKENS_ON_LOOP = 256
"""More unread tokens than this are turned into text off the event loop."""


class _Buffer:
    """What one request's reader hasn't read yet. Only the event loop uses it."""

    __slots__ = ("error", "submission", "waiter")

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    @property
    def live(self) -> LiveRequest:
        live = self.submission.live
        assert live is not None, f"{self.submission.request_id} has news before it was queued"
        return live

    @property
    def has_output(self) -> bool:
        return self.submission.live is not None and self.live.has_news

    @property
    def has_news(self) -> bool:
        return self.error is not None or self.has_output

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done() and self.has_news:
            self.waiter.set_result(None)


class Mailbox:
    """Brings the engine thread's news to the requests of one event loop.

    The loop is woken once for all of a step. If it is busy longer than a step, news wait here and
    are handed over together. A reader that is slow never holds up the engine or other readers:
    its tokens gather in its `LiveRequest`, and its next output has all of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._buffers: dict[Submission, _Buffer] = {}
        self._lock = threading.Lock()
        self._news: list[StepNews] = []
        self._is_awaited = False  # a handing over is on its way

    def register(self, submission: Submission) -> _Buffer:
        """Gather the news of a request, until its end or `forget`."""
        buffer = self._buffers[submission] = _Buffer(submission)
        return buffer

    def forget(self, submission: Submission) -> None:
        """Drop what comes for a request from now on."""
        self._buffers.pop(submission, None)

    def post(self, news: StepNews) -> bool:
        """See `Outbox.post`. Any thread may call it."""
        with self._lock:
            self._news.append(news)
            must_wake, self._is_awaited = not self._is_awaited, True
        if must_wake:
            try:
                self.loop.call_soon_threadsafe(self._hand_over)
            except RuntimeError:  # the loop is closed
                return False
        return not self.loop.is_closed()

    def _hand_over(self) -> None:
        with self._lock:
            waiting, self._news, self._is_awaited = self._news, [], False
        for buffer in {buffer for news in waiting for buffer in self._sort_in(news)}:
            buffer.wake()

    def _sort_in(self, news: StepNews) -> Iterator[_Buffer]:
        """Give each request its own; yields the buffers that got something."""
        find = self._buffers.get  # others are read in another loop, or no more
        rows = zip(news.submissions, news.sequences, news.token_ids, strict=True)
        for submission, sequence, token_id in rows:
            if submission is not None and (buffer := find(submission)) is not None:
                buffer.live.append(sequence, token_id)
                yield buffer
        for submission, sequence in news.ended:
            if (buffer := find(submission)) is not None:
                buffer.live.end(sequence)
                if buffer.live.is_ended:
                    self.forget(submission)
                yield buffer
        for submission, error in news.failed:
            if (buffer := self._buffers.pop(submission, None)) is not None:
                buffer.error = error
                yield buffer


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, by `async for`, in the event loop that asked for it.

    Its last output is `finished`. Whatever ends the reading early aborts the request: cancelling
    the reading task, `aclose`, or dropping the stream.

    Raises, while it is read:
        InvalidRequestError: the request can't be served.
        StepFailedError: the request made a step fail.
        EngineDeadError: the engine failed or was shut down before the request could start.
        RuntimeError: it is read by two tasks at once, or in another event loop.
    """

    def __init__(
        self, submission: Submission, mailbox: Mailbox, thread: EngineThread, owner: object
    ) -> None:
        self._submission = submission
        self._mailbox = mailbox
        self._thread = thread
        self._owner = owner  # the engine lives as long as somebody reads
        self._buffer = mailbox.register(submission)
        self._is_read = False
        self._is_over = False

    @property
    def request_id(self) -> str:
        """The id by which the request can be aborted."""
        return self._submission.request_id

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        if asyncio.get_running_loop() is not self._mailbox.loop:
            raise RuntimeError(
                f"the stream of request {self.request_id} is read in another event loop than the "
                f"one it was made in; call generate in the loop that reads"
            )
        if self._is_read:
            raise RuntimeError(
                f"the stream of request {self.request_id} is read by two tasks; read it in one"
            )
        self._is_read = True
        try:
            output = await self._read()
        except BaseException:  # cancelled, or the request failed
            self._close()
            raise
        finally:
            self._is_read = False
        self._is_over = output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request, if it is unfinished; nothing more is read."""
        self._close()

    def __del__(self) -> None:
        if not self._is_over:
            self._close()

    async def _read(self) -> RequestOutput:
        buffer = self._buffer
        while not buffer.has_news:
            buffer.waiter = self._mailbox.loop.create_future()
            await buffer.waiter
        if buffer.error is not None and not buffer.has_output:
            raise buffer.error
        live = buffer.live
        num_tokens, news = live.num_unread, live.collect()
        if num_tokens <= MAX_TOKENS_ON_LOOP:
            return live.render(news)
        return await self._mailbox.loop.run_in_executor(None, live.render, news)

    def _close(self) -> None:
        """Also runs in the destructor, on whatever thread that is."""
        self._is_over = True
        self._mailbox.forget(self._submission)
        self._thread.cancel(self._submission)
