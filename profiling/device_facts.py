"""What ran a benchmark: versions, the machine, and the GPU's state while it ran.

NVML is asked through pynvml (nvidia-ml-py). Where it is absent or fails, the facts say so.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

PACKAGES = ("torch", "numpy", "transformers", "flashinfer-python", "flash-attn", "triton")


def software_facts() -> dict[str, Any]:
    """The command, versions, commit and processor, in JSON's types."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": _commit(),
        "versions": versions,
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "system": platform.platform(),
    }


def _commit() -> str | None:
    folder = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


class DeviceSampler:
    """Asks NVML for memory, utilisation, power and clocks while its block runs.

        with DeviceSampler() as sampler:
            ...
        facts = sampler.facts()

    Args:
        index: of the GPU.
        interval: seconds between two samples.
    """

    def __init__(self, index: int = 0, interval: float = 0.5) -> None:
        self._index = index
        self._interval = interval
        self._samples: list[dict[str, Any]] = []
        self._static: dict[str, Any] = {}
        self._problem: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self._began = time.monotonic()

    def __enter__(self) -> DeviceSampler:
        try:
            import pynvml
        except ImportError as error:
            self._problem = f"pynvml can't be imported: {error}"
            return self
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(self._index)
            self._static = {
                "name": _text(pynvml.nvmlDeviceGetName(handle)),
                "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
            }
        except pynvml.NVMLError as error:
            self._problem = f"NVML: {error}"
            return self
        self._thread = threading.Thread(target=self._run, args=(handle,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError as error:
                self._problem = f"NVML: {error}"

    def facts(self) -> dict[str, Any]:
        """In JSON's types: what the device is, its samples, and why there are none or no more."""
        return {**self._static, "problem": self._problem, "samples": self._samples}

    def _run(self, handle: Any) -> None:
        while True:
            self._samples.append(self._sample(handle))
            if self._stop.wait(self._interval):
                return

    def _sample(self, handle: Any) -> dict[str, Any]:
        nvml, started = self._nvml, time.monotonic() - self._began
        questions: dict[str, Callable[[], Any]] = {
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory,
            "watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        }
        sample: dict[str, Any] = {"seconds": started}
        for name, ask in questions.items():
            try:
                sample[name] = ask()
            except nvml.NVMLError as error:  # some devices don't answer every question
                sample[name] = None
                self._problem = self._problem or f"NVML, {name}: {error}"
        return sample


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
