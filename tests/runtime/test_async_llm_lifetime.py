"""AsyncLLM: several loops, threads and engines, and all the ways in which one ends."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest

from runtime import (
    LLM,
    AsyncLLM,
    EngineDeadError,
    InvalidRequestError,
)
from tests.runtime.stream_reading import Gate, collect, final, greedy, run, until


@pytest.fixture(scope="module")
def offline(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=512, kv_cache_bytes=1 << 22) as llm:
        yield llm


@pytest.fixture
def llm(checkpoint):
    llm = AsyncLLM(checkpoint("llama"), max_model_len=512, kv_cache_bytes=1 << 22)
    yield llm
    run(llm.shutdown(drain=False))


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


def test_the_statistics_of_steps_are_given_while_it_runs_and_logged_at_its_end(llm, caplog):
    async def main():
        await final(llm.generate("abc", greedy(5)))
        return await llm.stats()

    stats = run(main())
    assert sum(bucket["steps"] for bucket in stats["buckets"]) == stats["num_steps"] == 5
    with caplog.at_level("INFO", logger="stepgraph.runtime"):
        run(llm.shutdown())
    assert "steps:\nmode         size    steps" in caplog.text

    async def too_late():
        await llm.stats()

    with pytest.raises(EngineDeadError, match="shut down"):
        run(too_late())


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


def test_draining_ends_though_the_last_request_is_refused_meanwhile(llm):
    async def main():
        tokenizing = threading.Event()
        llm._encoder.submit(tokenizing.wait)
        stream = llm.generate("", greedy())
        bad = llm.generate(5, greedy())
        down = asyncio.create_task(llm.shutdown())
        await until(lambda: llm._thread._drained)
        tokenizing.set()
        await down
        with pytest.raises(InvalidRequestError, match="no tokens"):
            await collect(stream)
        with pytest.raises(TypeError, match="prompt is 5"):
            await collect(bad)

    run(main())


@pytest.mark.parametrize("timeout", [None, 0.05])
def test_hard_shutdown_and_a_drain_that_takes_too_long_keep_the_tokens(llm, timeout):
    gate = Gate(llm)

    async def main():
        stream = llm.generate("abc", greedy(500))
        unread = llm.generate("xyz", greedy(500))
        thread = llm._thread
        await until(lambda: gate.is_blocking)
        await until(lambda: len(thread._submissions) + thread._inbox.qsize() == 2)
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
            first = await anext(stream)
            if fail:
                raise KeyError
        outputs = [first, *await collect(stream)]  # the first may be the last
        return len(outputs[-1].outputs[0].token_ids)

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
