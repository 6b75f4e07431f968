"""Memory of the CPU in huge pages.

A CPU that reads memory in pages of 4 KB waits for page walks, and under virtualisation for nested
ones; with pages of 2 MB it hardly does. Linux gives them to private anonymous memory that is
advised so before it is touched, unless the system forbids it (see
/sys/kernel/mm/transparent_hugepage/enabled).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

import torch

HUGE_PAGE_BYTES = 2 << 20


def empty_in_huge_pages(num_bytes: int) -> torch.Tensor:
    """Memory [num_bytes] uint8 that begins at a huge page, zero until it is written.

    So does its storage: Inductor takes the storage offsets of one cache for those of all.
    """
    mapping = mmap.mmap(
        -1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: ordinary ones serve
            mapping.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    start = -address % HUGE_PAGE_BYTES
    # The tensor keeps the mapping.
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=num_bytes)


def give_back_pages(memory: torch.Tensor) -> None:
    """Let the system have what empty_in_huge_pages gave, which keeps its address: zero again, and
    without memory until it is written."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, num_bytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    if libc.madvise(address, num_bytes, mmap.MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise: {os.strerror(number)}")


def huge_page_share(memory: torch.Tensor) -> float | None:
    """Share of written memory of empty_in_huge_pages that lies in huge pages; None where the
    system doesn't say."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return None
    inside = False
    for line in lines:
        name, *values = line.split()
        if not name.endswith(":"):  # the range that the next lines are about
            start, end = (int(address, 16) for address in name.split("-"))
            inside = start <= memory.data_ptr() < end
        elif inside and name == "AnonHugePages:":
            return min(1.0, int(values[0]) * 1024 / memory.nbytes)
    return None
