"""One mixed step gives the logits of its sequences run one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention import BoundAttention, PagedKVCache, select_backend
from runtime.input_batch import pack
from runtime.row_table import RowTable
from runtime.sampling_params import SamplingParams
from runtime.staging import StagingBuffer
from runtime.step import ScheduledBatch
from tests.graphs.traffic import (
    BLOCK_SIZE,
    VOCAB,
    copy_cache,
    poisoned_cache,
    tiny_model,
    tiny_spec,
)

CPU = torch.device("cpu")
# Computed and new tokens: three decodes, the middle of a prompt, and a fresh prompt of which the
# first two blocks are those of the second decode.
LENGTHS = ((9, 1), (11, 1), (20, 1), (17, 9), (8, 6))
TABLES = ([5, 2, 7], [9, 4, 8], [1, 3, 6, 10, 11, 12], [13, 14, 15, 16, 17, 18, 19], [9, 4, 20, 21])


def sequences():
    """Token ids of each sequence: those computed, then the new ones."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, VOCAB, sum(lengths)).astype(np.int32) for lengths in LENGTHS]
    ids[4][:8] = ids[1][:8]
    return ids


def scheduled(parts):
    """A step of (sequence, token ids, tokens before them)."""
    rows = np.array([row for row, _, _ in parts])
    blocks = [(row, index, block) for row in rows for index, block in enumerate(TABLES[row])]
    new_blocks = np.array(blocks)
    return ScheduledBatch(
        step=0,
        rows=rows,
        num_computed_tokens=np.array([computed for _, _, computed in parts]),
        num_new_tokens=np.array([len(ids) for _, ids, _ in parts]),
        num_decodes=sum(len(ids) == 1 for _, ids, _ in parts),
        token_ids=np.concatenate([ids for _, ids, _ in parts]),
        sampled=np.arange(len(parts)),
        released_rows=np.empty(0, dtype=np.int64),
        admitted_rows=rows,
        admitted_params=(SamplingParams(),) * len(parts),
        admitted_seeds=np.zeros(len(parts), dtype=np.uint64),
        admitted_num_prompt_tokens=np.ones(len(parts), dtype=np.int64),
        new_block_rows=new_blocks[:, 0],
        new_block_indices=new_blocks[:, 1],
        new_block_ids=new_blocks[:, 2],
    )


@pytest.mark.parametrize("name", ["native", "torch"])
@torch.inference_mode()
def test_three_decodes_a_middle_chunk_and_a_prefix_hit_equal_five_steps(name):
    model, backend = tiny_model(CPU), select_backend(name, tiny_spec(CPU))

    def logits(parts, cache: PagedKVCache) -> torch.Tensor:
        table = RowTable(len(TABLES), max(map(len, TABLES)), BLOCK_SIZE)
        batch = scheduled(parts)
        table.apply(batch)
        packed = pack(table, batch, StagingBuffer(CPU))
        attend = BoundAttention(backend=backend, plan=backend.plan(packed.metadata), cache=cache)
        return model.compute_logits(model(packed.input_ids, packed.positions, attend))

    ids = sequences()
    before = poisoned_cache(backend.spec)
    for row, (computed, _) in enumerate(LENGTHS[:4]):
        logits([(row, ids[row][:computed], 0)], before)
    parts = [(row, ids[row][computed:], computed) for row, (computed, _) in enumerate(LENGTHS)]
    caches = [poisoned_cache(backend.spec) for _ in range(3)]
    for cache in caches[:2]:
        copy_cache(before, cache)
    mixed = logits(parts, caches[0])
    alone = torch.cat([logits([part], caches[1]) for part in parts])
    torch.testing.assert_close(mixed, alone, rtol=0, atol=1e-4)
    # As if nothing had been in the cache: whole sequences, of which the new tokens are looked at.
    whole = [logits([(row, ids[row], 0)], caches[2])[n:] for row, (n, _) in enumerate(LENGTHS)]
    torch.testing.assert_close(mixed, torch.cat(whole), rtol=0, atol=1e-4)
    assert mixed.std() > 0.1  # the comparisons mean something
