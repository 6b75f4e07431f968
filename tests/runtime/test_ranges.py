"""NVTX ranges: there when asked for, balanced, around every stage, and without effect on tokens."""

from __future__ import annotations

import sys

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


STAGES = ["pack", "plan", "forward", "sample", "update"]


def assert_balanced(events) -> None:
    open_ranges = 0
    for kind, _ in events:
        open_ranges += 1 if kind == "push" else -1
        assert 0 <= open_ranges <= 2, "stages lie in a step, and not in each other"
    assert open_ranges == 0


@pytest.mark.parametrize("graph_mode", ["none", "full", "piecewise", "full_and_piecewise"])
def test_every_stage_of_a_step_has_its_range_and_no_token_changes(checkpoint, graph_mode):
    """Around graph replays too, where the ranges of eager code would be missing."""
    options = {"device": "cpu", "max_model_len": 64, "max_num_batched_tokens": 8}
    options |= {"graph_mode": graph_mode, "capture_sizes": "1,4,8"}
    with LLM(checkpoint("llama"), **options) as llm:
        plain = llm.generate(["abc"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(checkpoint("llama"), nvtx=True, **options) as llm:
        ranges, recorder = recorded()
        llm.engine.ranges = llm.engine._runner._ranges = ranges
        outputs = llm.generate(["abc"], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == plain
    assert_balanced(recorder.events)
    pushed = [attributes for kind, attributes in recorder.events if kind == "push"]
    first = ["schedule", "step: 3 tokens, 1 sequences", *STAGES]
    decode = ["schedule", "step: 1 tokens, 1 sequences", *STAGES]
    assert [name for name, _, _ in pushed] == [*first, *decode * 3, "detokenize"]
    by_name = {name: (bucket, num_tokens) for name, bucket, num_tokens in pushed[:7]}
    is_piecewise = graph_mode in ("piecewise", "full_and_piecewise")
    assert by_name["forward"] == by_name[first[1]] == (4 if is_piecewise else None, 3)
    forwards = [attributes for attributes in pushed if attributes[0] == "forward"]
    assert forwards[-1] == ("forward", None if graph_mode == "none" else 1, 1)


@pytest.mark.parametrize("graph_mode", ["none", "full_and_piecewise"])
@pytest.mark.parametrize("stage", ["prepare", "run"])
def test_a_step_that_raises_closes_its_ranges_and_is_run_again(
    checkpoint, graph_mode, stage, monkeypatch
):
    with LLM(
        checkpoint("llama"),
        device="cpu",
        max_model_len=64,
        nvtx=True,
        graph_mode=graph_mode,
        max_num_batched_tokens=8,
        capture_sizes="1,4,8",
    ) as llm:
        ranges, recorder = recorded()
        engine = llm.engine
        engine.ranges = engine._runner._ranges = ranges
        sequence = engine.add_request([1, 2, 3], GREEDY)
        with monkeypatch.context() as patched:

            def fail(*args):
                raise RuntimeError("the device is gone")

            patched.setattr(engine._runner._graphs, stage, fail)
            with pytest.raises(RuntimeError, match="the device is gone"):
                engine.step()
        assert_balanced(recorder.events)
        names = [attributes[0] for kind, attributes in recorder.events if kind == "push"]
        reached = STAGES[: {"prepare": 2, "run": 3}[stage]]
        assert names == ["schedule", "step: 3 tokens, 1 sequences", *reached]
        while engine.has_unfinished:
            engine.step()
        assert len(sequence.output_token_ids) == 4
        assert_balanced(recorder.events)


def test_switched_off_no_step_touches_nvtx(checkpoint, monkeypatch):
    class Forbidden:
        def __getattr__(self, name):
            raise AssertionError(f"{name} is called though the ranges are off")

    monkeypatch.setitem(sys.modules, "nvtx", Forbidden())
    with LLM(checkpoint("llama"), device="cpu", max_model_len=64) as llm:
        monkeypatch.setattr(llm.engine.ranges, "_domain", Forbidden())
        assert llm.engine.ranges.step(1, 1, 0) is llm.engine.ranges("schedule")
        assert len(llm.generate(["abc"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4
