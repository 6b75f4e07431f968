"""What devices compute and read a second at most, from their data sheets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """The two rates that bound a step."""

    flop_rate: float
    """Dense bfloat16 operations a second, accumulated in float32."""
    bandwidth: float
    """Bytes a second of its memory."""


GPU_RATES: Mapping[str, DeviceRates] = MappingProxyType(
    {
        # NVIDIA DGX B200 data sheet, an eighth of it: 64 TB/s; dense, FP8 rate halved.
        "B200": DeviceRates(flop_rate=2250e12, bandwidth=8e12),
        # NVIDIA H200 and H100 data sheets; half of the rates given with sparsity.
        "H200": DeviceRates(flop_rate=989.5e12, bandwidth=4.8e12),
        "H100 PCIe": DeviceRates(flop_rate=756e12, bandwidth=2e12),
        "H100": DeviceRates(flop_rate=989.5e12, bandwidth=3.35e12),
        # NVIDIA A100 data sheet.
        "A100-SXM4-40GB": DeviceRates(flop_rate=312e12, bandwidth=1555e9),
        "A100": DeviceRates(flop_rate=312e12, bandwidth=2039e9),
        # NVIDIA L40S and L4 data sheets; half of the rates given with sparsity.
        "L40S": DeviceRates(flop_rate=362e12, bandwidth=864e9),
        "L4": DeviceRates(flop_rate=121e12, bandwidth=300e9),
        # NVIDIA Ada GPU architecture white paper, appendix A.
        "RTX 4090": DeviceRates(flop_rate=165.2e12, bandwidth=1008e9),
    }
)
"""By a part of the name that CUDA gives a GPU; the first that fits counts."""

CPU_RATES = DeviceRates(flop_rate=1.4e11, bandwidth=2.8e10)
"""Of a few cores with one memory channel, in float32."""


def device_rates(device: torch.device) -> DeviceRates:
    """Rates of a device; those of an A100 for a GPU that isn't known."""
    if device.type == "cpu":
        return CPU_RATES
    import torch

    return rates_of_gpu(torch.cuda.get_device_name(device))


def rates_of_gpu(name: str) -> DeviceRates:
    """Rates of the GPU of that name; see GPU_RATES."""
    for part, rates in GPU_RATES.items():
        if re.search(rf"\b{part}\b", name):
            return rates
    return GPU_RATES["A100"]
