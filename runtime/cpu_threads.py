"""How many threads compute on a CPU: one per core that the process may use, and no more."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import torch

logger = logging.getLogger("stepgraph.runtime")

_SYSTEM = Path("/sys")


def limit_threads() -> None:
    """Lower torch's number of threads to that of usable cores, unless it is set from outside.

    By default torch takes every logical CPU that the process may run on. Two threads of one core
    share its vector units, and threads beyond a container's quota are stopped in the middle of a
    step, where all others wait for them. The number is the process's, so it is never raised, and
    OMP_NUM_THREADS stands.
    """
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        logger.info("threads: %d (OMP_NUM_THREADS, or set since)", before)
        return
    cores, quota = num_cores(usable_cpus()), cpu_quota()
    num_threads = cores if quota is None else min(cores, max(1, int(quota)))
    if num_threads < before:
        torch.set_num_threads(num_threads)
    logger.info(
        "threads: %d (torch had %d; the process may use %d cores%s)",
        *(min(num_threads, before), before, cores),
        "" if quota is None else f" and the time of {quota:g}",
    )


def usable_cpus() -> set[int]:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def num_cores(cpus: Iterable[int], system: Path = _SYSTEM) -> int:
    """Cores that these logical CPUs belong to; each is one where the system doesn't say."""
    cores = set()
    for cpu in cpus:
        topology = system / f"devices/system/cpu/cpu{cpu}/topology"
        names = (_text(topology / name) for name in ("physical_package_id", "core_id"))
        cores.add(tuple(name or f"cpu {cpu}" for name in names))
    return len(cores)


def cpu_quota(system: Path = _SYSTEM) -> float | None:
    """CPUs' worth of time that the container may use; None: no limit."""
    quota, _, period = _text(system / "fs/cgroup/cpu.max").partition(" ")
    if not quota:  # the first version of control groups
        folder = system / "fs/cgroup/cpu"
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    try:
        limit = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max", or not this system's way of telling
    return limit if limit > 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
