"""Rates of devices, found by the names that CUDA gives them."""

from __future__ import annotations

import pytest
import torch

from runtime.device_rates import CPU_RATES, GPU_RATES, device_rates, rates_of_gpu


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_gpus_are_known_by_their_names(name: str, known: str) -> None:
    assert rates_of_gpu(name) is GPU_RATES[known]


@pytest.mark.parametrize("name", ["NVIDIA L40", "Tesla T4", ""])
def test_other_gpus_are_taken_for_an_a100(name: str) -> None:
    assert rates_of_gpu(name) is GPU_RATES["A100"]


def test_a_cpu_has_rates_of_its_own() -> None:
    assert device_rates(torch.device("cpu")) is CPU_RATES


@pytest.mark.gpu
def test_the_gpu_that_is_there_has_rates() -> None:
    assert device_rates(torch.device("cuda")) in GPU_RATES.values()
