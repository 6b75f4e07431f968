"""CudaGraph: importing it starts no CUDA; on a device, replays equal eager runs.

Whole steps under it are in test_equal_to_eager.py.
"""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from graphs.cuda_graph import CudaGraphPool
from graphs.piecewise_graph import PiecewiseGraph

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
    inspect.signature(torch.cuda.mem_get_info).bind(torch.device("cuda"))
    inspect.signature(torch.cuda.synchronize).bind(torch.device("cuda"))
    inspect.signature(torch.cuda.empty_cache).bind()


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
def test_memory_in_use_grows_by_what_a_capture_keeps_and_falls_when_it_goes(device):
    pool = CudaGraphPool(device)
    x = torch.ones(1 << 20, device=device)
    before = pool.num_bytes()
    graph = pool.new_graph()
    graph.capture(lambda x: ((x + 1) * 2, x * 3), (x,))
    pool.wait_idle()
    taken = pool.num_bytes() - before
    assert 3 * 4 << 20 <= taken <= 256 << 20
    del graph
    assert pool.num_bytes() - before < taken
