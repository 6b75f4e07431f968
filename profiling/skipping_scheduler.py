"""The runtime's scheduler, with many like decode steps run as one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.step_builder import StepBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """A number of steps in which the same sequences decode and nothing else happens.

    Step i, from 0, reads a context of `num_kv_tokens + i * num_seqs` tokens.
    """

    num_steps: int
    num_seqs: int
    """Sequences of every step, so its tokens too."""
    num_kv_tokens: int
    """Context of the first step: the K/V rows that its attention reads."""
    rows: np.ndarray
    """[num_seqs] int64, in the order of the batch."""


class SkippingScheduler(Scheduler):
    """Runs a `DecodeRun` in one call, to the state that its single steps would have led to.

    With a prefix cache, blocks are taken and registered one by one in the order of the single
    steps, so that every block ends where it would have; without one they are only counted. A
    runner is not served: block changes, and row changes of skipped steps, are in no
    `ScheduledBatch`.

    Sequences must not be ended by tokens: what is skipped is only foreseeable where lengths alone
    end a sequence.
    """

    def add(self, sequence: Sequence) -> None:
        """As `Scheduler.add`; a sequence that tokens may end is a bug of the caller."""
        params = sequence.params
        assert not params.stop_token_ids and (params.ignore_eos or not self.config.end_token_ids), (
            f"tokens may end {sequence.request_id}, so its steps are not foreseeable"
        )
        super().add(sequence)

    def foresee(self) -> DecodeRun | None:
        """The longest run of steps that comes next for certain; None if that is none.

        It ends with the first step in which a sequence ends, or before one that lacks blocks. It
        holds as long as nothing is added or aborted.
        """
        if self._prefilling or not self._decoding or self._may_admit():
            return None
        table, rows = self._table, self._rows_of_decoding()
        num_steps = int((table.max_total_tokens[rows] - table.num_tokens[rows]).min())
        computed = table.num_computed[rows]
        num_steps = self._steps_within_blocks(table.num_slots[rows] - computed, num_steps)
        if num_steps < 1:
            return None
        return DecodeRun(
            num_steps=num_steps,
            num_seqs=len(rows),
            num_kv_tokens=int(computed.sum()) + len(rows),
            rows=rows,
        )

    def sequences_at(self, rows: np.ndarray) -> list[Sequence]:
        """The sequences of [n] rows."""
        return self._table.sequences_at(rows)

    def skip(self, run: DecodeRun, num_steps: int, token_ids: np.ndarray) -> list[Sequence]:
        """Do the first `num_steps` steps of what `foresee` just returned.

        Args:
            run: the foreseen steps; nothing was added, aborted or scheduled since.
            num_steps: at least 1, at most `run.num_steps`.
            token_ids: [num_seqs] int32, what each sequence generates in every one of them.

        Returns:
            The sequences that the last of these steps ended.
        """
        assert 1 <= num_steps <= run.num_steps, f"{num_steps} of {run.num_steps} steps"
        table, rows = self._table, run.rows
        if self._blocks.enable_prefix_caching:  # else nobody reads the ids again
            starts = table.num_tokens[rows].tolist()
            for row, start, token in zip(rows.tolist(), starts, token_ids.tolist(), strict=True):
                table.token_ids[row, start : start + num_steps] = token
        self._take_blocks(rows, num_steps)
        table.num_computed[rows] += num_steps
        num_tokens = table.num_tokens[rows] + num_steps
        table.num_tokens[rows] = num_tokens
        if self.sizing.has_target and self.config.policy != "prefill_first":
            has_waiting = self.num_waiting > 0
            for step in range(num_steps):
                num_kv_tokens = run.num_kv_tokens + step * run.num_seqs
                self.sizing.prompt_tokens(run.num_seqs, num_kv_tokens, has_waiting=has_waiting)
        self._next_step += num_steps
        if num_steps < run.num_steps:
            return []
        finished = table.sequences_at(rows[num_tokens == table.max_total_tokens[rows]])
        for sequence in finished:
            self._end(sequence, "length")
        return finished

    def _grow(self, step: StepBuilder, sequence: Sequence, num_blocks: int) -> None:
        self._blocks.allocate(sequence, num_blocks)
        self._table.num_slots[sequence.row] += num_blocks * self._blocks.block_size

    def _may_admit(self) -> bool:
        """Whether a waiting sequence could start in one of the next decode steps."""
        sequence = self._waiting.peek()
        if sequence is None or not self._table.num_free_rows:
            return False
        if self._num_endings < sequence.starts_after_endings:
            return False
        # Decodes only take free blocks, so who finds too few now finds too few later. But what
        # they register may be the next blocks of a waiting prompt.
        if self._blocks.enable_prefix_caching:
            return True
        return self._next_admission(self._reserved_blocks()) is not None

    def _steps_within_blocks(self, num_left: np.ndarray, num_steps: int) -> int:
        """The steps, at most num_steps, before one for which too few blocks are free.

        Args:
            num_left: [num_seqs] int64, tokens that each sequence's own blocks still hold.
        """
        size, num_free = self._blocks.block_size, self._blocks.num_free_blocks
        if len(num_left) * (num_steps // size + 1) <= num_free:
            return num_steps  # whatever they hold

        def num_blocks(steps: int) -> int:
            return int(np.maximum(-((num_left - steps) // size), 0).sum())

        if num_blocks(num_steps) <= num_free:
            return num_steps
        low, high = 0, num_steps  # enough for low steps, too few for high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if num_blocks(middle) <= num_free else (low, middle)
        return low

    def _take_blocks(self, rows: np.ndarray, num_steps: int) -> None:
        """Allocate and register what the steps need."""
        table, manager, size = self._table, self._blocks, self._blocks.block_size
        computed = table.num_computed[rows]
        num_left = table.num_slots[rows] - computed
        counts = np.maximum(-((num_left - num_steps) // size), 0)
        table.num_slots[rows] += size * counts
        if manager.enable_prefix_caching:
            self._take_in_order(rows, num_left, -(computed + 1) % size, num_steps)
            return
        for place in counts.nonzero()[0].tolist():
            sequence = table.sequences[rows[place]]
            assert sequence is not None, f"row {rows[place]} is not live"
            manager.allocate(sequence, int(counts[place]))

    def _take_in_order(
        self, rows: np.ndarray, first_taken: np.ndarray, first_full: np.ndarray, num_steps: int
    ) -> None:
        """Allocate and register in the order of the steps.

        Args:
            rows: [num_seqs] int64.
            first_taken: [num_seqs] int64, the first step in which each takes a block.
            first_full: [num_seqs] int64, the first step in which each fills one.
            num_steps: to do.
        """
        table, manager, size = self._table, self._blocks, self._blocks.block_size
        sequences = table.sequences_at(rows)
        steps, places = _every(size, first_taken, num_steps)
        full_steps, full_places = _every(size, first_full, num_steps)
        steps = np.concatenate([2 * steps, 2 * full_steps + 1])  # a step takes, then registers
        places = np.concatenate([places, full_places])
        order = np.argsort(steps, kind="stable")
        for moment, place in zip(steps[order].tolist(), places[order].tolist(), strict=True):
            sequence, step = sequences[place], self._next_step + moment // 2
            if moment % 2 == 0:
                manager.allocate(sequence, 1)
            else:
                num_scheduled = len(sequence.blocks) * size
                manager.register(sequence, table.token_ids[sequence.row], num_scheduled, step)
                manager.commit(step)


def _every(period: int, first: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """All of first, first + period, ... below limit, and the place of each in `first`."""
    counts = np.maximum(-((first - limit) // period), 0)
    places = np.repeat(np.arange(len(first)), counts)
    index = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    return first[places] + period * index, places
