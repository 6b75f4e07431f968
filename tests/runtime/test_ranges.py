"""NVTX ranges: there when asked for, balanced, around every stage, and without effect on tokens."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from runtime import LLM, SamplingParams
from runtime.ranges import Ranges

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


def test_every_stage_of_a_step_has_its_range_and_no_token_changes(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=64) as llm:
        plain = llm.generate(["abc"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(checkpoint("llama"), max_model_len=64, nvtx=True) as llm:
        ranges, recorder = recorded()
        llm.engine.ranges = llm.engine._runner._ranges = ranges
        outputs = llm.generate(["abc"], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == plain
    names = [attributes[0] for kind, attributes in recorder.events if kind == "push"]
    step = ["schedule", "pack", "plan", "forward", "sample", "update"]
    assert names == [*step * 4, "detokenize"]
    open_ranges = 0
    for kind, _ in recorder.events:
        open_ranges += 1 if kind == "push" else -1
        assert open_ranges in (0, 1)
    assert open_ranges == 0


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
