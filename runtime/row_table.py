"""What the runner knows of each running sequence."""

from __future__ import annotations

import numpy as np

from .grammar import GrammarMatcher
from .logits_rules import LogitsRules
from .sampler import seed_streams
from .sampling_params import SamplingParams
from .step import LateIdsBatch, ScheduledBatch

NO_LOGPROBS = -1
"""In `RowTable.num_logprobs`: the row wants none."""


class RowTable:
    """Block tables and sampling options by row; only `apply` changes it.

    Rows are the scheduler's. Everything a step needs beyond this table is in the
    `ScheduledBatch`, so packing the same batch twice gives the same arrays.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        block_size: int,
        *,
        keeps_drawn: bool = False,
    ) -> None:
        self.block_size = block_size
        self.keeps_drawn = keeps_drawn
        """Whether the device keeps what it draws, for the placeholders of the next step."""
        self.block_tables = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        """[max_num_seqs, max_blocks_per_seq]; entries past a sequence's blocks are block 0."""
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.streams = np.zeros(max_num_seqs, dtype=np.uint64)
        """Each row's `seed_streams`."""
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int32)
        """0: off."""
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        """Likeliest tokens wanted beside each sampled one, or NO_LOGPROBS."""
        self.rules: list[LogitsRules | None] = [None] * max_num_seqs
        self.has_edits = np.zeros(max_num_seqs, dtype=bool)
        """As `LogitsRules.has_edits`."""
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.has_penalties = np.zeros(max_num_seqs, dtype=bool)
        self.repetition_penalty = np.ones(max_num_seqs, dtype=np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, dtype=np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, dtype=np.float32)
        self.output_ids: dict[int, list[int]] = {}
        """All ids generated so far, by row, where the rules need them."""
        self.matchers: dict[int, GrammarMatcher] = {}
        """By row, of outputs that have a grammar. Each follows its `output_ids` when a mask is
        prepared, never further: so a step that fails leaves no trace in it."""
        self.params: list[SamplingParams | None] = [None] * max_num_seqs
        self.num_random = self.num_top_k = self.num_top_p = self.num_min_p = 0
        """Rows that use temperature above 0, top_k, ...: what nobody uses needs no work."""
        self.num_with_logprobs = self.num_with_rules = 0

    def apply(self, scheduled: ScheduledBatch) -> None:
        """Take in what changed since the last step: leavers, newcomers, new blocks, new ids."""
        for row in scheduled.released_rows.tolist():
            self._clear_params(row)
        admitted = scheduled.admitted_rows
        if len(admitted):
            # A row starts from null blocks, whatever its last sequence left there.
            self.block_tables[admitted] = 0
            self.num_prompt_tokens[admitted] = scheduled.admitted_num_prompt_tokens
            self.streams[admitted] = seed_streams(scheduled.admitted_seeds)
            for row, params in zip(admitted.tolist(), scheduled.admitted_params, strict=True):
                self._set_params(row, params)
        if scheduled.admitted_rules:
            self._admit_rules(scheduled)
        self.block_tables[scheduled.new_block_rows, scheduled.new_block_indices] = (
            scheduled.new_block_ids
        )
        if len(scheduled.host_rows) and not scheduled.draw_waits:
            self._extend_outputs(scheduled, scheduled.host_rows, scheduled.token_ids)

    def take_late_ids(self, scheduled: ScheduledBatch, late: LateIdsBatch) -> None:
        """Take in what the draw of `scheduled`, the last step applied, had to wait for."""
        places, ended = scheduled.host_rows, late.ended_rows
        if len(ended):
            for row in ended.tolist():
                self._clear_params(row)  # nobody wants its draw: spare the host the work
            places = places[~np.isin(scheduled.rows[places], ended)]
        self._extend_outputs(scheduled, places, late.token_ids)

    def _admit_rules(self, scheduled: ScheduledBatch) -> None:
        columns = (scheduled.admitted_rules, scheduled.admitted_token_ids)
        for row, rules, token_ids in zip(scheduled.admitted_rows.tolist(), *columns, strict=True):
            if rules is None:
                continue
            self.rules[row] = rules
            self.num_with_rules += 1
            self.has_edits[row] = rules.has_edits
            self.min_tokens[row] = rules.min_tokens
            self.has_penalties[row] = rules.has_penalties
            self.repetition_penalty[row] = rules.repetition_penalty
            self.frequency_penalty[row] = rules.frequency_penalty
            self.presence_penalty[row] = rules.presence_penalty
            if rules.needs_output_ids:
                assert token_ids is not None, f"row {row} came without its tokens"
                self.output_ids[row] = token_ids[self.num_prompt_tokens[row] :].tolist()
            if rules.grammar is not None:
                self.matchers[row] = rules.grammar.start()

    def _extend_outputs(
        self, scheduled: ScheduledBatch, places: np.ndarray, token_ids: np.ndarray
    ) -> None:
        """Add to `output_ids` what the last step drew, which is this step's input."""
        rows = scheduled.rows[places]
        ends = scheduled.num_computed_tokens[places] + scheduled.num_new_tokens[places]
        newest = token_ids[scheduled.num_new_tokens.cumsum()[places] - 1]
        num_outputs = ends - self.num_prompt_tokens[rows]
        for row, num, token_id in zip(
            rows.tolist(), num_outputs.tolist(), newest.tolist(), strict=True
        ):
            outputs = self.output_ids[row]
            if num > len(outputs):
                outputs.append(token_id)
            assert num == len(outputs), f"row {row} misses ids: {len(outputs)} of {num}"

    def _set_params(self, row: int, params: SamplingParams) -> None:
        self._clear_params(row)  # a step that failed may have swallowed the release
        self.params[row] = params
        self._count(params, 1)
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs

    def _clear_params(self, row: int) -> None:
        params, self.params[row] = self.params[row], None
        if params is not None:
            self._count(params, -1)
        if self.rules[row] is not None:
            self.rules[row] = None
            self.num_with_rules -= 1
            self.has_edits[row] = self.has_penalties[row] = False
            self.min_tokens[row] = 0
            self.output_ids.pop(row, None)
            self.matchers.pop(row, None)

    def _count(self, params: SamplingParams, change: int) -> None:
        self.num_random += change * (params.temperature > 0)
        self.num_top_k += change * (params.top_k > 0)
        self.num_top_p += change * (params.top_p < 1)
        self.num_min_p += change * (params.min_p > 0)
        self.num_with_logprobs += change * (params.logprobs is not None)
