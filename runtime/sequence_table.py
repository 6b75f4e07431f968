"""Running sequences as parallel arrays, so that a step costs no Python per sequence."""

from __future__ import annotations

from typing import cast

import numpy as np

from .sequence import Sequence, SequenceStatus
from .step import ScheduledBatch


class SequenceTable:
    """Row r describes one running sequence; the scheduler owns the table.

    Rows are handed out lowest first and are the same numbers in the runner's own table. All
    arrays have `max_num_seqs` entries and are int64 unless stated. `token_ids` is virtual memory
    until a sequence reaches that far, so its size costs nothing.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        self.token_ids = np.empty((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        """Prompt and output tokens whose ids are known."""
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        """Tokens whose K/V is in the pool once the steps scheduled so far have run."""
        self.num_drawing = np.zeros(max_num_seqs, dtype=np.int64)
        """Tokens that steps in flight are drawing: there, with ids that are not known yet."""
        self.num_slots = np.zeros(max_num_seqs, dtype=np.int64)
        """Tokens that the blocks owned by the sequence hold."""
        self.max_total_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.min_total_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        """Prompt plus min_tokens: below it no stop token counts."""
        self.obeys_end_tokens = np.zeros(max_num_seqs, dtype=bool)
        """False under ignore_eos."""
        self.has_stop_token_ids = np.zeros(max_num_seqs, dtype=bool)
        self.needs_output_ids = np.zeros(max_num_seqs, dtype=bool)
        """True where the host works on the logits; see `LogitsRules.needs_output_ids`."""
        self.is_live = np.zeros(max_num_seqs, dtype=bool)
        """False for a free row, and for an aborted sequence whose last step is in flight."""
        self.last_token_times = np.zeros(max_num_seqs, dtype=np.float64)
        """Seconds; NaN before the first token."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_flights = np.zeros(max_num_seqs, dtype=np.int64)  # steps in flight of each row
        self._retired_rows: list[int] = []  # left while in flight: free when their steps are in
        self._released_rows: list[int] = []  # not yet told to the runner

    @property
    def num_free_rows(self) -> int:
        """Sequences that can still be admitted."""
        return len(self._free_rows)

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        """Give `sequence` a row; its blocks hold its first `num_cached` tokens already."""
        row = self._free_rows.pop()
        params, num_tokens = sequence.params, len(sequence.token_ids)
        sequence.row = row
        sequence.status = SequenceStatus.RUNNING
        self.sequences[row] = sequence
        self.token_ids[row, :num_tokens] = sequence.token_ids
        self.num_tokens[row] = num_tokens
        self.num_computed[row] = num_cached
        assert self.num_drawing[row] == 0, f"row {row} is in flight"
        self.num_slots[row] = num_cached
        self.max_total_tokens[row] = sequence.max_total_tokens
        self.min_total_tokens[row] = sequence.num_prompt_tokens + params.min_tokens
        self.obeys_end_tokens[row] = not params.ignore_eos
        self.has_stop_token_ids[row] = bool(params.stop_token_ids)
        self.last_token_times[row] = sequence.last_token_time
        rules = sequence.rules
        self.needs_output_ids[row] = rules is not None and rules.needs_output_ids
        self.is_live[row] = True

    def sequences_at(self, rows: np.ndarray) -> list[Sequence]:
        """The sequences of [n] live rows."""
        return cast("list[Sequence]", [*map(self.sequences.__getitem__, rows.tolist())])

    def progress(self, sequences: list[Sequence]) -> list[tuple[int, int]]:
        """Of each sequence how many tokens are computed, and how many are left."""
        rows = [sequence.row for sequence in sequences]
        computed, num_tokens = self.num_computed[rows], self.num_tokens[rows]
        return list(zip(computed.tolist(), (num_tokens - computed).tolist(), strict=True))

    def append(self, rows: np.ndarray, token_ids: np.ndarray, time: float) -> np.ndarray:
        """Add one token, known since `time`, to each of [n] rows.

        Returns:
            [n] float64, seconds since the token before; NaN where there was none.
        """
        num_tokens = self.num_tokens[rows]
        self.token_ids[rows, num_tokens] = token_ids
        self.num_tokens[rows] = num_tokens + 1
        gaps: np.ndarray = time - self.last_token_times[rows]
        self.last_token_times[rows] = time
        return gaps

    def find_ends(
        self, rows: np.ndarray, token_ids: np.ndarray, end_token_ids: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which rows end with the token they just got, and which of those by a stop token.

        Args:
            rows: [n] live rows.
            token_ids: [n] int64, their newest tokens.
            end_token_ids: ids that end a sequence unless it ignores them.

        Returns:
            Two [n] bool arrays, ends and stops.
        """
        num_tokens = self.num_tokens[rows]
        stops = np.zeros(len(rows), dtype=bool)
        for end_token in end_token_ids:
            stops |= token_ids == end_token
        stops &= self.obeys_end_tokens[rows]
        for i in np.flatnonzero(self.has_stop_token_ids[rows]).tolist():
            sequence = self.sequences[rows[i]]
            assert sequence is not None, f"row {rows[i]} is not live"
            stops[i] |= int(token_ids[i]) in sequence.params.stop_token_ids
        stops &= num_tokens > self.min_total_tokens[rows]
        return stops | (num_tokens >= self.max_total_tokens[rows]), stops

    def check_integrity(self, running: list[Sequence], *, block_size: int) -> None:
        """Recount the rows from the sequences that own one; AssertionError if anything is off."""
        for sequence in running:
            row = sequence.row
            assert self.sequences[row] is sequence, f"row {row} is not {sequence.request_id}'s"
            num_slots = len(sequence.blocks) * block_size
            assert self.num_slots[row] == num_slots, f"row {row}: slots are off"
            num_tokens = self.num_tokens[row] + self.num_drawing[row]
            assert self.num_computed[row] <= min(num_slots, num_tokens), f"row {row} is ahead"
            assert self.num_drawing[row] <= self._num_flights[row], f"row {row} draws nowhere"
        num_rows = self.num_free_rows + len(running) + len(self._retired_rows)
        assert num_rows == self.max_num_seqs, "rows are lost or doubled"
        assert int(self.is_live.sum()) == len(running), "a live row has no sequence"

    def retire(self, sequence: Sequence) -> None:
        """Bring the sequence's own tokens up to date and take its row back.

        A row in flight becomes available only when its steps have ended.
        """
        row = sequence.row
        sequence.token_ids = self.token_ids[row, : self.num_tokens[row]].copy()
        sequence.last_token_time = float(self.last_token_times[row])
        sequence.row = -1
        self.sequences[row] = None
        self.is_live[row] = False
        if self._num_flights[row]:
            self._retired_rows.append(row)
        else:
            self._release(row)

    def start_flight(self, scheduled: ScheduledBatch) -> None:
        """Its rows run in one more step from now on."""
        self._num_flights[scheduled.rows] += 1
        self.num_drawing[scheduled.rows[scheduled.sampled]] += 1

    def end_flight(self, scheduled: ScheduledBatch) -> None:
        """That step has ended, one way or the other."""
        self._num_flights[scheduled.rows] -= 1
        self.num_drawing[scheduled.rows[scheduled.sampled]] -= 1
        retired, self._retired_rows = self._retired_rows, []
        for row in retired:
            if self._num_flights[row]:
                self._retired_rows.append(row)
            else:
                self._release(row)

    def take_released_rows(self) -> list[int]:
        """Rows that became available since this was last asked."""
        released, self._released_rows = self._released_rows, []
        return released

    def _release(self, row: int) -> None:
        assert not self.is_live[row], f"row {row} is live"
        self._free_rows.append(row)
        self._released_rows.append(row)
