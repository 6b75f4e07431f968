"""What the runner chooses, captures, returns and counts, and which defects its tests would see."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from attention.torch_backend import TorchBackend
from graphs import CaptureError, GraphOptions, GraphRunner, Launch
from graphs.host_graph import HostGraphPool
from tests.graphs.padded_attention import PaddedBackend
from tests.graphs.runner_setup import (
    CPU,
    DECODE_SIZES,
    MIXED_SIZES,
    MODES,
    Setup,
    decode_traffic,
)
from tests.graphs.traffic import (
    BLOCK_SIZE,
    BUDGET,
    MAX_BLOCKS,
    MAX_SEQS,
    Comparison,
    poisoned_cache,
    tiny_model,
    tiny_spec,
)


@pytest.fixture(scope="module")
def model():
    return tiny_model(CPU)


# Choice


def test_a_backend_without_full_graphs_is_piecewise_throughout(model, caplog):
    setup = Setup(model, "full_and_piecewise", backend=TorchBackend(tiny_spec(CPU)))
    assert {launch.mode for launch in setup.serve(decode_traffic(3))} == {"piecewise"}
    assert "can't be part of a full graph" in caplog.text


def test_kind_of_batch_decides_and_not_its_token_count(model):
    runner = Setup(model, "full_and_piecewise").runner
    assert runner.dispatch(4, 4, True) == Launch(mode="full", size=4)
    assert runner.dispatch(4, 2, False) == Launch(mode="piecewise", size=4)
    assert runner.dispatch(1, 1, True) == Launch(mode="full", size=1)


def test_decode_above_its_ladder_goes_piecewise_and_mixed_above_its_ladder_eager(model):
    runner = Setup(model, "full_and_piecewise", decode_sizes=(1, 2)).runner
    assert runner.dispatch(3, 3, True) == Launch(mode="piecewise", size=4)
    assert runner.dispatch(17, 3, False) == Launch(
        mode="eager", size=17, fall="above the largest size"
    )


def test_more_than_double_padding_runs_eagerly(model):
    runner = Setup(model, "piecewise", mixed_sizes=(8,)).runner
    assert runner.dispatch(4, 1, False).size == 8
    assert runner.dispatch(3, 1, False) == Launch(mode="eager", size=3, fall="padding above 2x")


def test_mode_none_captures_nothing_and_counts_no_fall(model):
    setup = Setup(model, "none")
    setup.serve(decode_traffic(3))
    table = setup.runner.statistics.as_dict()
    assert [bucket["mode"] for bucket in table["buckets"]] == ["eager"]
    assert table["falls"] == {}


@pytest.mark.parametrize(
    ("options", "match"),
    [({"mode": "both"}, "graph mode must be one of none, full"), ({"mixed_sizes": (0, 4)}, "4")],
)
def test_impossible_options_are_refused(options, match):
    values = {"mode": "full", "decode_sizes": (1,), "mixed_sizes": (1,), "max_blocks_per_seq": 1}
    with pytest.raises(ValueError, match=match):
        GraphOptions(**(values | options))


# Capture


def test_captures_from_the_largest_down_under_the_callers_progress_bar(model):
    runner = Setup(model, "full_and_piecewise").runner
    shown = []

    def progress(buckets):
        for bucket in buckets:
            shown.append(bucket)
            yield bucket

    runner.capture(progress)
    sizes = [size for _, size in shown]
    assert sizes == sorted(sizes, reverse=True)
    assert len(shown) == len(DECODE_SIZES) + len(MIXED_SIZES)


def test_a_size_that_fails_to_capture_is_left_out_and_named(model, caplog):
    def forward(input_ids, positions, attend, rows=None):
        if len(input_ids) == 4:
            raise torch.OutOfMemoryError("out of memory")
        return model(input_ids, positions, attend)

    backend = PaddedBackend(tiny_spec(CPU))
    options = GraphOptions(
        mode="piecewise", decode_sizes=(), mixed_sizes=MIXED_SIZES, max_blocks_per_seq=MAX_BLOCKS
    )
    cache = poisoned_cache(backend.spec)
    runner = GraphRunner(forward, backend, cache, options, HostGraphPool())
    runner.capture()
    assert set(runner.dropped) == {("piecewise", 4)}
    assert "no piecewise graph for size 4" in caplog.text
    assert runner.captured_sizes("piecewise") == (1, 2, 8, 12, 16)
    assert runner.dispatch(4, 1, False).size == 8
    assert runner.dispatch(3, 1, False).mode == "eager"


def test_a_forward_that_cannot_be_captured_still_serves(model):
    def forward(input_ids, positions, attend, rows=None):
        assert positions.max().item() >= 0
        return model(input_ids, positions, attend)

    backend = PaddedBackend(tiny_spec(CPU))
    options = GraphOptions(
        mode="piecewise", decode_sizes=(), mixed_sizes=(4,), max_blocks_per_seq=MAX_BLOCKS
    )
    cache = poisoned_cache(backend.spec)
    runner = GraphRunner(forward, backend, cache, options, HostGraphPool())
    runner.capture()
    assert "Tensor.item" in runner.dropped["piecewise", 4]
    comparison = Comparison(model, backend, runner, cache)
    traffic = decode_traffic(2)
    while (step := traffic.schedule()) is not None:
        traffic.update(step[0], comparison.step(*step))
    assert set(runner.statistics.falls) == {"no graph captured"}


def test_a_changed_plan_retires_the_graph_and_its_step_runs_eagerly(model, caplog):
    setup = Setup(model, "full")
    setup.backend.plans[4].refresh = lambda metadata: False
    launches = setup.serve(decode_traffic(4, length=2, max_tokens=3))
    decodes = [launch for launch in launches if launch.size == 4 or launch.mode == "full"]
    assert decodes[0] == Launch(mode="eager", size=4, fall="changed plan")
    assert decodes[1] == Launch(mode="full", size=6)
    assert setup.runner.captured_sizes("full") == (1, 2, 6)
    assert "size 4 is given up" in caplog.text


# Outputs and order


@pytest.mark.parametrize("mode", MODES)
def test_results_outlive_all_later_steps(model, mode):
    setup = Setup(model, mode)
    traffic, kept = decode_traffic(4), []
    run = setup.runner.run

    def keep(step, rows=None):
        hidden = run(step, rows)
        kept.append((hidden, hidden.clone()))
        return hidden

    setup.runner.run = keep
    setup.serve(traffic)
    assert len(kept) > 3
    assert all(torch.equal(hidden, then) for hidden, then in kept)


def test_rows_asked_for_are_those_of_the_whole_result(model):
    setup = Setup(model, "full_and_piecewise")
    traffic = decode_traffic(3)
    scheduled, batch = traffic.schedule()
    launch = setup.runner.dispatch(scheduled.num_tokens, scheduled.num_seqs, False)
    results = []
    for rows in (None, batch.logits_indices):
        step = setup.runner.prepare(launch, batch.input_ids, batch.positions, batch.metadata)
        results.append(setup.runner.run(step, rows))
    assert torch.equal(results[0][batch.logits_indices], results[1])


def test_a_step_is_run_before_the_next_is_prepared(model):
    setup = Setup(model, "piecewise")
    scheduled, batch = decode_traffic(3).schedule()
    launch = setup.runner.dispatch(scheduled.num_tokens, scheduled.num_seqs, False)
    inputs = (launch, batch.input_ids, batch.positions, batch.metadata)
    stale = setup.runner.prepare(*inputs)
    setup.runner.prepare(*inputs)
    with pytest.raises(AssertionError, match="another step was prepared"):
        setup.runner.run(stale)


# Statistics


def test_statistics_count_steps_tokens_padding_and_time(model):
    setup = Setup(model, "full_and_piecewise")
    launches = setup.serve(decode_traffic(3, length=3, max_tokens=4))
    assert launches == [Launch(mode="piecewise", size=12)] + 3 * [Launch(mode="full", size=4)]
    setup.runner.statistics.add_seconds(launches[1], 0.25)
    table = json.loads(json.dumps(setup.runner.statistics.as_dict()))
    captures = table.pop("captures")
    assert table == {
        "buckets": [
            {
                "mode": "full",
                "size": 4,
                "steps": 3,
                "num_tokens": 9,
                "num_padded_tokens": 3,
                "seconds": 0.25,
                "num_timed_steps": 1,
            },
            {
                "mode": "piecewise",
                "size": 12,
                "steps": 1,
                "num_tokens": 9,
                "num_padded_tokens": 3,
                "seconds": 0.0,
                "num_timed_steps": 0,
            },
        ],
        "falls": {},
        "step_sizes": {"decode": [[3, 3]], "mixed": [[9, 1]]},
    }
    buckets = [("full", size) for size in DECODE_SIZES]
    buckets += [("piecewise", size) for size in MIXED_SIZES]
    assert sorted((c["mode"], c["size"]) for c in captures) == sorted(buckets)
    assert all(c["seconds"] > 0 and not c["at_first_use"] for c in captures)


# Defects that only graphs have. Each is planted and must be seen.


def differs(setup, traffic):
    """Whether serving the traffic fails, or gives other results than eager code."""
    try:
        setup.serve(traffic)
    except (AssertionError, CaptureError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_defect_host_number_of_the_batch_in_the_forward(model, mode):
    batch = {"scale": 1.0}

    def forward(input_ids, positions, attend, rows=None):
        return model(input_ids, positions, attend) * batch["scale"]

    setup = Setup(model, mode, model_to_capture=forward)
    setup.comparison.model = forward
    assert not differs(setup, decode_traffic(4))
    batch["scale"] = 3.0
    assert differs(setup, decode_traffic(4))


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_defect_python_state_changed_after_capture(mode):
    model = tiny_model(CPU)
    setup = Setup(model, mode)
    assert not differs(setup, decode_traffic(4))
    for layer in model.layers:
        layer.eps = 10.0
    assert differs(setup, decode_traffic(4))


@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize("name", ["input_ids", "positions"])
def test_defect_reallocated_input_buffer(model, mode, name):
    setup = Setup(model, mode)
    assert not differs(setup, decode_traffic(4))
    inputs = setup.runner._inputs
    setattr(inputs, name, getattr(inputs, name).clone())
    assert differs(setup, decode_traffic(4))


def test_defect_attention_plan_not_refreshed(model):
    setup = Setup(model, "full")
    assert not differs(setup, decode_traffic(4))
    for plan in setup.backend.plans.values():
        plan.refresh = lambda metadata: True
    assert differs(setup, decode_traffic(4))


def test_defect_piecewise_attention_planned_once(model):
    setup = Setup(model, "piecewise")
    assert not differs(setup, decode_traffic(4))
    plans = {}

    def plan_once(metadata, plan=setup.backend.plan):
        return plans.setdefault(metadata.num_tokens, plan(metadata))

    setup.backend.plan = plan_once
    assert differs(setup, decode_traffic(4))


def test_defect_output_aliased_by_the_next_replay(model):
    setup = Setup(model, "full")
    setup.serve(decode_traffic(4))
    aliased = setup.runner._graphs.hidden[:4]
    then = aliased.clone()
    setup.serve(decode_traffic(3))
    assert not torch.equal(aliased, then)


@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize("keeps", [False, True])
def test_defect_intermediate_kept_across_replays_of_another_size(model, mode, keeps):
    largest = MAX_SEQS if mode == "full" else BUDGET
    saved = {}

    def forward(input_ids, positions, attend, rows=None):
        ones = (positions * 0 + 1)[:, None].to(torch.float32)
        if len(positions) == largest:
            saved["ones"] = ones
        if keeps:
            ones = saved["ones"][: len(positions)]
        return model(input_ids, positions, attend) * ones

    setup = Setup(model, mode, model_to_capture=forward)
    assert differs(setup, decode_traffic(2)) == keeps


@pytest.mark.parametrize("which", ["tables", "slots"])
def test_defect_padded_row_that_touches_a_live_block(model, which):
    """With a stale table it reads the block, so that its result depends on another sequence;
    with a stale slot it writes to it. Neither happens unless it is planted."""
    setup = Setup(model, "full", decode_sizes=(MAX_SEQS,))
    traffic = decode_traffic(5, length=3, max_tokens=9)
    for _ in range(4):
        scheduled, batch = traffic.schedule()
        traffic.update(scheduled, setup.comparison.step(scheduled, batch))
    scheduled, batch = traffic.schedule()
    launch = setup.runner.dispatch(scheduled.num_tokens, scheduled.num_seqs, True)
    assert launch == Launch(mode="full", size=MAX_SEQS)
    owner, padded = 1, 5
    live = int(batch.metadata.block_tables_cpu[owner, 0])

    @torch.inference_mode()
    def run(planted, shift):
        for tensor in setup.cache.values:
            tensor[live] += shift
        step = setup.runner.prepare(launch, batch.input_ids, batch.positions, batch.metadata)
        if planted:
            plant_stale_row(setup, which, owner, padded, live * BLOCK_SIZE)
        setup.runner.run(step)
        return setup.runner._graphs.hidden[padded].clone(), setup.cache.keys[0][live].clone()

    row, keys = run(False, 0.0)
    shifted_row, same_keys = run(False, 1.0)
    assert torch.equal(row, shifted_row)
    assert torch.equal(keys, same_keys)
    row, keys = run(True, 0.0)
    shifted_row, _ = run(True, 1.0)
    if which == "tables":
        assert not torch.equal(row, shifted_row)
    else:
        assert not torch.equal(keys, same_keys)


def plant_stale_row(setup, which, owner, padded, slot):
    inputs = setup.runner._inputs
    if which == "slots":
        inputs.slot_mapping[padded] = slot
        return
    inputs._block_tables[padded].copy_(inputs._block_tables[owner])
    inputs._context_lens[padded].copy_(inputs._context_lens[owner])
    plan = setup.backend.plans[MAX_SEQS].plan
    plan.active[padded] = True
    for hidden in plan.hidden.values():
        hidden[padded].copy_(hidden[owner])


def test_padding_of_decode_steps_is_null_after_larger_steps(model):
    """Six long sequences, then four short ones in the same bucket: nothing stale is left."""
    setup = Setup(model, "full", decode_sizes=(MAX_SEQS,))
    seen = []
    plan = setup.backend.plans[MAX_SEQS]
    refresh = plan.refresh

    def spy(metadata):
        host = (metadata.context_lens_cpu.copy(), metadata.block_tables_cpu.copy())
        device = (metadata.context_lens.numpy().copy(), metadata.block_tables.numpy().copy())
        tail = (metadata.slot_mapping.clone(), inputs.input_ids.clone(), inputs.positions.clone())
        seen.append((host, device, tail, metadata.cu_seqlens_k.clone()))
        return refresh(metadata)

    inputs = setup.runner._inputs
    plan.refresh = spy
    setup.serve(decode_traffic(6, length=2, max_tokens=12))
    assert seen[-1][0][0].tolist() == [13] * 6
    setup.serve(decode_traffic(4, length=2, max_tokens=4))
    host, device, (slots, ids, positions), cu_seqlens_k = seen[-1]
    for contexts, tables in (host, device):
        assert contexts[4:].tolist() == [0, 0]
        assert not tables[4:].any()
        assert not tables[:4, 2:].any()
        assert tables[:4, 0].all()
    assert all(np.array_equal(a, b) for a, b in zip(host, device, strict=True))
    assert (slots[4:6] < BLOCK_SIZE).all()
    assert ids[4:6].tolist() == positions[4:6].tolist() == [0, 0]
    assert cu_seqlens_k[4:].unique().numel() == 1
