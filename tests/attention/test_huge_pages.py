from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from attention import huge_pages
from attention.huge_pages import (
    HUGE_PAGE_BYTES,
    empty_in_huge_pages,
    give_back_pages,
    huge_page_share,
)

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ALLOWED = MODE.exists() and "[never]" not in MODE.read_text()


@pytest.mark.parametrize("num_bytes", [1, 4096, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5])
def test_memory_is_aligned_zero_and_writable(num_bytes: int) -> None:
    memory = empty_in_huge_pages(num_bytes)
    assert memory.shape == (num_bytes,)
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert memory.untyped_storage().data_ptr() == memory.data_ptr()
    assert not memory.any()
    memory.fill_(7)
    assert bool((memory == 7).all())


def test_memory_lives_as_long_as_a_tensor_in_it() -> None:
    part = empty_in_huge_pages(1 << 20)[1000:1004]
    part.copy_(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    gc.collect()
    assert part.tolist() == [1, 2, 3, 4]


@pytest.mark.skipif(not ALLOWED, reason="the system gives no huge pages")
def test_written_memory_lies_in_huge_pages() -> None:
    memory = empty_in_huge_pages(8 * HUGE_PAGE_BYTES)
    assert huge_page_share(memory) == 0
    memory.fill_(1)
    assert (huge_page_share(memory) or 0) > 0.5


def test_memory_that_is_given_back_is_zero_at_its_address_and_leaves_the_process() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident_bytes()
    memory = empty_in_huge_pages(16 * HUGE_PAGE_BYTES + 5).fill_(1)
    address, written = memory.data_ptr(), resident_bytes()
    assert written - before > 15 * HUGE_PAGE_BYTES
    give_back_pages(memory)
    assert written - resident_bytes() > 15 * HUGE_PAGE_BYTES
    assert memory.data_ptr() == address
    assert not memory.any()
    assert bool((memory.fill_(2) == 2).all())


def test_the_share_of_other_memory_is_none_or_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "smaps"
    monkeypatch.setattr(huge_pages, "Path", lambda _: missing)
    assert huge_page_share(torch.zeros(10)) is None
