"""Breakable capture: segments replay, what stands between them runs with fresh state."""

from __future__ import annotations

import pytest
import torch

from graphs.graph import CaptureError
from graphs.host_graph import HostGraphPool
from graphs.piecewise_graph import PiecewiseGraph


def forward(x, break_):
    """Two breaks; the first segment's result is read by the last one."""
    start = x * 2
    first = break_(torch.empty(3), 0, start)
    middle = first + 1
    second = break_(torch.empty(3), 1, middle)
    return start + second


def scale_by(factor):
    def eager(out, index, value):
        out.copy_(value * factor + index)

    return eager


def expected(x, factor):
    return x * 2 + ((x * 2 * factor + 1) * factor + 1)


@pytest.fixture
def captured():
    x = torch.ones(3)
    graph = PiecewiseGraph(HostGraphPool())
    result = graph.capture(lambda break_: forward(x, break_), scale_by(1.0))
    return x, graph, result


def test_replay_runs_eager_calls_with_fresh_state(captured):
    x, graph, result = captured
    assert graph.num_segments == 3
    for factor in (2.0, -3.0, 0.5):
        x.normal_()
        graph.replay(scale_by(factor))
        assert torch.equal(result, expected(x, factor))


def test_eager_calls_see_what_their_segment_made_and_no_later_memory(captured):
    x, graph, _ = captured
    seen = []

    def eager(out, index, value):
        assert out.isnan().all()
        seen.append((index, value.tolist()))
        out.fill_(5.0)

    x.fill_(1.0)
    graph.replay(eager)
    assert seen == [(0, [2.0] * 3), (1, [6.0] * 3)]


def test_eager_calls_may_read_tensors_on_the_host_and_differ_in_shape(captured):
    x, graph, result = captured

    def eager(out, index, value):
        rows = value.nonzero().flatten().tolist()
        out.zero_()
        out[rows] = value[rows]

    x.copy_(torch.tensor([1.0, 0.0, 2.0]))
    graph.replay(eager)
    assert result.tolist() == [5.0, 1.0, 9.0]


def test_a_call_that_writes_nothing_shows(captured):
    _, graph, result = captured
    graph.replay(lambda out, *_: None)
    assert result.isnan().all()


def test_eager_calls_run_once_to_warm_up_and_not_under_capture():
    calls = []

    def eager(out, index, value):
        calls.append(index)
        out.copy_(value)

    x = torch.ones(3)
    PiecewiseGraph(HostGraphPool()).capture(lambda break_: forward(x, break_), eager)
    assert calls == [0, 1]


def test_a_failed_capture_ends_its_segment():
    def failing(break_):
        x = break_(torch.empty(3), 0)
        return x * x.sum().item() if under_capture(x) else x

    def under_capture(x):
        return bool(torch.utils._python_dispatch._get_current_dispatch_mode_stack())

    pool = HostGraphPool()
    with pytest.raises(CaptureError, match="item"):
        PiecewiseGraph(pool).capture(failing, lambda out, _: out.zero_())
    assert torch.ones(2).tolist() == [1.0, 1.0]
    x = torch.ones(3)
    graph = PiecewiseGraph(pool)
    result = graph.capture(lambda break_: forward(x, break_), scale_by(1.0))
    graph.replay(scale_by(2.0))
    assert torch.equal(result, expected(x, 2.0))


def test_sizes_share_a_pool_and_spoil_each_others_results():
    pool, x = HostGraphPool(), torch.ones(3)
    large, small = PiecewiseGraph(pool), PiecewiseGraph(pool)
    from_large = large.capture(lambda break_: forward(x, break_), scale_by(1.0))
    from_small = small.capture(lambda break_: break_(torch.empty(2), 0, x[:2] * 3) + 1, scale_by(1))
    large.replay(scale_by(2.0))
    assert torch.equal(from_large, expected(x, 2.0))
    small.replay(scale_by(2.0))
    assert from_small.tolist() == [7.0, 7.0]
    assert from_large.isnan().all()
