"""The stand-in for flashinfer computes what it was planned for, and refuses misuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphs.host_graph import HostGraphPool
from tests.attention.flashinfer_double import make_double

HEADS = (4, 2, 8)
PAGE = 4
ALL_PAGES = 128


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_cache() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(ALL_PAGES, PAGE, 2, 8), torch.randn(ALL_PAGES, PAGE, 2, 8))


def naive(
    query: torch.Tensor, cache: tuple[torch.Tensor, ...], pages: list[int], num_keys: int
) -> torch.Tensor:
    """One row that sees all keys of its sequence."""
    keys, values = (tensor[pages].flatten(0, 1)[:num_keys].double() for tensor in cache)
    out = torch.empty(4, 8)
    for head in range(4):
        scores = keys[:, head // 2] @ query[head].double() * 8**-0.5
        out[head] = scores.softmax(0) @ values[:, head // 2]
    return out


class Decode:
    """A decode wrapper for two sequences, in graph mode or not."""

    def __init__(self, *, graph: bool = False, library: Any = None, size: int = 2) -> None:
        self.library = library or make_double()
        self.buffers = {
            "paged_kv_indptr_buffer": torch.zeros(size + 1, dtype=torch.int32),
            "paged_kv_indices_buffer": torch.zeros(ALL_PAGES, dtype=torch.int32),
            "paged_kv_last_page_len_buffer": torch.zeros(size, dtype=torch.int32),
        }
        options = {"use_cuda_graph": True, "use_tensor_cores": True, **self.buffers}
        self.wrapper = self.library.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(8 << 20, dtype=torch.uint8),
            "NHD",
            backend="fa2",
            **(options if graph else {}),
        )
        self.cache = make_cache()
        self.query = torch.randn(size, 4, 8)
        self.out = torch.full((size, 4, 8), float("nan"))

    def plan(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, **kw: Any):
        kw = {"q_data_type": torch.float32} | kw
        self.wrapper.plan(indptr, indices, last, *HEADS, PAGE, **kw)

    def run(self, **kwargs: Any) -> torch.Tensor:
        return self.wrapper.run(
            kwargs.pop("q", self.query),
            kwargs.pop("cache", self.cache),
            **({"out": self.out} | kwargs),
        )


GOOD = (ints(0, 2, 5), ints(7, 3, 9, 1, 4), ints(2, 4))


@pytest.mark.parametrize("graph", [False, True])
def test_decodes_attend_the_pages_given_to_plan(graph: bool) -> None:
    decode = Decode(graph=graph)
    decode.plan(*GOOD)
    result = decode.run()
    assert result is decode.out
    expected = [
        naive(decode.query[0], decode.cache, [7, 3], 6),
        naive(decode.query[1], decode.cache, [9, 1, 4], 12),
    ]
    torch.testing.assert_close(result, torch.stack(expected))


@pytest.mark.parametrize(("version", "empty"), [("0.6.18", float("nan")), ("0.7.0", 0.0)])
def test_rows_without_keys_are_what_the_version_makes_of_them(version: str, empty: float) -> None:
    decode = Decode(library=make_double(version))
    decode.plan(ints(0, 0, 1), ints(3), ints(0, 1))
    result = decode.run()
    torch.testing.assert_close(result[0], torch.full((4, 8), empty), equal_nan=True)
    torch.testing.assert_close(result[1], naive(decode.query[1], decode.cache, [3], 1))


def test_a_schedule_that_was_not_refreshed_gives_stale_results() -> None:
    """Lengths in the buffers grew, the plan did not: the new parts are never visited."""
    decode = Decode(graph=True)
    decode.plan(ints(0, 1, 2), ints(7, 9), ints(1, 1))
    indices = torch.arange(ALL_PAGES, dtype=torch.int32).roll(5)
    decode.buffers["paged_kv_indptr_buffer"].copy_(ints(0, 64, 128))
    decode.buffers["paged_kv_indices_buffer"].copy_(indices)
    decode.buffers["paged_kv_last_page_len_buffer"].copy_(ints(4, 4))
    long = Decode(graph=True)
    long.plan(ints(0, 64, 128), indices, ints(4, 4))
    assert decode.wrapper._plan_info == long.wrapper._plan_info
    stale = decode.run().clone()
    fresh = long.run(q=decode.query)
    decode.library.fast_decode_plan(
        decode.wrapper,
        ints(0, 64, 128),
        indices,
        ints(4, 4),
        *HEADS,
        PAGE,
        q_data_type=torch.float32,
    )
    assert torch.equal(decode.run(), fresh)
    expected = torch.stack(
        [
            naive(decode.query[i], decode.cache, part.tolist(), 256)
            for i, part in enumerate(indices.view(2, 64))
        ]
    )
    torch.testing.assert_close(fresh, expected)
    assert not torch.allclose(stale, fresh)


def test_two_wrappers_that_share_a_schedule_disturb_each_other() -> None:
    one, other = Decode(), Decode()
    shared = torch.empty(1 << 16, dtype=torch.uint8)
    for decode in (one, other):
        decode.wrapper.reset_workspace_buffer(torch.zeros(8 << 20, dtype=torch.uint8), shared)
    one.plan(*GOOD)
    right = one.run().clone()
    other.plan(ints(0, 1, 1), ints(2), ints(1, 0))
    one.plan(*GOOD)
    other.plan(ints(0, 0, 0), ints(), ints(0, 0))
    assert torch.equal(one.run(), right), "the same parts, whatever their lengths"
    other.wrapper._pin_memory_int_workspace_buffer.zero_()
    shared.zero_()
    one.out.fill_(float("nan"))
    assert bool(one.run().isnan().all())


def test_run_is_one_leaf_that_reads_the_bound_buffers_at_replay() -> None:
    decode = Decode(graph=True)
    decode.plan(*GOOD)
    graph = HostGraphPool().new_graph()
    query = decode.query
    graph.capture(lambda q: decode.run(q=q), (query,))
    assert [call.name for call in graph.tape.calls] == ["attend_pages"]
    for plan in (GOOD, (ints(0, 1, 4), ints(5, 6, 2, 8), ints(3, 1))):
        query.normal_()
        decode.plan(*plan)
        graph.replay()
        replayed = decode.out.clone()
        assert torch.equal(decode.run(), replayed)


# Refusals


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ((ints(0, 3, 2), ints(7, 3), ints(2, 4)), "decreases"),
        ((ints(1, 2, 3), ints(7, 3, 1), ints(2, 4)), "must begin with 0"),
        ((ints(0, 2, 5).long(), GOOD[1], GOOD[2]), "torch.int64, not int32"),
        ((GOOD[0], GOOD[1].long(), GOOD[2]), "torch.int64, not int32"),
        ((GOOD[0], GOOD[1].to("meta"), GOOD[2]), "must be on the device"),
        ((GOOD[0].to("meta"), GOOD[1], GOOD[2]), "copied back from the device"),
        ((GOOD[0], ints(7, 3), GOOD[2]), "disagree"),
        ((GOOD[0], GOOD[1], ints(2, 5)), "last_page_len out of range"),
        ((GOOD[0], GOOD[1], ints(0, 4)), "last_page_len out of range"),
        ((ints(0, 0, 1), ints(7), ints(1, 4)), "last_page_len out of range"),
        ((GOOD[0], GOOD[1], ints(2)), "another batch size"),
        ((GOOD[0], ints(7, 0, 3, 0, 9, 0, 1, 0, 4)[::2], GOOD[2]), "isn't a contiguous list"),
    ],
)
@pytest.mark.parametrize("graph", [False, True])
def test_wrong_lists_of_pages_are_refused(graph: bool, plan: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decode(graph=graph).plan(*plan)


def test_lengths_that_disagree_with_the_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="seq_lens disagree"):
        Decode().plan(*GOOD, seq_lens=ints(6, 11))


def test_another_batch_size_than_captured_is_refused() -> None:
    decode = Decode(graph=True)
    decode.plan(*GOOD)
    with pytest.raises(ValueError, match="fixed at 2 in graph mode, got 1"):
        decode.plan(ints(0, 1), ints(7), ints(1))
    with pytest.raises(ValueError, match="fixed at 2 in graph mode, got 1"):
        decode.library.fast_decode_plan(decode.wrapper, ints(0, 1), ints(7), ints(1), *HEADS, PAGE)


def test_buffers_that_moved_are_refused_under_graph_mode() -> None:
    decode = Decode(graph=True)
    decode.plan(*GOOD)
    decode.wrapper._paged_kv_indptr_buf = decode.wrapper._paged_kv_indptr_buf.clone()
    for call in (decode.run, lambda: decode.plan(*GOOD)):
        with pytest.raises(ValueError, match="_paged_kv_indptr_buf moved"):
            call()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"q": torch.zeros(3, 4, 8)}, "q has 3 rows, 2 were planned"),
        ({"q": torch.zeros(2, 4, 8).half()}, "q is torch.float16, planned was torch.float32"),
        ({"cache": (make_cache()[0].half(),) * 2}, "k is torch.float16"),
        ({"out": torch.zeros(2, 4, 8).half()}, "o is torch.float16"),
        ({"out": torch.zeros(2, 4, 8, device="meta")}, "o isn't on the workspace's device"),
        ({"out": None}, "out must be passed"),
        ({"out": torch.zeros(2, 4, 9)[..., :8]}, "isn't contiguous"),
        ({"out": torch.zeros(1, 4, 8)}, r"out is \(1, 4, 8\)"),
    ],
)
def test_wrong_tensors_are_refused(kwargs: dict[str, Any], message: str) -> None:
    decode = Decode()
    decode.plan(*GOOD)
    with pytest.raises(ValueError, match=message):
        decode.run(**kwargs)


def test_prefill_refuses_rows_that_were_not_planned() -> None:
    library = make_double()
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(8 << 20, dtype=torch.uint8), "NHD", backend="fa2"
    )
    wrapper.plan(ints(0, 3), ints(0, 1), ints(5), ints(3), *HEADS, PAGE, q_data_type=torch.float32)
    query = torch.zeros(4, 4, 8)
    with pytest.raises(ValueError, match="q has 4 rows, 3 were planned"):
        wrapper.run(query, make_cache(), out=torch.zeros_like(query))


def test_too_small_workspaces_are_refused_when_planning() -> None:
    decode = Decode(graph=True)
    small = torch.zeros(1 << 10, dtype=torch.uint8)
    large = torch.zeros(8 << 20, dtype=torch.uint8)
    for buffers, kind in (((small, large), "float"), ((large, small), "int")):
        decode.wrapper.reset_workspace_buffer(*buffers)
        with pytest.raises(RuntimeError, match=rf"Buffer overflow .* \({kind}\)"):
            decode.plan(*GOOD)


def test_layouts_backends_and_graphs_that_the_backend_must_not_ask_for_are_refused() -> None:
    cls = make_double().BatchDecodeWithPagedKVCacheWrapper
    workspace = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(ValueError, match="NHD, got HND"):
        cls(workspace, "HND", backend="fa2")
    with pytest.raises(ValueError, match="explicit, got 'auto'"):
        cls(workspace)
    with pytest.raises(ValueError, match="without tensor cores"):
        cls(workspace, "NHD", use_cuda_graph=True, backend="fa2")
