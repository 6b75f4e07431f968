"""The Python API for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from . import value_checks as checks
from .chat_format import ChatFormat
from .engine import Engine
from .engine_thread import EngineThread
from .errors import EngineDeadError
from .grammar import GrammarCompiler
from .llm import LLM
from .metrics import EngineMetrics
from .prompts import (
    Conversation,
    EncodedPrompt,
    Prompt,
    check_cache_salt,
    encode_chats,
    encode_prompt,
    one_sampling_params,
)
from .request_stream import Mailbox, RequestStream
from .sampling_params import SamplingParams
from .submission import Submission
from .tokenizer import Tokenizer

T = TypeVar("T")


class AsyncLLM:
    """A model that many tasks share, each reading its own stream.

        async with AsyncLLM("smollm2-135m-instruct") as engine:
            async for output in engine.generate("The sky is", SamplingParams(max_tokens=20)):
                print(output.outputs[0].text)

    One thread runs the steps; another tokenizes and compiles grammars. The event loop waits for
    neither. It turns ids into text itself, when an output is read: so it is done while the device
    runs, in one piece for all tokens since the last reading, and not at all for a request that
    nobody reads.

    A request's tokens wait for its reader without limit other than the output's own length, and
    slow readers hold up nobody. Several event loops may use one AsyncLLM; a stream is read in the
    loop that asked for it. Making one loads the model and takes long: do it before the loop runs,
    or in a thread.

    Args:
        model: as for `LLM`.
        max_waiting: most requests that wait, beyond those that the next step can start; one with n
            streams counts n times; None: any number. One more is refused with QueueFullError.
        config: fields of `EngineConfig`.

    Raises:
        As `LLM`.
    """

    def __init__(self, model: str | Path, *, max_waiting: int | None = None, **config: Any) -> None:
        if max_waiting is not None:
            max_waiting = checks.integer("max_waiting", max_waiting, 0, None)
        self._llm = LLM(model, **config)
        self.tokenizer = self._llm.tokenizer
        # One thread: requests keep their order, and the tokenizer is used by nobody else.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="stepgraph-tokenize")
        self._thread = EngineThread(self._llm.engine, max_waiting=max_waiting)
        self._grammars = self._llm.engine.grammars
        self._limits = self._llm.engine.scheduler.config
        self._lock = threading.Lock()
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._numbers = itertools.count()
        weakref.finalize(self, self._thread.stop)

    # -- requests -----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> RequestStream:
        """Complete one prompt. The request is queued at once and runs whether it is read or not.

        Args:
            prompt: a string, a list of token ids, or a mapping (see `Prompt`).
            sampling_params: None: `SamplingParams()`; `output_kind` says what each output has.
            request_id: a name of the caller's, for `abort`; None: one is given.
            priority: under policy "priority", lower runs first; 0 under others.
            deadline: seconds from now. A request that isn't finished by then is ended with reason
                "abort" and keeps its tokens.

        Returns:
            The stream of its outputs. What is wrong with the prompt is raised by reading it.

        Raises:
            TypeError, InvalidRequestError: an argument is of the wrong type or out of range.
            QueueFullError: max_waiting requests wait already.
            EngineDeadError: the engine was shut down or has failed.
            RuntimeError: no event loop is running.
        """
        prompt = _own(prompt)
        return self._start(
            lambda tokenizer: encode_prompt(prompt, tokenizer),
            sampling_params,
            request_id,
            priority,
            deadline,
        )

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        **chat_format: Any,
    ) -> RequestStream:
        """Answer one conversation, through a chat template.

        Args:
            messages: a list of {"role": ..., "content": ...}.
            cache_salt: only requests with the same one share cached K/V.
            chat_format: fields of `ChatFormat`, as in `LLM.chat`.

        The other arguments, and what is returned and raised: as `generate`.
        """
        messages, salt = _own(messages), check_cache_salt(cache_salt)
        options = ChatFormat(**chat_format)

        def encode(tokenizer: Tokenizer) -> EncodedPrompt:
            return encode_chats([messages], options, tokenizer, salt)[0]

        return self._start(encode, sampling_params, request_id, priority, deadline)

    async def abort(self, request_id: str) -> None:
        """End a request with reason "abort"; its stream gives a last output with what there is.

        Returns when it has ended. Other ids than those of unfinished requests do nothing.
        """
        if not isinstance(request_id, str):
            raise checks.wrong_type("request_id", request_id, "a string")
        submission = self._thread.find(request_id)
        if submission is not None:
            self._thread.cancel(submission)
            with contextlib.suppress(EngineDeadError):
                await self._call(lambda engine: None)

    # -- the engine ---------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """True while requests are taken."""
        return self._thread.end is None

    async def check_health(self) -> None:
        """Return if the engine takes requests; raise EngineDeadError, with the cause, if not."""
        if (error := self._thread.end) is not None:
            raise error

    def metrics(self) -> EngineMetrics:
        """What the engine has done so far; RuntimeError once shut down. Doesn't wait for a step."""
        return self._llm.metrics()

    async def stats(self) -> dict[str, Any]:
        """How the steps so far were launched, in JSON's types; see `engine_stats`."""
        return await self._call(Engine.stats)

    async def reset_prefix_cache(self) -> None:
        """Forget the K/V of past prompts and outputs; running requests keep their own."""
        await self._call(Engine.reset_prefix_cache)

    async def is_sleeping(self) -> bool:
        """True between `sleep` and `wake_up`."""
        return await self._call(lambda engine: engine.is_sleeping)

    async def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`; see `LLM.sleep`.

        Refused with EngineStateError while a request is unfinished, also one that nobody reads.
        Meanwhile reading a new request's stream raises that error; one that comes while the engine
        wakes up is served afterwards.
        """
        await self._call_idle("sleep", lambda engine: engine.sleep(level))

    async def wake_up(self) -> None:
        """Take the memory back; see `LLM.wake_up`."""
        await self._call(Engine.wake_up)

    async def reload_weights(self, path: str | os.PathLike[str] | None = None) -> None:
        """Read other weights in place; see `LLM.reload_weights`.

        Refused with EngineStateError while a request is unfinished; one that comes meanwhile gets
        the new weights.
        """
        await self._call_idle("reload_weights", lambda engine: engine.reload_weights(path))

    async def shutdown(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, end those there are, and give back the memory.

        Doing it twice is fine. What a stream has not read yet can still be read.

        Args:
            drain: let unfinished requests run to their end; False: end them after the step that
                runs, with reason "abort" and the tokens they have.
            timeout: most seconds to drain, after which the rest is ended; None: as long as it
                takes.
        """
        drain = checks.flag("drain", drain)
        if timeout is not None:
            timeout = checks.number("timeout", timeout, 0.0, math.inf)
        self._thread.refuse("the engine was shut down; make a new one")
        if drain:
            await asyncio.wait([asyncio.wrap_future(self._thread.drain())], timeout=timeout)
        self._thread.stop()
        await asyncio.get_running_loop().run_in_executor(None, self._give_back)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down: after draining, or at once if the body raised."""
        await self.shutdown(drain=exc_type is None)

    def _give_back(self) -> None:
        self._thread.join()
        self._encoder.shutdown(wait=False)
        self._llm.close()

    # -- inside -------------------------------------------------------------------------------

    def _start(
        self,
        encode: Callable[[Tokenizer], EncodedPrompt],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        deadline: float | None,
    ) -> RequestStream:
        mailbox = self._mailbox(asyncio.get_running_loop())
        if request_id is None:
            names = (f"request-{number}" for number in self._numbers)
            request_id = next(name for name in names if self._thread.find(name) is None)
        elif not isinstance(request_id, str):
            raise checks.wrong_type("request_id", request_id, "a string")
        priority = checks.integer("priority", priority, -(2**63), 2**63 - 1)
        self._limits.check_priority(priority)
        if deadline is not None:
            deadline = checks.number("deadline", deadline, 0.0, math.inf, above_minimum=True)
        now = time.monotonic()
        submission = Submission(
            request_id=request_id,
            params=one_sampling_params(sampling_params),
            priority=priority,
            arrival_time=now,
            deadline=math.inf if deadline is None else now + deadline,
            outbox=mailbox,
        )
        self._thread.open(submission)
        stream = RequestStream(submission, mailbox, self._thread, owner=self)
        try:
            self._encoder.submit(
                _encode, encode, self.tokenizer, self._grammars, submission, self._thread
            )
        except RuntimeError as error:  # another thread has shut it down in this moment
            self._thread.fail(submission, EngineDeadError(str(error)))
        return stream

    def _mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        with self._lock:
            if loop not in self._mailboxes:
                known = self._mailboxes.items()
                self._mailboxes = {old: box for old, box in known if not old.is_closed()}
                self._mailboxes[loop] = Mailbox(loop)
            return self._mailboxes[loop]

    async def _call(self, function: Callable[[Engine], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(function))

    async def _call_idle(self, purpose: str, function: Callable[[Engine], T]) -> T:
        return await asyncio.wrap_future(self._thread.call_idle(purpose, function))


def _encode(
    encode: Callable[[Tokenizer], EncodedPrompt],
    tokenizer: Tokenizer,
    grammars: GrammarCompiler,
    submission: Submission,
    thread: EngineThread,
) -> None:
    """Runs in the tokenizing thread, without holding the AsyncLLM alive."""
    try:
        submission.prompt = encode(tokenizer)
        if submission.params.structured_outputs is not None:
            grammars.compile(submission.params.structured_outputs)  # the engine finds it then
    except Exception as error:  # noqa: BLE001 - it is the caller's
        thread.fail(submission, error)
    except BaseException as error:  # noqa: BLE001 - as a panic of the tokenizers library is
        thread.fail(submission, RuntimeError(f"the tokenizer failed: {error!r}"))
    else:
        thread.submit(submission)


def _own(value: T) -> T:
    """A list as it is now: the caller may add to it before it is tokenized."""
    return copy.copy(value) if isinstance(value, list) else value
