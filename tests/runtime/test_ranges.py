"""NVTX ranges: there when asked for, balanced, around every stage, and without effect on tokens."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest
import torch

from runtime import LLM, SamplingParams
from runtime.ranges import Ranges

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=(
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present"),
        ),
    ),
]
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
        assert 0 <= open_ranges <= 2, "stages lie in a step, and not in each other"
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


STAGES = ["pack", "plan", "forward", "sample", "update"]
FIRST = ["schedule", "step: 3 tokens, 1 sequences", *STAGES]
DECODE = ["schedule", "step: 1 tokens, 1 sequences", *STAGES]


def pushed(recorder: Recorder) -> list:
    return [attributes for kind, attributes in recorder.events if kind == "push"]


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("graph_mode", ["none", "full", "piecewise", "full_and_piecewise"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_stage_of_a_step_has_its_range_and_no_token_changes(
    checkpoint, compiled_once, compiled, graph_mode, device
):
    """Around graph replays too, where the ranges of eager code would be missing."""
    options = {"device": device, "graph_mode": graph_mode, "capture_sizes": "1,4,32"} | SIZES
    options |= {"overlap_scheduling": False}  # which a GPU has by default, with other ranges
    with LLM(checkpoint("llama"), compile=False, **options) as llm:
        plain = llm.generate(["abc"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(checkpoint("llama"), compile=compiled, nvtx=True, **options) as llm:
        stats = llm.stats()
        assert stats["compile"]["enabled"] == compiled
        ranges, recorder = recorded()
        llm.engine.ranges = llm.engine._runner._ranges = llm.engine._pipeline._ranges = ranges
        outputs = llm.generate(["abc"], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == plain
    assert_balanced(recorder)
    events = pushed(recorder)
    assert [name for name, _, _ in events] == [*FIRST, *DECODE * 3, "detokenize"]
    sizes = {name: (bucket, num_tokens) for name, bucket, num_tokens in events[:7]}
    bucket = 4 if graph_mode in ("piecewise", "full_and_piecewise") else None
    assert sizes["forward"] == sizes[FIRST[1]] == (bucket, 3)
    forwards = [attributes for attributes in events if attributes[0] == "forward"]
    # Full graphs alone need a backend that has them: not every device gets one here.
    has_graph = stats["ladders"]["decode"] or stats["ladders"]["mixed"]
    assert has_graph or graph_mode == "none" or (graph_mode == "full" and device != "cpu")
    assert forwards[-1] == ("forward", 1 if has_graph else None, 1)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_ranges_are_closed_when_a_step_raises(checkpoint, compiled_once, compiled, monkeypatch):
    with LLM(checkpoint("llama"), compile=compiled, nvtx=True, **SIZES) as llm:
        ranges, recorder = recorded()
        llm.engine.ranges = llm.engine._runner._ranges = llm.engine._pipeline._ranges = ranges
        with monkeypatch.context() as patch:
            patch.setattr(type(llm.engine._runner._backend), "run", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate(["abc"], GREEDY, use_tqdm=False)
        assert pushed(recorder)[-1] == ("forward", None, 3)
        assert recorder.events[-2:] == [("pop", None)] * 2
        assert_balanced(recorder)
        assert llm.generate(["abc"], GREEDY, use_tqdm=False)[0].finished
        assert_balanced(recorder)


@pytest.mark.parametrize("stage", ["prepare", "run"])
def test_a_step_under_graphs_that_raises_closes_its_ranges_and_is_run_again(
    checkpoint, stage, monkeypatch
):
    options = {"device": "cpu", "graph_mode": "full_and_piecewise", "capture_sizes": "1,4,32"}
    with LLM(checkpoint("llama"), nvtx=True, **SIZES, **options) as llm:
        ranges, recorder = recorded()
        engine = llm.engine
        engine.ranges = engine._runner._ranges = engine._pipeline._ranges = ranges
        sequence = engine.add_request([1, 2, 3], GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner._graphs, stage, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        assert_balanced(recorder)
        num_stages = {"prepare": 2, "run": 3}[stage]
        assert [name for name, _, _ in pushed(recorder)] == FIRST[: 2 + num_stages]
        while engine.has_unfinished:
            engine.step()
        assert len(sequence.output_token_ids) == 4
        assert_balanced(recorder)


def test_switched_off_no_step_touches_nvtx(checkpoint, monkeypatch):
    class Forbidden:
        def __getattr__(self, name):
            raise AssertionError(f"{name} is called though the ranges are off")

    monkeypatch.setitem(sys.modules, "nvtx", Forbidden())
    with LLM(checkpoint("llama"), device="cpu", **SIZES) as llm:
        monkeypatch.setattr(llm.engine.ranges, "_domain", Forbidden())
        assert llm.engine.ranges.step(1, 1, 0) is llm.engine.ranges("schedule")
        assert len(llm.generate(["abc"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_an_opener_takes_the_place_of_nvtx():
    opened = []

    def opener(name, num_tokens, bucket):
        opened.append((name, num_tokens, bucket))
        return nullcontext()

    for enabled in (False, True):
        ranges = Ranges(enabled=enabled)
        ranges.opener = opener
        with ranges("forward", 5, 8), ranges.step(5, 2, 8):
            pass
        ranges.opener = None
        with ranges("forward", 6, 8):
            pass
    assert opened == [("forward", 5, 8), ("step", 5, 8)] * 2
