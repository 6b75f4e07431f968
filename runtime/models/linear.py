"""Products with weights that may be prepacked for the CPU's matrix kernels.

oneDNN reads a weight in blocks of its own layout. A plain weight is brought into it at every call,
which for few rows costs as much as the product; a prepacked one is brought into it once. Both give
the same numbers. torch.compile's CPU backend packs weights by the same operators.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] times weight [out, in], plain or prepacked, plus bias [out]: [n, out]."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def prepack_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why weights of that dtype on that device stay plain; None if they can be prepacked."""
    if device.type != "cpu":
        return f"device {device} is not a CPU"
    if dtype != torch.bfloat16:
        return f"dtype {dtype} is not bfloat16"
    operators = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    missing = [name for name in operators if not hasattr(torch.ops.mkldnn, name)]
    if missing:
        return f"this torch has no operator mkldnn::{missing[0]}"
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bfloat16 products for this CPU"
    return None


def prepack(weight: Tensor) -> Tensor:
    """A copy of a weight [out, in] in oneDNN's layout, of the same size; only `linear` reads it."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed
