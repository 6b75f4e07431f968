"""CudaGraph: importing it starts no CUDA; on a device, captured steps equal eager ones."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch

from graphs import GraphOptions, GraphRunner
from graphs.cuda_graph import CudaGraphPool
from graphs.piecewise_graph import PiecewiseGraph
from tests.graphs.padded_attention import PaddedBackend
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

on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present")


def test_import_does_not_initialise_cuda():
    code = (
        "import graphs.cuda_graph, graphs.piecewise_graph, torch; "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_installed_torch_takes_the_arguments_that_are_passed():
    """What can be known of the calls without a device."""
    inspect.signature(torch.cuda.graph.__init__).bind(
        None, None, pool=None, stream=None, capture_error_mode="thread_local"
    )
    inspect.signature(torch.cuda.graph_pool_handle).bind()
    inspect.signature(torch.cuda.current_stream).bind(torch.device("cuda"))
    inspect.signature(torch.cuda.stream).bind(None)
    inspect.signature(torch.cuda.Stream).bind(torch.device("cuda"))
    inspect.signature(torch.cuda.Stream.wait_stream).bind(None, None)
    inspect.signature(torch.cuda.device).bind(torch.device("cuda"))
    inspect.signature(torch.cuda.CUDAGraph.replay).bind(None)


@pytest.fixture
def device():
    return torch.device("cuda", 0)


@pytest.mark.gpu
@on_device
def test_replay_equals_eager(device):
    x, weight = torch.randn(8, 16, device=device), torch.randn(16, 16, device=device)

    def fn(x):
        return torch.relu(x @ weight) + torch.arange(16, device=device)

    graph = CudaGraphPool(device).new_graph()
    result = graph.capture(fn, (x,))
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(result, fn(x))


@pytest.mark.gpu
@on_device
def test_failed_capture_leaves_the_callers_stream_current(device):
    pool = CudaGraphPool(device)
    before = torch.cuda.current_stream(device)
    calls = []

    def fn(x):
        calls.append(x)
        return x + (x.sum().item() if len(calls) == 2 else 0.0)

    with pytest.raises(RuntimeError):
        pool.new_graph().capture(fn, (torch.ones(3, device=device),))
    assert torch.cuda.current_stream(device) == before
    x = torch.ones(3, device=device)
    graph = pool.new_graph()
    result = graph.capture(lambda x: x + 1, (x,))
    graph.replay()
    assert result.tolist() == [2.0] * 3


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_aliases_share_memory_without_owning_it(device, dtype):
    tensor = torch.zeros(4, 6, dtype=dtype, device=device)
    alias = CudaGraphPool(device).alias(tensor[:, 1:3])
    assert (alias.dtype, alias.shape, alias.stride()) == (dtype, (4, 2), (6, 1))
    assert alias.data_ptr() == tensor[:, 1:3].data_ptr()
    tensor.fill_(1)
    assert alias.bool().all()
    allocated = torch.cuda.memory_allocated(device)
    del tensor
    assert torch.cuda.memory_allocated(device) < allocated


@pytest.mark.gpu
@on_device
def test_segments_replay_around_fresh_eager_calls(device):
    x = torch.ones(3, device=device)

    def forward(break_):
        start = x * 2
        first = break_(torch.empty(3, device=device), start)
        return start + first

    def scale_by(factor):
        return lambda out, value: out.copy_(value * factor)

    graph = PiecewiseGraph(CudaGraphPool(device))
    result = graph.capture(forward, scale_by(1.0))
    for factor in (2.0, -1.0):
        x.normal_()
        graph.replay(scale_by(factor))
        assert torch.equal(result, x * 2 + x * 2 * factor)


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("mode", ["full", "piecewise", "full_and_piecewise"])
def test_random_mixed_traffic_equals_eager(device, mode):
    model = tiny_model(device)
    backend = PaddedBackend(tiny_spec(device))
    cache = poisoned_cache(backend.spec)
    options = GraphOptions(
        mode=mode,
        decode_sizes=(1, 2, 4, MAX_SEQS),
        mixed_sizes=(1, 2, 4, 8, 12, BUDGET),
        max_blocks_per_seq=MAX_BLOCKS,
    )
    runner = GraphRunner(
        model, backend, cache, options, CudaGraphPool(device), graph_support=backend
    )
    runner.capture()
    assert not runner.dropped
    comparison = Comparison(model, backend, runner, cache)
    traffic, rng = Traffic(device, num_blocks=13), np.random.default_rng(0)
    for _ in range(3):
        for _ in range(8):
            traffic.add_random(rng)
        while (step := traffic.schedule()) is not None:
            traffic.update(step[0], comparison.step(*step))
    modes = {step.launch.mode for step in comparison.steps}
    assert modes >= {"full", "piecewise"} if mode == "full_and_piecewise" else mode in modes
