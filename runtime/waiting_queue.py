"""Sequences waiting to be admitted."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from .sequence import Sequence, SequenceStatus


class WaitingQueue:
    """A queue by (priority, arrival).

    A preempted sequence goes back to its old place, which under "fcfs" is the front, since all
    that still wait for their first admission arrived later. Removal is lazy: an aborted sequence
    is passed over when its turn comes.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._heap: list[tuple[int, int, Sequence]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence whose status is WAITING."""
        heapq.heappush(self._heap, (*self.precedence(sequence), sequence))
        self._length += 1

    def peek(self) -> Sequence | None:
        """The next sequence, left in the queue; None if nobody waits."""
        while self._heap:
            sequence = self._heap[0][2]
            if sequence.status is SequenceStatus.WAITING:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Take out what `peek` returned."""
        sequence = heapq.heappop(self._heap)[2]
        self._length -= 1
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Count out a queued sequence that the caller marks FINISHED next."""
        assert sequence.status is SequenceStatus.WAITING, f"{sequence.request_id} doesn't wait"
        self._length -= 1

    def remove(self, sequences: Collection[Sequence]) -> None:
        """Take out queued sequences."""
        self._heap = [entry for entry in self._heap if entry[2] not in sequences]
        heapq.heapify(self._heap)
        self._length -= len(sequences)

    def precedence(self, sequence: Sequence) -> tuple[int, int]:
        """Lower is served first. Unique, since arrival indices are."""
        return (sequence.priority if self._by_priority else 0, sequence.arrival_index)
