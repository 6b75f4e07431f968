"""Host time of one engine step without the model: schedule, apply and pack, update.

    python profiling/host_cost.py [--context 600] [--steps 200]

Every sequence decodes. The mean covers whole block periods, so that the steps in which sequences
take and register blocks count with their share; contexts are staggered as in real traffic.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time

import numpy as np
import torch

from runtime.block_manager import BlockManager
from runtime.input_batch import pack
from runtime.row_table import RowTable
from runtime.sampling_params import SamplingParams
from runtime.scheduler import Scheduler
from runtime.scheduler_config import SchedulerConfig
from runtime.sequence import Sequence
from runtime.staging import StagingBuffer
from runtime.step import ScheduledBatch, StepOutput

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192


class Loop:
    """A scheduler and a batch builder with `num_seqs` sequences decoding."""

    def __init__(self, num_seqs: int, context: int) -> None:
        blocks_per_seq = -(-MAX_MODEL_LEN // BLOCK_SIZE)
        self.blocks = BlockManager(num_seqs * blocks_per_seq // 4, BLOCK_SIZE)
        config = SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(8192, num_seqs),
            max_model_len=MAX_MODEL_LEN,
            end_token_ids=(0, 2),
        )
        self.scheduler = Scheduler(config, self.blocks)
        self.table = RowTable(num_seqs, blocks_per_seq, BLOCK_SIZE)
        self.staging = StagingBuffer(torch.device("cpu"))
        rng = np.random.default_rng(0)
        params = SamplingParams(temperature=0.6, max_tokens=MAX_MODEL_LEN, ignore_eos=True)
        for index in range(num_seqs):
            num_tokens = context + index % BLOCK_SIZE
            sequence = Sequence(
                request_id=str(index),
                token_ids=rng.integers(3, 10_000, num_tokens).astype(np.int32),
                num_prompt_tokens=num_tokens,
                params=params,
                seed=index,
                max_total_tokens=MAX_MODEL_LEN,
                arrival_index=index,
                arrival_time=0.0,
            )
            self.scheduler.add(sequence)
        while self.step().num_decodes < num_seqs:
            pass

    def step(self, times: list[tuple[float, float, float]] | None = None) -> ScheduledBatch:
        """One step with made-up tokens; appends (schedule, pack, update) seconds to `times`."""
        start = time.perf_counter()
        scheduled = self.scheduler.schedule()
        middle = time.perf_counter()
        self.table.apply(scheduled)
        pack(self.table, scheduled, self.staging)
        packed = time.perf_counter()
        token_ids = np.full(len(scheduled.sampled), 5, dtype=np.int64)
        output = StepOutput(token_ids=token_ids, is_valid=np.ones(len(token_ids), dtype=bool))
        before = time.perf_counter()
        self.scheduler.update(scheduled, output)
        end = time.perf_counter()
        if times is not None:
            times.append((middle - start, packed - middle, end - before))
        return scheduled


def main() -> None:
    """Print one line per number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=600, help="tokens of each sequence")
    parser.add_argument("--steps", type=int, default=160, help="multiple of the block size")
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 64, 256, 1024])
    args = parser.parse_args()
    print(f"python {platform.python_version()}, numpy {np.__version__}, context {args.context}")
    print("sequences   schedule       pack     update   total mean  median   microseconds a step")
    for num_seqs in args.seqs:
        loop = Loop(num_seqs, args.context)
        for _ in range(BLOCK_SIZE):
            loop.step()
        gc.collect()
        times: list[tuple[float, float, float]] = []
        for _ in range(args.steps):
            loop.step(times)
        parts = [1e6 * statistics.fmean(part) for part in zip(*times, strict=True)]
        median = 1e6 * statistics.median(map(sum, times))
        columns = "".join(f"{part:11.1f}" for part in parts)
        print(f"{num_seqs:9d}{columns}{sum(parts):13.1f}{median:8.1f}")


if __name__ == "__main__":
    main()
