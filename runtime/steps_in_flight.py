"""The steps whose ids are still to come, and what the scheduler may know of them before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .block_manager import BlockManager
from .sequence import Sequence
from .sequence_table import SequenceTable
from .step import LateIdsBatch, ScheduledBatch

MAX_IN_FLIGHT = 2
"""One that runs, and one scheduled ahead with placeholders for what that draws."""


class StepsInFlight:
    """Scheduled steps without their outcome, oldest first. Empty whenever steps don't overlap.

    Args:
        table: the scheduler's; it keeps rows from being given away while they are in flight.
        blocks: their blocks registered by a step are final only once it is in.
    """

    def __init__(self, table: SequenceTable, blocks: BlockManager) -> None:
        self._table = table
        self._blocks = blocks
        self._steps: list[ScheduledBatch] = []

    def __len__(self) -> int:
        return len(self._steps)

    def start(self, scheduled: ScheduledBatch) -> None:
        """`scheduled` is in flight from now on."""
        assert len(self._steps) < MAX_IN_FLIGHT, "a step is scheduled ahead of one other at most"
        self._table.start_flight(scheduled)
        self._steps.append(scheduled)

    def end(self, scheduled: ScheduledBatch) -> None:
        """The oldest step ran."""
        assert self._steps[0] is scheduled, "steps come in in order"
        del self._steps[0]
        self._blocks.commit(scheduled.step)
        self._table.end_flight(scheduled)

    def roll_back(
        self, scheduled: ScheduledBatch, preempt: Callable[[Sequence], None]
    ) -> list[Sequence]:
        """Undo `scheduled` and all steps after it; `preempt` is called for their sequences.

        Later ones may have hit a block that it was to fill. What all of them registered in the
        prefix cache is taken back.

        Returns:
            The sequences of `scheduled`.
        """
        sequences = self._live_sequences(scheduled)
        while self._steps and self._steps[-1].step >= scheduled.step:
            last = self._steps.pop()
            for sequence in self._live_sequences(last):
                preempt(sequence)
            self._blocks.rollback(last.step)
            self._table.end_flight(last)
        return sequences

    def going_on(self, rows: np.ndarray) -> np.ndarray:
        """Those of the decoding `rows` that don't end for certain with a token being drawn."""
        if not self._steps:
            return rows
        table = self._table
        num_tokens = table.num_tokens[rows] + table.num_drawing[rows]
        kept: np.ndarray = rows[num_tokens < table.max_total_tokens[rows]]
        return kept

    def register_decodes(self, rows: np.ndarray, step: int) -> None:
        """Register the blocks that the newest token of each decoding row, run by `step`, fills.

        Only where its id is known; `register_late` comes back to the others.
        """
        table, blocks = self._table, self._blocks
        if not blocks.enable_prefix_caching:
            return
        computed = table.num_computed[rows]
        is_full = (computed % blocks.block_size == 0) & (computed <= table.num_tokens[rows])
        for sequence in table.sequences_at(rows[is_full]):
            num_scheduled = len(sequence.blocks) * blocks.block_size
            blocks.register(sequence, table.token_ids[sequence.row], num_scheduled, step)

    def register_late(self, rows: np.ndarray) -> None:
        """The ids of `rows` have become known: register what the step after theirs fills."""
        if self._steps:
            table = self._table
            is_ahead = table.is_live[rows] & (table.num_computed[rows] == table.num_tokens[rows])
            self.register_decodes(rows[is_ahead], self._steps[-1].step)

    def late_ids(self, scheduled: ScheduledBatch) -> LateIdsBatch:
        """What `scheduled` has placeholders for, once the step before it is in."""
        assert self._steps[0] is scheduled, "the step before it is still in flight"
        rows, places, table = scheduled.rows, scheduled.placeholders, self._table
        token_ids = scheduled.token_ids.copy()
        token_ids[places] = table.token_ids[rows[places], scheduled.num_computed_tokens[places]]
        return LateIdsBatch(token_ids=token_ids, ended_rows=rows[~table.is_live[rows]])

    def _live_sequences(self, scheduled: ScheduledBatch) -> list[Sequence]:
        rows = scheduled.rows
        return self._table.sequences_at(rows[self._table.is_live[rows]])
