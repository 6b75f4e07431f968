"""NVTX ranges: there when asked for, balanced, around every stage, and without effect on tokens."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from runtime import LLM, SamplingParams
from runtime.ranges import Ranges

SIZES = {"max_model_len": 64, "max_num_batched_tokens": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Recorder:
    """Takes the place of an NVTX domain."""

    def __init__(self):
        self.events = []

    def get_event_attributes(self, *, message, category, payload):
        return (message, category, payload)

    def push_range(self, attributes):
        self.events.append(("push", attributes))

    def pop_range(self):
        self.events.append(("pop", None))


def recorded() -> tuple[Ranges, Recorder]:
    ranges, recorder = Ranges(enabled=True), Recorder()
    ranges._domain = recorder
    return ranges, recorder


def assert_balanced(recorder: Recorder) -> None:
    open_ranges = 0
    for kind, _ in recorder.events:
        open_ranges += 1 if kind == "push" else -1
        assert open_ranges in (0, 1)
    assert open_ranges == 0


def test_a_range_carries_tokens_and_bucket_and_closes_on_an_exception():
    ranges, recorder = recorded()
    with pytest.raises(ZeroDivisionError), ranges("forward", 7, bucket=8):
        raise ZeroDivisionError
    assert recorder.events == [("push", ("forward", 8, 7)), ("pop", None)]


def test_switched_off_nothing_is_made_per_call():
    ranges = Ranges(enabled=False)
    assert ranges("forward", 7) is ranges("sample", 3)
    with ranges("forward"):
        pass


def test_switched_on_without_a_profiler_or_cuda_it_runs():
    with Ranges(enabled=True)("forward", 7, bucket=8):
        pass


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_every_stage_of_a_step_has_its_range_and_no_token_changes(
    checkpoint, compiled_once, compiled
):
    with LLM(checkpoint("llama"), **SIZES) as llm:
        plain = llm.generate(["abc"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(checkpoint("llama"), compile=compiled, nvtx=True, **SIZES) as llm:
        assert llm.engine.stats()["compile"]["enabled"] == compiled
        ranges, recorder = recorded()
        llm.engine.ranges = llm.engine._runner._ranges = ranges
        outputs = llm.generate(["abc"], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == plain
    names = [attributes[0] for kind, attributes in recorder.events if kind == "push"]
    step = ["schedule", "pack", "plan", "forward", "sample", "update"]
    assert names == [*step * 4, "detokenize"]
    assert_balanced(recorder)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_ranges_are_closed_when_a_step_raises(checkpoint, compiled_once, compiled, monkeypatch):
    with LLM(checkpoint("llama"), compile=compiled, nvtx=True, **SIZES) as llm:
        ranges, recorder = recorded()
        llm.engine.ranges = llm.engine._runner._ranges = ranges
        with monkeypatch.context() as patch:
            patch.setattr(type(llm.engine._runner._backend), "run", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate(["abc"], GREEDY, use_tqdm=False)
        assert recorder.events[-2:] == [("push", ("forward", None, 3)), ("pop", None)]
        assert_balanced(recorder)
        assert llm.generate(["abc"], GREEDY, use_tqdm=False)[0].finished
        assert_balanced(recorder)


def test_an_opener_takes_the_place_of_nvtx():
    opened = []

    def opener(name, num_tokens, bucket):
        opened.append((name, num_tokens, bucket))
        return nullcontext()

    for enabled in (False, True):
        ranges = Ranges(enabled=enabled)
        ranges.opener = opener
        with ranges("forward", 5, 8):
            pass
        ranges.opener = None
        with ranges("forward", 6, 8):
            pass
    assert opened == [("forward", 5, 8)] * 2
