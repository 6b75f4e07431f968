"""Host memory for copies that the host doesn't wait for, in turns, so that none is overwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch


class CopyEvent(Protocol):
    """A mark in a stream of device work, as torch.cuda.Event."""

    def record(self) -> None:
        """Mark the current end of the stream."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until the mark is reached."""
        ...


class PinnedRing:
    """Buffers of equal size that steps take in turns.

    A step writes its buffer and queues copies out of it. By the time the turn comes round again
    they have long been done, unless the host runs `depth` steps ahead; then it waits for them.

    Args:
        num_bytes: of each buffer.
        device: where copies go. Only for CUDA the memory is pinned and copies are waited for.
        depth: how many buffers.
        make_event: in place of torch.cuda.Event.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        *,
        depth: int = 3,
        make_event: Callable[[], CopyEvent] | None = None,
    ) -> None:
        self._pinned = device.type == "cuda"
        if make_event is None and self._pinned:
            make_event = cast("Callable[[], CopyEvent]", torch.cuda.Event)
        self._buffers = [self._allocate(num_bytes) for _ in range(depth)]
        self._events = [make_event() for _ in range(depth)] if make_event else None
        self._recorded = [False] * depth
        self._turn = 0

    @contextmanager
    def turn(self) -> Iterator[torch.Tensor]:
        """The next buffer, [num_bytes] uint8, whose copies are queued on the current stream inside.

        Its contents are undefined.
        """
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        self._wait(turn)
        try:
            yield self._buffers[turn]
        finally:
            if self._events is not None:
                self._events[turn].record()
                self._recorded[turn] = True

    def grow(self, num_bytes: int) -> None:
        """Make the buffers at least num_bytes long. Waits for all copies if they have to move."""
        if num_bytes <= len(self._buffers[0]):
            return
        for turn in range(len(self._buffers)):
            self._wait(turn)
            self._buffers[turn] = self._allocate(num_bytes)

    def _wait(self, turn: int) -> None:
        if self._events is not None and self._recorded[turn]:
            self._events[turn].synchronize()  # sync: a copy may still read this buffer

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
