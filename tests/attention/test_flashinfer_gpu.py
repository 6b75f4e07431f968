"""The FlashInfer backend with the real package on a CUDA device, against the float64 reference.

    pytest -m gpu tests/attention/test_flashinfer_gpu.py

compiles the kernels on its first run, which takes minutes. Names of tests are those of the same
tests on the stand-in, where there are any.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attention import AttentionMetadata, AttentionSpec, PagedKVCache
from attention.flashinfer_backend import FlashInferBackend, FlashInferOptions
from graphs import Launch
from tests.attention.conftest import GQA
from tests.attention.decode_bucket import DecodeBucket

MakeSpec = Callable[..., AttentionSpec]
MakeStep = Callable[..., Any]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present"),
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
    ),
]

CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0)
# The kernels round weights to the narrow type before they are multiplied with values.
TOLERANCES = {torch.bfloat16: 4e-2, torch.float16: 5e-3}
SHAPES = [
    (64, torch.bfloat16),
    (128, torch.bfloat16),
    (256, torch.bfloat16),
    (128, torch.float16),
]


def make_backend(spec: AttentionSpec, **options: Any) -> FlashInferBackend:
    spec = dataclasses.replace(spec, device=DEVICE)
    assert FlashInferBackend.unsupported_reasons(spec) == []
    return FlashInferBackend(spec, options=FlashInferOptions(**options))


def run(step: Any, backend: FlashInferBackend) -> list[torch.Tensor]:
    """Run all layers on the device and compare each; their results."""
    moved, results = step.to(DEVICE), []
    plan = backend.plan(moved.metadata)
    for layer in range(step.spec.num_layers):
        result = moved.run(layer, plan, backend).cpu()
        moved.to(CPU).assert_right(result, layer, tolerance=TOLERANCES[step.spec.dtype])
        results.append(result)
    return results


@pytest.mark.parametrize("group", GQA)
@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES, ids=str)
def test_mixed_batches_equal_the_reference(
    make_grid_step: MakeStep, head_dim: int, dtype: torch.dtype, group: int
) -> None:
    step = make_grid_step(head_dim, group, dtype)
    run(step, make_backend(step.spec))


@pytest.mark.parametrize("block_size", [1, 16, 32, 256])
@pytest.mark.parametrize("group", GQA)
def test_decodes_and_prompts_of_one_step_are_two_launches(
    make_spec: MakeSpec, make_step: MakeStep, group: int, block_size: int
) -> None:
    spec = make_spec(
        num_heads=2 * group,
        head_dim=64,
        dtype=torch.bfloat16,
        block_size=block_size,
        windows=(None, 5, 100) if group != 3 else (None,),
    )
    pairs = [(1, 0), (1, 16), (1, 255), (1, 4000), (130, 17), (1, 15), (17, 0)]
    step = make_step(spec, pairs, num_decodes=4, padded_rows=3, unused_columns=2)
    for tensor in (step.query, step.key, step.value):
        tensor[152:] = float("nan")
    run(step, make_backend(spec))


@pytest.mark.parametrize("option", ["ragged_prompts", "prefill_kernel", "mixed_kernel"])
def test_other_kernels_for_prompts_equal_the_reference(
    make_spec: MakeSpec, make_step: MakeStep, option: str
) -> None:
    if option == "prefill_kernel" and torch.cuda.get_device_capability(DEVICE)[0] != 9:
        pytest.skip("fa3 is for Hopper")
    spec = make_spec(head_dim=64, dtype=torch.bfloat16)
    step = make_step(spec, [(1, 40), (1, 300), (9, 0), (300, 0)], num_decodes=2, padded_rows=2)
    value = "fa3" if option == "prefill_kernel" else True
    run(step, make_backend(spec, **{option: value}))


@pytest.mark.parametrize("group", GQA)
def test_rows_without_context_give_zeros(
    make_spec: MakeSpec, make_step: MakeStep, group: int
) -> None:
    spec = make_spec(num_heads=2 * group, head_dim=64, dtype=torch.bfloat16)
    for num_decodes, padded_seqs in ((4, (1, 1)), (2, (1, 3, 0))):
        step = make_step(spec, [(1, 40), (1, 7)], num_decodes=num_decodes, padded_seqs=padded_seqs)
        for tensor in (step.query, step.key, step.value):
            tensor[2:] = float("nan")
        assert not run(step, make_backend(spec))[0][2:].any()


# Graphs


@pytest.fixture
def spec(make_spec: MakeSpec) -> AttentionSpec:
    return make_spec(
        num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, windows=(None, 100)
    )


def make_bucket(spec: AttentionSpec, sizes: tuple[int, ...], max_context: int) -> DecodeBucket:
    from graphs.cuda_graph import CudaGraphPool

    max_blocks = -(-max_context // spec.block_size)
    num_blocks = max(sizes) * max_blocks + 8
    pool, tolerance = CudaGraphPool(DEVICE), TOLERANCES[spec.dtype]
    backend = make_backend(spec)
    return DecodeBucket(backend, pool, sizes, num_blocks, max_blocks, tolerance=tolerance)


def decodes(make_step: MakeStep, spec: AttentionSpec, contexts: list[int], seed: int) -> Any:
    pairs = [(1, context - 1) for context in contexts]
    return make_step(spec, pairs, num_decodes=len(pairs), seed=seed)


@pytest.mark.parametrize("group", GQA)
def test_every_captured_size_equals_the_reference_up_and_down(
    make_spec: MakeSpec, make_step: MakeStep, group: int
) -> None:
    spec = make_spec(num_heads=2 * group, head_dim=64, dtype=torch.bfloat16, windows=(None, 100))
    bucket = make_bucket(spec, (1, 2, 4, 8), 600)
    rng = np.random.default_rng(group)
    for seed, num_seqs in enumerate([*range(1, 9), *range(8, 0, -1)]):
        step = decodes(make_step, spec, rng.integers(1, 600, num_seqs).tolist(), seed)
        launch, rows = bucket.serve(step)
        assert launch.mode == "full"
        assert not rows[num_seqs:].any(), "padded rows are zero, though their queries are NaN"
    assert bucket.runner.statistics.falls == {}


def test_short_sequences_after_long_ones_leave_all_other_blocks_alone(
    spec: AttentionSpec, make_step: MakeStep
) -> None:
    bucket = make_bucket(spec, (8,), 600)
    bucket.serve(decodes(make_step, spec, [300 + 17 * i for i in range(8)], 0))
    launch, rows = bucket.serve(decodes(make_step, spec, [3, 1, 16, 17, 5], 1))
    assert launch == Launch(mode="full", size=8)
    assert not rows[5:].any()


def test_lengths_that_jump_within_one_bucket(spec: AttentionSpec, make_step: MakeStep) -> None:
    bucket = make_bucket(spec, (4,), 5000)
    lengths = [[10] * 4, [5000] * 4, [10, 5000, 1, 700]]
    lengths += [[n + 16 * i for i in (1, 2, 3, 255)] for n in (-1, 0, 1)] + [[10] * 4]
    for seed, contexts in enumerate(lengths):
        launch, _ = bucket.serve(decodes(make_step, spec, contexts, seed))
        assert launch == Launch(mode="full", size=4)


# Staging


@pytest.mark.parametrize("captured", [False, True])
def test_planning_far_ahead_of_the_device_equals_planning_in_step(
    spec: AttentionSpec, make_step: MakeStep, captured: bool
) -> None:
    """A thousand steps of alternating lengths, queued behind a kernel that keeps the device."""
    short, long = (decodes(make_step, spec, [context] * 4, 0) for context in (1, 4000))
    device_spec = dataclasses.replace(spec, device=DEVICE)
    cache = PagedKVCache.allocate(device_spec, long.cache.num_blocks)
    for tensor, given in zip(
        (*cache.keys, *cache.values), (*long.cache.keys, *long.cache.values), strict=True
    ):
        tensor.copy_(given.nan_to_num(0.5))
    backend = make_backend(spec)
    rows = [tensor.to(DEVICE) for tensor in (long.query, long.key, long.value)]
    inputs = [step.to(DEVICE).metadata for step in (short, long)]
    width = long.metadata.block_tables.shape[1]
    tables = torch.zeros(4, width, dtype=torch.int32, device=DEVICE)
    contexts = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    slots = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    plan = None
    if captured:
        plan = backend.capturable_plan(
            dataclasses.replace(
                inputs[1], block_tables=tables, context_lens=contexts, slot_mapping=slots
            )
        )

    def step(index: int, sync: bool) -> torch.Tensor:
        metadata = inputs[index]
        if plan is None:
            planned = backend.plan(metadata)
        else:
            tables[:, : metadata.block_tables.shape[1]].copy_(metadata.block_tables)
            contexts.copy_(metadata.context_lens)
            slots.copy_(metadata.slot_mapping)
            padded = np.zeros((4, width), dtype=np.int32)
            padded[:, : metadata.block_tables_cpu.shape[1]] = metadata.block_tables_cpu
            static = {"block_tables": tables, "context_lens": contexts, "slot_mapping": slots}
            assert plan.refresh(dataclasses.replace(metadata, block_tables_cpu=padded, **static))
            planned = plan.plan
        if sync:
            torch.cuda.synchronize()
        results = [backend.run(layer, *rows, cache, planned) for layer in range(2)]
        if sync:
            torch.cuda.synchronize()
        return torch.stack(results)

    expected = [step(0, True), step(1, True)]
    assert not torch.equal(*expected)
    torch.cuda._sleep(2_000_000_000)
    results = [step(index % 2, False) for index in range(1000)]
    for index, result in enumerate(results):
        assert torch.equal(result, expected[index % 2]), f"step {index}"


# Workspaces


def long_metadata(
    rows: list[int], context: int, block_size: int, num_decodes: int
) -> AttentionMetadata:
    """Sequences of one length that share all of their blocks, to need little memory."""
    num_seqs, width = len(rows), -(-context // block_size)
    bounds = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    contexts = np.full(num_seqs, context, dtype=np.int32)
    tables = np.tile(np.arange(1, width + 1, dtype=np.int32), (num_seqs, 1))
    return AttentionMetadata(
        cu_seqlens_q=torch.from_numpy(bounds).to(DEVICE),
        cu_seqlens_k=torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE) * context,
        max_seqlen_q=max(rows),
        max_seqlen_k=context,
        slot_mapping=torch.arange(int(bounds[-1]), device=DEVICE) % block_size,  # the null block
        context_lens=torch.from_numpy(contexts).to(DEVICE),
        block_tables=torch.from_numpy(tables).to(DEVICE),
        num_decodes=num_decodes,
        block_size=block_size,
        cu_seqlens_q_cpu=bounds,
        context_lens_cpu=contexts,
        block_tables_cpu=tables,
    )


@pytest.mark.parametrize("num_kv_heads", [1, 8, 64])
def test_the_largest_steps_right_after_start_find_their_workspace(
    make_spec: MakeSpec, num_kv_heads: int
) -> None:
    """As many sequences as allowed, all long, many query heads: decoding, captured or not, and
    with chunks that fill the budget."""
    num_seqs, context = 256, 20_000
    spec = make_spec(num_heads=64, num_kv_heads=num_kv_heads, head_dim=128, dtype=torch.bfloat16)
    spec = dataclasses.replace(spec, device=DEVICE, max_num_seqs=num_seqs, max_num_tokens=8192)
    backend = make_backend(spec)
    buffer = backend._workspace.float_buffer
    cache = PagedKVCache.allocate(spec, -(-context // spec.block_size) + 1)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    steps = [
        long_metadata(rows, context, spec.block_size, rows.count(1))
        for rows in ([1] * num_seqs, [1], [1] * 10 + [8182], [1] * 255 + [7000], [33] * 248)
    ]
    plans = [(metadata, None) for metadata in steps]
    for size in (num_seqs, 33, 1):
        metadata = long_metadata([1] * size, context, spec.block_size, size)
        plans.append((metadata, backend.capturable_plan(metadata)))
    for metadata, captured in plans:
        num_tokens = metadata.num_tokens
        query = torch.randn(num_tokens, 64, 128, device=DEVICE, dtype=spec.dtype)
        key = torch.randn(num_tokens, num_kv_heads, 128, device=DEVICE, dtype=spec.dtype)
        if captured is not None:
            assert captured.refresh(metadata)
        plan = backend.plan(metadata) if captured is None else captured.plan
        result = backend.run(0, query, key, key, cache, plan)
        assert bool(result.isfinite().all())
    assert backend._workspace.float_buffer is buffer


# The engine


@pytest.mark.parametrize("mode", ["none", "full", "piecewise", "full_and_piecewise"])
def test_a_real_model_answers_in_every_graph_mode(mode: str) -> None:
    from runtime import LLM, SamplingParams
    from runtime.errors import ModelLoadError
    from runtime.model_source import resolve_model

    try:
        resolve_model("smollm2-135m-instruct")
    except ModelLoadError as error:
        pytest.skip(f"the default model can't be fetched: {error}")
    params = SamplingParams(temperature=0, max_tokens=24)
    message = "What is the capital of France?"
    options = {"attention_backend": "flashinfer", "graph_mode": mode, "max_num_seqs": 16}
    with LLM("smollm2-135m-instruct", device="cuda", dtype="bfloat16", **options) as llm:
        for output in llm.chat([[{"role": "user", "content": message}]] * 9, params):
            assert "Paris" in output.outputs[0].text
        stats = llm.engine.stats()
    assert stats["dropped"] == {}
    assert "changed plan" not in stats["falls"]
