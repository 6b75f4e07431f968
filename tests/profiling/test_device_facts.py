"""Device facts are sampled where NVML answers, and its absence is said."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest
from device_facts import DeviceSampler, software_facts


class FakeNvmlError(Exception):
    """As pynvml.NVMLError."""


def fake_nvml(*, fails: bool = False, watts: bool = True) -> SimpleNamespace:
    def init() -> None:
        if fails:
            raise FakeNvmlError("Driver Not Loaded")

    def power(handle: object) -> int:
        if not watts:
            raise FakeNvmlError("Not Supported")
        return 250_000

    return SimpleNamespace(
        NVMLError=FakeNvmlError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"handle {index}",
        nvmlDeviceGetName=lambda handle: b"A GPU",
        nvmlSystemGetDriverVersion=lambda: "1.2",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80, used=30),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=99, memory=40),
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1000 * kind,
    )


def sampled(monkeypatch: pytest.MonkeyPatch, nvml: object) -> dict:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with DeviceSampler(interval=0.001) as sampler:
        deadline = time.monotonic() + 10
        while len(sampler.facts()["samples"]) < 3 and sampler.facts()["problem"] is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    return sampler.facts()


def test_a_gpu_is_named_and_sampled(monkeypatch):
    facts = sampled(monkeypatch, fake_nvml())
    assert (facts["name"], facts["driver"], facts["memory_bytes"]) == ("A GPU", "1.2", 80)
    assert facts["problem"] is None
    sample = facts["samples"][0]
    assert sample.pop("seconds") >= 0
    assert sample == {
        "memory_used_bytes": 30,
        "gpu_percent": 99,
        "memory_percent": 40,
        "watts": 250.0,
        "sm_mhz": 1000,
        "memory_mhz": 2000,
    }


def test_nvml_that_fails_or_is_absent_is_reported(monkeypatch):
    facts = sampled(monkeypatch, fake_nvml(fails=True))
    assert facts == {"problem": "NVML: Driver Not Loaded", "samples": []}
    facts = sampled(monkeypatch, None)
    assert "pynvml can't be imported" in facts["problem"]


def test_a_question_that_a_device_does_not_answer_leaves_the_others(monkeypatch):
    facts = sampled(monkeypatch, fake_nvml(watts=False))
    assert facts["samples"][0]["watts"] is None
    assert facts["samples"][0]["gpu_percent"] == 99
    assert facts["problem"] == "NVML, watts: Not Supported"


def test_software_is_named_with_versions():
    facts = software_facts()
    assert facts["versions"]["torch"] and facts["versions"]["python"]
    assert facts["num_cpus"] >= 1 and facts["command"]
