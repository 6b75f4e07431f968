"""What the tests of AsyncLLM share: reading streams, holding back steps, looking for leftovers."""

from __future__ import annotations

import asyncio
import threading

from runtime import SamplingParams
from runtime.engine import Engine


def greedy(max_tokens=6, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)


def run(coroutine, seconds=60):
    """The coroutine's result; TimeoutError rather than a test run that hangs."""
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


async def collect(stream):
    return [output async for output in stream]


async def final(stream):
    return (await collect(stream))[-1].outputs[0]


def all_ids(completions):
    return [token_id for completion in completions for token_id in completion.token_ids]


async def is_clean(llm):
    """All blocks are free and nothing is kept of any request, once what was aborted has ended."""
    await llm._call(Engine.check_integrity)
    engine = llm._llm.engine
    assert not engine.has_unfinished
    assert engine._blocks.num_free_blocks == engine._blocks.num_usable_blocks
    assert not llm._thread._open
    assert not llm._thread._submissions
    assert not any(mailbox._buffers for mailbox in llm._mailboxes.values())
    return True


class Gate:
    """Lets an engine's steps through one at a time, as the test says."""

    def __init__(self, llm):
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self.is_blocking = False
        engine = llm._llm.engine
        step = engine.try_step

        def gated():
            if not self._is_open and not self._permits.acquire(blocking=False):
                self.is_blocking = True
                assert self._permits.acquire(timeout=30), "the test lets no step through"
                self.is_blocking = False
            return step()

        engine.try_step = gated

    def let_through(self, num_steps):
        for _ in range(num_steps):
            self._permits.release()

    def open(self):
        self._is_open = True
        self._permits.release()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)
