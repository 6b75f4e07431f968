"""Sequences waiting to be admitted."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from .sequence import Sequence, SequenceStatus
from .siblings import Siblings


class WaitingQueue:
    """A queue by (priority, arrival).

    A preempted sequence goes back to its old place, which under "fcfs" is the front, since all
    that still wait for their first admission arrived later. Removal is lazy: an aborted sequence
    is passed over when its turn comes. One whose sibling computes the prompt of both is set aside
    when its turn comes, and takes its place again once that is done or off.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._heap: list[tuple[int, int, Sequence]] = []
        self._length = 0
        self._set_aside: dict[Siblings, list[Sequence]] = {}

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence whose status is WAITING."""
        self._put(sequence)
        self._length += 1

    def peek(self) -> Sequence | None:
        """The next sequence, left in the queue; None if nobody waits for anything but a sibling."""
        while self._heap:
            sequence, siblings = self._heap[0][2], self._heap[0][2].siblings
            if sequence.status is SequenceStatus.WAITING:
                if siblings is None or not siblings.should_wait(sequence):
                    return sequence
                self._set_aside.setdefault(siblings, []).append(sequence)
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Take out what `peek` returned, to be admitted."""
        sequence = heapq.heappop(self._heap)[2]
        self._length -= 1
        if sequence.siblings is not None:
            sequence.siblings.admit()
        return sequence

    def note_complete(self, sequences: Iterable[Sequence]) -> None:
        """The rest of their prompts is scheduled: from the next step on siblings can use them."""
        for sequence in sequences:
            if sequence.siblings is not None:
                sequence.siblings.complete(sequence)
                self._call_back(sequence.siblings)

    def note_leaving(self, sequence: Sequence) -> None:
        """One that was admitted loses its blocks: no sibling need wait for it any more."""
        if sequence.siblings is not None:
            sequence.siblings.leave(sequence)
            self._call_back(sequence.siblings)

    def discard(self, sequence: Sequence) -> None:
        """Count out a queued sequence that the caller marks FINISHED next."""
        assert sequence.status is SequenceStatus.WAITING, f"{sequence.request_id} doesn't wait"
        self._length -= 1

    def remove(self, sequences: Collection[Sequence]) -> None:
        """Take out queued sequences."""
        for siblings in list(self._set_aside):
            self._call_back(siblings)
        self._heap = [entry for entry in self._heap if entry[2] not in sequences]
        heapq.heapify(self._heap)
        self._length -= len(sequences)

    def precedence(self, sequence: Sequence) -> tuple[int, int]:
        """Lower is served first. Unique, since arrival indices are."""
        return (sequence.priority if self._by_priority else 0, sequence.arrival_index)

    def _put(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (*self.precedence(sequence), sequence))

    def _call_back(self, siblings: Siblings) -> None:
        for sequence in self._set_aside.pop(siblings, ()):
            self._put(sequence)
