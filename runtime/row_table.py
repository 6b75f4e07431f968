"""What the runner knows of each running sequence."""

from __future__ import annotations

import numpy as np

from .sampling_params import SamplingParams
from .step import ScheduledBatch


class RowTable:
    """Block tables and sampling options by row; only `apply` changes it.

    Rows are the scheduler's. Everything a step needs beyond this table is in the
    `ScheduledBatch`, so packing the same batch twice gives the same arrays.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self.block_size = block_size
        self.block_tables = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        """[max_num_seqs, max_blocks_per_seq]; entries past a sequence's blocks are block 0."""
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int32)
        """0: off."""
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.params: list[SamplingParams | None] = [None] * max_num_seqs
        self.num_random = self.num_top_k = self.num_top_p = self.num_min_p = 0
        """Rows that use temperature above 0, top_k, ...: what nobody uses needs no work."""
        self.num_min_tokens = 0

    def apply(self, scheduled: ScheduledBatch) -> None:
        """Take in what changed since the last step: leavers, newcomers, new blocks."""
        for row in scheduled.released_rows.tolist():
            self._clear_params(row)
        admitted = scheduled.admitted_rows
        if len(admitted):
            # A row starts from null blocks, whatever its last sequence left there.
            self.block_tables[admitted] = 0
            self.num_prompt_tokens[admitted] = scheduled.admitted_num_prompt_tokens
            self.seeds[admitted] = scheduled.admitted_seeds
            for row, params in zip(admitted.tolist(), scheduled.admitted_params, strict=True):
                self._set_params(row, params)
        self.block_tables[scheduled.new_block_rows, scheduled.new_block_indices] = (
            scheduled.new_block_ids
        )

    def _set_params(self, row: int, params: SamplingParams) -> None:
        self._clear_params(row)  # a step that failed may have swallowed the release
        self.params[row] = params
        self._count(params, 1)
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.min_tokens[row] = params.min_tokens

    def _clear_params(self, row: int) -> None:
        params, self.params[row] = self.params[row], None
        if params is not None:
            self._count(params, -1)

    def _count(self, params: SamplingParams, change: int) -> None:
        self.num_random += change * (params.temperature > 0)
        self.num_top_k += change * (params.top_k > 0)
        self.num_top_p += change * (params.top_p < 1)
        self.num_min_p += change * (params.min_p > 0)
        self.num_min_tokens += change * (params.min_tokens > 0)
