"""AsyncLLM: what is refused, where it is refused, and that nobody else is disturbed."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter

import numpy as np
import pytest

from runtime import (
    AsyncLLM,
    InvalidRequestError,
    SamplingParams,
)
from tests.runtime.stream_reading import Gate, collect, final, greedy, is_clean, run


@pytest.fixture
def llm(checkpoint):
    llm = AsyncLLM(checkpoint("llama"), max_model_len=512, kv_cache_bytes=1 << 22)
    yield llm
    run(llm.shutdown(drain=False))


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


JUNK = (
    *(
        None,
        True,
        0,
        -1,
        1.5,
        float("nan"),
        float("inf"),
        2**70,
        "",
        "abc",
        b"abc",
        [],
        {},
        object(),
    ),
    *([1, 2], [-1], [2**70], [True], ["a"], [[1]], ("a", 1), {"prompt": "a"}, {"prompt": None}),
    *({"prompt_token_ids": [5], "cache_salt": "s"}, np.arange(4), np.ones(2), np.array("a"), set()),
    *([{"role": "user", "content": "hi"}], [{"role": "user"}], SamplingParams, greedy(2), len),
)


CHAT_OPTIONS = (
    *("cache_salt", "chat_template", "add_generation_prompt", "continue_final_message", "tools"),
    "chat_template_kwargs",
)


def test_junk_in_any_place_is_a_type_or_value_error_or_works(llm):
    rng = random.Random(0)
    outcomes = Counter()

    async def attempt():
        call = rng.choice([llm.generate, llm.chat])
        arguments = {
            name: rng.choice(JUNK)
            for name in ("sampling_params", "request_id", "priority", "deadline")
            if rng.random() < 0.15
        }
        arguments.setdefault("sampling_params", greedy(2))
        if call == llm.chat and rng.random() < 0.3:
            arguments[rng.choice(CHAT_OPTIONS)] = rng.choice(JUNK)
        try:
            await collect(call(rng.choice(JUNK), **arguments))
            outcomes["works"] += 1
        except (TypeError, ValueError) as error:
            assert str(error)
            outcomes[type(error).__name__] += 1

    async def main():
        for _ in range(40):
            good = llm.generate("abc", greedy(4))
            await asyncio.gather(*(attempt() for _ in range(10)))
            assert (await final(good)).finish_reason == "length"
        return await is_clean(llm)

    assert run(main())
    assert outcomes["works"] > 20
    assert set(outcomes) == {"works", "TypeError", "InvalidRequestError"}


def test_junk_is_refused_by_the_engines_own_calls_too(llm):
    async def main():
        for value in (None, 5, True, b"a", ["a"], {}, np.arange(3)):
            with pytest.raises(TypeError, match="request_id="):
                await llm.abort(value)
        for arguments, error in (
            ({"drain": 1}, TypeError),
            ({"drain": None}, TypeError),
            ({"timeout": "5"}, TypeError),
            ({"timeout": -1.0}, InvalidRequestError),
            ({"timeout": float("nan")}, InvalidRequestError),
        ):
            with pytest.raises(error, match=next(iter(arguments))):
                await llm.shutdown(**arguments)
        assert llm.is_running
        assert (await final(llm.generate("abc", greedy(2)))).finish_reason == "length"
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
        outputs = [await reading, *await collect(stream)]  # the first may be the last
        assert outputs[-1].outputs[0].finish_reason == "length"

    run(main())
    with pytest.raises(RuntimeError, match="no running event loop"):
        llm.generate("abc", greedy())


@pytest.mark.parametrize("max_waiting", ["3", 1.5, True, -1])
def test_a_wrong_max_waiting_is_refused_before_the_model_is_loaded(max_waiting):
    with pytest.raises((TypeError, InvalidRequestError), match="max_waiting"):
        AsyncLLM("no such model", max_waiting=max_waiting)


def test_a_list_may_change_once_it_was_handed_over(llm):
    async def main():
        tokenizing = threading.Event()
        llm._encoder.submit(tokenizing.wait)
        ids, messages = [1, 2, 3], [{"role": "user", "content": "hi"}]
        streams = [llm.generate(ids, greedy(1)), llm.chat(messages, greedy(1))]
        before = llm.tokenizer.apply_chat_template(messages)
        ids.append(10**6)
        messages.append("no message")
        tokenizing.set()
        seen = [(await collect(stream))[-1].prompt_token_ids for stream in streams]
        assert seen == [[1, 2, 3], before]

    run(main())


def test_a_tokenizer_that_panics_fails_its_request_alone(llm, monkeypatch):
    class Panic(BaseException):
        """As the tokenizers library raises."""

    encode = llm.tokenizer.encode

    def panicking(text):
        if text == "bad":
            raise Panic("index out of bounds")
        return encode(text)

    monkeypatch.setattr(llm.tokenizer, "encode", panicking)

    async def main():
        good = llm.generate("abc", greedy())
        with pytest.raises(RuntimeError, match="index out of bounds"):
            await collect(llm.generate("bad", greedy()))
        assert (await final(good)).finish_reason == "length"
        return await is_clean(llm)

    assert run(main())
