from __future__ import annotations

import pytest
import torch

from attention.pinned_ring import PinnedRing

CPU = torch.device("cpu")


class Stream:
    """Copies that are carried out only when somebody waits for them."""

    def __init__(self) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_done = 0
        self.waits: list[int] = []

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.waiting.append((source, target))

    def run_to(self, mark: int) -> None:
        while self.num_done < mark:
            source, target = self.waiting[self.num_done]
            target.copy_(source)
            self.num_done += 1


class Event:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._mark = 0

    def record(self) -> None:
        self._mark = len(self._stream.waiting)

    def synchronize(self) -> None:
        self._stream.waits.append(self._mark)
        self._stream.run_to(self._mark)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_copy_in_flight_is_never_overwritten(depth: int) -> None:
    """A host that runs far ahead: without the ring's waiting all copies would bring the last."""
    stream = Stream()
    ring = PinnedRing(8, CPU, depth=depth, make_event=lambda: Event(stream))
    targets = [torch.zeros(8, dtype=torch.uint8) for _ in range(10)]
    for step, target in enumerate(targets):
        with ring.turn() as buffer:
            buffer.fill_(step)
            stream.copy(buffer, target)
    assert stream.num_done == 10 - depth
    stream.run_to(10)
    assert [int(target[0]) for target in targets] == list(range(10))


def test_it_waits_for_the_copies_of_its_own_buffer_alone() -> None:
    stream = Stream()
    ring = PinnedRing(8, CPU, depth=3, make_event=lambda: Event(stream))
    for _ in range(5):
        with ring.turn() as buffer:
            stream.copy(buffer, torch.zeros(8, dtype=torch.uint8))
    assert stream.waits == [1, 2]


def test_copies_of_a_turn_that_failed_are_waited_for_too() -> None:
    stream = Stream()
    ring = PinnedRing(8, CPU, depth=1, make_event=lambda: Event(stream))
    target = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(RuntimeError), ring.turn() as buffer:
        buffer.fill_(5)
        stream.copy(buffer, target)
        raise RuntimeError
    with ring.turn() as buffer:
        buffer.fill_(6)
    assert target.tolist() == [5] * 8


def test_growing_waits_for_all_copies_and_keeps_what_is_large_enough() -> None:
    stream = Stream()
    ring = PinnedRing(8, CPU, depth=2, make_event=lambda: Event(stream))
    for _ in range(2):
        with ring.turn() as buffer:
            stream.copy(buffer, torch.zeros(8, dtype=torch.uint8))
    ring.grow(4)
    assert stream.num_done == 0
    ring.grow(100)
    assert stream.num_done == 2
    for _ in range(2):
        with ring.turn() as buffer:
            assert buffer.shape == (100,) and buffer.dtype == torch.uint8


def test_on_a_cpu_nothing_is_pinned_and_nothing_waits() -> None:
    ring = PinnedRing(8, CPU)
    seen = set()
    for _ in range(9):
        with ring.turn() as buffer:
            assert not buffer.is_pinned()
            seen.add(buffer.data_ptr())
    assert len(seen) == 3
