"""AsyncLLM: what streams give, what ends them, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from runtime import (
    LLM,
    AsyncLLM,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RequestOutputKind,
    SamplingParams,
)
from runtime import engine as engine_module

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


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
    await llm._call(engine_module.Engine.check_integrity)
    engine = llm._llm.engine
    assert not engine.has_unfinished
    assert engine._blocks.num_free_blocks == engine._blocks.num_usable_blocks
    assert not llm._thread._open
    assert not llm._thread._submissions
    assert not any(mailbox._buffers for mailbox in llm._mailboxes.values())
    return True


@pytest.fixture(scope="module")
def offline(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=512, kv_cache_bytes=1 << 22) as llm:
        yield llm


@pytest.fixture
def llm(checkpoint):
    llm = AsyncLLM(checkpoint("llama"), max_model_len=512, kv_cache_bytes=1 << 22)
    yield llm
    run(llm.shutdown(drain=False))


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


# What streams give


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_streams_text_is_that_of_the_offline_call(llm, offline, kind):
    (expected,) = offline.generate(["abc"], greedy(20), use_tqdm=False)

    async def main():
        return await collect(llm.generate("abc", greedy(20, output_kind=kind)))

    outputs = run(main())
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    completions = [output.outputs[0] for output in outputs]
    if kind is DELTA:
        assert all_ids(completions) == expected.outputs[0].token_ids
        assert "".join(c.text for c in completions) == expected.outputs[0].text
        assert all(c.token_ids for c in completions)
    else:
        assert completions[-1].token_ids == expected.outputs[0].token_ids
        assert completions[-1].text == expected.outputs[0].text
        for before, after in itertools.pairwise(completions):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert after.text.startswith(before.text)
        assert len(completions) == 1 or kind is CUMULATIVE
    assert {c.finish_reason for c in completions[:-1]} <= {None}
    assert completions[-1].finish_reason == "length"
    last = outputs[-1]
    assert (last.prompt, last.prompt_token_ids) == (expected.prompt, expected.prompt_token_ids)
    assert last.metrics.arrival_time <= last.metrics.first_token_time <= last.metrics.finish_time


def test_prompts_come_as_text_ids_mappings_or_conversations(llm, offline):
    ids = offline.tokenizer.encode("abc")
    expected = offline.generate("abc", greedy(), use_tqdm=False)[0].outputs[0].text
    conversation = [{"role": "user", "content": "hi"}]
    answer = offline.chat(conversation, greedy(), use_tqdm=False)[0].outputs[0].text

    async def main():
        for prompt in ("abc", ids, np.array(ids), {"prompt": "abc"}, {"prompt_token_ids": ids}):
            assert (await final(llm.generate(prompt, greedy()))).text == expected
        assert (await final(llm.chat(conversation, greedy()))).text == answer
        return await is_clean(llm)

    assert run(main())


def test_a_slow_reader_gets_fewer_longer_outputs_and_holds_up_nobody(llm, offline):
    expected = offline.generate("abc", greedy(400), use_tqdm=False)[0].outputs[0]

    async def main():
        slow = llm.generate("abc", greedy(400, output_kind=DELTA))
        first = await anext(slow)
        fast = await collect(llm.generate("xyz", greedy(400, output_kind=DELTA)))
        assert sum(len(output.outputs[0].token_ids) for output in fast) == 400
        await until(lambda: llm.metrics().num_running == 0)
        rest = await collect(slow)
        assert len(rest) == 1, "all that came meanwhile is in one output"
        pieces = [first.outputs[0], rest[0].outputs[0]]
        assert "".join(piece.text for piece in pieces) == expected.text
        assert all_ids(pieces) == expected.token_ids
        return await is_clean(llm)

    assert run(main())


def test_the_loop_is_woken_once_for_all_steps_it_missed(llm):
    async def main():
        loop = asyncio.get_running_loop()
        calls = []
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args, **kwargs: (
            calls.append(args[0]),
            wake(*args, **kwargs),
        )[1]
        streams = [llm.generate("abc", greedy(30)) for _ in range(8)]
        while llm.metrics().num_output_tokens < 8 * 30:
            time.sleep(0.01)  # the loop is busy, on purpose
        assert len([call for call in calls if call.__name__ == "_hand_over"]) <= 2
        assert {(await final(stream)).finish_reason for stream in streams} == {"length"}

    run(main())


def test_the_loop_runs_on_while_a_step_does(llm):
    gate = Gate(llm)

    async def main():
        reading = asyncio.create_task(final(llm.generate("abc", greedy())))
        await until(lambda: llm._thread._submissions)
        for _ in range(100):  # the step waits for the gate all the while
            await asyncio.sleep(0)
        assert not reading.done()
        gate.open()
        assert (await reading).finish_reason == "length"

    run(main())


def test_a_request_that_nobody_reads_runs_to_its_end(llm):
    async def main():
        stream = llm.generate("abc", greedy(10))
        await until(lambda: llm.metrics().num_finished["length"] == 1)
        (output,) = await collect(stream)
        assert len(output.outputs[0].token_ids) == 10

    run(main())


def test_the_readmes_example_runs(checkpoint, capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = [block for block in readme.split("```") if "AsyncLLM(" in block]
    code = example.removeprefix("python").replace(
        '"smollm2-135m-instruct"', f"{str(checkpoint('llama'))!r}, max_model_len=128"
    )
    exec(compile(code, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "The sea is ->" in shown
    assert "Rain falls ->" in shown


# What ends them


async def is_aborted(llm):
    """Its one request ends early and leaves nothing behind."""
    gc.collect()
    await until(lambda: not llm._thread._open)
    ends = llm.metrics().num_finished
    assert (ends["abort"], ends["length"]) == (1, 0)
    return await is_clean(llm)


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_cancelling_the_reading_task_aborts_the_request(llm, num_read):
    gate = Gate(llm)

    async def main():
        read_ids = []

        async def read():
            async for output in llm.generate("abc", greedy(400, output_kind=DELTA)):
                read_ids.extend(output.outputs[0].token_ids)

        task = asyncio.create_task(read())
        gate.let_through(num_read)
        await until(lambda: len(read_ids) == num_read and llm._thread._submissions)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        return await is_aborted(llm)

    assert run(main())


def test_a_timeout_on_an_output_aborts_the_request(llm):
    gate = Gate(llm)

    async def main():
        stream = llm.generate("abc", greedy(400))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        gate.open()
        assert await collect(stream) == []
        return await is_aborted(llm)

    assert run(main())


@pytest.mark.parametrize("num_read", [0, 2])
def test_closing_or_dropping_the_stream_aborts_the_request(llm, num_read):
    async def closed():
        stream = llm.generate("abc", greedy(400))
        for _ in range(num_read):
            await anext(stream)
        await stream.aclose()
        assert await collect(stream) == []

    async def dropped():
        stream = llm.generate("abc", greedy(400))
        for _ in range(num_read):
            await anext(stream)

    async def left():
        count = 0
        async for _ in llm.generate("abc", greedy(400)):
            if (count := count + 1) >= num_read:
                break

    async def main():
        for number, leave in enumerate((closed, dropped, left), start=1):
            await leave()
            await until(lambda: not llm._thread._open)
            assert llm.metrics().num_finished["abort"] == number
        return await is_clean(llm)

    assert run(main())


def test_abort_ends_a_request_wherever_it_is_and_its_stream_keeps_the_tokens(llm):
    gate = Gate(llm)

    async def main():
        streams = [llm.generate("abc", greedy(400), f"r{i}") for i in range(3)]
        await llm.abort("no such request")
        aborting = asyncio.create_task(llm.abort("r0"))  # tokenized or not
        gate.let_through(5)
        await aborting
        assert (await final(streams[0])).finish_reason == "abort"
        output = await anext(streams[1])
        num_tokens = len(output.outputs[0].token_ids)
        aborting = asyncio.create_task(llm.abort("r1"))
        gate.open()
        await aborting
        last = (await collect(streams[1]))[-1]
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        assert len(last.outputs[0].token_ids) >= num_tokens > 0
        again = llm.generate("abc", greedy(2), "r1")
        assert (await final(again)).finish_reason == "length", "its id is free"
        await llm.abort("r2")
        await llm.abort("r2")
        assert (await final(streams[2])).finish_reason == "abort"
        return await is_clean(llm)

    assert run(main())


def test_a_deadline_ends_a_request_with_its_tokens_and_says_so(llm):
    gate = Gate(llm)

    async def main():
        stream = llm.generate("abc", greedy(400), deadline=0.05)
        other = llm.generate("xyz", greedy(5), deadline=3600)
        unstarted = llm.generate("xyz", greedy(5), deadline=1e-9)
        gate.let_through(2)
        await anext(stream)
        await asyncio.sleep(0.06)
        gate.open()
        completion = await final(stream)
        assert completion.finish_reason == "abort"
        assert "deadline of 0.05 s" in completion.error
        assert 1 <= len(completion.token_ids) < 400
        assert (await final(other)).finish_reason == "length"
        assert (await final(unstarted)).token_ids == []
        return await is_clean(llm)

    assert run(main())


def test_a_nan_row_ends_its_request_with_an_error_in_the_output(llm, monkeypatch):
    model = llm._llm.engine._runner._model
    compute_logits = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda hidden: compute_logits(hidden) * np.nan)

    async def main():
        completion = await final(llm.generate("abc", greedy()))
        assert completion.finish_reason == "error"
        assert "NaN" in completion.error
        return await is_clean(llm)

    assert run(main())


# Order and limits


def test_lower_priority_runs_first(checkpoint):
    llm = AsyncLLM(checkpoint("llama"), max_model_len=64, max_num_seqs=1, policy="priority")
    gate = Gate(llm)
    order = []

    async def read(name, priority):
        await final(llm.generate("abc", greedy(2), name, priority=priority))
        order.append(name)

    async def main():
        tasks = [asyncio.create_task(read("first", 5))]
        await until(lambda: gate.is_blocking)
        tasks += [asyncio.create_task(read(str(p), p)) for p in (3, -1, 2, np.int64(0))]
        await until(lambda: llm._thread._inbox.qsize() == 4)
        gate.open()
        await asyncio.gather(*tasks)
        await llm.shutdown()

    run(main())
    assert order == ["first", "-1", "0", "2", "3"]


def test_max_waiting_bounds_those_that_the_next_step_cannot_start(checkpoint):
    llm = AsyncLLM(checkpoint("llama"), max_model_len=64, max_num_seqs=2, max_waiting=3)
    gate = Gate(llm)

    async def main():
        streams = [llm.generate("abc", greedy(4)) for _ in range(5)]
        with pytest.raises(QueueFullError, match="3 requests wait and max_waiting=3"):
            llm.generate("abc", greedy(4))
        gate.open()
        assert {(await final(stream)).finish_reason for stream in streams} == {"length"}
        assert (await final(llm.generate("abc", greedy(4)))).finish_reason == "length"
        await llm.shutdown()

    run(main())


def test_max_waiting_counts_who_waits_for_memory_though_rows_are_free(checkpoint):
    llm = AsyncLLM(checkpoint("llama"), max_model_len=64, num_kv_blocks=4, max_waiting=1)
    gate = Gate(llm)

    async def main():
        streams = [llm.generate([token] * 40, greedy(4)) for token in (7, 8)]
        thread = llm._thread
        await until(lambda: gate.is_blocking)
        await until(lambda: len(thread._submissions) + thread._inbox.qsize() == 2)
        gate.let_through(2)
        await until(lambda: thread._num_startable == 1)
        with pytest.raises(QueueFullError):
            llm.generate("abc", greedy(4))
        gate.open()
        for stream in streams:
            await final(stream)
        await llm.shutdown()

    run(main())


def test_cache_salts_keep_tenants_apart_and_the_cache_can_be_reset(llm):
    prompt = list(range(100))

    async def num_cached(**entries):
        outputs = await collect(llm.generate({"prompt_token_ids": prompt, **entries}, greedy(1)))
        return outputs[-1].num_cached_tokens

    async def main():
        assert [await num_cached() for _ in range(2)] == [0, 96]
        assert [await num_cached(cache_salt="a") for _ in range(2)] == [0, 96]
        assert await num_cached(cache_salt="b") == 0
        await llm.reset_prefix_cache()
        assert await num_cached() == 0
        return await is_clean(llm)

    assert run(main())


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"sampling_params": 3}, TypeError, "sampling_params is 3"),
        ({"request_id": 5}, TypeError, "request_id=5 is of type int: give a string"),
        ({"request_id": b"a"}, TypeError, "request_id=b'a'"),
        ({"priority": 1.5}, TypeError, "priority=1.5"),
        ({"priority": True}, TypeError, "priority=True"),
        ({"priority": None}, TypeError, "priority=None"),
        ({"priority": 1}, InvalidRequestError, "priority=1 has no effect under policy='fcfs'"),
        ({"deadline": "soon"}, TypeError, "deadline='soon'"),
        ({"deadline": True}, TypeError, "deadline=True"),
        (
            {"deadline": 0},
            InvalidRequestError,
            "deadline=0 is out of range: give a number more than 0",
        ),
        ({"deadline": -1.0}, InvalidRequestError, "deadline=-1.0"),
        ({"deadline": float("nan")}, InvalidRequestError, "deadline=nan"),
    ],
)
def test_wrong_arguments_are_refused_by_name_at_the_call(llm, arguments, error, text):
    async def main():
        with pytest.raises(error, match=text):
            llm.generate("abc", **arguments)
        with pytest.raises(error, match=text):
            llm.chat([{"role": "user", "content": "hi"}], **arguments)
        return await is_clean(llm)

    assert run(main())


@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        (5, TypeError, "prompt is 5"),
        (None, TypeError, "prompt is None"),
        (["a", "b"], TypeError, r"prompt is \['a', 'b'\]"),
        ([[1], [2]], TypeError, r"prompt is \[\[1\], \[2\]\]"),
        (np.ones((2, 2), np.int64), TypeError, "prompt is array"),
        (np.ones(3), TypeError, "prompt is array"),
        ([True], TypeError, r"prompt is \[True\]"),
        (b"abc", TypeError, "prompt is b'abc'"),
        ("", InvalidRequestError, "no tokens"),
        ([], InvalidRequestError, "no tokens"),
        ([300], InvalidRequestError, "300 at place 0"),
        ([-1], InvalidRequestError, "-1 at place 0"),
        ([2**70], InvalidRequestError, "64 bits"),
        ([1] * 513, InvalidRequestError, "a prompt of 513 tokens"),
        ("\ud800", InvalidRequestError, "surrogate"),
        ({"text": "a"}, InvalidRequestError, "entries"),
        ({"prompt": [1]}, TypeError, "prompt is"),
        ({"prompt": "a", "prompt_token_ids": [1]}, InvalidRequestError, "entries"),
    ],
)
def test_a_bad_prompt_is_refused_by_its_stream_and_disturbs_nobody(llm, prompt, error, text):
    async def main():
        good = llm.generate("abc", greedy())
        bad = llm.generate(prompt, greedy())
        with pytest.raises(error, match=text):
            await collect(bad)
        assert await collect(bad) == []
        assert (await final(good)).finish_reason == "length"
        return await is_clean(llm)

    assert run(main())


@pytest.mark.parametrize("messages", [[], "hi", [{"content": "hi"}], [3], [{"role": 1}], None, {}])
def test_a_bad_conversation_is_refused_by_its_stream(llm, messages):
    async def main():
        with pytest.raises(InvalidRequestError):
            await collect(llm.chat(messages, greedy()))
        return await is_clean(llm)

    assert run(main())


def test_request_ids_are_unique_among_unfinished_requests(llm):
    gate = Gate(llm)

    async def main():
        first = llm.generate("abc", greedy(), "request-0")
        with pytest.raises(InvalidRequestError, match="'request-0' is in use"):
            llm.generate("abc", greedy(), "request-0")
        unnamed = llm.generate("abc", greedy())
        assert unnamed.request_id != "request-0"
        gate.open()
        await final(first)
        await final(unnamed)

    run(main())


def test_a_stream_is_read_by_one_task_in_its_own_loop(llm):
    gate = Gate(llm)

    async def main():
        stream = llm.generate("abc", greedy())
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="read by two tasks"):
            await anext(stream)
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, collect(stream))
        gate.open()
        await reading
        assert (await final(stream)).finish_reason == "length"

    run(main())
    with pytest.raises(RuntimeError, match="no running event loop"):
        llm.generate("abc", greedy())


@pytest.mark.parametrize("max_waiting", ["3", 1.5, True, -1])
def test_a_wrong_max_waiting_is_refused_before_the_model_is_loaded(max_waiting):
    with pytest.raises((TypeError, InvalidRequestError), match="max_waiting"):
        AsyncLLM("no such model", max_waiting=max_waiting)


# Several loops, threads and engines


def test_several_event_loops_and_engines_work_side_by_side(llm, checkpoint, offline):
    expected = offline.generate(["abc"], greedy(20), use_tqdm=False)[0].outputs[0].text
    other = AsyncLLM(checkpoint("llama"), max_model_len=512, block_size=4)
    texts = []

    async def main():
        streams = [engine.generate("abc", greedy(20)) for engine in (llm, other) * 10]
        texts.extend([(await final(stream)).text for stream in streams])

    threads = [threading.Thread(target=run, args=(main(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 60
    run(main())
    assert len(llm._mailboxes) == 1, "closed loops are forgotten"
    run(other.shutdown())


def test_a_loop_that_closes_with_open_streams_ends_their_requests(llm):
    streams = []

    async def leave_open():
        streams.append(llm.generate("abc", greedy(500)))
        await anext(streams[0])

    async def main():
        await until(lambda: not llm._thread._open)
        assert llm.metrics().num_finished["abort"] == 1

    run(leave_open())
    run(main())


# The end


def test_shutdown_drains_what_runs_and_refuses_what_comes(llm):
    async def main():
        streams = [llm.generate("abc", greedy(50)) for _ in range(5)]
        down = asyncio.create_task(llm.shutdown())
        await asyncio.sleep(0)
        assert not llm.is_running
        with pytest.raises(EngineDeadError, match="shut down"):
            llm.generate("abc")
        with pytest.raises(EngineDeadError, match="shut down"):
            await llm.check_health()
        await down
        for stream in streams:
            assert len((await final(stream)).token_ids) == 50
        await llm.shutdown()

    run(main())
    assert not llm._thread._thread.is_alive()


@pytest.mark.parametrize("timeout", [None, 0.05])
def test_hard_shutdown_and_a_drain_that_takes_too_long_keep_the_tokens(llm, timeout):
    gate = Gate(llm)

    async def main():
        stream = llm.generate("abc", greedy(500))
        unread = llm.generate("xyz", greedy(500))
        gate.let_through(3)
        await anext(stream)
        await until(lambda: gate.is_blocking)
        down = asyncio.create_task(llm.shutdown(drain=timeout is not None, timeout=timeout))
        await asyncio.sleep(0.1)
        assert not down.done(), "it waits for the step"
        gate.let_through(1)
        await down
        for completion in (await final(stream), await final(unread)):
            assert completion.finish_reason == "abort"
            assert "shut down" in completion.error
            assert 0 < len(completion.token_ids) < 500

    run(main())


def test_leaving_the_context_drains_and_an_exception_does_not(checkpoint):
    async def main(fail):
        async with AsyncLLM(checkpoint("llama"), max_model_len=512) as llm:
            stream = llm.generate("abc", greedy(400))
            await anext(stream)
            if fail:
                raise KeyError
        return len((await final(stream)).token_ids)

    assert run(main(fail=False)) == 400
    with pytest.raises(KeyError):
        run(main(fail=True))


def test_shutdown_gives_back_the_engine_though_streams_are_kept(checkpoint):
    llm = AsyncLLM(checkpoint("llama"), max_model_len=512)
    runner = weakref.ref(llm._llm.engine._runner)

    async def main():
        streams = [llm.generate("abc", greedy(400)) for _ in range(3)]
        await anext(streams[0])
        await llm.shutdown(drain=False)
        return streams

    streams = run(main())
    gc.collect()
    assert runner() is None
    assert len(streams) == 3


def test_a_dropped_engine_ends_its_thread(checkpoint):
    llm = AsyncLLM(checkpoint("llama"), max_model_len=512)
    runner, thread = weakref.ref(llm._llm.engine._runner), llm._thread._thread

    async def main(llm):
        await anext(llm.generate("abc", greedy(400)))

    run(main(llm))
    del llm
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    gc.collect()
    assert runner() is None


def in_a_process(body, checkpoint):
    code = f"""
import asyncio, gc
from runtime import LLM, AsyncLLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
llm = AsyncLLM({str(checkpoint("llama"))!r}, max_model_len=512)
{textwrap.dedent(body)}
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_process_ends_quietly_with_streams_open_and_dropped(checkpoint):
    body = """
    async def main(streams):
        streams += [llm.generate("abc", params) for _ in range(20)]
        await anext(streams[0])
        del streams[10:]
    kept = []
    asyncio.run(main(kept))
    """
    process = in_a_process(body, checkpoint)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "")


def test_ctrl_c_ends_a_process_with_streams_open(checkpoint):
    body = """
    async def read(index):
        async for output in llm.generate([index], params):
            if index == 0 and len(output.outputs[0].token_ids) == 5:
                print("ready", flush=True)
    async def main():
        async with llm:
            while True:
                await asyncio.gather(*(read(index) for index in range(20)))
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print(llm._thread._thread.is_alive())
    """
    process = in_a_process(body, checkpoint)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out.replace("ready\n", ""), err) == (0, "False\n", "")
