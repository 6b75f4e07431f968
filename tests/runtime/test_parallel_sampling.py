"""Requests with n above 1: the outputs of n separate requests, from one computed prompt."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from runtime import (
    LLM,
    AsyncLLM,
    InvalidRequestError,
    QueueFullError,
    RequestOutputKind,
    StepFailedError,
    StructuredOutputsParams,
)
from runtime import SamplingParams as Params
from runtime import model_runner as runner_module
from runtime.siblings import stream_seed
from runtime.step import StepFailure
from tests.runtime.stream_reading import Gate, all_ids, collect, run
from tests.runtime.stream_reading import is_clean as is_left_clean

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
SIZES = {"device": "cpu", "max_model_len": 160, "max_num_batched_tokens": 24, "max_num_seqs": 6}
GRAPHS = {"capture_sizes": "1,2,4,8,24"}


def never_twice(output_ids, logits):
    if output_ids:
        logits[output_ids[-1]] = -np.inf
    return logits


OPTIONS = (
    {},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 2},
    {"logprobs": 1, "prompt_logprobs": 1},
    {"stop_token_ids": tuple(range(0, 300, 7))},
    {"stop": ["a", "e", "Q"], "min_tokens": 3},
    {"logits_processors": [never_twice], "stop": ["t"]},
    {"bad_words": ["ab", "xyz"], "ignore_eos": True, "logit_bias": {5: 3.0}},
)


def requests(seed, count=12):
    """Step to arrive at, prompt, salt and params of requests, most with several streams."""
    rng, made = random.Random(seed), []
    prefixes = [[(31 * k + i) % 250 for i in range(64)] for k in range(2)]
    for place in range(count):
        prompt = rng.choice(prefixes)[: rng.randint(0, 60)]
        prompt = prompt + [rng.randrange(250) for _ in range(rng.randint(1, 12))]
        params = Params(
            n=rng.choice([1, 2, 3, 3, 8]),
            seed=seed + place,
            max_tokens=rng.choice([1, 3, 15, 25]),
            **OPTIONS[place % len(OPTIONS)],
        )
        made.append((rng.randint(0, 60), prompt, rng.choice([None, "salt"]), params))
    return made


def separately(traffic):
    """The same streams as requests of their own."""
    return [
        (arrival, prompt, salt, replace(params, n=1, seed=stream_seed(params.seed, index)))
        for arrival, prompt, salt, params in traffic
        for index in range(params.n)
    ]


def serve(engine, traffic, *, retry=False, before_step=lambda: None):
    """All streams, and how many blocks were copied; each step is followed by a recount."""
    waiting, firsts, step, copied = dict(enumerate(traffic)), {}, 0, []
    engine.on_step = lambda scheduled: copied.append(scheduled.block_copies.shape[1])
    while waiting or engine.has_unfinished:
        for place in [p for p, (arrival, *_) in waiting.items() if arrival <= step]:
            _, prompt, salt, params = waiting.pop(place)
            firsts[place] = engine.add_request(prompt, params, cache_salt=salt)
        step += 1
        if engine.has_unfinished:
            before_step()
            outcome = engine.try_step()
            engine.check_integrity()
            assert retry or not isinstance(outcome, StepFailure)
    assert is_clean(engine)
    streams = [stream for place in range(len(traffic)) for stream in firsts[place].streams]
    return streams, sum(copied)


def is_clean(engine):
    engine.check_integrity()
    assert engine.num_free_blocks == engine._blocks.num_usable_blocks
    assert not engine._sequences
    assert not engine._watched_texts
    assert not engine.scheduler._waiting._set_aside
    return engine.metrics().num_waiting == engine.metrics().num_running == 0


def values(record):
    return [next(iter(found.values())).logprob for found in record.as_dicts(None)]


def assert_same(actual, expected):
    for mine, other in zip(actual, expected, strict=True):
        assert mine.output_token_ids == other.output_token_ids, mine.name
        assert (mine.finish_reason, mine.stop_reason) == (other.finish_reason, other.stop_reason)
        for name in ("logprobs", "prompt_logprobs"):
            record = getattr(mine, name)
            if record is None:
                assert getattr(other, name) is None or (name[0], mine.index > 0) == ("p", True)
            else:
                alone = values(getattr(other, name))
                np.testing.assert_allclose(values(record), alone, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Outcomes of separate requests without overlap or graphs, by the traffic's seed."""
    known = {}

    def outcomes(seed):
        if seed not in known:
            with LLM(checkpoint("llama"), overlap_scheduling=False, **SIZES) as llm:
                known[seed], num_copied = serve(llm.engine, separately(requests(seed)))
                assert num_copied == 0
        return known[seed]

    return outcomes


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (100, {}),
        (200, {"enable_prefix_caching": False}),
        (300, {"num_kv_blocks": 11}),
        (100, {"num_kv_blocks": 11, "enable_prefix_caching": False}),
        (200, {"num_kv_blocks": 44, "block_size": 4, "policy": "priority"}),
        (300, {"block_size": 1, "max_prefill_chunk": 5}),
        (100, {"policy": "prefill_first", "enable_prefix_caching": False}),
        (200, {"attention_backend": "torch", "itl_target_ms": 5.0}),
        (300, {"graph_mode": "full"} | GRAPHS),
        (100, {"graph_mode": "full_and_piecewise", "bucket_fitting": True} | GRAPHS),
        (200, {"graph_mode": "piecewise", "num_kv_blocks": 12, "lazy_capture": True} | GRAPHS),
    ],
    ids=str,
)
def test_streams_get_the_tokens_of_separate_requests(checkpoint, expected, seed, options, overlap):
    with LLM(checkpoint("llama"), overlap_scheduling=overlap, **SIZES | options) as llm:
        streams, num_copied = serve(llm.engine, requests(seed))
        stats = llm.stats()
    assert_same(streams, expected(seed))
    assert (num_copied > 5) == (options.get("block_size") != 1)
    assert (stats["num_preemptions"] > 0) >= (options.get("num_kv_blocks", 44) < 44)
    assert (stats["num_steps_ahead"] > 0) == overlap
    if "graph_mode" in options:
        assert {bucket["mode"] for bucket in stats["buckets"]} - {"eager"}
        assert "changed plan" not in stats["falls"]


def test_what_blocks_held_before_and_what_siblings_write_never_shows(checkpoint, expected):
    """All free blocks are overwritten before each step."""
    with LLM(
        checkpoint("llama"), overlap_scheduling=False, enable_prefix_caching=False, **SIZES
    ) as llm:
        engine = llm.engine
        cache = engine._runner._graphs.cache

        def poison():
            free = [block.block_id for block in engine._blocks._free]
            for layer in (*cache.keys, *cache.values):
                layer[free] = 1e3

        streams, num_copied = serve(engine, requests(100), before_step=poison)
    assert_same(streams, expected(100))
    assert num_copied > 5


STAGES = {
    "pack": lambda runner: (runner_module, "pack"),
    "copy": lambda runner: (type(runner._graphs.cache), "copy_blocks"),
    "forward": lambda runner: (runner._graphs, "run"),
    "sample": lambda runner: (runner._sampler, "draw"),
}


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
@pytest.mark.parametrize("stage", STAGES)
def test_steps_that_fail_lose_nothing(checkpoint, expected, monkeypatch, stage, overlap):
    calls = 0
    options = {"num_kv_blocks": 24, "enable_prefix_caching": stage != "forward"}
    with LLM(checkpoint("llama"), overlap_scheduling=overlap, **SIZES | options) as llm:
        owner, name = STAGES[stage](llm.engine._runner)
        function = getattr(owner, name)

        def failing(*args, **kwargs):
            nonlocal calls
            calls += 1
            result = function(*args, **kwargs)
            if calls % 5 in (1, 3) and calls < 60:
                raise RuntimeError(stage)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            streams, _ = serve(llm.engine, requests(200), retry=True)
        assert_same(streams, expected(200))
        assert llm.engine.counters.num_failed_steps >= 3


# Blocks


@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize(
    ("num_prompt", "num_shared", "num_copied"), [(40, 2, 3), (48, 2, 3), (49, 3, 0), (2, 0, 3)]
)
def test_the_prompt_is_computed_once_and_its_blocks_are_shared(
    make_bench, caching, num_prompt, num_shared, num_copied
):
    bench = make_bench(prefix_caching=caching, budget=24)
    streams = bench.add(list(range(num_prompt)), 5, n=4).streams
    num_tokens, steps = 0, 0
    while len(bench.scheduler.running_sequences()) < 4:
        batch = bench.schedule()
        bench.scheduler.update(batch, bench.model.execute(batch))
        num_tokens += batch.num_tokens - batch.num_decodes
        steps += 1
    assert num_tokens == num_prompt + 3, "each sibling computes the last token alone"
    assert steps == -(-num_prompt // 24) + 1
    assert bench.num_copies == num_copied
    num_used = bench.blocks.num_usable_blocks - bench.blocks.num_free_blocks
    assert num_used == num_shared + 4 + (num_prompt == 48), "the first has gone on to its next"
    tables = [[block.block_id for block in s.blocks] for s in streams]
    assert len({tuple(table[:num_shared]) for table in tables}) == 1
    assert len({table[num_shared] for table in tables}) == 4
    bench.run()
    assert len({tuple(bench.output(stream)) for stream in streams}) == 4


def test_a_prompt_of_one_token_has_nothing_to_share(make_bench):
    bench = make_bench(prefix_caching=False)
    streams = bench.add([5], 5, n=4).streams
    assert bench.schedule().num_seqs == 4, "so nobody waits"
    bench.scheduler.rollback(bench.scheduler._flights._steps[0])
    bench.run()
    assert [len(bench.output(stream)) for stream in streams] == [5] * 4


def test_others_are_admitted_while_siblings_wait_for_their_prompt(make_bench):
    bench = make_bench(budget=20, prefix_caching=False)
    streams = bench.add(list(range(30)), 8, n=3).streams
    other = bench.add([1, 2, 3], 8)
    bench.step()
    assert [s.row for s in streams[1:]] == [-1, -1]
    bench.step()
    assert other.row >= 0
    assert bench.scheduler.num_waiting == 2
    bench.step()
    assert all(s.row >= 0 for s in streams)


@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("chunk", [None, 9])
def test_one_that_leaves_takes_nobody_along(make_bench, caching, num_steps, place, chunk):
    """At any time: before its prompt, in the middle of it, before and after it was shared."""
    for leave, num_steps_away in (("abort", 0), ("hold", 0), ("hold", 3)):
        bench = make_bench(budget=16, prefix_caching=caching, max_prefill_chunk=chunk)
        streams = bench.add(list(range(40)), 6, n=4).streams
        for _ in range(num_steps):
            bench.step()
        if leave == "abort":
            bench.scheduler.abort(streams[place])
        else:
            bench.scheduler.hold([streams[place]])
            assert not bench.scheduler._waiting._set_aside, "it would be in the queue twice"
            bench.scheduler.check_integrity()
        for _ in range(num_steps_away):
            bench.step()
        if leave == "hold":
            bench.scheduler.resume([streams[place]])
        bench.run()
        reasons = ["length"] * 4
        if leave == "abort":
            reasons[place] = "abort"
        assert [s.finish_reason for s in streams] == reasons
        assert [len(bench.output(s)) for s in streams if s.finish_reason == "length"]


@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "cache"])
def test_more_streams_than_rows_or_blocks_wait_for_their_turn(make_bench, caching):
    bench = make_bench(max_num_seqs=3, num_blocks=5, prefix_caching=caching)
    streams = bench.add(list(range(30)), 20, n=12).streams
    other = bench.add([1, 2], 4)
    bench.run()
    assert [len(bench.output(s)) for s in streams] == [20] * 12
    assert bench.output(other)
    assert bench.scheduler.num_preemptions > 0


def test_a_preempted_stream_takes_the_prompt_over_again(make_bench):
    bench = make_bench(prefix_caching=False, budget=64)
    streams = bench.add(list(range(40)), 12, n=3).streams
    for _ in range(5):
        bench.step()
    bench.scheduler._preempt(streams[1])
    batch = bench.schedule()
    assert batch.num_new_tokens.tolist() == [1, 1, 1 + len(streams[1].token_ids) - 40]
    bench.scheduler.update(batch, bench.model.execute(batch))
    bench.run()
    assert [len(bench.output(s)) for s in streams] == [12] * 3


@pytest.mark.parametrize("last", [48, 49])
def test_shared_blocks_that_the_cache_has_forgotten_are_registered_anew(make_bench, last):
    bench = make_bench(budget=200)
    prompt = list(range(last))
    streams = bench.add(prompt, 20, n=2).streams
    bench.step()
    bench.blocks.reset_prefix_cache()
    bench.step()
    assert streams[1].blocks[1] is streams[0].blocks[1]
    assert bench.blocks.num_registered_blocks == 3
    others = [bench.add([*prompt[start:], 90, 91], 4) for start in (0, 16, 32)]
    bench.step()
    assert [other.num_cached_tokens for other in others] == [48, 0, 0]
    bench.run()
    assert all(bench.output(sequence) for sequence in bench.added)


# Outputs


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint("llama"), max_num_seqs=4, max_model_len=256) as llm:
        yield llm


PARAMS = Params(n=6, seed=5, max_tokens=9, logprobs=1, prompt_logprobs=1)


def test_generate_gives_the_outputs_in_the_order_of_their_indices(llm):
    single = Params(seed=5, max_tokens=9, logprobs=1, prompt_logprobs=1)
    prompts = ["a prompt of some length", "another"]
    outputs = llm.generate(prompts, [PARAMS, replace(PARAMS, n=2)], use_tqdm=False)
    for prompt, output, n in zip(prompts, outputs, (6, 2), strict=True):
        assert [c.index for c in output.outputs] == list(range(n))
        assert len({tuple(c.token_ids) for c in output.outputs}) == n
        for index, completion in enumerate(output.outputs):
            params = replace(single, seed=stream_seed(5, index))
            (alone,) = llm.generate(prompt, params, use_tqdm=False)
            assert completion.token_ids == alone.outputs[0].token_ids
            assert completion.text == alone.outputs[0].text
            assert completion.cumulative_logprob == pytest.approx(
                alone.outputs[0].cumulative_logprob, rel=1e-4
            )
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        assert output.finished
    assert is_clean(llm.engine)


def test_the_first_stream_has_the_seed_of_the_request_and_no_two_share_one():
    assert stream_seed(7, 0) == 7
    seeds = {stream_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert max(seeds) < 2**64
    assert stream_seed(7, 1) == 17331758776565137014, "what a version drew, the next one draws"


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_stream_names_the_index_of_each_piece(llm, kind):
    (whole,) = llm.generate("abc", PARAMS, use_tqdm=False)
    outputs = list(llm.generate_iter("abc", replace(PARAMS, output_kind=kind)))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is DELTA:
        for index, expected in enumerate(whole.outputs):
            pieces = [c for o in outputs for c in o.outputs if c.index == index]
            assert "".join(piece.text for piece in pieces) == expected.text
            assert [i for piece in pieces for i in piece.token_ids] == expected.token_ids
            assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert sum(o.prompt_logprobs is not None for o in outputs) == 1
    else:
        assert outputs[-1].outputs == whole.outputs
        assert all([c.index for c in o.outputs] == list(range(6)) for o in outputs)
        assert len(outputs) == 1 or kind is CUMULATIVE
    assert is_clean(llm.engine)
    assert not llm._streamed


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_prompt_logprobs_are_whole_though_another_stream_comes_first(checkpoint, kind):
    """As after a step that failed: the first is held while the others get their tokens."""
    with LLM(checkpoint("llama"), **SIZES) as llm:
        engine, prompt = llm.engine, [(7 * i) % 250 for i in range(60)]
        params = Params(n=3, max_tokens=9, prompt_logprobs=1, output_kind=kind)
        params = replace(params, ignore_eos=True)
        (alone,) = llm.generate([prompt], replace(params, n=1), use_tqdm=False)
        first = []

        def hold(scheduled):
            if not first:
                first.append(engine.unfinished_sequences()[0])
                engine.scheduler.hold(first)
            elif any(stream.first_token_time is not None for stream in first[0].streams):
                engine.scheduler.resume(first)

        llm.reset_prefix_cache()
        engine.on_step = hold
        outputs = list(llm.generate_iter([prompt], params))
        given = [output.prompt_logprobs for output in outputs]
        wholes = [each for each in given if each is not None]
        assert {len(each) for each in wholes} == {60}
        assert given[0] is None
        assert len(wholes) == 1 or kind is CUMULATIVE
        for mine, other in zip(wholes[-1][1:], alone.prompt_logprobs[1:], strict=True):
            assert mine.keys() == other.keys()


def test_leaving_a_stream_early_aborts_all_of_it(llm):
    outputs = llm.generate_iter("abc", PARAMS)
    for _ in range(4):
        next(outputs)
    outputs.close()
    assert is_clean(llm.engine)
    assert not llm._streamed


def test_an_error_ends_its_own_stream_alone(llm):
    params = Params(n=4, seed=3, max_tokens=8)
    (whole,) = llm.generate("abc", params, use_tqdm=False)
    culprit = whole.outputs[2].token_ids[:2]
    assert [c.token_ids[:2] == culprit for c in whole.outputs] == [False, False, True, False]

    def raising(output_ids, logits):
        if output_ids == culprit:
            raise ValueError("not this one")
        return logits

    (output,) = llm.generate("abc", replace(params, logits_processors=[raising]), use_tqdm=False)
    reasons = [c.finish_reason for c in output.outputs]
    assert reasons == ["length", "length", "error", "length"]
    assert "output 2, output token 2" in output.outputs[2].error
    for index, completion in enumerate(output.outputs):
        expected = culprit if index == 2 else whole.outputs[index].token_ids
        assert completion.token_ids == expected
    assert is_clean(llm.engine)


def test_each_stream_has_the_form_that_was_asked_for(llm):
    form = StructuredOutputsParams(choice=["yes", "no", "maybe"])
    params = Params(n=8, seed=1, max_tokens=12, structured_outputs=form)
    (output,) = llm.generate("abc", params, use_tqdm=False)
    texts = [completion.text for completion in output.outputs]
    assert set(texts) <= {"yes", "no", "maybe"}
    assert len(set(texts)) > 1


def test_metrics_count_streams_and_look_the_prompt_up_once(checkpoint):
    with LLM(checkpoint("llama"), max_num_seqs=2, max_model_len=64, block_size=4) as llm:
        llm.generate([[7] * 20], Params(n=4, seed=1, max_tokens=3, ignore_eos=True), use_tqdm=False)
        metrics = llm.metrics()
        assert metrics.num_finished["length"] == 4
        assert metrics.time_to_first_token.count == metrics.e2e_latency.count == 4
        assert metrics.num_output_tokens == 12
        assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (20, 0)
        first = llm.engine.add_request([1, 2], Params(n=3))
        assert llm.metrics().num_waiting == 3
        assert llm.engine.unfinished_sequences() == list(first.streams)
        llm.engine.abort(first.request_id)
        assert llm.metrics().num_finished["abort"] == 3
        assert is_clean(llm.engine)


def test_a_request_is_unfinished_until_its_last_stream_has_ended(llm):
    engine = llm.engine
    params = Params(n=3, max_tokens=20, ignore_eos=True)
    first = engine.add_request([1, 2, 3], params, request_id="mine")
    first.max_total_tokens = 5
    while not first.is_finished:
        engine.step()
    assert engine.unfinished_sequences() == list(first.streams[1:])
    assert engine.metrics().num_running == 2
    with pytest.raises(InvalidRequestError, match="in use by an unfinished request"):
        engine.add_request([1], Params(), request_id="mine")
    assert engine.abort("mine") is first
    assert engine.abort("mine") is None
    assert [s.finish_reason for s in first.streams] == ["length", "abort", "abort"]
    assert is_clean(engine)


def test_what_makes_no_sense_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="n=3 with temperature=0 would give 3 equal"):
        Params(n=3, temperature=0)
    with pytest.raises(InvalidRequestError, match="n=16385 is out of range"):
        Params(n=16385)
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequestError, match="n=2 has no place in a stream of text"):
        llm.stream_chat(messages, Params(n=2))


# AsyncLLM


@pytest.fixture
def async_llm(checkpoint):
    llm = AsyncLLM(
        checkpoint("llama"),
        max_num_seqs=4,
        max_model_len=256,
        max_num_batched_tokens=32,
        max_waiting=9,
    )
    yield llm
    run(llm.shutdown(drain=False))


async def pieces_of(stream):
    """All pieces of a stream of differences, by index."""
    pieces = {}
    async for output in stream:
        for completion in output.outputs:
            pieces.setdefault(completion.index, []).append(completion)
    return pieces


def test_differences_name_their_index(llm, async_llm):
    (whole,) = llm.generate("abc", PARAMS, use_tqdm=False)

    async def main():
        pieces = await pieces_of(async_llm.generate("abc", replace(PARAMS, output_kind=DELTA)))
        assert sorted(pieces) == list(range(6))
        for index, expected in enumerate(whole.outputs):
            assert all_ids(pieces[index]) == expected.token_ids
            assert "".join(piece.text for piece in pieces[index]) == expected.text
            assert [p.finish_reason for p in pieces[index]].count("length") == 1
        assert await is_left_clean(async_llm)

    run(main())


@pytest.mark.parametrize("how", ["abort", "deadline", "close"])
def test_what_ends_a_request_ends_all_its_streams(async_llm, how):
    params = Params(n=6, max_tokens=200, ignore_eos=True)

    async def main():
        deadline = 0.05 if how == "deadline" else None
        stream = async_llm.generate([3] * 40, params, "mine", deadline=deadline)
        other = async_llm.generate([4] * 10, Params(n=2, seed=1, max_tokens=30, ignore_eos=True))
        if how != "deadline":
            await anext(stream)
        if how == "close":
            await stream.aclose()
        else:
            if how == "abort":
                await async_llm.abort("mine")
            last = (await collect(stream))[-1]
            assert last.finished
            reasons = [completion.finish_reason for completion in last.outputs]
            assert reasons == ["abort"] * 6
            errors = {completion.error for completion in last.outputs}
            assert errors == {None} if how == "abort" else "deadline" in str(errors)
        assert [len(c.token_ids) for c in (await collect(other))[-1].outputs] == [30, 30]
        assert await is_left_clean(async_llm)

    run(main())


def test_a_request_can_be_aborted_after_some_of_its_streams_have_ended(llm, async_llm):
    params = Params(n=2, seed=2, max_tokens=40, stop_token_ids=range(0, 300, 9))
    (whole,) = llm.generate([[3] * 10], params, use_tqdm=False)
    lengths = [len(completion.token_ids) for completion in whole.outputs]
    assert lengths[0] + 3 < lengths[1], "the first, which is also a step ahead, ends first"

    async def main():
        gate = Gate(async_llm)
        stream = async_llm.generate([3] * 10, params, "mine")
        gate.let_through(lengths[0] + 1)
        async for output in stream:
            if output.outputs[0].finish_reason is not None:
                break
        aborting = asyncio.create_task(async_llm.abort("mine"))
        await asyncio.sleep(0)  # it is sent
        gate.open()
        await aborting
        last = (await collect(stream))[-1]
        assert [c.finish_reason for c in last.outputs] == ["stop", "abort"]
        assert last.outputs[0] == whole.outputs[0]
        assert await is_left_clean(async_llm)

    run(main())


def test_max_waiting_counts_streams_that_have_not_ended(async_llm):
    async def main():
        params = Params(n=13, max_tokens=8, ignore_eos=True)
        gate = Gate(async_llm)
        stream = async_llm.generate([3] * 10, params)
        with pytest.raises(QueueFullError, match="9 requests wait and max_waiting=9"):
            async_llm.generate([4] * 10, Params(max_tokens=2))
        gate.open()
        await collect(stream)
        assert await is_left_clean(async_llm)
        assert async_llm._thread._num_open == 0

    run(main())


@pytest.mark.parametrize("n", [1, 4])
def test_a_request_that_makes_steps_fail_ends_with_all_its_streams(llm, async_llm, monkeypatch, n):
    """Others, of which some have several streams too, get the tokens that they get without it."""
    others = {
        f"r{place}": Params(n=1 + place, seed=place, max_tokens=6, prompt_logprobs=1)
        for place in range(3)
    }
    expected = {
        name: llm.generate([7] * 30 + [place], params, use_tqdm=False)[0]
        for place, (name, params) in enumerate(others.items())
    }
    engine = async_llm._llm.engine
    execute, table = engine._runner.execute, engine.scheduler._table

    def failing(scheduled):
        names = {s.request_id for s in table.sequences_at(scheduled.rows)}
        if "bad" in names:
            raise RuntimeError("broken")
        return execute(scheduled)

    monkeypatch.setattr(engine._runner, "execute", failing)

    async def main():
        bad = async_llm.generate([5] * 20, Params(n=n, max_tokens=9, ignore_eos=True), "bad")
        streams = {}
        for place, (name, params) in enumerate(others.items()):
            streams[name] = async_llm.generate([7] * 30 + [place], params, name)
        with pytest.raises(StepFailedError, match="request bad"):
            await collect(bad)
        for name, stream in streams.items():
            last = (await collect(stream))[-1]
            ids = [completion.token_ids for completion in last.outputs]
            assert ids == [completion.token_ids for completion in expected[name].outputs]
            assert len(last.prompt_logprobs) == 31
        assert await is_left_clean(async_llm)

    run(main())
