"""Full graphs of decode steps whose attention is flash_attn: doubles of the kernels on a CPU, the
kernels themselves on a GPU."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen

from attention.flash_attn_backend import FlashAttnBackend
from graphs import GraphOptions, GraphPool, GraphRunner, GraphSupport
from graphs.host_graph import HostGraphPool, leaf
from graphs.static_inputs import StaticInputs
from tests.attention import flash_attn_doubles as doubles
from tests.graphs.traffic import (
    MAX_SEQS,
    Comparison,
    Traffic,
    poisoned_cache,
    tiny_model,
    tiny_spec,
)

CPU = torch.device("cpu")
DTYPE = torch.float16  # rounds less than bfloat16
BLOCK_SIZE = 256
MAX_MODEL_LEN = 600
BUDGET = 300
NUM_BLOCKS = 12
DECODE_SIZES = (1, 2, 4, MAX_SEQS)
MIXED_SIZES = (4, 64, BUDGET)

on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present")


@pytest.fixture(params=["package", "torch"])
def kernel_double(request, monkeypatch):
    """Each form's double as one call of the tape."""
    package = None
    if request.param == "package":
        package = doubles.flash_attn_package()
        package.flash_attn_varlen_func = leaf(package.flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(varlen, "varlen_attn", leaf(doubles.varlen_attn))


def new_traffic(device):
    return Traffic(
        device,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        budget=BUDGET,
    )


def new_comparison(pool: GraphPool, device: torch.device) -> Comparison:
    model = tiny_model(device, DTYPE, MAX_MODEL_LEN)
    backend = FlashAttnBackend(tiny_spec(device, DTYPE, BLOCK_SIZE))
    assert isinstance(backend, GraphSupport)
    cache = poisoned_cache(backend.spec, NUM_BLOCKS)
    options = GraphOptions(
        mode="full_and_piecewise",
        decode_sizes=DECODE_SIZES,
        mixed_sizes=MIXED_SIZES,
        max_blocks_per_seq=-(-MAX_MODEL_LEN // BLOCK_SIZE),
    )
    runner = GraphRunner(model, backend, cache, options, pool, graph_support=backend)
    runner.capture()
    assert not runner.dropped
    # float16 through three layers, on results of about unit size; logits are larger.
    return Comparison(model, backend, runner, cache, tolerance=0.03, tie=0.1)


def serve(comparison, traffic):
    """Run all that is queued, each step compared; the modes and sizes taken."""
    before = len(comparison.steps)
    while (step := traffic.schedule()) is not None:
        traffic.update(step[0], comparison.step(*step))
    return {(step.launch.mode, step.launch.size) for step in comparison.steps[before:]}


def serve_decodes_and_mixes(pool: GraphPool, device: torch.device) -> None:
    comparison = new_comparison(pool, device)
    taken = set()
    # Lengths jump within a size, and cross the border of a page while they decode.
    for num_seqs, length in [(1, 3), (2, 250), (2, 2), (4, 254), (MAX_SEQS, 5), (3, 252), (1, 509)]:
        traffic = new_traffic(device)
        for i in range(num_seqs):
            traffic.add([(7 * i + j) % 50 for j in range(length)], 8)
        taken |= serve(comparison, traffic)
    assert {("full", size) for size in DECODE_SIZES} <= taken
    rng, traffic = np.random.default_rng(0), new_traffic(device)
    for _ in range(12):
        traffic.add_random(rng, max_length=560)
    modes = {mode for mode, _ in serve(comparison, traffic)}
    assert modes >= {"full", "piecewise"}
    assert traffic.num_cached_tokens > 0


@pytest.mark.usefixtures("kernel_double")
def test_full_graphs_of_decode_and_piecewise_mixes_equal_eager_steps():
    serve_decodes_and_mixes(HostGraphPool(), CPU)


@pytest.mark.usefixtures("kernel_double")
def test_a_capturable_plan_reads_the_static_tensors_and_bounds_the_context():
    backend = FlashAttnBackend(tiny_spec(CPU, DTYPE, BLOCK_SIZE))
    inputs = StaticInputs(max_tokens=2, max_seqs=2, max_blocks=5, block_size=BLOCK_SIZE, device=CPU)
    metadata = inputs.dummy_decode(2)
    capturable = backend.capturable_plan(metadata)
    (group,) = capturable.plan.groups
    assert group.max_seqlen_k == 5 * BLOCK_SIZE
    assert group.context_lens.data_ptr() == metadata.context_lens.data_ptr()
    assert capturable.refresh(metadata)
    moved = dataclasses.replace(metadata, context_lens=metadata.context_lens.clone())
    with pytest.raises(AssertionError, match="context_lens has moved"):
        capturable.refresh(moved)


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("form", ["package", "torch"])
def test_cuda_graphs_of_the_kernels_equal_eager_steps(form, monkeypatch):
    from graphs.cuda_graph import CudaGraphPool

    if form == "package":
        pytest.importorskip("flash_attn", reason="flash_attn is not installed")
    else:
        monkeypatch.setitem(sys.modules, "flash_attn", None)
    device = torch.device("cuda", 0)
    serve_decodes_and_mixes(CudaGraphPool(device), device)
