"""AsyncLLM: what streams give, what ends them, in which order, and how many may wait."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from runtime import (
    LLM,
    AsyncLLM,
    QueueFullError,
    RequestOutputKind,
)
from tests.runtime.stream_reading import Gate, all_ids, collect, final, greedy, is_clean, run, until

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


@pytest.fixture(scope="module")
def offline(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=512, kv_cache_bytes=1 << 22) as llm:
        yield llm


@pytest.fixture
def llm(checkpoint):
    llm = AsyncLLM(checkpoint("llama"), max_model_len=512, kv_cache_bytes=1 << 22)
    yield llm
    run(llm.shutdown(drain=False))


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
        stream = llm.generate("abc", greedy(400), deadline=1)
        other = llm.generate("xyz", greedy(5), deadline=3600)
        unstarted = llm.generate("xyz", greedy(5), deadline=1e-9)
        gate.let_through(2)
        await anext(stream)
        await asyncio.sleep(1.1)
        gate.open()
        completion = await final(stream)
        assert completion.finish_reason == "abort"
        assert "deadline of 1 s" in completion.error
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
    first_tokens = {}

    async def read(name, priority):
        outputs = await collect(llm.generate("abc", greedy(2), name, priority=priority))
        first_tokens[name] = outputs[-1].metrics.first_token_time

    async def main():
        tasks = [asyncio.create_task(read("first", 5))]
        await until(lambda: gate.is_blocking)
        tasks += [asyncio.create_task(read(str(p), p)) for p in (3, -1, 2, np.int64(0))]
        await until(lambda: llm._thread._inbox.qsize() == 4)
        gate.open()
        await asyncio.gather(*tasks)
        await llm.shutdown()

    run(main())
    assert sorted(first_tokens, key=first_tokens.get) == ["first", "-1", "0", "2", "3"]


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
