"""Collects one step's decisions and makes the `ScheduledBatch` of them."""

from __future__ import annotations

import numpy as np

from .block import Block
from .budget_policy import BudgetPolicy
from .sequence import Sequence
from .sequence_table import SequenceTable
from .step import ScheduledBatch, ScoringBatch
from .step_cost import chunk_pairs


def _int64(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class StepBuilder:
    """Filled by the scheduler during one schedule().

    `budget` is how many tokens can still be added, `num_tokens` how many there are.
    """

    def __init__(self, table: SequenceTable, budget: int) -> None:
        self.budget = budget
        self.num_tokens = 0
        self._table = table
        self._decode_rows = np.empty(0, dtype=np.int64)
        self._chunked: list[Sequence] = []
        self._chunk_starts: list[int] = []
        self._chunk_sizes: list[int] = []
        self._admitted: list[Sequence] = []
        self._new_blocks: list[tuple[int, int, int]] = []
        self._block_copies: list[tuple[int, int]] = []

    @property
    def is_empty(self) -> bool:
        """True while no sequence is in the step."""
        return not len(self._decode_rows) and not self._chunked

    @property
    def num_decodes(self) -> int:
        """Decodes of the step."""
        return len(self._decode_rows)

    def num_kv_tokens(self) -> int:
        """Context, after the step, of what is in it."""
        decodes = int(self._table.num_computed[self._decode_rows].sum())
        return decodes + sum(self._chunk_starts) + sum(self._chunk_sizes)

    def num_pairs(self) -> int:
        """Pairs of a query and a key of what is in it."""
        decodes = int(self._table.num_computed[self._decode_rows].sum())
        return decodes + sum(map(chunk_pairs, self._chunk_starts, self._chunk_sizes))

    def add_decodes(self, rows: np.ndarray) -> None:
        """Put all decoding rows in, one token each; the table's counts are advanced already."""
        self._decode_rows = rows
        self.budget -= len(rows)
        self.num_tokens += len(rows)

    def add_chunk(self, sequence: Sequence, num_computed: int, num_new: int) -> None:
        """Put `num_new` tokens of a sequence in, from position `num_computed` on."""
        self._chunked.append(sequence)
        self._chunk_starts.append(num_computed)
        self._chunk_sizes.append(num_new)
        self.budget -= num_new
        self.num_tokens += num_new

    def add_admission(self, sequence: Sequence) -> None:
        """Tell the runner whose row it is now, and of the blocks it has taken over."""
        self._admitted.append(sequence)
        self.add_blocks(sequence, 0)

    def add_blocks(self, sequence: Sequence, first: int) -> None:
        """Tell the runner of the sequence's blocks from index `first` on."""
        row = sequence.row
        for index in range(first, len(sequence.blocks)):
            self._new_blocks.append((row, index, sequence.blocks[index].block_id))

    def add_copy(self, source: Block, target: Block) -> None:
        """Have `target` filled with what `source` holds before the step."""
        self._block_copies.append((source.block_id, target.block_id))

    def completed_prompts(self) -> list[Sequence]:
        """Sequences whose last known token is in the step: their next one is wanted."""
        computed, known = self._table.num_computed, self._table.num_tokens
        return [s for s in self._chunked if computed[s.row] == known[s.row]]

    def build(self, step: int, released_rows: list[int], policy: BudgetPolicy) -> ScheduledBatch:
        """The step as a value, its bucket chosen by `policy`."""
        table, num_decodes = self._table, len(self._decode_rows)
        num_seqs = num_decodes + len(self._chunked)
        bucket = policy.bucket(self.num_tokens, is_uniform_decode=self.num_tokens == num_seqs)
        decode_starts = table.num_computed[self._decode_rows] - 1
        chunk_rows = _int64([s.row for s in self._chunked])
        sampled_chunks = np.flatnonzero(
            table.num_computed[chunk_rows] == table.num_tokens[chunk_rows]
        )
        chunk_tokens = [
            table.token_ids[s.row, start : start + size]
            for s, start, size in zip(
                self._chunked, self._chunk_starts, self._chunk_sizes, strict=True
            )
        ]
        new_blocks = np.array(self._new_blocks, dtype=np.int64).reshape(-1, 3)
        admitted = self._admitted
        has_rules = any(s.rules is not None for s in admitted)
        decode_ids = table.token_ids[self._decode_rows, decode_starts]
        placeholders = np.flatnonzero(decode_starts >= table.num_tokens[self._decode_rows])
        decode_ids[placeholders] = 0
        rows = np.concatenate([self._decode_rows, chunk_rows])
        sampled = np.concatenate([np.arange(num_decodes), num_decodes + sampled_chunks])
        return ScheduledBatch(
            step=step,
            rows=rows,
            num_computed_tokens=np.concatenate([decode_starts, _int64(self._chunk_starts)]),
            num_new_tokens=np.concatenate(
                [np.ones(num_decodes, dtype=np.int64), _int64(self._chunk_sizes)]
            ),
            num_decodes=num_decodes,
            token_ids=np.concatenate([decode_ids, *chunk_tokens]),
            sampled=sampled,
            released_rows=_int64(released_rows),
            admitted_rows=_int64([s.row for s in admitted]),
            admitted_params=tuple(s.params for s in admitted),
            admitted_seeds=np.array([s.seed for s in admitted], dtype=np.uint64),
            admitted_num_prompt_tokens=_int64([s.num_prompt_tokens for s in admitted]),
            new_block_rows=new_blocks[:, 0],
            new_block_indices=new_blocks[:, 1],
            new_block_ids=new_blocks[:, 2],
            block_copies=np.array(self._block_copies, dtype=np.int64).reshape(-1, 2).T,
            bucket=bucket,
            admitted_rules=tuple(s.rules for s in admitted) if has_rules else (),
            admitted_token_ids=tuple(map(_token_ids, admitted)) if has_rules else (),
            host_rows=sampled[table.needs_output_ids[rows[sampled]]],
            placeholders=placeholders,
            scoring=self._scoring(),
        )

    def _scoring(self) -> ScoringBatch | None:
        """The prompt rows whose log-probabilities are wanted and not there yet."""
        places, next_ids, rows, firsts, counts, num_top = [], [], [], [], [], 0
        place = len(self._decode_rows)  # of the chunk's first token in the flat batch
        for sequence, start, size in zip(
            self._chunked, self._chunk_starts, self._chunk_sizes, strict=True
        ):
            record = sequence.prompt_logprobs
            if record is not None:
                first = max(start, len(record))
                last = min(start + size, sequence.num_prompt_tokens - 1)
                if first < last:
                    places.append(np.arange(first, last) + (place - start))
                    next_ids.append(self._table.token_ids[sequence.row, first + 1 : last + 1])
                    rows.append(sequence.row)
                    firsts.append(first)
                    counts.append(last - first)
                    num_top = max(num_top, record.num_top)
            place += size
        if not rows:
            return None
        return ScoringBatch(
            places=np.concatenate(places),
            next_ids=np.concatenate(next_ids).astype(np.int64),
            rows=_int64(rows),
            firsts=_int64(firsts),
            counts=_int64(counts),
            num_top=num_top,
        )


def _token_ids(sequence: Sequence) -> np.ndarray | None:
    rules = sequence.rules
    looks_back = rules is not None and (rules.has_penalties or rules.needs_output_ids)
    return sequence.token_ids if looks_back else None
