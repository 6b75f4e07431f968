"""The Triton kernel that writes K/V equals index_copy_: in Triton's interpreter where Triton is
installed, and itself on a GPU."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from attention import paged_kv_cache, write_kv
from attention.kv_write_kernel import write_rows

Writer = Callable[..., None]

ROOT = Path(__file__).parents[2]
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "fused projection", "heads first", "every second")
# Five rows anywhere, and two of padding that share a slot of the null block.
SLOTS = (23, 4, 9, 17, 8, 1, 1)

# The interpreter looks for triton.language among the globals of the kernel's module alone.
INTERPRET = """
import triton.language
from attention import kv_write_kernel
from tests.attention.test_kv_write_kernel import check_all
kv_write_kernel.tl = triton.language
check_all(kv_write_kernel.write_rows, "cpu")
"""

on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present")


def make_rows(
    layout: str, num_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [len(SLOTS), num_heads, head_dim] of some strides."""
    num_tokens = len(SLOTS)
    if layout == "fused projection":  # behind twice as many query heads
        rows = torch.randn(num_tokens, 4 * num_heads, head_dim, device=device).to(dtype)
        key, value = rows[:, 2 * num_heads : 3 * num_heads], rows[:, 3 * num_heads :]
    elif layout == "heads first":
        rows = torch.randn(2, num_heads, num_tokens, head_dim, device=device).to(dtype)
        key, value = rows.transpose(1, 2)
    elif layout == "every second":
        rows = torch.randn(2, num_tokens, num_heads, 2 * head_dim, device=device).to(dtype)
        key, value = rows[..., ::2]
    else:
        key, value = torch.randn(2, num_tokens, num_heads, head_dim, device=device).to(dtype)
    key[0, 0, 0], value[1, -1, -1] = float("nan"), float("inf")
    return key, value


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def check(
    write: Writer, layout: str, num_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    """Of two equal caches one is written by write, the other by index_copy_."""
    case = f"{layout}, {num_heads} heads of {head_dim}, {dtype}"
    torch.manual_seed(0)
    rows = make_rows(layout, num_heads, head_dim, dtype, device)
    slots = torch.tensor(SLOTS, device=device)
    expected = torch.randn(2, 6, 4, num_heads, head_dim, device=device).to(dtype)
    written = expected.clone()
    write(*rows, *written, slots)
    for result, cache, new in zip(written.flatten(1, 2), expected.flatten(1, 2), rows, strict=True):
        cache.index_copy_(0, slots, new)
        assert same_bits(result[0], cache[0]) and same_bits(result[2:], cache[2:]), case
        assert same_bits(result[1], new[-1]) or same_bits(result[1], new[-2]), case


def check_all(write: Writer, device: str) -> None:
    """Every dtype, head size and layout, at one to five heads; and no rows at all."""
    for dtype in DTYPES:
        for num_heads, head_dim in enumerate(HEAD_DIMS, 1):
            for layout in LAYOUTS:
                check(write, layout, num_heads, head_dim, dtype, device)
    nothing = torch.empty(0, 2, 64, device=device)
    caches = torch.zeros(2, 3, 4, 2, 64, device=device)
    write(nothing, nothing, *caches, torch.empty(0, dtype=torch.int64, device=device))
    assert not caches.any()


def test_write_kv_on_a_cpu_is_index_copy() -> None:
    check_all(write_kv, "cpu")


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (it is on CUDA)"
)
def test_the_interpreted_kernel_equals_index_copy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRET],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_rows_that_do_not_suit_the_cache_are_a_bug() -> None:
    key = torch.zeros(2, 2, 64)
    keys = torch.zeros(3, 4, 2, 64)
    slots = torch.tensor([4, 5])
    for wrong, match in [
        ((key, key[:1], keys, keys, slots), "value differs in shape"),
        ((key, key, keys[..., :32], keys, slots), "other heads"),
        ((key, key, keys.half(), keys, slots), "another dtype"),
    ]:
        with pytest.raises(AssertionError, match=match):
            write_rows(*wrong)


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    paged_kv_cache._cuda_writer.cache_clear()
    yield
    paged_kv_cache._cuda_writer.cache_clear()


@pytest.mark.usefixtures("fresh_choice")
def test_without_triton_index_copy_is_taken_on_cuda_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING, logger="stepgraph.attention"):
        writers = {paged_kv_cache._cuda_writer() for _ in range(3)}
    (writer,) = writers
    check(writer, "fused projection", 2, 64, torch.bfloat16, "cpu")
    (message,) = caplog.messages
    assert message.startswith("K/V is written by index_copy_, since Triton can't be imported")


@pytest.mark.gpu
@on_device
def test_the_kernel_equals_index_copy() -> None:
    assert paged_kv_cache._cuda_writer() is write_rows
    check_all(write_kv, "cuda")


@pytest.mark.gpu
@on_device
def test_a_captured_write_goes_to_the_slots_of_each_replay() -> None:
    from graphs.cuda_graph import CudaGraphPool

    device = torch.device("cuda", 0)
    keys, values = torch.zeros(2, 6, 4, 2, 64, device=device)
    key, value = torch.randn(2, 3, 2, 64, device=device)
    slots = torch.tensor([4, 5, 0], device=device)
    graph = CudaGraphPool(device).new_graph()
    graph.capture(lambda *args: write_kv(*args), (key, value, keys, values, slots))
    keys.zero_()
    slots.copy_(torch.tensor([7, 22, 0]))
    key.normal_()
    graph.replay()
    assert torch.equal(keys.flatten(0, 1)[[7, 22, 0]], key)
    assert keys.flatten(0, 1).any(-1).any(-1).sum() == 3
