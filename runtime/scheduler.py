"""Decides what the next step runs. Pure policy: imports no torch and touches no device."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable

import numpy as np

from .block_manager import BlockManager
from .budget_policy import BudgetPolicy
from .logprobs import record_logprobs
from .outputs import FinishReason
from .scheduler_config import SchedulerConfig
from .sequence import Sequence, SequenceStatus
from .sequence_table import SequenceTable
from .siblings import ComputedPrefix, computed_prefix
from .step import LateIdsBatch, ScheduledBatch, SequenceUpdates, StepOutput
from .step_builder import StepBuilder
from .step_cost import StepCost, chunk_pairs
from .steps_in_flight import StepsInFlight
from .waiting_queue import WaitingQueue


class Scheduler:
    """Mixes decodes and prompt chunks into steps of at most `max_num_batched_tokens` tokens.

    There is no prefill phase: each sequence has computed some of its tokens, and a step lets it
    catch up. Decoding sequences come first, one token each, so none is ever held up by a prompt;
    prompts under way share what is left of the budget in order of admission; then waiting
    sequences are admitted. A waiting prompt therefore starts at the latest after
    ceil(prompt tokens ahead of it / (budget - decodes)) steps, rows and blocks permitting.
    (The token-budget loop is vLLM V1's; the arrays, so that a decode costs no Python, are ours.)

    Admission asks for the blocks of the whole prompt, beyond what prompts under way still need.
    When blocks run out nonetheless, the sequence with the lowest priority, admitted last, is
    preempted: it loses its blocks, keeps its tokens, and starts again, mostly from the cache, once
    another sequence has ended; so a shortage costs a sequence one re-prefill, not a circle of them.
    A sequence's total length is bounded by the pool, so one alone always goes on.

    A step may be scheduled while one is in flight, since that takes only counts (`StepsInFlight`).
    Who ends meanwhile gives its blocks back at once: their next owner writes after rows in flight.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        *,
        clock: Callable[[], float] = time.monotonic,
        step_cost: StepCost | None = None,
    ) -> None:
        assert config.max_num_batched_tokens >= config.max_num_seqs, "decodes exceed the budget"
        self.config = config
        self.num_preemptions = 0
        self.sizing = BudgetPolicy(config, step_cost)
        self._blocks = block_manager
        self._clock = clock
        self._waiting = WaitingQueue(by_priority=config.policy == "priority")
        self._table = SequenceTable(config.max_num_seqs, config.max_model_len)
        self._prefilling: list[Sequence] = []  # by precedence
        self._decoding: list[Sequence] = []  # by completion of the prompt
        self._decode_rows: np.ndarray | None = None  # rows of _decoding; None: out of date
        self._num_admissions = 0
        self._num_endings = 0
        self._next_step = 0
        self._flights = StepsInFlight(self._table, block_manager)

    # -- queries ----------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Sequences that own nothing yet, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that own a row and blocks."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def has_unfinished(self) -> bool:
        """True while a further step can bring something."""
        return bool(self.num_waiting or self.num_running)

    @property
    def max_sequence_tokens(self) -> int:
        """Longest sequence that the model and the pool allow."""
        pool = self._blocks.num_usable_blocks * self._blocks.block_size
        return min(self.config.max_model_len, pool)

    def running_sequences(self) -> list[Sequence]:
        """All sequences that own blocks."""
        return self._decoding + self._prefilling

    def check_integrity(self) -> None:
        """Recount rows and blocks; AssertionError if anything is off."""
        running = self.running_sequences()
        self._blocks.check_integrity(running)
        self._table.check_integrity(running, block_size=self._blocks.block_size)

    # -- requests ---------------------------------------------------------------------------

    def check(self, num_prompt_tokens: int) -> None:
        """Raise InvalidRequestError if a prompt of that length could never be served."""
        num_blocks, block_size = self._blocks.num_usable_blocks, self._blocks.block_size
        self.config.check_prompt(num_prompt_tokens, num_blocks, block_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; one that can never fit is refused."""
        self.check(sequence.num_prompt_tokens)
        sequence.max_total_tokens = min(sequence.max_total_tokens, self.max_sequence_tokens)
        self._waiting.push(sequence)

    def hold(self, sequences: Iterable[Sequence]) -> None:
        """Take unfinished sequences out of the queue, preempting those that run."""
        held = {sequence for sequence in sequences if not sequence.is_finished}
        for sequence in held.intersection(self.running_sequences()):
            self._preempt(sequence)
        self._waiting.remove(held)
        for sequence in held:
            sequence.status = SequenceStatus.HELD

    def resume(self, sequences: Iterable[Sequence]) -> None:
        """Put held sequences back to their places in the queue, those that have not ended."""
        for sequence in sequences:
            if sequence.status is SequenceStatus.HELD:
                sequence.status = SequenceStatus.WAITING
                self._waiting.push(sequence)

    def abort(
        self, sequence: Sequence, reason: FinishReason = "abort", error: Exception | None = None
    ) -> None:
        """End a sequence now; a finished one is left as it is.

        In steps that are in flight its row still runs, and its result is dropped.
        """
        if not sequence.is_finished:
            sequence.error = error
            self._end(sequence, reason)

    def stop(self, sequence: Sequence, stop_string: str) -> None:
        """End a sequence in whose text a stop string was found, whatever its last token did."""
        sequence.stop_string = stop_string
        if sequence.is_finished:
            sequence.finish_reason = "stop"
        else:
            self._end(sequence, "stop")

    # -- schedule ---------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        """Choose the sequences and token counts of the next step.

        The batch is empty only if no sequence is unfinished, or if the step in flight has to come
        in first: because all end with it, or because blocks are short, since nobody is preempted
        who is about to get a token. Counts advance at once; the ids come with `update`.
        """
        step = StepBuilder(self._table, self.config.max_num_batched_tokens)
        if self.config.policy == "prefill_first":
            self._schedule_prompts(step)
            if step.is_empty:
                self._schedule_decodes(step)
        elif self._schedule_decodes(step):
            if self.sizing.has_target:
                step.budget = min(step.budget, self._prompt_tokens(step))
            self._schedule_prompts(step)
        if step.is_empty:
            assert self._flights or not self.has_unfinished, "an empty step: nothing would end"
            return step.build(self._next_step, [], self.sizing)
        completed = step.completed_prompts()  # their next tokens are decodes
        scheduled = step.build(self._next_step, self._table.take_released_rows(), self.sizing)
        self._flights.start(scheduled)
        self._next_step += 1
        if completed:
            self._decoding += completed
            self._decode_rows = None
            gone = set(completed)
            self._prefilling = [s for s in self._prefilling if s not in gone]
            self._waiting.note_complete(completed)
        return scheduled

    def _schedule_decodes(self, step: StepBuilder) -> bool:
        """Put the decodes in; False, with nothing done, if a step in flight has to be in first."""
        table, manager = self._table, self._blocks
        while True:
            rows = self._flights.going_on(self._rows_of_decoding())
            computed = table.num_computed[rows]
            growing = rows[computed == table.num_slots[rows]]
            if len(growing) <= manager.num_free_blocks:
                break
            if self._flights:
                return False
            self._preempt_for_blocks(self._victim(self.running_sequences()))
        for sequence in self._table.sequences_at(growing):
            self._grow(step, sequence, 1)
        table.num_computed[rows] = computed + 1
        self._flights.register_decodes(rows, self._next_step)
        step.add_decodes(rows)
        return True

    def _prompt_tokens(self, step: StepBuilder) -> int:
        size = (step.num_decodes, step.num_kv_tokens())
        under_way, has_waiting = self._table.progress(self._prefilling), bool(self._waiting)
        return self.sizing.prompt_tokens(*size, under_way, has_waiting=has_waiting)

    def _schedule_prompts(self, step: StepBuilder) -> None:
        under_way = list(self._prefilling)
        for sequence in under_way:
            if step.budget == 0:
                return
            if sequence.status is SequenceStatus.RUNNING:  # not preempted by one before it
                self._schedule_chunk(step, sequence, may_be_last=sequence is under_way[-1])
        self._admit(step)

    def _admit(self, step: StepBuilder) -> None:
        manager, reserved = self._blocks, self._reserved_blocks()
        while step.budget > 0 and (prefix := self._next_admission(reserved)) is not None:
            sequence = self._waiting.pop()
            num_blocks = manager.blocks_for(len(sequence.token_ids))
            manager.claim(sequence, prefix.blocks)
            if sequence.admission_index < 0:
                sequence.num_cached_tokens = prefix.num_tokens
            sequence.admission_index = self._num_admissions
            self._num_admissions += 1
            self._table.admit(sequence, len(prefix.blocks) * manager.block_size)
            bisect.insort(self._prefilling, sequence, key=self._waiting.precedence)
            step.add_admission(sequence)
            if prefix.copied is not None:
                self._grow(step, sequence, 1)
                step.add_copy(prefix.copied, sequence.blocks[-1])
                self._table.num_computed[sequence.row] = prefix.num_tokens
            self._schedule_chunk(step, sequence, may_be_last=True)
            reserved += num_blocks - len(sequence.blocks)

    def _next_admission(self, reserved: int) -> ComputedPrefix | None:
        """What the first waiting sequence can take over; None if none can be admitted now."""
        manager, sequence = self._blocks, self._waiting.peek()
        if sequence is None or not self._table.num_free_rows:
            return None
        if self._num_endings < sequence.starts_after_endings and self.num_running:
            return None  # the victim of a shortage that nobody's end has relieved yet
        prefix = computed_prefix(sequence, manager)
        num_blocks = manager.blocks_for(len(sequence.token_ids))
        needed = num_blocks - len(prefix.blocks) + manager.num_free_hits(prefix.blocks)
        # Strictly in order: smaller ones behind it must not starve it.
        return prefix if needed + reserved <= manager.num_free_blocks else None

    def _reserved_blocks(self) -> int:
        """Free blocks that sequences already admitted will want."""
        reserved = 0
        for sequence in self._prefilling:
            num_tokens = int(self._table.num_tokens[sequence.row])
            reserved += self._blocks.blocks_for(num_tokens) - len(sequence.blocks)
        # Decodes grow too: without some room a newcomer would be preempted again at once.
        return reserved + min(len(self._decoding), self._blocks.num_usable_blocks // 16)

    def _schedule_chunk(self, step: StepBuilder, sequence: Sequence, *, may_be_last: bool) -> None:
        table, manager, row = self._table, self._blocks, sequence.row
        computed, num_tokens = int(table.num_computed[row]), int(table.num_tokens[row])
        num_new = min(num_tokens - computed, step.budget)
        num_new = min(num_new, self.config.max_prefill_chunk or num_new)
        missing = manager.blocks_for(computed + num_new) - len(sequence.blocks)
        while missing > manager.num_free_blocks:
            # Prompts behind this one are not in the step yet, so they can be preempted.
            behind = self._prefilling[self._prefilling.index(sequence) + 1 :]
            if not behind:
                missing = manager.num_free_blocks
                break
            self._preempt_for_blocks(self._victim(behind))
        num_slots = (len(sequence.blocks) + missing) * manager.block_size
        num_new = min(num_new, num_slots - computed)
        if num_new == 0:
            return  # decodes grew into what was reserved; the step goes on with them
        may_be_cut = may_be_last and computed + num_new == num_tokens
        if may_be_cut and (num_left := self._num_left(step, num_tokens, num_new)):
            num_new = step.budget = num_new - num_left  # nothing may follow: the step is full
            missing = manager.blocks_for(computed + num_new) - len(sequence.blocks)
        self._grow(step, sequence, missing)
        table.num_computed[row] = computed + num_new
        step.add_chunk(sequence, computed, num_new)
        manager.register(sequence, table.token_ids[row], computed + num_new, self._next_step)

    def _num_left(self, step: StepBuilder, num_context: int, num_new: int) -> int:
        """How much of the step's last chunk, which ends a prompt, should wait for the next step."""
        num_left = self.sizing.num_beyond_size(num_new, num_before=step.num_tokens)
        if not num_left or not self.sizing.shortening_pays(
            step.num_tokens + num_new,
            num_left,
            num_kv_tokens=step.num_kv_tokens() + num_context,
            num_pairs=step.num_pairs() + chunk_pairs(num_context - num_new, num_new),
            num_left_pairs=chunk_pairs(num_context - num_left, num_left),
            num_next_decodes=step.num_decodes + len(step.completed_prompts()),
        ):
            return 0
        return num_left if self._next_admission(self._reserved_blocks()) is None else 0

    def _grow(self, step: StepBuilder, sequence: Sequence, num_blocks: int) -> None:
        first = len(sequence.blocks)
        self._blocks.allocate(sequence, num_blocks)
        self._table.num_slots[sequence.row] += num_blocks * self._blocks.block_size
        step.add_blocks(sequence, first)

    # -- update -----------------------------------------------------------------------------

    def update(self, scheduled: ScheduledBatch, output: StepOutput) -> SequenceUpdates:
        """Take in the ids of the oldest step in flight; end the sequences that are done."""
        table, token_ids, is_valid = self._table, output.token_ids, output.is_valid
        record_logprobs(table.sequences, scheduled, output)
        self._flights.end(scheduled)
        rows = scheduled.rows[scheduled.sampled]
        keep = table.is_live[rows]
        if not keep.all():  # aborted meanwhile
            rows, token_ids, is_valid = rows[keep], token_ids[keep], is_valid[keep]
        sequences, finished = table.sequences_at(rows), []
        if not is_valid.all():
            failed = [s for s, valid in zip(sequences, is_valid.tolist(), strict=True) if not valid]
            finished = [self._fail(sequence, output) for sequence in failed]
            sequences = [s for s in sequences if s not in failed]
            rows, token_ids = rows[is_valid], token_ids[is_valid]
        gaps = table.append(rows, token_ids, now := self._clock())
        for i in np.flatnonzero(np.isnan(gaps)).tolist():
            sequences[i].first_token_time = now
        finished += self._end_sequences(sequences, rows, token_ids)
        self._flights.register_late(rows)
        return SequenceUpdates(
            sequences=sequences, token_ids=token_ids, gaps=gaps, finished=finished
        )

    def rollback(self, scheduled: ScheduledBatch) -> list[Sequence]:
        """`scheduled` failed: all its sequences, which are returned, go back to the queue.

        So do those of the step after it. They lose no token that `update` has brought, and blocks
        filled by earlier steps stay findable, so that most of the work isn't done again.
        """
        return self._flights.roll_back(scheduled, self._preempt)

    def late_ids(self, scheduled: ScheduledBatch) -> LateIdsBatch:
        """What the oldest step in flight has placeholders for."""
        return self._flights.late_ids(scheduled)

    def _end_sequences(
        self, sequences: list[Sequence], rows: np.ndarray, token_ids: np.ndarray
    ) -> list[Sequence]:
        ends, stops = self._table.find_ends(rows, token_ids, self.config.end_token_ids)
        finished = []
        for i in np.flatnonzero(ends).tolist():
            self._end(sequences[i], "stop" if stops[i] else "length")
            finished.append(sequences[i])
        return finished

    def _fail(self, sequence: Sequence, output: StepOutput) -> Sequence:
        sequence.error = output.error_of(sequence, int(self._table.num_tokens[sequence.row]))
        if sequence.row not in output.row_errors:
            self._blocks.forget(sequence)  # its K/V may be as bad, and must serve nobody else
        self._end(sequence, "error")
        return sequence

    # -- leaving ----------------------------------------------------------------------------

    def _victim(self, sequences: list[Sequence]) -> Sequence:
        return max(sequences, key=lambda s: (self._waiting.precedence(s)[0], s.admission_index))

    def _preempt_for_blocks(self, sequence: Sequence) -> None:
        self._preempt(sequence)
        sequence.starts_after_endings = self._num_endings + 1

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.push(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take back a running sequence's blocks and row."""
        self._blocks.free(sequence)
        self._table.retire(sequence)
        self._waiting.note_leaving(sequence)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        else:
            self._decoding.remove(sequence)
            self._decode_rows = None

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._leave(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting.discard(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.finish_time = self._clock()
        self._num_endings += 1

    def _rows_of_decoding(self) -> np.ndarray:
        if self._decode_rows is None:
            self._decode_rows = np.array([s.row for s in self._decoding], dtype=np.int64)
        return self._decode_rows
