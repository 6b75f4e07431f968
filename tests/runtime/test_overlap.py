"""Steps that overlap give the tokens of steps that don't, and lose nothing when one fails."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import textwrap
import threading
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name

from runtime import LLM, ConfigError, EngineConfig, SamplingParams, StructuredOutputsParams
from runtime import model_runner as runner_module
from runtime import sampler as sampler_module
from runtime import token_sampler as token_sampler_module
from runtime.pending_step import InlineQueue
from runtime.step import StepFailure

SIZES = {"device": "cpu", "max_model_len": 160, "max_num_batched_tokens": 24, "max_num_seqs": 6}
GRAPHS = {"capture_sizes": "1,2,4,8,24"}


def never_twice(output_ids, logits):
    """A logits processor that must know every id so far."""
    if output_ids:
        logits[output_ids[-1]] = -torch.inf
    return logits


OPTIONS = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 1.3, "seed": 12, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "seed": 13, "presence_penalty": 0.7, "logprobs": 2},
    {"temperature": 0, "logprobs": 1, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 14, "stop_token_ids": tuple(range(0, 300, 7))},
    {"temperature": 1.0, "seed": 15, "stop": ["a", "e", "Q"], "min_tokens": 3},
    {"temperature": 0, "logits_processors": [never_twice]},
    {"temperature": 1.0, "seed": 16, "bad_words": ["ab", "xyz"], "logit_bias": {5: 3.0}},
    {"temperature": 1.0, "seed": 17, "logits_processors": [never_twice], "stop": ["t"]},
    {"temperature": 1.0, "seed": 18, "ignore_eos": True, "allowed_token_ids": tuple(range(90))},
    {
        "temperature": 1.0,
        "seed": 19,
        "structured_outputs": StructuredOutputsParams(regex="(ab?)*c"),
    },
)
HOST_WORK = (8, 9, 10, 12)
"""Places in OPTIONS of those whose draw waits for the ids before it."""


def requests(seed: int, count: int = 24):
    """Step to arrive at, prompt, params and, for some, how many tokens they are aborted after."""
    rng = random.Random(seed)
    prefixes = [[(31 * k + i) % 250 for i in range(64)] for k in range(2)]
    made = []
    for place in range(count):
        prompt = rng.choice(prefixes)[: rng.randint(0, 60)]
        prompt = prompt + [rng.randrange(250) for _ in range(rng.randint(1, 12))]
        params = SamplingParams(max_tokens=rng.randint(1, 30), **OPTIONS[place % len(OPTIONS)])
        abort_after = rng.randint(1, 10) if rng.random() < 0.2 else None
        made.append((rng.randint(0, 40), prompt, params, abort_after))
    return made


def serve(engine, traffic, *, retry: bool = False):
    """What became of each request; every step is followed by a recount of rows and blocks."""
    waiting = dict(enumerate(traffic))
    sequences, aborted, step = {}, set(), 0
    while waiting or engine.has_unfinished:
        for place in [p for p, (arrival, *_) in waiting.items() if arrival <= step]:
            _, prompt, params, _ = waiting.pop(place)
            sequences[place] = engine.add_request(prompt, params, request_id=str(place))
        step += 1
        if not engine.has_unfinished:
            continue
        outcome = engine.try_step()
        engine.check_integrity()
        if isinstance(outcome, StepFailure):
            assert retry, "no step should fail"
            continue
        for sequence in outcome.sequences:
            place = int(sequence.request_id)
            limit = traffic[place][3]
            if limit is not None and not sequence.is_finished:
                table = engine.scheduler._table
                if table.num_tokens[sequence.row] - sequence.num_prompt_tokens >= limit:
                    engine.abort(sequence.request_id)
                    engine.check_integrity()
                    aborted.add(place)
    assert engine.num_free_blocks == engine._blocks.num_usable_blocks
    assert not engine._sequences
    assert not engine._watched_texts
    return [sequences[place] for place in range(len(traffic))], aborted


def values(record):
    """Log-probabilities as one array, which the rest of a batch may move a little."""
    dicts = record.as_dicts(None)
    assert len(dicts) == len(record)
    return [found.logprob for each in dicts for found in list(each.values())[:1]]


def assert_same(actual, expected):
    (actual, ended), (expected, _) = actual, expected
    for place, (mine, other) in enumerate(zip(actual, expected, strict=True)):
        assert mine.output_token_ids == other.output_token_ids, f"request {place}"
        assert mine.finish_reason == other.finish_reason
        assert mine.stop_reason == other.stop_reason
        assert (mine.finish_reason == "abort") == (place in ended)
        for name in ("logprobs", "prompt_logprobs"):
            records = getattr(mine, name), getattr(other, name)
            assert (records[0] is None) == (records[1] is None)
            if records[0] is not None:
                np.testing.assert_allclose(*map(values, records), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Outcomes without overlap or graphs, by the traffic's seed."""
    known = {}

    def outcomes(seed):
        if seed not in known:
            with LLM(checkpoint("llama"), overlap_scheduling=False, **SIZES) as llm:
                known[seed] = serve(llm.engine, requests(seed))
                assert llm.stats()["num_steps_ahead"] == 0
        return known[seed]

    return outcomes


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, {}),
        (2, {"enable_prefix_caching": False}),
        (3, {"num_kv_blocks": 11}),
        (4, {"num_kv_blocks": 44, "block_size": 4, "policy": "priority"}),
        (1, {"policy": "prefill_first"}),
        (2, {"max_prefill_chunk": 5, "block_size": 1}),
        (2, {"attention_backend": "torch", "itl_target_ms": 5.0}),
        (3, {"graph_mode": "full"} | GRAPHS),
        (4, {"graph_mode": "piecewise", "lazy_capture": True} | GRAPHS),
        (1, {"graph_mode": "full_and_piecewise", "bucket_fitting": True} | GRAPHS),
        (3, {"graph_mode": "full_and_piecewise", "num_kv_blocks": 12} | GRAPHS),
    ],
    ids=str,
)
def test_overlapped_steps_give_the_same_tokens(checkpoint, expected, seed, options):
    with LLM(checkpoint("llama"), overlap_scheduling=True, **SIZES | options) as llm:
        outcomes = serve(llm.engine, requests(seed))
        stats = llm.stats()
    assert_same(outcomes, expected(seed))
    assert stats["num_steps_ahead"] > stats["num_steps"] / 2
    if options.get("num_kv_blocks", 44) < 44:
        assert stats["num_preemptions"] > 0
    if "graph_mode" in options:
        assert {bucket["mode"] for bucket in stats["buckets"]} - {"eager"}
        assert "changed plan" not in stats["falls"]


def test_the_next_step_is_scheduled_and_packed_while_one_runs(checkpoint, monkeypatch):
    """Each forward but the last waits until its successor was launched, or nothing would end."""
    with LLM(checkpoint("llama"), overlap_scheduling=True, **SIZES) as llm:
        runner, launched = llm.engine._runner, [threading.Event() for _ in range(5)]
        launch, forward, met = runner.launch, runner._run_forward, []

        def launch_noted(scheduled):
            pending = launch(scheduled)
            launched[scheduled.step].set()
            return pending

        def forward_waiting(batch, scheduled, graphs):
            if scheduled.step < 4:
                met.append(launched[scheduled.step + 1].wait(30))
            return forward(batch, scheduled, graphs)

        monkeypatch.setattr(runner, "launch", launch_noted)
        monkeypatch.setattr(runner, "_run_forward", forward_waiting)
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        llm.generate(["abc"], params, use_tqdm=False)
        assert met == [True] * 4


def test_a_processor_is_called_once_for_each_token_that_counts(checkpoint):
    """Not for the row that runs on after a stop, and each time with all ids so far."""
    seen = []

    def note(output_ids, logits):
        seen.append(list(output_ids))
        return logits

    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=60, logits_processors=[note], stop_token_ids=range(150)
    )
    with LLM(checkpoint("llama"), overlap_scheduling=True, **SIZES) as llm:
        (output,) = llm.generate(["abc"], params, use_tqdm=False)
        ids = list(output.outputs[0].token_ids)
        assert output.outputs[0].finish_reason == "stop"
        # The step after the last one has ended too, once others have.
        llm.generate(["abc"], SamplingParams(max_tokens=2), use_tqdm=False)
        assert seen == [ids[:count] for count in range(len(ids))]


def test_each_thread_closes_its_ranges_and_all_stages_have_one(checkpoint):
    opened = {}

    @contextmanager
    def opener(name, num_tokens, bucket):
        names = opened.setdefault(threading.current_thread().name, [])
        names.append(name)
        yield
        names.append(f"end of {name}")

    with LLM(checkpoint("llama"), overlap_scheduling=True, **SIZES) as llm:
        llm.engine.ranges.opener = opener
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        llm.generate(["abc"], params, use_tqdm=False)
    worker, host = opened.pop("stepgraph-step"), opened.popitem()[1]
    stages = [[name, f"end of {name}"] for name in ("plan", "forward", "sample")]
    assert worker == [*itertools.chain(*stages)] * 3
    launched = ["schedule", "end of schedule", "step", "pack", "end of pack", "end of step"]
    ended = ["wait", "end of wait", "update", "end of update"]
    nothing = ["schedule", "end of schedule"]
    whole = [*launched * 2, *ended, *launched, *ended, *nothing, *ended]
    assert host[: len(whole)] == whole


def test_the_default_is_off_on_a_cpu_and_says_why(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=64, device="cpu") as llm:
        assert not llm.engine.config.overlap_scheduling
        assert "cpu" in llm.engine.config.reasons["overlap_scheduling"]
    with LLM(checkpoint("llama"), max_model_len=64, overlap_scheduling=True) as llm:
        assert "overlap_scheduling = True\n" in llm.engine.config.describe()
    with pytest.raises(ConfigError, match="overlap_scheduling=1 is not True or False"):
        EngineConfig(model="any", overlap_scheduling=1)


# Failures

STAGES = {
    "apply": lambda runner: (runner._rows, "apply"),
    "pack": lambda runner: (runner_module, "pack"),
    "admit": lambda runner: (runner._sampler, "admit"),
    "fill": lambda runner: (runner._sampler, "fill_placeholders"),
    "plan": lambda runner: (runner._graphs, "prepare"),
    "forward": lambda runner: (runner._graphs, "run"),
    "logits": lambda runner: (runner._model, "compute_logits"),
    "sample": lambda runner: (runner._sampler, "draw"),
    "late ids": lambda runner: (runner._rows, "take_late_ids"),
    "late pack": lambda runner: (runner_module, "pack_logits"),
    "copy": lambda runner: (token_sampler_module.OutputCopy, "wait"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_step_that_fails_with_another_in_flight_loses_nothing(
    checkpoint, expected, monkeypatch, stage, after
):
    calls = 0
    with LLM(checkpoint("llama"), overlap_scheduling=True, num_kv_blocks=24, **SIZES) as llm:
        owner, name = STAGES[stage](llm.engine._runner)
        function = getattr(owner, name)

        def failing(*args, **kwargs):
            nonlocal calls
            calls += 1
            is_bad = calls % 7 in (3, 4) and calls < 60
            result = function(*args, **kwargs) if after or not is_bad else None
            if is_bad:
                raise RuntimeError(stage)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            outcomes = serve(llm.engine, requests(5), retry=True)
        assert_same(outcomes, expected(5))
        assert llm.engine.counters.num_failed_steps >= 4
        assert llm.engine.counters.num_steps_ahead > 0


def test_what_fails_after_all_have_left_hurts_nobody(checkpoint, monkeypatch, caplog):
    with LLM(checkpoint("llama"), overlap_scheduling=True, **SIZES) as llm:
        engine = llm.engine
        runner, may_run = engine._runner, threading.Event()
        forward, bad_steps = runner._run_forward, []

        def failing(batch, scheduled, graphs):
            if scheduled.step in bad_steps:
                assert may_run.wait(30)
                raise RuntimeError("too late")
            return forward(batch, scheduled, graphs)

        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (expected,) = llm.generate(["abc"], params, use_tqdm=False)
        engine.add_request([5, 6, 7], params, request_id="leaver")
        monkeypatch.setattr(runner, "_run_forward", failing)
        engine.step()
        bad_steps.append(engine.scheduler._next_step)
        engine.step()  # launches that one
        engine.abort("leaver")
        may_run.set()
        assert not engine.has_unfinished
        sequence = engine.add_request(expected.prompt_token_ids, params)
        assert engine.step().sequences == []
        while engine.has_unfinished:
            engine.step()
            engine.check_integrity()
        assert sequence.output_token_ids == list(expected.outputs[0].token_ids)
        assert "all its requests had left" in caplog.text


def test_a_failed_step_lets_go_of_its_tensors(checkpoint, monkeypatch):
    with LLM(checkpoint("llama"), overlap_scheduling=True, **SIZES) as llm:
        graphs, kept = llm.engine._runner._graphs, []
        run = graphs.run

        def failing(*args):
            hidden = run(*args)
            kept.append(weakref.ref(hidden))
            raise RuntimeError

        monkeypatch.setattr(graphs, "run", failing)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        llm.engine.add_request([7], params)
        outcome = llm.engine.try_step()
        assert isinstance(outcome, StepFailure)
        assert len(kept) == 2, "the next step was launched too"
        assert kept[0]() is None
        assert kept[1]() is None


def test_closing_with_a_step_in_flight_ends_its_thread(checkpoint):
    before = set(threading.enumerate())
    llm = LLM(checkpoint("llama"), overlap_scheduling=True, **SIZES)
    llm.engine.add_request([7], SamplingParams(max_tokens=9, ignore_eos=True))
    llm.engine.step()
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "stepgraph-step"
    llm.close()
    thread.join(timeout=30)  # it may itself be the last to let go of the engine
    assert not thread.is_alive()


def test_a_process_ends_quietly_with_steps_in_flight(checkpoint):
    code = f"""
        import asyncio
        from runtime import AsyncLLM, LLM, SamplingParams
        options = {{"model": {str(checkpoint("llama"))!r}, "overlap_scheduling": True}}
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        llm = LLM(max_model_len=64, **options)
        llm.engine.add_request([7], params)
        llm.engine.step()
        engine = AsyncLLM(max_model_len=1024, **options)
        async def main():
            async for output in engine.generate("abc", params):
                break
            engine.generate("abc", params)
        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


# Synchronisation

READS = {
    f"torch.Tensor.{name}"
    for name in (
        *("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__"),
        *("__index__", "nonzero", "__dlpack__", "is_nonzero", "masked_select", "unique"),
    )
} | {"torch.nonzero", "torch.masked_select", "torch.unique", "torch.equal", "torch.allclose"}


class ReadCounter(TorchFunctionMode):
    """Counts what would wait for an accelerator: each look at a tensor that no copy brought."""

    def __init__(self):
        super().__init__()
        self.copied: list[torch.Tensor] = []
        self.reads: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = resolve_name(func)
        if name in READS and not any(args[0] is tensor for tensor in self.copied):
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


def as_on_an_accelerator(llm, monkeypatch, counter):
    """Queue work on the caller's thread, sample without a look, and know the copies apart."""
    waits = []
    wait = token_sampler_module.OutputCopy.wait

    def start_copy(tensor):
        counter.copied.append(tensor.clone())
        return counter.copied[-1]

    def wait_noted(copy):
        waits.append(copy)
        return wait(copy)

    llm.engine._runner._tasks = InlineQueue()
    llm.engine._runner._sampler._library = None
    monkeypatch.setattr(token_sampler_module, "_start_copy", start_copy)
    monkeypatch.setattr(token_sampler_module.OutputCopy, "wait", wait_noted)
    monkeypatch.setattr(sampler_module, "_row_max", lambda logits: tuple(logits.max(dim=-1)))
    monkeypatch.setattr(sampler_module, "_draw_on_host", sampler_module._draw_batched)
    return waits


def counted(checkpoint, monkeypatch, places, **options):
    counter = ReadCounter()
    options = {"attention_backend": "torch", "overlap_scheduling": True} | SIZES | options
    with LLM(checkpoint("llama"), **options) as llm:
        waits = as_on_an_accelerator(llm, monkeypatch, counter)
        engine = llm.engine
        for place in places:
            params = SamplingParams(max_tokens=12, **OPTIONS[place])
            engine.add_request([9 + place] * (5 + 3 * place), params)
        num_steps = 0
        while engine.has_unfinished:
            with counter:
                engine.step()
            num_steps += 1
        assert engine.counters.num_steps_ahead > 5
        assert len(waits) == num_steps
    return counter.reads


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
def test_nothing_is_waited_for_but_the_copy_of_what_was_drawn(checkpoint, monkeypatch, mode):
    places = [place for place in range(len(OPTIONS)) if place not in HOST_WORK]
    options = {"graph_mode": mode} | (GRAPHS if mode != "none" else {})
    assert counted(checkpoint, monkeypatch, places, **options) == []


def test_a_logits_processor_does_wait(checkpoint, monkeypatch):
    """So the count would show what waits."""
    assert counted(checkpoint, monkeypatch, HOST_WORK) != []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present")
@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
def test_on_cuda_tokens_are_the_same_and_torch_sees_no_step_wait(checkpoint, mode):
    params = [SamplingParams(max_tokens=24, **OPTIONS[place]) for place in (0, 1, 2, 3, 4, 5, 6)]
    prompts = [[9 + place] * (5 + 3 * place) for place in range(len(params))]
    options = SIZES | {"device": "cuda", "graph_mode": mode, "compile": False}
    tokens = []
    for overlap in (False, True):
        with LLM(checkpoint("llama"), overlap_scheduling=overlap, **options) as llm:
            llm.generate(prompts, params, use_tqdm=False)  # builds what is built at first use
            llm.reset_prefix_cache()
            engine = llm.engine
            sequences = [engine.add_request(*pair) for pair in zip(prompts, params, strict=True)]
            while engine.has_unfinished:
                torch.cuda.set_sync_debug_mode("error" if overlap else "default")
                try:
                    engine.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                engine.check_integrity()
            tokens.append([sequence.output_token_ids for sequence in sequences])
            assert (engine.counters.num_steps_ahead > 0) == overlap
    assert tokens[0] == tokens[1]
