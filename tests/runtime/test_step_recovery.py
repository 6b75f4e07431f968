"""A step that raises, at every stage: who ends, who goes on, and when the engine is dead."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import weakref

import pytest

from runtime import LLM, AsyncLLM, EngineDeadError, SamplingParams, StepFailedError
from runtime import model_runner as runner_module
from runtime.engine import Engine
from runtime.step import StepFailure
from runtime.step_recovery import StepRecovery

STAGES = ("apply", "admit", "pack", "plan", "forward", "logits", "sample")


LOGPROBS = {"logprobs": 1, "prompt_logprobs": 0, "repetition_penalty": 1.2}


class Broken(Exception):
    """What the tests' steps raise."""


def greedy(max_tokens=8, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)


def run(coroutine, seconds=60):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


async def ids_of(stream):
    last = [output async for output in stream][-1]
    (completion,) = last.outputs
    if completion.logprobs is not None and completion.finish_reason == "length":
        assert len(completion.logprobs) == len(completion.token_ids)
        assert len(last.prompt_logprobs) == len(last.prompt_token_ids)
    return completion.token_ids


def break_stage(monkeypatch, engine, stage, is_broken):
    """Raise in `stage` of each step for which `is_broken(request ids of the step)`."""
    runner, current, names = engine._runner, [], {}
    run_forward = runner._run_forward

    def noting(function):
        def call(scheduled):
            sequences = engine.scheduler._table.sequences_at(scheduled.rows)
            names[scheduled.step] = [sequence.request_id for sequence in sequences]
            return function(scheduled)

        return call

    def run_forward_noted(batch, scheduled, graphs):
        current[:] = names[scheduled.step]  # of this stage and of all after it
        return run_forward(batch, scheduled, graphs)

    def breaking(function):
        def call(*args, **kwargs):
            before = stage in ("apply", "admit")
            result = None if before else function(*args, **kwargs)
            step = getattr(args[-1], "step", None) if stage in ("apply", "admit") else None
            step = args[1].step if stage == "pack" else step
            if is_broken(list(current if step is None else names[step])):
                raise Broken(stage)
            return function(*args, **kwargs) if before else result

        return call

    owner, name = {
        "apply": (runner._rows, "apply"),
        "admit": (runner._sampler, "admit"),
        "pack": (runner_module, "pack"),
        "plan": (runner._graphs, "prepare"),
        "forward": (runner._graphs, "run"),
        "logits": (runner._model, "compute_logits"),
        "sample": (runner._sampler, "draw"),
    }[stage]
    for entry in ("execute", "launch"):
        monkeypatch.setattr(runner, entry, noting(getattr(runner, entry)))
    monkeypatch.setattr(runner, "_run_forward", run_forward_noted)
    monkeypatch.setattr(owner, name, breaking(getattr(owner, name)))


PROMPTS = {f"r{i}": [i + 1] * (3 + 5 * i) for i in range(9)}
PARAMS = {
    name: greedy(**options)
    for name, options in zip(
        PROMPTS, itertools.cycle([{}, {"frequency_penalty": 1.5}, LOGPROBS]), strict=False
    )
}
"""Also such that keep something of the sequence on the device or beside it."""


@pytest.fixture(scope="module")
def expected(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=256) as llm:
        outputs = llm.generate(list(PROMPTS.values()), list(PARAMS.values()), use_tqdm=False)
    return {name: o.outputs[0].token_ids for name, o in zip(PROMPTS, outputs, strict=True)}


@pytest.fixture(params=[False, True], ids=["one by one", "overlapped"])
def llm(checkpoint, request):
    llm = AsyncLLM(
        checkpoint("llama"),
        max_model_len=256,
        max_num_batched_tokens=64,
        overlap_scheduling=request.param,
    )
    yield llm
    run(llm.shutdown(drain=False))


async def generate_all(llm):
    """Token ids, or the error, by request."""
    streams, results = {}, {}
    for name, prompt in PROMPTS.items():
        try:
            streams[name] = llm.generate(prompt, PARAMS[name], name)
        except EngineDeadError as error:
            results[name] = error
    for name, stream in streams.items():
        try:
            results[name] = await ids_of(stream)
        except (StepFailedError, EngineDeadError) as error:
            results[name] = error
    return results


async def check_clean(llm):
    await llm._call(Engine.check_integrity)
    engine = llm._llm.engine
    assert not engine.has_unfinished
    assert engine._blocks.num_free_blocks == engine._blocks.num_usable_blocks
    assert not engine._sequences
    assert not llm._thread._open
    assert not llm._thread._recovery.is_active


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_fails_once_ends_nobody(llm, expected, monkeypatch, stage):
    fails = iter([False, False, True, False, False, False, True])
    break_stage(monkeypatch, llm._llm.engine, stage, lambda names: next(fails, False))

    async def main():
        assert await generate_all(llm) == expected
        await check_clean(llm)
        num_failed = llm.metrics().num_failed_steps
        # The second failure may hit a step that is dropped with the first one.
        overlaps = llm._llm.engine.config.overlap_scheduling
        assert num_failed == 2 or (overlaps and num_failed == 1)

    run(main())


@pytest.mark.parametrize("stage", STAGES)
def test_the_request_that_breaks_its_steps_ends_alone(llm, expected, monkeypatch, stage):
    break_stage(monkeypatch, llm._llm.engine, stage, lambda names: "r4" in names)

    async def main():
        results = await generate_all(llm)
        error = results.pop("r4")
        assert isinstance(error, StepFailedError)
        assert "request r4" in str(error)
        assert isinstance(error.__cause__, Broken)
        assert results == {name: ids for name, ids in expected.items() if name != "r4"}
        await check_clean(llm)
        assert await ids_of(llm.generate(PROMPTS["r4"], PARAMS["r4"], "other")) == expected["r4"]
        assert llm.metrics().num_finished["error"] == 1

    run(main())


def test_a_request_that_breaks_late_keeps_what_was_read(llm, expected, monkeypatch):
    """It fails alone after its neighbours were cleared, in the middle of its output."""
    engine = llm._llm.engine

    def is_broken(names):
        if "r2" not in names:
            return False
        row = engine._sequences["r2"].row
        table = engine.scheduler._table
        return row >= 0 and table.num_tokens[row] >= len(PROMPTS["r2"]) + 3

    break_stage(monkeypatch, engine, "forward", is_broken)

    async def main():
        tokens = []
        streams = {
            name: llm.generate(prompt, PARAMS[name], name) for name, prompt in PROMPTS.items()
        }
        with pytest.raises(StepFailedError):
            async for output in streams.pop("r2"):
                tokens = output.outputs[0].token_ids
        overlaps = engine.config.overlap_scheduling  # then ids come in after the next launch
        assert len(tokens) == 3 or (overlaps and 3 < len(tokens) <= 5)
        assert tokens == expected["r2"][: len(tokens)]
        for name, stream in streams.items():
            assert await ids_of(stream) == expected[name]
        await check_clean(llm)

    run(main())


def test_steps_that_are_too_large_end_nobody(llm, expected, monkeypatch):
    """As a step that runs out of device memory: smaller ones work."""
    break_stage(monkeypatch, llm._llm.engine, "forward", lambda names: len(names) > 3)

    async def main():
        assert await generate_all(llm) == expected
        await check_clean(llm)
        assert llm.metrics().num_failed_steps > 0

    run(main())


def test_several_bad_requests_end_and_all_others_go_on(llm, expected, monkeypatch):
    bad = {"r0", "r3", "r8"}
    break_stage(monkeypatch, llm._llm.engine, "sample", lambda names: bool(bad & set(names)))

    async def main():
        results = await generate_all(llm)
        for name in PROMPTS:
            assert (
                isinstance(results[name], StepFailedError)
                if name in bad
                else (results[name] == expected[name])
            )
        await check_clean(llm)

    run(main())


def test_a_bad_request_on_an_idle_engine_does_not_kill_it_however_often_it_comes(
    llm, expected, monkeypatch
):
    break_stage(monkeypatch, llm._llm.engine, "forward", lambda names: "bad" in names)

    async def main():
        for _ in range(5):
            with pytest.raises(StepFailedError):
                await ids_of(llm.generate("abc", greedy(), "bad"))
            await llm.check_health()
        assert await ids_of(llm.generate(PROMPTS["r1"], PARAMS["r1"], "r1")) == expected["r1"]
        await check_clean(llm)

    run(main())


def test_what_comes_and_goes_during_the_search_is_served_or_ended(llm, expected, monkeypatch):
    """Newcomers, aborts and deadlines while the culprit is looked for."""
    engine, seen = llm._llm.engine, []
    extra = {}

    def is_broken(names):
        if "r4" not in names:
            return False
        seen.append(names)
        if len(seen) == 2:  # in the middle of the search
            loop.call_soon_threadsafe(come_and_go)
            assert done.wait(30)
        return True

    def come_and_go():
        extra["late"] = llm.generate(PROMPTS["r1"], PARAMS["r1"], "late")
        extra["ended"] = llm.generate(PROMPTS["r1"], greedy(), "ended", deadline=1e-6)
        for name in ("r0", "r5"):
            llm._thread.cancel(llm._thread.find(name))
        done.set()

    break_stage(monkeypatch, engine, "plan", is_broken)

    async def main():
        results = await generate_all(llm)
        assert isinstance(results.pop("r4"), StepFailedError)
        for name in ("r0", "r5"):
            ids = results.pop(name)
            assert ids == expected[name][: len(ids)]
        assert results.items() <= expected.items()
        assert await ids_of(extra["late"]) == expected["r1"]
        last = [output async for output in extra["ended"]][-1].outputs[0]
        assert last.finish_reason == "abort"
        await check_clean(llm)

    done, loop = threading.Event(), asyncio.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(main(), 60))
    loop.close()


def test_an_engine_that_runs_no_step_is_dead_and_says_why(llm, monkeypatch):
    engine = llm._llm.engine
    break_stage(monkeypatch, engine, "forward", lambda names: True)

    async def main():
        results = await generate_all(llm)
        kinds = [type(error) for error in results.values()]
        assert kinds.count(StepFailedError) == 1, "the one that failed alone"
        assert kinds.count(EngineDeadError) == len(PROMPTS) - 1
        for error in results.values():
            assert isinstance(error.__cause__, Broken)
        with pytest.raises(EngineDeadError, match="not even one of a single token") as caught:
            llm.generate("abc")
        assert isinstance(caught.value.__cause__, Broken)
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()
        assert not llm.is_running
        await llm.abort("r1")
        await llm.shutdown()

    run(main())


@pytest.mark.parametrize("part", ["schedule", "update", "rollback"])
def test_an_error_of_the_scheduler_kills_the_engine_at_once(llm, monkeypatch, part):
    def broken(*_):
        raise Broken(part)

    monkeypatch.setattr(llm._llm.engine.scheduler, part, broken)
    if part == "rollback":
        break_stage(monkeypatch, llm._llm.engine, "pack", lambda names: True)

    async def main():
        results = await generate_all(llm)
        for error in results.values():
            assert isinstance(error, EngineDeadError)
            assert isinstance(error.__cause__, Broken)
        assert not llm.is_running

    run(main())


@pytest.mark.parametrize("num_requests", [1, 2, 3, 16, 61])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_the_search_takes_a_logarithm_of_the_steps(checkpoint, monkeypatch, num_requests, place):
    with LLM(checkpoint("llama"), max_model_len=64) as llm:
        engine = llm.engine
        culprit = f"r{round(place * (num_requests - 1))}"
        break_stage(monkeypatch, engine, "plan", lambda names: culprit in names)
        recovery = StepRecovery(engine)
        sequences = [
            engine.add_request([7, i], greedy(4), request_id=f"r{i}") for i in range(num_requests)
        ]
        found = None
        while engine.has_unfinished or recovery.is_active:
            recovery.go_on()
            if not engine.has_unfinished:
                continue
            outcome = engine.try_step()
            engine.check_integrity()
            if not isinstance(outcome, StepFailure):
                recovery.take_success(outcome)
            elif (sequence := recovery.take_failure(outcome)) is not None:
                assert found is None
                found = engine.abort(sequence.request_id, reason="error", error=outcome.error)
        assert found.request_id == culprit
        halvings = math.log2(num_requests)
        num_failed = engine.counters.num_failed_steps
        assert 2 + math.floor(halvings) <= num_failed <= 2 + math.ceil(halvings)
        assert [s.finish_reason for s in sequences].count("length") == num_requests - 1


def test_a_failed_step_lets_go_of_its_tensors(checkpoint, monkeypatch):
    """Else a step that ran out of memory would leave none for the smaller one after it."""
    with LLM(checkpoint("llama"), max_model_len=64) as llm:
        graphs, kept = llm.engine._runner._graphs, []
        run_graphs = graphs.run

        def failing(*args):
            hidden = run_graphs(*args)
            kept.append(weakref.ref(hidden))
            raise Broken

        monkeypatch.setattr(graphs, "run", failing)
        llm.engine.add_request([7], greedy())
        outcome = llm.engine.try_step()
        assert isinstance(outcome, StepFailure)
        assert isinstance(outcome.error, Broken)
        assert kept[0]() is None
