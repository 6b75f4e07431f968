"""The FlashInfer backend on a stand-in for the package, against the naive float64 reference."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from attention import AttentionMetadata, AttentionPlan, AttentionSpec
from attention.flashinfer_backend import FlashInferBackend, FlashInferOptions
from attention.flashinfer_library import FlashInferLibrary
from attention.flashinfer_workspace import float_workspace_bytes, schedule_workspace_bytes
from attention.pinned_ring import PinnedRing
from tests.attention.flashinfer_double import make_backend_class, make_double
from tests.attention.flashinfer_schedule import NUM_SMS, Shape, make_schedule

MakeSpec = Callable[..., AttentionSpec]
MakeStep = Callable[..., Any]

DTYPES = (torch.float64, torch.bfloat16, torch.float16)
VERSIONS = ("0.6.18.post1", "0.7.0", "0.7.2", "0.7.4")
OnDouble = make_backend_class()


def run(step: Any, layer: int = 0, **options: Any) -> torch.Tensor:
    backend = OnDouble(step.spec, options=FlashInferOptions(**options))
    result: torch.Tensor = step.run(layer, backend=backend)
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_batches_equal_the_reference(
    make_grid_step: MakeStep, grid_head_dim: int, grid_group: int, dtype: torch.dtype
) -> None:
    step = make_grid_step(grid_head_dim, grid_group, dtype)
    for layer in range(step.spec.num_layers):
        step.assert_right(run(step, layer), layer)


@pytest.mark.parametrize("block_size", [1, 16, 32, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_decodes_and_prompts_of_one_step_are_two_launches(
    make_spec: MakeSpec, make_step: MakeStep, group: int, block_size: int
) -> None:
    spec = make_spec(
        num_heads=2 * group, num_kv_heads=2, block_size=block_size, windows=(None, 5, 100, None)
    )
    pairs = [(1, 0), (1, 16), (1, 255), (1, 1000), (130, 17), (1, 15), (17, 0)]
    step = make_step(spec, pairs, num_decodes=4, padded_rows=3, unused_columns=2)
    backend = OnDouble(spec)
    plan = backend.plan(step.metadata)
    for layer in range(spec.num_layers):
        assert [launch.rows for launch in plan.layers[layer]] == [slice(0, 4), slice(4, 152)]
        step.assert_right(step.run(layer, plan, backend), layer)


def test_a_step_of_decodes_alone_or_prompts_alone_is_one_launch(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    for pairs, num_decodes in (([(1, 40), (1, 3)], 2), ([(9, 40), (1, 3)], 0)):
        step = make_step(make_spec(), pairs, num_decodes=num_decodes)
        backend = OnDouble(step.spec)
        plan = backend.plan(step.metadata)
        assert [len(launches) for launches in plan.layers] == [1]
        step.assert_right(step.run(0, plan, backend))


def test_layers_with_the_same_window_share_launches(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    spec = make_spec(windows=(None, 4, 4, None))
    step = make_step(spec, [(1, 100), (20, 30)], num_decodes=1)
    plain, four, four_again, plain_again = OnDouble(spec).plan(step.metadata).layers
    assert four is four_again and plain is plain_again
    assert {launch.wrapper for launch in plain}.isdisjoint(launch.wrapper for launch in four)


@pytest.mark.parametrize("version", VERSIONS)
def test_sequences_split_over_keys_equal_the_reference(
    make_spec: MakeSpec, make_step: MakeStep, version: str
) -> None:
    spec = make_spec(num_heads=6, windows=(None, 700))
    step = make_step(spec, [(1, 4000), (1, 2999), (5, 1500), (1, 40), (1, 0)], num_decodes=2)
    backend = make_backend_class(make_double(version))(spec)
    plan = backend.plan(step.metadata)
    split = [launch.wrapper._plan_info[-1] for launch in plan.layers[0]]
    assert split == [1, 1]
    for layer in range(2):
        step.assert_right(step.run(layer, plan, backend), layer)


@pytest.mark.parametrize(("option", "value"), [("prefill_kernel", "fa3"), ("mixed_kernel", True)])
def test_other_kernels_for_prompts_equal_the_reference(
    make_spec: MakeSpec, make_step: MakeStep, option: str, value: Any
) -> None:
    pairs = [(1, 40), (1, 300), (9, 20), (30, 0)]
    for soft_cap in (None, 20.0):
        spec = dataclasses.replace(make_spec(), soft_cap=soft_cap)
        step = make_step(spec, pairs, num_decodes=2, padded_rows=2)
        expected = run(step)
        torch.testing.assert_close(run(step, **{option: value}), expected)
        if soft_cap is None:
            step.assert_right(expected)


def test_one_persistent_kernel_takes_mixed_steps_alone(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    options = FlashInferOptions(mixed_kernel=True)
    mixed = make_step(make_spec(), [(1, 40), (9, 20)], num_decodes=1)
    decodes = make_step(make_spec(), [(1, 40), (1, 20)], num_decodes=2)
    backend = OnDouble(mixed.spec, options=options)
    kinds = [
        [type(launch.wrapper).__name__ for launch in backend.plan(step.metadata).layers[0]]
        for step in (mixed, decodes)
    ]
    assert kinds == [["BatchAttention"], ["BatchDecodeWithPagedKVCacheWrapper"]]


@pytest.mark.parametrize("computed", [0, 16])
def test_prompts_with_nothing_cached_skip_the_pages_if_wanted(
    make_spec: MakeSpec, make_step: MakeStep, computed: int
) -> None:
    """Without keys in the cache it must be the step's own tensors that were read."""
    spec = make_spec(windows=(None, 7))
    step = make_step(spec, [(1, 40), (30, 0), (9, computed)], num_decodes=1, padded_rows=2)
    backend = OnDouble(spec, options=FlashInferOptions(ragged_prompts=True))
    plan = backend.plan(step.metadata)
    assert [launch.is_ragged for launch in plan.layers[0]] == [False, computed == 0]
    for layer in range(2):
        step.assert_right(step.run(layer, plan, backend), layer)


def test_scale_and_cap_of_the_spec_are_applied(make_spec: MakeSpec, make_step: MakeStep) -> None:
    pairs = [(1, 40), (9, 20), (30, 0)]
    spec = make_spec(scale=0.9)
    step = make_step(spec, pairs, num_decodes=1)
    step.assert_right(run(step))
    capped = make_step(dataclasses.replace(spec, soft_cap=1e-9), pairs, num_decodes=1)
    result = run(capped)
    # All scores become equal, so that each row is the mean of the values it sees.
    values = capped.cache.values[0][torch.tensor(capped.tables[0])].flatten(0, 1)
    torch.testing.assert_close(result[0, ::2], values[:41].mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("window", [None, 7])
def test_slots_that_no_sequence_owns_are_neither_read_nor_written(
    make_spec: MakeSpec,
    make_step: MakeStep,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    spec = make_spec(block_size=block_size, windows=(window,), dtype=dtype)
    step = make_step(spec, [(1, 40), (1, 33), (9, 20), (30, 0)], num_decodes=2, unused_columns=3)
    result = run(step)
    step.assert_right(result)
    owned = step.owned_slots()
    for tensor in (step.cache.keys[0], step.cache.values[0]):
        assert bool(tensor[owned].isfinite().all())
        assert bool(tensor[~owned].isnan().all())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("padded_seqs", [(), (0, 0), (1, 1), (3, 0, 1)])
@pytest.mark.parametrize("padded_rows", [0, 5])
def test_padding_gives_zeros_and_changes_no_other_row(
    make_spec: MakeSpec,
    make_step: MakeStep,
    padded_seqs: tuple[int, ...],
    padded_rows: int,
    version: str,
) -> None:
    pairs = [(1, 40), (1, 7), (9, 20), (30, 0)]
    step = make_step(
        make_spec(), pairs, num_decodes=2, padded_seqs=padded_seqs, padded_rows=padded_rows
    )
    live = sum(query_len for query_len, _ in pairs)
    for tensor in (step.query, step.key, step.value):
        tensor[live:] = float("nan")
    result = step.run(0, backend=make_backend_class(make_double(version))(step.spec))
    step.assert_right(result)
    assert not result[live:].any()


@pytest.mark.parametrize("version", VERSIONS)
def test_decodes_without_context_give_zeros(
    make_spec: MakeSpec, make_step: MakeStep, version: str
) -> None:
    """As in a padded step that is run eagerly."""
    step = make_step(make_spec(), [(1, 40), (1, 7)], num_decodes=4, padded_seqs=(1, 1))
    result = step.run(0, backend=make_backend_class(make_double(version))(step.spec))
    step.assert_right(result)
    assert not result[2:].any()


def test_step_of_padding_alone_gives_zeros(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(), [], padded_seqs=[1, 0], padded_rows=3, unused_columns=1)
    for tensor in (step.query, step.key, step.value):
        tensor.fill_(float("nan"))
    result = run(step)
    assert result.shape == (4, 4, 16)
    assert not result.any()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_sequence_reads_blocks_that_another_one_writes_in_the_same_step(
    make_spec: MakeSpec, make_step: MakeStep, order: tuple[int, ...]
) -> None:
    """Equal prompts: a fresh one fills the two blocks that a chunk and a decode hit."""
    pairs = [(40, 0), (6, 32), (1, 32)]
    tables = [[5, 2, 7], [5, 2, 3], [5, 2, 6]]
    step = make_step(
        make_spec(), [pairs[i] for i in order], tables=[tables[i] for i in order], num_decodes=0
    )
    step.assert_right(run(step))


def test_a_mixed_step_equals_its_sequences_one_by_one(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    """Three decodes, a middle chunk, and a prompt that hits a prefix; the order of rows is kept."""
    pairs = [(1, 40), (1, 17), (1, 300), (20, 32), (8, 16)]
    step = make_step(make_spec(), pairs, num_decodes=3)
    together, bounds = run(step), step.metadata.cu_seqlens_q_cpu
    for index, (query_len, computed) in enumerate(pairs):
        rows = slice(int(bounds[index]), int(bounds[index + 1]))
        pair, table = [(query_len, computed)], [step.tables[index]]
        alone = make_step(step.spec, pair, tables=table, num_decodes=int(index < 3))
        parts = {name: getattr(step, name)[rows] for name in ("query", "key", "value")}
        alone = dataclasses.replace(alone, cache=step.cache, **parts)
        torch.testing.assert_close(run(alone), together[rows])


# Workspaces


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (32, 32), (32, 1), (9, 3), (24, 8)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_workspaces_hold_what_any_step_within_the_limits_reserves(
    make_spec: MakeSpec, version: str, heads: tuple[int, int], head_dim: int
) -> None:
    """The planner's own arithmetic, on long and short steps, many sequences and few."""
    num_heads, num_kv_heads = heads
    spec = make_spec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    library = FlashInferLibrary.of(make_double(version))
    num_seqs, num_rows = 512, 8192
    float_bytes = float_workspace_bytes(spec, library, NUM_SMS, num_seqs)
    int_bytes = schedule_workspace_bytes(spec, NUM_SMS, num_seqs, num_rows)
    largest = 0
    for batch, rows, context, window, is_graph in itertools.product(
        (1, 2, 7, 33, 100, 264, num_seqs),
        (1, 2, 5, 16, 100),
        (1, 500, 40_000),
        (-1, 1000),
        (True, False),
    ):
        if (is_graph and rows > 1) or batch * rows > num_rows:
            continue
        shape = Shape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=16,
            window_left=window,
            is_graph=is_graph,
            version=library.version,
        )
        lengths = [rows] * (batch - 1) + [rows if is_graph else num_rows - rows * (batch - 1)]
        schedule = make_schedule(shape, lengths, [-(-context // 16)] * batch)
        assert schedule.float_bytes <= float_bytes
        assert schedule.int_bytes <= int_bytes
        largest = max(largest, schedule.float_bytes)
    assert float_bytes < 2 * largest + (64 << 20), "far more than any step reserves"


class CountingEvent:
    """Counts the records and waits of all events of a test."""

    counts: ClassVar[dict[str, int]] = {}

    def record(self) -> None:
        self.counts["record"] += 1

    def synchronize(self) -> None:
        self.counts["wait"] += 1


def test_plans_take_turns_in_host_memory_and_wait_for_its_copies(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    CountingEvent.counts = {"record": 0, "wait": 0}
    spec = make_spec(windows=(None, 7))
    ring = PinnedRing(0, spec.device, depth=3, make_event=CountingEvent)
    backend = OnDouble(spec, ring=ring)
    step = make_step(spec, [(1, 40), (9, 20)], num_decodes=1)
    captured = backend.capturable_plan(make_step(spec, [(1, 40)], num_decodes=1).metadata)
    CountingEvent.counts.update(record=0, wait=0)
    turns = []
    for _ in range(4):
        launches = itertools.chain(*backend.plan(step.metadata).layers)
        wrappers = [launch.wrapper for launch in launches]
        turns.append([w._pin_memory_int_workspace_buffer.data_ptr() for w in wrappers])
    assert CountingEvent.counts == {"record": 4, "wait": 4}
    assert turns[3] == turns[0]
    assert len(set().union(*turns)) == 3 * 4, "a launch shares its staging memory with no other"
    schedules = {wrapper._int_workspace_buffer.data_ptr() for wrapper in wrappers}
    assert len(schedules) == 4
    assert len({wrapper._float_workspace_buffer.data_ptr() for wrapper in wrappers}) == 1
    graphs = [launch.wrapper for launches in captured.plan.layers for launch in launches]
    assert {wrapper._int_workspace_buffer.data_ptr() for wrapper in graphs} <= schedules


def test_the_largest_step_right_after_start_finds_its_workspace(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    """Many query heads, as many sequences as allowed, all long: no buffer moves or overflows."""
    spec = make_spec(num_heads=32, num_kv_heads=2, head_dim=8)
    spec = dataclasses.replace(spec, max_num_seqs=40, max_num_tokens=40)
    step = make_step(spec, [(1, 500)] * 40, num_decodes=40)
    backend = OnDouble(spec)
    buffer = backend._workspace.float_buffer
    step.assert_right(step.run(0, backend=backend))
    assert backend._workspace.float_buffer is buffer


def test_steps_beyond_the_limits_grow_the_workspace_and_say_why(
    make_spec: MakeSpec, make_step: MakeStep, caplog: pytest.LogCaptureFixture
) -> None:
    spec = dataclasses.replace(make_spec(num_heads=2), max_num_seqs=1, max_num_tokens=1)
    backend = make_backend_class(make_double("0.6.18"))(spec)
    small = make_step(spec, [(1, 40)], num_decodes=1)
    small.assert_right(small.run(0, backend=backend))
    before = backend._workspace.float_buffer, backend._workspace.schedules
    step = make_step(spec, [(1, 4)] * 1200, num_decodes=1200)
    with caplog.at_level("INFO", logger="stepgraph.attention"):
        step.assert_right(step.run(0, backend=backend))
        backend.plan(_of_size(step.metadata, 100_000))
    assert "1200 sequences (a larger step)" in caplog.text
    assert backend._workspace.float_buffer is not before[0]
    assert backend._workspace.schedules is not before[1]
    small.assert_right(small.run(0, backend=backend))


def _of_size(metadata: AttentionMetadata, num_rows: int) -> AttentionMetadata:
    slots = torch.zeros(num_rows, dtype=torch.int64)
    return dataclasses.replace(metadata, slot_mapping=slots)


# Misuse and refusals


def test_a_plan_is_stale_as_soon_as_the_next_is_made(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    step = make_step(make_spec(), [(1, 5)], num_decodes=1)
    backend = OnDouble(step.spec)
    stale = backend.plan(step.metadata)
    backend.plan(step.metadata)
    with pytest.raises(AssertionError, match="another step was planned since"):
        step.run(0, stale, backend)


def test_metadata_of_another_block_size_is_a_bug(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(block_size=4), [(1, 5)])
    with pytest.raises(AssertionError, match="blocks of 4, the backend for 16"):
        OnDouble(make_spec()).plan(step.metadata)


def test_a_plan_of_another_backend_is_a_bug(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(), [(1, 5)])
    with pytest.raises(AssertionError, match="another backend"):
        step.run(0, AttentionPlan(), OnDouble(step.spec))


def test_other_devices_dtypes_and_head_sizes_are_refused_with_every_reason(
    make_spec: MakeSpec,
) -> None:
    assert FlashInferBackend.unsupported_reasons(make_spec(head_dim=80)) == [
        "device cpu is not a CUDA device",
        "dtype torch.float64 is none of torch.bfloat16, torch.float16",
        "head_dim 80 is none of 64, 128, 256",
    ]


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.6.17", False),
        ("0.6.18", True),
        ("0.6.18.post1", True),
        ("0.7.4", True),
        ("0.7.12.dev3", True),
        ("0.8.0", False),
        ("1.0", False),
        ("", False),
    ],
)
def test_versions_outside_the_range_are_refused(
    make_spec: MakeSpec, version: str, fits: bool
) -> None:
    library = make_double()
    library.__version__ = version
    reasons = make_backend_class(library).unsupported_reasons(make_spec())
    text = f"flashinfer {version} is not from 0.6.18 up to, but not including, 0.8; pip install"
    assert bool(reasons) != fits
    assert all(text in reason for reason in reasons)


def test_a_missing_package_is_a_reason_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention import flashinfer_library

    monkeypatch.setattr(flashinfer_library.importlib.util, "find_spec", lambda name: None)
    reasons = flashinfer_library.library_reasons.__wrapped__()
    remedy = "pip install 'flashinfer-python>=0.6.18,<0.8'"
    assert reasons == [f"flashinfer is not installed; {remedy}"]


def test_missing_build_tools_are_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from attention import flashinfer_library

    monkeypatch.setattr(flashinfer_library, "load_flashinfer", make_double)
    monkeypatch.setattr(flashinfer_library.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(flashinfer_library.shutil, "which", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    nvcc, ninja = flashinfer_library.library_reasons.__wrapped__()
    assert f"nvcc is neither on PATH nor in {tmp_path}/bin" in nvcc
    assert "ninja is missing" in ninja
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert flashinfer_library.library_reasons.__wrapped__() == [ninja]


def test_a_planner_of_another_signature_is_said_once_and_not_used(
    make_spec: MakeSpec, caplog: pytest.LogCaptureFixture
) -> None:
    library = make_double()
    library.fast_decode_plan = lambda self, indptr: None
    backend = make_backend_class(library)(make_spec())
    assert backend._kernels.fast_plan is None
    assert caplog.text.count("has no fast_decode_plan of the known signature") == 1
    assert OnDouble(make_spec())._kernels.fast_plan is not None


@pytest.mark.parametrize(
    ("options", "spec", "match"),
    [
        ({"prefill_kernel": "fa4"}, {}, "prefill_kernel must be one of fa2, fa3, got 'fa4'"),
        ({"mixed_kernel": True}, {"windows": (None, 4)}, "mixed_kernel knows no windows"),
        (
            {"mixed_kernel": True},
            {"num_heads": 16, "num_kv_heads": 16, "head_dim": 128},
            "would need 603 MiB of its workspace of 384 MiB for 16 key/value heads of 128",
        ),
    ],
)
def test_impossible_options_are_refused(
    make_spec: MakeSpec, options: dict[str, Any], spec: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        OnDouble(make_spec(**spec), options=FlashInferOptions(**options))


def test_a_planner_that_fails_at_the_start_is_named(make_spec: MakeSpec) -> None:
    library = make_double()

    class Broken(library.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("ninja: build stopped")

    library.BatchPrefillWithPagedKVCacheWrapper = Broken
    with pytest.raises(RuntimeError, match=r"flashinfer 0.7.4 can't plan .*build stopped"):
        make_backend_class(library)(make_spec())
