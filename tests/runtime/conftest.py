"""A scheduler under test, and a stand-in for the model that notices every wrong K/V slot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from runtime.block_manager import BlockManager
from runtime.sampling_params import SamplingParams
from runtime.scheduler import Scheduler
from runtime.scheduler_config import SchedulerConfig
from runtime.sequence import Sequence, SequenceStatus
from runtime.siblings import make_streams
from runtime.step import ScheduledBatch, SequenceUpdates, StepOutput
from runtime.step_cost import StepCost

VOCAB = 97
MASK = (1 << 61) - 1


def fold(state: int, token: int) -> int:
    """The "K/V" of a token: a digest of it and of all tokens before it."""
    return (state * 1_000_003 + token * 7919 + 12345) & MASK


def next_token(state: int, seed: int = 0) -> int:
    """The "draw" after a context with that digest."""
    return ((state ^ seed) >> 17) % VOCAB


def continuation(prompt: list[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What the stand-in generates after `prompt`, computed without any cache."""
    state = 0
    for token in prompt:
        state = fold(state, token)
    output = []
    for _ in range(num_tokens):
        output.append(next_token(state, seed))
        state = fold(state, output[-1])
    return output


class StandInModel:
    """Keeps a digest per KV slot, reached only through block tables, as a real pool would be.

    A wrong hit, a stale block, a slot written twice or a block taken away too early changes the
    digest that a sequence finds, and with it its tokens.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tables: dict[int, dict[int, int]] = {}
        self.slots: dict[int, int] = {}
        self.drawn: dict[int, int] = {}
        self.seeds: dict[int, int] = {}

    def execute(
        self, batch: ScheduledBatch, *, invalid: frozenset[int] = frozenset()
    ) -> StepOutput:
        """Run a step; sampled positions in `invalid` come back as NaN rows would."""
        for row in batch.admitted_rows.tolist():
            self.tables[row] = {}
        self.seeds.update(
            zip(batch.admitted_rows.tolist(), batch.admitted_seeds.tolist(), strict=True)
        )
        self._copy_blocks(*batch.block_copies.tolist())
        deltas = (batch.new_block_rows, batch.new_block_indices, batch.new_block_ids)
        for row, index, block in zip(*(array.tolist() for array in deltas), strict=True):
            assert index == len(self.tables[row]), "a block table has a hole"
            self.tables[row][index] = block
        token_ids = batch.token_ids.copy()
        for place in batch.placeholders.tolist():
            assert token_ids[place] == 0, "a placeholder has an id"
            token_ids[place] = self.drawn[int(batch.rows[place])]
        states, written, start = [], set(), 0
        for row, computed, new in zip(
            batch.rows.tolist(),
            batch.num_computed_tokens.tolist(),
            batch.num_new_tokens.tolist(),
            strict=True,
        ):
            state = self.slots[self._slot(row, computed - 1)] if computed else 0
            for offset, token in enumerate(token_ids[start : start + new].tolist()):
                slot = self._slot(row, computed + offset)
                assert slot >= self.block_size, "the null block was written"
                assert slot not in written, "two sequences write one slot"
                written.add(slot)
                state = self.slots[slot] = fold(state, token)
            states.append(state)
            start += new
        assert start == batch.num_tokens
        rows = batch.rows.tolist()
        ids = [next_token(states[i], self.seeds[rows[i]]) for i in batch.sampled.tolist()]
        self.drawn.update(zip(batch.rows[batch.sampled].tolist(), ids, strict=True))
        valid = [i not in invalid for i in range(len(ids))]
        return StepOutput(
            token_ids=np.array(ids, dtype=np.int64), is_valid=np.array(valid, dtype=bool)
        )

    def _copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        assert len({*targets, 0}) == len(targets) + 1, "the null block, or one twice, is written"
        assert not set(sources) & set(targets), "a copied block is copied on"
        for source, target in zip(sources, targets, strict=True):
            for offset in range(self.block_size):
                state = self.slots.get(source * self.block_size + offset)
                self.slots.pop(target * self.block_size + offset, None)
                if state is not None:
                    self.slots[target * self.block_size + offset] = state

    def _slot(self, row: int, position: int) -> int:
        return self.tables[row][position // self.block_size] * self.block_size + (
            position % self.block_size
        )


class Bench:
    """A scheduler with the stand-in model behind it; checks every step's invariants."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        budget: int = 64,
        max_num_seqs: int | None = None,
        max_model_len: int = 4096,
        policy: str = "fcfs",
        max_prefill_chunk: int | None = None,
        end_token_ids: tuple[int, ...] = (),
        prefix_caching: bool = True,
        content_hash: Callable[[bytes], int] | None = None,
        step_cost: StepCost | None = None,
        **sizing: object,
    ) -> None:
        self.blocks = BlockManager(
            num_blocks + 1,
            block_size,
            enable_prefix_caching=prefix_caching,
            content_hash=content_hash,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=min(budget, 256) if max_num_seqs is None else max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=max_model_len,
                policy=policy,
                max_prefill_chunk=max_prefill_chunk,
                end_token_ids=end_token_ids,
                **sizing,
            ),
            self.blocks,
            step_cost=step_cost,
        )
        self.model = StandInModel(block_size)
        self.added: list[Sequence] = []
        self.in_flight: list[ScheduledBatch] = []
        self.num_steps = self.num_placeholders = self.num_copies = 0

    def add(
        self, prompt: list[int], max_tokens: int = 8, *, priority: int = 0, **params: object
    ) -> Sequence:
        """Queue a request; its first sequence, if it has several."""
        sequence = Sequence(
            request_id=f"r{len(self.added)}",
            token_ids=np.array(prompt, dtype=np.int32),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(max_tokens=max_tokens, **params),
            seed=0,
            max_total_tokens=len(prompt) + max_tokens,
            arrival_index=len(self.added),
            arrival_time=0.0,
            priority=priority,
        )
        for stream in make_streams(sequence):
            self.scheduler.add(stream)
            self.added.append(stream)
        return sequence

    def schedule(self) -> ScheduledBatch:
        running = set(self.scheduler.running_sequences())
        batch = self.scheduler.schedule()
        self.num_copies += batch.block_copies.shape[1]
        self.check_batch(batch)
        for sequence in running - set(self.scheduler.running_sequences()):
            assert sequence.status is SequenceStatus.WAITING, "only preemption removes here"
        return batch

    def check_batch(self, batch: ScheduledBatch) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        assert batch.num_tokens <= config.max_num_batched_tokens
        assert batch.num_tokens == batch.num_new_tokens.sum()
        assert scheduler.num_running <= config.max_num_seqs
        assert (batch.num_new_tokens[: batch.num_decodes] == 1).all()
        assert len(set(batch.rows.tolist())) == batch.num_seqs
        assert batch.num_seqs > 0 or self.in_flight or not scheduler.has_unfinished
        assert self.in_flight or not len(batch.placeholders)
        assert batch.bucket == self.smallest_bucket(batch)
        owners = {sequence.row: sequence for sequence in scheduler.running_sequences()}
        context = batch.num_computed_tokens + batch.num_new_tokens
        for row, length in zip(batch.rows.tolist(), context.tolist(), strict=True):
            assert len(owners[row].blocks) == self.blocks.blocks_for(length)
        scheduler.check_integrity()

    def smallest_bucket(self, batch: ScheduledBatch) -> int:
        ladders = self.scheduler.config.ladders
        if ladders is None or batch.num_tokens == 0:
            return 0
        for ladder in (ladders.decode if batch.is_uniform_decode else None, ladders.mixed):
            sizes = ladder.sizes if ladder is not None else ()
            size = min((size for size in sizes if size >= batch.num_tokens), default=0)
            if 0 < size <= 2 * batch.num_tokens:
                return size
        return 0

    def step(self) -> SequenceUpdates:
        batch = self.schedule()
        updates = self.scheduler.update(batch, self.model.execute(batch))
        self.scheduler.check_integrity()
        self.num_steps += 1
        return updates

    def launch(self) -> bool:
        """Schedule a step without running it; False if that has to wait for the last one."""
        batch = self.schedule()
        if batch.num_seqs:
            self.in_flight.append(batch)
            self.num_placeholders += len(batch.placeholders)
        return batch.num_seqs > 0

    def finish(self, *, invalid: frozenset[int] = frozenset()) -> SequenceUpdates:
        """Run the oldest step in flight and take in what it drew."""
        batch = self.in_flight.pop(0)
        updates = self.scheduler.update(batch, self.model.execute(batch, invalid=invalid))
        self.scheduler.check_integrity()
        self.num_steps += 1
        return updates

    def fail(self, batch: ScheduledBatch) -> list[Sequence]:
        """Let a step in flight fail, and so the one after it."""
        del self.in_flight[self.in_flight.index(batch) :]
        sequences = self.scheduler.rollback(batch)
        self.scheduler.check_integrity()
        return sequences

    def overlapped_step(self) -> SequenceUpdates:
        """Schedule ahead as far as that goes, then finish one step."""
        while len(self.in_flight) < 2 and self.launch():
            pass
        return self.finish()

    def run(self, max_steps: int = 100_000) -> None:
        while self.in_flight:
            self.finish()
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished, f"not done after {max_steps} steps"
        assert self.blocks.num_free_blocks == self.blocks.num_usable_blocks

    def output(self, sequence: Sequence) -> list[int]:
        """The sequence's output, checked against the model without a cache."""
        output = sequence.output_token_ids
        prompt = sequence.token_ids[: sequence.num_prompt_tokens].tolist()
        expected = continuation(prompt, len(output), sequence.seed)
        assert output == expected, f"{sequence.name} went wrong"
        return output


@pytest.fixture
def make_bench() -> type[Bench]:
    """Builds a scheduler with a stand-in model that notices every wrong K/V slot."""
    return Bench
