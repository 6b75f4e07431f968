"""Five hundred streams at once, with all that callers do to them; nothing may be left behind."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

import pytest

from runtime import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from runtime.engine import Engine
from runtime.live_request import LiveRequest
from runtime.request_stream import RequestStream, _Buffer
from runtime.sequence import Sequence
from runtime.submission import StepNews, Submission

NUM_STREAMS = 500
OPTIONS = {"max_model_len": 128, "max_num_seqs": 48, "num_kv_blocks": 40}
PER_REQUEST = (LiveRequest, RequestStream, Sequence, StepNews, Submission, _Buffer)
ACTIONS = ("read", "read", "read", "cancel", "break", "close", "drop", "abort", "late")


def make_requests(seed):
    """Prompts of which many begin alike, greedy and seeded, of all kinds of output."""
    rng = random.Random(seed)
    heads = ["".join(rng.choices("abcdefgh ", k=rng.randint(0, 40))) for _ in range(12)]
    requests = []
    for _ in range(NUM_STREAMS):
        prompt = rng.choice(heads) + "".join(rng.choices("xyz", k=rng.randint(1, 12)))
        params = SamplingParams(
            temperature=rng.choice([0, 1]),
            seed=rng.getrandbits(32),
            max_tokens=rng.randint(1, 24),
            ignore_eos=rng.random() < 0.8,
            stop=rng.choice([[], [], ["e"], ["in", "o"]]),
            logprobs=rng.choice([None, None, 2]),
            frequency_penalty=rng.choice([0, 0, 0.5]),
            output_kind=rng.choice(list(RequestOutputKind)),
        )
        requests.append((prompt, params, rng.choice(ACTIONS), rng.randint(0, 6)))
    return requests


def objects_of_requests():
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) in PER_REQUEST]


async def read(stream, kind, stop_after=None):
    """(text, ids, finish reason) of a stream, checked for order on the way."""
    text, ids, reason = "", [], None
    count = 0
    async for output in stream:
        assert reason is None, "nothing follows the end"
        (completion,) = output.outputs
        if kind is RequestOutputKind.DELTA:
            text, ids = text + completion.text, ids + completion.token_ids
        else:
            assert completion.text.startswith(text)
            assert completion.token_ids[: len(ids)] == ids
            text, ids = completion.text, completion.token_ids
        assert completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)
        reason = completion.finish_reason
        assert output.finished == (reason is not None)
        count += 1
        if count == stop_after and not output.finished:
            return None
    return text, ids, reason


async def act(llm, request):
    """Do to one stream what the request says; its result if it was read to its end."""
    prompt, params, action, number = request
    stream = llm.generate(prompt, params)
    kind = params.output_kind
    if action == "cancel":
        task = asyncio.create_task(read(stream, kind))
        del stream
        for _ in range(number * 3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()
    if action == "break":
        return await read(stream, kind, stop_after=number)
    if action == "close":
        await read(stream, kind, stop_after=number) if number else None
        await stream.aclose()
        return None
    if action == "drop":
        return None
    if action == "abort":
        aborting = asyncio.create_task(llm.abort(stream.request_id))
        result = await read(stream, kind)
        await aborting
        return result
    if action == "late":
        await asyncio.sleep(number / 20)
    return await read(stream, kind)


@pytest.fixture
def expected(checkpoint):
    """By seed of the wave: text, ids and finish reason of each request, offline."""
    with LLM(checkpoint("llama"), **OPTIONS) as llm:
        found = {}
        for seed in (1, 2):
            requests = make_requests(seed)
            outputs = llm.generate([r[0] for r in requests], [r[1] for r in requests], False)
            completions = [output.outputs[0] for output in outputs]
            found[seed] = [(c.text, c.token_ids, c.finish_reason) for c in completions]
    return found


def test_500_streams_with_random_ends_are_complete_and_leave_nothing(checkpoint, expected):
    llm = AsyncLLM(checkpoint("llama"), **OPTIONS)
    engine = llm._llm.engine
    of_others = objects_of_requests()  # of earlier tests; kept, so that their ids stay theirs
    known = set(map(id, of_others))

    async def wave(seed):
        requests = make_requests(seed)
        results = await asyncio.gather(*(act(llm, request) for request in requests))
        num_complete = 0
        for request, result, whole in zip(requests, results, expected[seed], strict=True):
            text, ids, reason = result or ("", [], "abort")
            if reason == "abort":
                assert request[2] in ("cancel", "break", "close", "drop", "abort")
                assert whole[0].startswith(text.removesuffix("\N{REPLACEMENT CHARACTER}"))
                assert whole[1][: len(ids)] == ids
            else:
                assert (text, ids, reason) == whole
                num_complete += 1
        assert num_complete >= NUM_STREAMS // 3

    async def main():
        tasks = asyncio.all_tasks()
        for seed in (1, 2):
            await wave(seed)
            while llm._thread._open:
                await asyncio.sleep(0.001)
            await llm._call(Engine.check_integrity)
            assert engine._blocks.num_free_blocks == engine._blocks.num_usable_blocks
            assert not engine.has_unfinished
            assert asyncio.all_tasks() == tasks
            await asyncio.sleep(0)  # the last news are handed over
            left = [thing for thing in objects_of_requests() if id(thing) not in known]
            assert Counter(type(thing).__name__ for thing in left) == {}
            del left
        metrics = llm.metrics()
        assert metrics.num_preemptions > 0, "blocks were short"
        assert metrics.prefix_cache_hits > 0
        assert sum(metrics.num_finished.values()) == 2 * NUM_STREAMS
        assert metrics.num_finished["abort"] > NUM_STREAMS // 10
        assert metrics.num_finished["stop"] > 5
        await llm.shutdown()

    asyncio.run(asyncio.wait_for(main(), 180))
