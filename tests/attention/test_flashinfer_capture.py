"""Captured steps on the FlashInfer backend, over its stand-in, equal eager ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from attention import flashinfer_capture
from attention.flashinfer_launch import Kernels
from graphs import GraphOptions, GraphRunner, Launch
from graphs.host_graph import HostGraphPool
from tests.attention.decode_bucket import DecodeBucket
from tests.attention.flashinfer_double import make_backend_class, make_double
from tests.graphs.traffic import (
    BUDGET,
    MAX_BLOCKS,
    MAX_SEQS,
    Comparison,
    Traffic,
    poisoned_cache,
    tiny_model,
    tiny_spec,
)

CPU = torch.device("cpu")
DECODE_SIZES = (1, 2, 4, MAX_SEQS)
MIXED_SIZES = (1, 2, 4, 8, 12, BUDGET)
MODES = ("full", "piecewise", "full_and_piecewise")
VERSIONS = ("0.6.18", "0.7.4")
OnDouble = make_backend_class()


@pytest.fixture(scope="module")
def model():
    return tiny_model(CPU)


class Setup:
    def __init__(self, model, mode, *, backend_class=OnDouble) -> None:
        backend = backend_class(tiny_spec(CPU))
        cache = poisoned_cache(backend.spec)
        options = GraphOptions(
            mode=mode,
            decode_sizes=DECODE_SIZES,
            mixed_sizes=MIXED_SIZES,
            max_blocks_per_seq=MAX_BLOCKS,
        )
        self.runner = GraphRunner(
            model, backend, cache, options, HostGraphPool(), graph_support=backend
        )
        self.runner.capture()
        assert not self.runner.dropped
        self.comparison = Comparison(model, backend, self.runner, cache)

    def serve(self, traffic: Traffic) -> list[Launch]:
        """Run all that is queued, each step compared; the launches taken."""
        before = len(self.comparison.steps)
        while (step := traffic.schedule()) is not None:
            traffic.update(step[0], self.comparison.step(*step))
        return [step.launch for step in self.comparison.steps[before:]]


def prompts(num_seqs, *, length=3, max_tokens=6):
    traffic = Traffic(CPU)
    for i in range(num_seqs):
        traffic.add([(7 * i + j) % 50 for j in range(length)], max_tokens)
    return traffic


@pytest.mark.parametrize("mode", MODES)
def test_every_captured_size_equals_eager_up_and_down(model, mode):
    setup = Setup(model, mode)
    taken = set()
    for num_seqs in [*range(1, MAX_SEQS + 1), *range(MAX_SEQS, 0, -1)]:
        taken |= {(launch.mode, launch.size) for launch in setup.serve(prompts(num_seqs))}
    for num_tokens in [*range(2, BUDGET + 1), *range(BUDGET, 1, -3)]:
        launches = setup.serve(prompts(1, length=num_tokens, max_tokens=1))
        taken |= {(launch.mode, launch.size) for launch in launches}
    if mode != "piecewise":
        assert {("full", size) for size in DECODE_SIZES} <= taken
    if mode != "full":
        assert {("piecewise", size) for size in MIXED_SIZES[1:]} <= taken


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", MODES)
def test_random_mixed_traffic_equals_eager(model, mode, version):
    """With preemption and prefix hits; free blocks hold NaN until they are written."""
    setup = Setup(model, mode, backend_class=make_backend_class(make_double(version)))
    rng = np.random.default_rng(3)
    traffic = Traffic(CPU, num_blocks=13)
    launches = []
    for _ in range(2):
        for _ in range(8):
            traffic.add_random(rng)
        launches += setup.serve(traffic)
    assert traffic.scheduler.num_preemptions > 0
    assert traffic.num_cached_tokens > 0
    expected = {"full": {"full", "eager"}, "piecewise": {"piecewise"}}
    wanted = expected.get(mode, {"full", "piecewise"})
    assert {launch.mode for launch in launches} == wanted
    assert "changed plan" not in setup.runner.statistics.falls


def test_public_planner_serves_where_the_fast_one_is_unknown(model):
    library = make_double(fast_plan=False)
    setup = Setup(model, "full", backend_class=make_backend_class(library))
    launches = setup.serve(prompts(4, length=5))
    assert Launch(mode="full", size=4) in launches


def test_the_kind_of_step_decides_and_not_its_token_count(model):
    """One bucket size for everything: a decode, a prompt of as many tokens, a one-token prompt."""
    setup = Setup(model, "full_and_piecewise")
    taken = setup.serve(prompts(1, length=12, max_tokens=2))
    assert taken == [Launch(mode="piecewise", size=12), Launch(mode="full", size=1)]
    traffic = prompts(1, length=1, max_tokens=3)
    assert {launch.mode for launch in setup.serve(traffic)} == {"full"}
    traffic = prompts(1, length=2, max_tokens=4)
    scheduled, batch = traffic.schedule()
    traffic.update(scheduled, setup.comparison.step(scheduled, batch))
    traffic.add(list(range(20)), 1)
    scheduled, batch = traffic.schedule()
    assert (scheduled.num_decodes, scheduled.num_tokens) == (1, BUDGET)
    setup.comparison.step(scheduled, batch)
    assert setup.comparison.steps[-1].launch == Launch(mode="piecewise", size=BUDGET)


# One bucket, with lengths of all kinds


def make_bucket(spec, sizes, *, version="0.7.4", max_context=600, num_blocks=400):
    backend = make_backend_class(make_double(version))(spec)
    max_blocks = -(-max_context // spec.block_size)
    return DecodeBucket(backend, HostGraphPool(), sizes, num_blocks, max_blocks)


@pytest.fixture
def decodes(make_step):
    """A step of decodes with the contexts given."""

    def make(spec, contexts, seed=0):
        pairs = [(1, context - 1) for context in contexts]
        return make_step(spec, pairs, num_decodes=len(pairs), seed=seed)

    return make


@pytest.fixture
def spec(make_spec):
    return make_spec(windows=(None, 100), dtype=torch.float64)


@pytest.mark.parametrize("version", VERSIONS)
def test_short_sequences_after_long_ones_leave_all_other_blocks_alone(spec, decodes, version):
    """Eight long sequences, then five short ones in the same bucket, over a pool of NaN."""
    bucket = make_bucket(spec, (8,), version=version)
    launch, _ = bucket.serve(decodes(spec, [300 + 17 * i for i in range(8)]))
    assert launch == Launch(mode="full", size=8)
    launch, rows = bucket.serve(decodes(spec, [3, 1, 16, 17, 5], seed=1))
    assert launch == Launch(mode="full", size=8)
    assert not rows[5:].any(), "padded rows are zero, though their queries are NaN"


@pytest.mark.parametrize("version", VERSIONS)
def test_lengths_that_jump_within_one_bucket(spec, decodes, version):
    bucket = make_bucket(spec, (4,), version=version, max_context=5000, num_blocks=1300)
    for seed, contexts in enumerate(
        (
            [10] * 4,
            [5000] * 4,
            [10, 5000, 1, 700],
            [15, 31, 47, 4095],
            [16, 32, 48, 4096],
            [17, 33, 49, 4097],
            [10] * 4,
        )
    ):
        launch, _ = bucket.serve(decodes(spec, contexts, seed))
        assert launch == Launch(mode="full", size=4)
    assert bucket.runner.statistics.falls == {}


def test_sizes_share_workspaces_without_disturbing_each_other(spec, decodes):
    bucket = make_bucket(spec, (1, 2, 4, 8))
    rng = np.random.default_rng(0)
    for seed, num_seqs in enumerate([1, 3, 8, 2, 5, 1, 7, 4]):
        contexts = rng.integers(1, 600, num_seqs).tolist()
        bucket.serve(decodes(spec, contexts, seed))
    sizes = {bucket["size"] for bucket in bucket.runner.statistics.as_dict()["buckets"]}
    assert sizes == {1, 2, 4, 8}


def differs(bucket, step):
    try:
        bucket.serve(step)
    except (AssertionError, RuntimeError):
        return True
    return False


def test_defect_plan_not_refreshed(spec, decodes):
    bucket = make_bucket(spec, (4,))
    assert not differs(bucket, decodes(spec, [10] * 4))
    bucket.runner._graphs.full[4]._plan.refresh = lambda metadata: True
    assert differs(bucket, decodes(spec, [400] * 4, 1))


def test_defect_buffers_refreshed_but_not_the_schedule(spec, decodes, monkeypatch):
    bucket = make_bucket(spec, (4,))
    assert not differs(bucket, decodes(spec, [10] * 4))
    monkeypatch.setattr(Kernels, "plan_decode", lambda *args, **kwargs: None)
    assert differs(bucket, decodes(spec, [400] * 4, 1))


@pytest.mark.parametrize("missing", ["_packed", "_pages"])
def test_defect_schedule_refreshed_but_not_the_buffers(spec, decodes, missing):
    bucket = make_bucket(spec, (4,))
    assert not differs(bucket, decodes(spec, [10] * 4))
    plan = bucket.runner._graphs.full[4]._plan
    setattr(plan, missing, getattr(plan, missing).clone())
    assert differs(bucket, decodes(spec, [400] * 4, 1))


def test_defect_windows_that_share_a_schedule(spec, decodes, monkeypatch):
    monkeypatch.setattr(flashinfer_capture, "LAUNCHES_PER_WINDOW", 0)
    bucket = make_bucket(spec, (4,))
    assert differs(bucket, decodes(spec, [500] * 4))


def test_a_changed_plan_vector_retires_the_graph_and_its_step_runs_eagerly(
    spec, decodes, monkeypatch
):
    bucket = make_bucket(spec, (2, 4))
    assert bucket.serve(decodes(spec, [10] * 4))[0] == Launch(mode="full", size=4)
    vector = flashinfer_capture.plan_vector
    monkeypatch.setattr(flashinfer_capture, "plan_vector", lambda wrapper: (*vector(wrapper), 1))
    launch, _ = bucket.serve(decodes(spec, [10] * 4, 1))
    assert launch == Launch(mode="eager", size=4, fall="changed plan")
    assert bucket.runner.captured_sizes("full") == (2,)


def test_more_sequences_than_the_limits_are_captured_with_a_larger_workspace(spec, decodes, caplog):
    limited = dataclasses.replace(spec, num_heads=2, max_num_seqs=1, max_num_tokens=1)
    with caplog.at_level("INFO", logger="stepgraph.attention"):
        bucket = make_bucket(limited, (1100,), version="0.6.18", max_context=16, num_blocks=1200)
    assert "1100 sequences (a graph of 1100 sequences)" in caplog.text
    bucket.serve(decodes(limited, [5] * 1099))
