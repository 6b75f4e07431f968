"""HostGraph replays like eager code, freezes what CUDA freezes, and refuses what CUDA refuses."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from graphs.graph import CaptureError
from graphs.host_graph import HostGraph, HostGraphPool, leaf

SIZE = 6


def graph_of(fn, *static, pool=None):
    graph = HostGraph(pool or HostGraphPool())
    return graph, graph.capture(fn, static)


def block(x, weight, bias):
    """What a layer does: products, a norm, views, a fused attention, updates in place."""
    normed = F.rms_norm(x, (x.shape[-1],), eps=1e-6)
    left, right = F.linear(normed, weight, bias).chunk(2, -1)
    gated = F.silu(left) * right
    heads = gated.reshape(SIZE, 2, -1).transpose(0, 1)[None]
    attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    out = torch.zeros_like(x)
    out.index_copy_(0, torch.arange(SIZE), attended[0].transpose(0, 1).flatten(1))
    out += x.t().contiguous().t()
    rest = torch.cat([out, torch.full((1, x.shape[-1]), 0.5)])
    rest[0, 0] = 2.0
    return rest.softmax(-1), rest.argmax(-1)


def test_replay_equals_eager_bit_for_bit():
    x, weight, bias = torch.randn(SIZE, 8), torch.randn(16, 8), torch.randn(16)
    graph, (probs, ids) = graph_of(block, x, weight, bias)
    for _ in range(3):
        x.normal_()
        weight.normal_()
        graph.replay()
        expected_probs, expected_ids = block(x, weight, bias)
        assert torch.equal(probs, expected_probs)
        assert torch.equal(ids, expected_ids)


def test_replay_writes_into_tensors_outside_the_graph():
    x, cache, slots = torch.randn(2, 3), torch.zeros(5, 3), torch.tensor([1, 3])
    graph, _ = graph_of(lambda x, cache, slots: cache.index_copy_(0, slots, x * 2), x, cache, slots)
    cache.zero_()
    slots.copy_(torch.tensor([4, 0]))
    graph.replay()
    assert torch.equal(cache, torch.zeros(5, 3).index_copy(0, torch.tensor([4, 0]), x * 2))


def test_outputs_of_a_capture_hold_nothing():
    x = torch.ones(3)
    _, (values, counts) = graph_of(lambda x: (x + 1, torch.arange(3) + 1), x)
    assert values.isnan().all()
    assert (counts > 1 << 60).all()


def test_constants_are_made_anew_by_each_replay():
    def fn(x):
        constant = torch.full((3,), 2.0)
        result = x * constant
        constant.add_(100)
        return result

    x = torch.ones(3)
    graph, result = graph_of(fn, x)
    for _ in range(2):
        graph.replay()
        assert result.tolist() == [2, 2, 2]


def test_numbers_assigned_to_elements_are_captured():
    def fn(x):
        y = x + 0
        y[1] = 7.0
        return torch.where(y > 6, y, -1.0)

    x = torch.zeros(3)
    graph, result = graph_of(fn, x)
    graph.replay()
    assert result.tolist() == [-1, 7, -1]


def test_uninitialised_memory_is_poison():
    x = torch.ones(3)
    graph, result = graph_of(lambda x: torch.empty(3) + x, x)
    graph.replay()
    assert result.isnan().all()


def test_views_in_place_and_out_arguments_keep_their_memory():
    def fn(x):
        y = x * 2
        row = y[0].unsqueeze_(0)
        row.add_(1)
        out = torch.empty(2, 2)
        torch.add(y, 1, out=out)
        return y, out

    x = torch.zeros(2, 2)
    graph, (y, out) = graph_of(fn, x)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [[2 * value + 1] * 2, [2 * value] * 2]
        assert torch.equal(out, y + 1)


def test_random_operators_draw_anew():
    x = torch.zeros(8)
    graph, result = graph_of(lambda x: x + torch.rand(8), x)
    graph.replay()
    first = result.clone()
    graph.replay()
    assert not torch.equal(first, result)


# What CUDA refuses while a graph is captured

REFUSED = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "index": lambda x: [1, 2, 3][x.argmax()],
    "bool": lambda x: 1 if x.any() else 2,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "numpy sum": lambda x: x + np.zeros(3, dtype=np.float32),
    "from_dlpack": lambda x: np.from_dlpack(x),
    "print": lambda x: repr(x),
    "format": lambda x: f"{x}",
    "cpu": lambda x: x.cpu(),
    "slice by tensor": lambda x: x[: x.argmax()],
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask as index": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.int64)),
    "tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "as_tensor": lambda x: x + torch.as_tensor([1.0, 2.0, 3.0]),
    "from_numpy": lambda x: x + torch.from_numpy(np.zeros(3, dtype=np.float32)),
    "Tensor": lambda x: x + torch.Tensor([1.0, 2.0, 3.0]),
    "new_tensor": lambda x: x + x.new_tensor([1.0, 2.0, 3.0]),
    "list as index": lambda x: x[[0, 2]],
    "list assigned": lambda x: x.clone().__setitem__(slice(0, 2), torch.tensor([1.0, 2.0])),
    "resize": lambda x: x.clone().resize_(7),
}
NAMES = {
    "item": "Tensor.item",
    "tolist": "Tensor.tolist",
    "numpy": "Tensor.numpy",
    "bool": "Tensor.__bool__",
    "nonzero": "Tensor.nonzero",
    "masked_select": "masked_select",
    "unique": "unique",
    "tensor": "torch.tensor",
    "from_numpy": "host's memory",
    "from_dlpack": "__dlpack__",
    "mask as index": "__getitem__",
    "resize": "resize_",
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_and_names_the_operation(case):
    x = torch.tensor([1.0, 2.0, 0.0])
    graph = HostGraph(HostGraphPool())
    with pytest.raises(CaptureError, match=NAMES.get(case, "CUDA refuses")), graph.recording():
        REFUSED[case](x)
    assert x.tolist() == [1.0, 2.0, 0.0]  # the modes are gone


ALLOWED = {
    "integer index": lambda x: x[torch.arange(2)],
    "index_put by index": lambda x: x.clone().index_put_((torch.arange(2),), x[:2]),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "repeat_interleave of known size": lambda x: x.repeat_interleave(
        torch.ones_like(x, dtype=torch.int64), output_size=3
    ),
    "numpy number": lambda x: x * np.float32(2),
    "scalar_tensor": lambda x: x * torch.scalar_tensor(2.0),
    "as_tensor of a tensor": lambda x: torch.as_tensor(x) + 1,
    "to": lambda x: x.to(torch.float64).to("cpu"),
    "split": lambda x: x.split([1, 2])[1] + 1,
    "scalar clamp": lambda x: x.clamp(0.5, 1.5),
    "pow of a number": lambda x: 2.0**x,
}


@pytest.mark.parametrize("case", ALLOWED)
def test_takes_what_cuda_takes(case):
    x = torch.tensor([1.0, 2.0, 0.0])
    graph, result = graph_of(ALLOWED[case], x)
    x.copy_(torch.tensor([3.0, -1.0, 0.5]))
    graph.replay()
    assert torch.equal(result, ALLOWED[case](x))


# Operators written in Python, and leaves


@pytest.fixture(scope="module")
def library():
    library = torch.library.Library("stepgraph_host_graph_test", "DEF")
    yield library
    library._destroy()


@pytest.mark.parametrize(
    "key", ["CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "custom_op"]
)
def test_python_operators_are_recorded_through(library, key):
    """Run again as a whole, they would read the live factor, which a CUDA graph can't."""
    factor = [2.0]

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return (x * factor[0]).relu()

    if key == "custom_op":
        op = torch.library.custom_op("stepgraph_host_graph_test::custom", kernel, mutates_args=())
    else:
        name = f"scale_{key.lower()}"
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, kernel, key)
        op = getattr(torch.ops.stepgraph_host_graph_test, name)
    x = torch.ones(3)
    graph, result = graph_of(op, x)
    factor[0] = 5.0
    x.fill_(3.0)
    graph.replay()
    assert result.tolist() == [6.0, 6.0, 6.0]
    assert op(x).tolist() == [15.0, 15.0, 15.0]


def test_host_reads_inside_python_operators_are_refused(library):
    library.define("peek(Tensor x) -> Tensor")
    library.impl("peek", lambda x: x * len(x.tolist()), "CPU")
    with pytest.raises(CaptureError, match="tolist"):
        graph_of(torch.ops.stepgraph_host_graph_test.peek, torch.ones(3))


def test_python_operators_may_change_their_arguments(library):
    library.define("bump(Tensor(a!) x) -> ()")
    library.impl("bump", _bump, "CPU")
    x = torch.zeros(3)
    graph, _ = graph_of(torch.ops.stepgraph_host_graph_test.bump, x)
    x.zero_()
    graph.replay()
    assert x.tolist() == [1.0, 1.0, 1.0]


def _bump(x):
    x.add_(1)


def test_leaf_is_one_call_of_the_tape_and_plain_elsewhere():
    calls = []

    @leaf
    def opaque(x, *, scale):
        calls.append(scale)
        return x.sum().item() * torch.ones(2) * scale, x.view(-1)

    x = torch.ones(2, 2)
    graph, (sums, flat) = graph_of(lambda x: opaque(x + 0, scale=2.0), x)
    x.fill_(2.0)
    graph.replay()
    assert sums.tolist() == [16.0, 16.0]
    assert flat.tolist() == [2.0] * 4
    assert [call.name for call in graph.tape.calls if "opaque" in call.name] == [
        opaque.__qualname__
    ]
    assert len(calls) == 3
    assert opaque(torch.ones(1, 1), scale=3.0)[0].tolist() == [3.0, 3.0]


def test_results_of_a_leaf_may_share_new_memory():
    @leaf
    def split(x):
        both = x.repeat(2)
        return both[:2], both[2:]

    x = torch.ones(2)
    graph, (left, right) = graph_of(split, x)
    x.fill_(3.0)
    graph.replay()
    assert left.tolist() == right.tolist() == [3.0, 3.0]


def test_compiled_function_is_recorded_uncompiled():
    compiled = torch.compile(lambda x: torch.relu(x * 2) + 1, backend="eager")
    x = torch.ones(4)
    graph, result = graph_of(compiled, x)
    assert {"aten::mul.Tensor", "aten::relu"} <= {call.name for call in graph.tape.calls}
    x.fill_(3.0)
    graph.replay()
    assert result.tolist() == [7.0] * 4


def test_compiled_function_as_a_leaf_runs_compiled():
    counted = []

    def backend(module, _):
        counted.append(module)
        return module.forward

    compiled = torch.compile(lambda x: torch.relu(x * 2) + 1, backend=backend)
    x = torch.ones(4)
    graph, result = graph_of(leaf(compiled), x)
    assert len(counted) == 1
    assert len(graph.tape.calls) == 1
    x.fill_(3.0)
    graph.replay()
    assert result.tolist() == [7.0] * 4
    assert len(counted) == 1


# The pool


def test_other_graphs_outputs_are_poisoned_by_a_replay():
    pool = HostGraphPool()
    x = torch.ones(3)
    large, from_large = graph_of(lambda x: x + 1, x, pool=pool)
    small, from_small = graph_of(lambda x: x[:2] + 2, x, pool=pool)
    large.replay()
    assert from_large.tolist() == [2, 2, 2]
    small.replay()
    assert from_small.tolist() == [3, 3]
    assert from_large.isnan().all()


def test_other_pools_are_left_alone():
    x = torch.ones(3)
    one, from_one = graph_of(lambda x: x + 1, x)
    other, _ = graph_of(lambda x: x + 2, x)
    one.replay()
    other.replay()
    assert from_one.tolist() == [2, 2, 2]


def test_linked_graphs_keep_what_later_ones_read():
    pool = HostGraphPool()
    first, second, third = (HostGraph(pool) for _ in range(3))
    x = torch.ones(3)
    with pool.capturing():
        with first.recording():
            kept, dropped = x + 1, x + 2
        with second.recording():
            middle = kept * 2
        with third.recording():
            result = kept + middle
    pool.link([first, second, third])
    x.fill_(10.0)
    first.replay()
    second.replay()
    assert dropped.isnan().all()
    third.replay()
    assert result.tolist() == [33.0] * 3


# Defects that a CUDA graph hides until a wrong token comes out. Each is planted here and seen.


def test_defect_host_number_of_the_batch_read_in_the_forward():
    batch = {"max_len": 2}

    def forward(x):
        return torch.arange(4) < batch["max_len"], x.sum()

    x = torch.ones(4)
    graph, (mask, _) = graph_of(forward, x)
    batch["max_len"] = 3
    graph.replay()
    assert not torch.equal(mask, forward(x)[0])


def test_defect_python_state_changed_after_capture():
    model = torch.nn.Linear(3, 3)
    model.scale = 1.0
    x = torch.ones(3)
    graph, result = graph_of(lambda x: model(x) * model.scale, x)
    graph.replay()
    assert torch.equal(result, model(x) * model.scale)
    model.scale = 2.0
    graph.replay()
    assert not torch.equal(result, model(x) * model.scale)


def test_defect_reallocated_input_buffer_that_is_freed():
    holder = {"ids": torch.zeros(3)}
    graph = HostGraph(HostGraphPool())
    graph.capture(lambda: holder["ids"] + 1, ())
    holder["ids"] = torch.ones(3)
    gc.collect()
    with pytest.raises(CaptureError, match=r"float32 tensor of shape \(3,\) that was freed"):
        graph.replay()


def test_defect_reallocated_input_buffer_that_lives_on():
    holder = {"ids": torch.zeros(3)}
    graph = HostGraph(HostGraphPool())
    result = graph.capture(lambda: holder["ids"] + 1, ())
    old, holder["ids"] = holder["ids"], torch.ones(3)
    graph.replay()
    assert torch.equal(result, old + 1)
    assert not torch.equal(result, holder["ids"] + 1)


def test_defect_input_buffer_that_was_resized():
    ids = torch.zeros(3)
    graph, _ = graph_of(lambda ids: ids + 1, ids)
    ids.resize_(1 << 16)
    with pytest.raises(CaptureError, match="moved"):
        graph.replay()


def test_defect_output_aliased_by_the_next_replay():
    x = torch.ones(3)
    graph, result = graph_of(lambda x: x + 1, x)
    graph.replay()
    kept, expected = result, result.clone()
    x.fill_(5.0)
    graph.replay()
    assert not torch.equal(kept, expected)


def test_defect_intermediate_kept_across_replays_of_another_size():
    saved = {}

    def forward(x):
        hidden = x * 2
        saved.setdefault("scratch", hidden)
        return hidden + saved["scratch"][: len(x)]

    pool = HostGraphPool()
    x = torch.ones(4)
    large = HostGraph(pool)
    with pool.capturing(), large.recording():
        forward(x)
    small = HostGraph(pool)
    with pool.capturing(), small.recording():
        from_small = forward(x[:2])
    large.replay()
    small.replay()
    assert from_small.isnan().all()


def test_a_graph_is_recorded_once():
    graph, _ = graph_of(lambda x: x + 1, torch.ones(3))
    with pytest.raises(AssertionError, match="recorded once"), graph.recording():
        pass
