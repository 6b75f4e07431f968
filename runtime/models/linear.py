"""Products with weights that may be packed for the CPU.

A plain bfloat16 weight is brought into the layout of the CPU's dot products at every call, which
for few rows costs as much as the product; a packed one is brought into it once. Its kernels are a
native library, csrc/native_layers.cpp; the operator is stepgraph::packed_linear.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.native_build import (
    NativeBuildError,
    NativeSource,
    load_library,
    usable_levels,
    usable_library,
)
from graphs.host_graph import leaf

LAYERS_SOURCE = NativeSource(
    name="layers", file=Path(__file__).parent / "csrc" / "native_layers.cpp"
)
PANEL = 32
"""Outputs of a panel; csrc/panels.h explains the layout."""
# Products per thread below which waking it costs more than it saves.
_MIN_THREAD_PRODUCTS = 1 << 16
_SCHEMA = (
    "packed_linear(Tensor x, Tensor panels, Tensor? bias, int num_outputs, str library) -> Tensor"
)
_LinearCall = ctypes.c_int64 * 9


class PackedWeight(NamedTuple):
    """A weight [num_outputs, inputs] in panels; only `linear` and native regions read it."""

    panels: Tensor
    """[panels, pairs of inputs, PANEL, 2] bfloat16, contiguous, zero where there is no weight."""
    num_outputs: int
    """Rows of the weight that was packed."""
    library: str
    """Path of the native library that multiplies with it."""


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [n, in] times weight [out, in], plain or packed, plus bias [out]: [n, out].

    Sums are in float32 and rounded once, in an order that differs between the two. With a packed
    weight a row's result doesn't depend on the rows beside it, except where the CPU has matrix
    tiles (the level "amx").
    """
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    product: Tensor = _operator(x, weight.panels, bias, weight.num_outputs, weight.library)
    return product


def pack_refusal(
    dtype: torch.dtype, device: torch.device, *, cache_dir: Path | None = None
) -> str | None:
    """Why weights of that dtype on that device stay plain; None if they can be packed.

    Builds the native library, so the first call may take some seconds. `cache_dir` is where it is
    kept; None: stepgraph in the user's cache.
    """
    if device.type != "cpu":
        return f"device {device} is not a CPU"
    if dtype != torch.bfloat16:
        return f"dtype {dtype} is not bfloat16"
    try:
        usable_library(LAYERS_SOURCE, usable_levels()[0], cache_dir)
    except NativeBuildError as error:
        return str(error)
    return None


def pack(
    weight: Tensor,
    *,
    memory: Tensor | None = None,
    level: str | None = None,
    cache_dir: Path | None = None,
) -> PackedWeight:
    """A packed copy of a bfloat16 weight [out, in].

    Args:
        weight: on the CPU.
        memory: [packed_bytes(weight)] uint8 that the copy fills; None: memory of its own.
        level: the vector instructions to use, a name from usable_levels(); None takes the best.
        cache_dir: as for pack_refusal.

    Raises:
        NativeBuildError: the native library can't be built here.
    """
    library = usable_library(LAYERS_SOURCE, level or usable_levels()[0], cache_dir)
    if memory is None:
        memory = torch.empty(packed_bytes(weight), dtype=torch.uint8)
    num_panels, num_pairs = _panels(weight)
    panels = memory.view(torch.bfloat16).view(num_panels, num_pairs, PANEL, 2)
    rows, columns = weight.shape
    padded = F.pad(weight.detach(), (0, 2 * num_pairs - columns, 0, PANEL * num_panels - rows))
    # As words of two inputs, which move together.
    words = padded.contiguous().view(torch.int32).view(num_panels, PANEL, num_pairs)
    panels.view(torch.int32).squeeze(-1).copy_(words.transpose(1, 2))
    return PackedWeight(panels=panels, num_outputs=rows, library=library)


def packed_bytes(weight: Tensor) -> int:
    """Size of a packed copy of a weight [out, in]."""
    num_panels, num_pairs = _panels(weight)
    return num_panels * num_pairs * PANEL * 2 * torch.bfloat16.itemsize


def _panels(weight: Tensor) -> tuple[int, int]:
    """Panels of outputs and pairs of inputs."""
    return -(-weight.shape[0] // PANEL), -(-weight.shape[1] // 2)


def num_threads(num_products: int) -> int:
    """Threads for so many multiplications: all of torch's, or one.

    OpenMP runtimes end the threads that a smaller team leaves over.
    """
    threads = torch.get_num_threads()
    return threads if num_products >= threads * _MIN_THREAD_PRODUCTS else 1


def address(tensor: Tensor | None) -> int:
    """Of a contiguous tensor's first element; 0 for None."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "native kernels read contiguous tensors"
    return tensor.data_ptr()


def _packed_linear(
    x: Tensor, panels: Tensor, bias: Tensor | None, num_outputs: int, library: str
) -> Tensor:
    """The operator's kernel; see `linear` and PackedWeight."""
    num_rows, num_inputs = x.shape
    assert x.dtype == panels.dtype == torch.bfloat16, "packed weights are of bfloat16"
    assert panels.shape[1] == (num_inputs + 1) // 2, "the weight has another number of inputs"
    assert bias is None or bias.dtype == x.dtype, "a bias has the weight's dtype"
    if num_inputs % 2:
        x = F.pad(x, (0, 1))
    elif x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty((num_rows, num_outputs))
    # In the order of LinearCall in csrc/linear.h.
    call = _LinearCall(
        num_threads(num_rows * panels.numel()),
        num_rows,
        2 * panels.shape[1],
        num_outputs,
        x.stride(0),
        x.data_ptr(),
        address(panels),
        address(bias),
        out.data_ptr(),
    )
    load_library(library).stepgraph_linear(call)
    return out


def _packed_linear_fake(
    x: Tensor, panels: Tensor, bias: Tensor | None, num_outputs: int, library: str
) -> Tensor:
    return x.new_empty((x.shape[0], num_outputs))


_library = torch.library.Library("stepgraph", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(_SCHEMA)  # type: ignore[no-untyped-call]
_library.impl("packed_linear", leaf(_packed_linear), "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("stepgraph::packed_linear", _packed_linear_fake, lib=_library)
_operator = torch.ops.stepgraph.packed_linear.default
