"""Products with weights that may be packed for the CPU.

A plain bfloat16 weight is brought into the layout of the CPU's dot products at every call, which
for few rows costs as much as the product; a packed one is brought into it once, in bfloat16 or
rounded to int8, which halves the bytes that a step of few rows has to read. Its kernels are a
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
# Rows of a weight that are packed at a time: what copies are made of them stays small.
_ROWS_AT_ONCE = 128 * PANEL
_WORD = torch.float32.itemsize
# The kernels compute with this many times the bytes of a weight in int8; csrc/panels.h.
_BYTE_SCALE = 2.0**24
_SCHEMA = (
    "packed_linear(Tensor x, Tensor panels, Tensor? scales, Tensor? bias, int num_outputs, "
    "str library, bool to_float=False) -> Tensor"
)
_LinearCall = ctypes.c_int64 * 11


class PackedWeight(NamedTuple):
    """A weight [num_outputs, inputs] in panels; only `linear` and native regions read it."""

    panels: Tensor
    """[panels, pairs of inputs, PANEL, 2] bfloat16, or [panels, quads of inputs, PANEL, 4] int8,
    contiguous, zero where there is no weight."""
    scales: Tensor | None
    """[panels * PANEL] float32: what each output of an int8 weight is multiplied by, over 2**24;
    None: the weight is bfloat16."""
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
    product: Tensor = _operator(x, weight.panels, weight.scales, bias, *weight[2:])
    return product


def linear_in_float(x: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """`linear(x, weight)`, without bias, as float32."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight).float()
    product: Tensor = _operator(x, weight.panels, weight.scales, None, *weight[2:], to_float=True)
    return product


def embedding(ids: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """Rows [n, in] of a weight [out, in], plain or packed from bfloat16, whose rows may be longer.

    `ids` [n] int32 or int64 below out.
    """
    if isinstance(weight, Tensor):
        return F.embedding(ids, weight)
    assert weight.scales is None, "rounded weights are no embeddings"
    return weight.panels[ids // PANEL, :, ids % PANEL].flatten(1)


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
    int8: bool = False,
    memory: Tensor | None = None,
    level: str | None = None,
    cache_dir: Path | None = None,
) -> PackedWeight:
    """A packed copy of a bfloat16 weight [out, in].

    Args:
        weight: on the CPU.
        int8: round each output's weights to 127 steps on either side of zero, symmetrically.
            Activations stay bfloat16 or, where the CPU multiplies bytes, are rounded to 16 bits in
            fixed point below the largest one of their row (csrc/fixed.h); products are exact.
        memory: [packed_bytes(weight, int8=int8)] uint8 that the copy fills; None: memory of its
            own.
        level: the vector instructions to use, a name from usable_levels(); None takes the best.
        cache_dir: as for pack_refusal.

    Raises:
        NativeBuildError: the native library can't be built here.
    """
    library = usable_library(LAYERS_SOURCE, level or usable_levels()[0], cache_dir)
    if memory is None:
        memory = torch.empty(packed_bytes(weight, int8=int8), dtype=torch.uint8)
    num_panels, num_words = _panels(weight, int8=int8)
    end = num_panels * num_words * PANEL * _WORD
    words = memory[:end].view(torch.int32).view(num_panels, num_words, PANEL)
    scales = memory[end:].view(torch.float32) if int8 else None
    for first in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = weight.detach()[first : first + _ROWS_AT_ONCE]
        rows = F.pad(rows, (0, 0, 0, -rows.shape[0] % PANEL))
        if scales is not None:
            rows, scales[first : first + len(rows)] = _quantize(rows)
        per_word = _WORD // rows.itemsize
        rows = F.pad(rows, (0, per_word * num_words - rows.shape[1])).contiguous()
        # As words of several inputs, which move together.
        panels = rows.view(torch.int32).view(-1, PANEL, num_words).transpose(1, 2)
        words[first // PANEL :][: len(panels)].copy_(panels)
    dtype, per_word = (torch.int8, 4) if int8 else (torch.bfloat16, 2)
    return PackedWeight(
        panels=words.view(dtype).view(num_panels, num_words, PANEL, per_word),
        scales=scales,
        num_outputs=weight.shape[0],
        library=library,
    )


def packed_bytes(weight: Tensor, *, int8: bool = False) -> int:
    """Size of a packed copy of a weight [out, in]."""
    num_panels, num_words = _panels(weight, int8=int8)
    return num_panels * PANEL * (num_words + int8) * _WORD


def _quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """int8 rows, and what each is to be multiplied by, over 2**24."""
    rows = rows.float()
    steps = rows.abs().amax(dim=1) / 127
    quantized = (rows / steps.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    return quantized.to(torch.int8), steps / _BYTE_SCALE


def _panels(weight: Tensor, *, int8: bool) -> tuple[int, int]:
    """Panels of outputs, and words of two or four inputs."""
    return -(-weight.shape[0] // PANEL), -(-weight.shape[1] // (4 if int8 else 2))


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
    x: Tensor,
    panels: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    num_outputs: int,
    library: str,
    to_float: bool = False,
) -> Tensor:
    """The operator's kernel; see `linear` and PackedWeight."""
    num_rows, num_inputs = x.shape
    width = panels.shape[1] * panels.shape[3]
    assert x.dtype == torch.bfloat16, "packed weights multiply bfloat16"
    assert panels.dtype == (torch.bfloat16 if scales is None else torch.int8), "wrong panels"
    assert 0 <= width - num_inputs < panels.shape[3], "the weight has another number of inputs"
    assert bias is None or bias.dtype == x.dtype, "a bias has the activations' dtype"
    if num_inputs < width:
        x = F.pad(x, (0, width - num_inputs))
    elif x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty((num_rows, num_outputs), dtype=torch.float32 if to_float else x.dtype)
    # In the order of LinearCall in csrc/linear.h.
    call = _LinearCall(
        num_threads(num_rows * panels.numel()),
        num_rows,
        width,
        num_outputs,
        x.stride(0),
        x.data_ptr(),
        address(panels),
        address(scales),
        address(bias),
        *((0, out.data_ptr()) if to_float else (out.data_ptr(), 0)),
    )
    load_library(library).stepgraph_linear(call)
    return out


def _packed_linear_fake(
    x: Tensor,
    panels: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    num_outputs: int,
    library: str,
    to_float: bool = False,
) -> Tensor:
    dtype = torch.float32 if to_float else x.dtype
    return x.new_empty((x.shape[0], num_outputs), dtype=dtype)


_library = torch.library.Library("stepgraph", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(_SCHEMA)  # type: ignore[no-untyped-call]
_library.impl("packed_linear", leaf(_packed_linear), "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("stepgraph::packed_linear", _packed_linear_fake, lib=_library)
_operator = torch.ops.stepgraph.packed_linear.default
