"""The flat batch: the worked example to the digit, and equality with a loop per token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from runtime.input_batch import pack
from runtime.logits_rules import make_logits_rules
from runtime.row_table import RowTable
from runtime.sampling_params import SamplingParams
from runtime.staging import StagingBuffer
from runtime.step import ScheduledBatch, ScoringBatch

CPU = torch.device("cpu")


def scheduled(
    sequences, *, num_decodes, sampled, params=None, prompt_lens=None, end_token_ids=(), **fields
):
    """A batch that admits all its sequences: (row, new token ids, computed, block table)."""
    rows = np.array([row for row, _, _, _ in sequences], dtype=np.int64)
    blocks = [
        (row, index, block) for row, _, _, table in sequences for index, block in enumerate(table)
    ]
    new_blocks = np.array(blocks, dtype=np.int64).reshape(-1, 3)
    tokens = [token for _, ids, _, _ in sequences for token in ids]
    params = params or [SamplingParams()] * len(rows)
    rules = [
        make_logits_rules(p, vocab_size=1000, end_token_ids=end_token_ids, tokenizer=None)
        for p in params
    ]
    return ScheduledBatch(
        step=0,
        rows=rows,
        num_computed_tokens=np.array([c for _, _, c, _ in sequences], dtype=np.int64),
        num_new_tokens=np.array([len(ids) for _, ids, _, _ in sequences], dtype=np.int64),
        num_decodes=num_decodes,
        token_ids=np.array(tokens, dtype=np.int32),
        sampled=np.array(sampled, dtype=np.int64),
        released_rows=np.empty(0, dtype=np.int64),
        admitted_rows=rows,
        admitted_params=tuple(params),
        admitted_seeds=np.arange(len(rows)).astype(np.uint64),
        admitted_num_prompt_tokens=np.array(prompt_lens or [1] * len(rows), dtype=np.int64),
        new_block_rows=new_blocks[:, 0],
        new_block_indices=new_blocks[:, 1],
        new_block_ids=new_blocks[:, 2],
        admitted_rules=tuple(rules),
        **{"admitted_token_ids": (None,) * len(rows), **fields},
    )


def packed(batch, *, block_size=4):
    table = RowTable(max_num_seqs=8, max_blocks_per_seq=64, block_size=block_size)
    table.apply(batch)
    return pack(table, batch, StagingBuffer(CPU))


def test_the_worked_example_to_the_digit():
    """A decodes, B is in the middle of its prompt, C is fresh and short enough to finish."""
    batch = packed(
        scheduled(
            [(0, [17], 6, [5, 2]), (1, [25, 26, 27], 4, [7, 9]), (2, [31, 32, 33, 34], 0, [3])],
            num_decodes=1,
            sampled=[0, 2],
        )
    )
    meta = batch.metadata
    assert batch.input_ids.tolist() == [17, 25, 26, 27, 31, 32, 33, 34]
    assert batch.positions.tolist() == [6, 4, 5, 6, 0, 1, 2, 3]
    assert meta.cu_seqlens_q.tolist() == [0, 1, 4, 8]
    assert meta.cu_seqlens_k.tolist() == [0, 7, 14, 18]
    assert (meta.max_seqlen_q, meta.max_seqlen_k) == (4, 7)
    assert meta.slot_mapping.tolist() == [10, 36, 37, 38, 12, 13, 14, 15]
    assert meta.context_lens.tolist() == [7, 7, 4]
    assert meta.block_tables.tolist() == [[5, 2], [7, 9], [3, 0]]
    assert batch.logits_indices.tolist() == [0, 7]
    assert (batch.input_ids.dtype, meta.cu_seqlens_q.dtype) == (torch.int32, torch.int32)
    assert (batch.positions.dtype, meta.slot_mapping.dtype) == (torch.int64, torch.int64)


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("seed", range(5))
def test_pack_equals_a_loop_per_token(block_size, seed):
    rng = np.random.default_rng(seed)
    num_decodes, sequences, next_block = int(rng.integers(0, 4)), [], 1
    free_rows = rng.permutation(8)
    for i in range(int(rng.integers(max(num_decodes, 1), 7))):
        new = 1 if i < num_decodes else int(rng.integers(1, 20))
        computed = int(rng.integers(0, 40))
        num_blocks = -(-(computed + new) // block_size)
        table = rng.permutation(np.arange(next_block, next_block + num_blocks)).tolist()
        next_block += num_blocks
        ids = rng.integers(0, 1000, new).tolist()
        sequences.append((int(free_rows[i]), ids, computed, table))
    batch = packed(
        scheduled(sequences, num_decodes=num_decodes, sampled=range(len(sequences))),
        block_size=block_size,
    )
    positions, slots = [], []
    for _, ids, computed, table in sequences:
        for position in range(computed, computed + len(ids)):
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
    assert batch.positions.tolist() == positions
    assert batch.metadata.slot_mapping.tolist() == slots
    assert batch.metadata.context_lens.tolist() == [c + len(ids) for _, ids, c, _ in sequences]
    for row, (_, _, _, table) in zip(batch.metadata.block_tables.tolist(), sequences, strict=True):
        assert row == table + [0] * (len(row) - len(table))


def test_packing_twice_gives_the_same_arrays():
    batch = scheduled([(3, [1, 2], 5, [4, 6])], num_decodes=0, sampled=[0])
    table = RowTable(8, 64, 4)
    table.apply(batch)
    first, second = (pack(table, batch, StagingBuffer(CPU)) for _ in range(2))
    assert torch.equal(first.metadata.slot_mapping, second.metadata.slot_mapping)
    assert torch.equal(first.sampling.uniforms, second.sampling.uniforms)


def test_a_row_starts_clean_whatever_its_last_sequence_left():
    table = RowTable(8, 64, 4)
    table.apply(scheduled([(2, [1] * 12, 0, [5, 6, 7])], num_decodes=0, sampled=[0]))
    table.apply(scheduled([(2, [1], 0, [9])], num_decodes=0, sampled=[0]))
    assert table.block_tables[2].tolist() == [9] + [0] * 63


def test_a_step_without_finished_prompts_samples_nothing():
    batch = packed(scheduled([(0, [1, 2, 3], 0, [1])], num_decodes=0, sampled=[]))
    assert batch.logits_indices.tolist() == []
    assert batch.sampling.temperature.shape == (0,)


def test_sampling_inputs_follow_the_sampled_rows():
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, top_k=-1),
        SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.1),
    ]
    sequences = [(4, [1], 3, [1]), (1, [2, 3], 0, [2]), (6, [4], 0, [3])]
    batch = packed(scheduled(sequences, num_decodes=1, sampled=[0, 2], params=params))
    sampling = batch.sampling
    assert sampling.temperature.tolist() == pytest.approx([0.0, 0.7])
    assert sampling.top_k.tolist() == [0, 9]
    assert (sampling.max_top_k, sampling.any_top_p, sampling.any_min_p) == (9, True, True)
    assert not sampling.all_greedy


def test_a_stage_that_no_running_row_uses_is_skipped():
    table, staging = RowTable(8, 64, 4), StagingBuffer(CPU)
    plain = (0, [1], 0, [1])
    fancy = SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.1, min_tokens=2)

    def flags(batch):
        table.apply(batch)
        packed = pack(table, batch, staging)
        sampling = packed.sampling
        flags = (sampling.all_greedy, sampling.max_top_k, sampling.any_top_p, sampling.any_min_p)
        return (*flags, packed.logits is not None)

    greedy = [SamplingParams(temperature=0)]
    first = scheduled([plain], num_decodes=0, sampled=[0], params=greedy)
    assert flags(first) == (True, 0, False, False, False)
    second = scheduled(
        [(1, [1], 0, [2])], num_decodes=0, sampled=[0], params=[fancy], end_token_ids=(0,)
    )
    assert flags(second) == (False, 9, True, True, True)
    # The row is admitted anew although its release was never told, then told.
    assert flags(second) == (False, 9, True, True, True)
    left = dataclasses.replace(
        scheduled([plain], num_decodes=0, sampled=[0], params=greedy), released_rows=np.array([1])
    )
    assert flags(left) == (True, 0, False, False, False)


def test_draws_depend_on_seed_and_output_position_alone():
    one = packed(scheduled([(0, [5], 9, [1, 2, 3])], num_decodes=1, sampled=[0], prompt_lens=[4]))
    two = packed(
        scheduled(
            [(0, [5], 29, [*range(8)]), (1, [5], 9, [1, 2, 3])],
            num_decodes=2,
            sampled=[0, 1],
            prompt_lens=[24, 4],
        )
    )
    # Same seed (0) and the same number of outputs so far (6), in another batch and place.
    assert one.sampling.uniforms[0] == two.sampling.uniforms[0]
    assert one.sampling.uniforms[0] != two.sampling.uniforms[1]


def test_end_tokens_are_forbidden_before_min_tokens():
    params = [
        SamplingParams(min_tokens=3, stop_token_ids=(7,)),
        SamplingParams(min_tokens=3, ignore_eos=True),
        SamplingParams(),
    ]
    sequences = [(0, [1], 3, [1]), (1, [1], 3, [2]), (2, [1], 3, [3])]

    def banned(prompt_lens):
        batch = scheduled(
            sequences,
            num_decodes=3,
            sampled=[0, 1, 2],
            params=params,
            prompt_lens=prompt_lens,
            end_token_ids=(0, 2),
        )
        logits = packed(batch).logits
        if logits is None:
            return []
        assert torch.isneginf(logits.edit_values).all()
        return [*zip(logits.edit_places.tolist(), logits.edit_ids.tolist(), strict=True)]

    assert banned([2, 2, 2]) == [(0, 0), (0, 2), (0, 7)]
    assert banned([1, 1, 1]) == [], "three outputs were made: nothing is forbidden any more"


def test_scored_rows_follow_the_sampled_ones():
    scoring = ScoringBatch(
        places=np.array([1, 2, 4]),
        next_ids=np.array([26, 27, 32]),
        rows=np.array([1, 2]),
        firsts=np.array([0, 0]),
        counts=np.array([2, 1]),
        num_top=3,
    )
    batch = packed(
        scheduled(
            [(0, [17], 6, [5, 2]), (1, [25, 26, 27], 4, [7, 9]), (2, [31, 32], 0, [3])],
            num_decodes=1,
            sampled=[0, 2],
            scoring=scoring,
        )
    )
    assert batch.logits_indices.tolist() == [0, 5, 1, 2, 4]
    assert batch.scored_ids.tolist() == [26, 27, 32]
    assert (batch.num_scored_logprobs, len(batch.sampling.temperature)) == (3, 2)


def test_rows_that_want_logprobs_are_told_apart():
    params = [SamplingParams(), SamplingParams(logprobs=2), SamplingParams(logprobs=5)]
    sequences = [(row, [1], 3, [row + 1]) for row in range(3)]
    batch = packed(scheduled(sequences, num_decodes=3, sampled=[0, 1, 2], params=params))
    assert batch.logprobs_of.tolist() == batch.logprobs_of_cpu.tolist() == [1, 2]
    assert batch.num_logprobs == 5
    plain = packed(scheduled(sequences, num_decodes=3, sampled=[0, 1, 2]))
    assert plain.logprobs_of is None
    assert len(plain.logprobs_of_cpu) == plain.num_logprobs == 0


def test_output_ids_are_followed_for_the_rows_whose_rules_need_them():
    """Admitted with two outputs, whose prompt is computed again; then two decodes."""
    keep = SamplingParams(logits_processors=[lambda ids, logits: logits])
    table, staging = RowTable(8, 64, 4), StagingBuffer(CPU)

    def step(tokens, computed, num_decodes, **fields):
        batch = scheduled(
            [(3, tokens, computed, [1, 2])],
            num_decodes=num_decodes,
            sampled=[0],
            params=[keep],
            prompt_lens=[3],
            host_rows=np.array([0]),
            **fields,
        )
        if not fields:
            batch = dataclasses.replace(
                batch, admitted_rows=np.empty(0, np.int64), admitted_params=(), admitted_rules=()
            )
        table.apply(batch)
        (work,) = pack(table, batch, staging).logits.host_work
        return work.output_ids

    ids = np.array([10, 11, 12, 20, 21], dtype=np.int32)
    assert step([12, 20, 21], 2, 0, admitted_token_ids=(ids,)) == (20, 21)
    assert step([22], 5, 1) == (20, 21, 22)
    assert step([22], 5, 1) == (20, 21, 22), "applying the same step twice changes nothing"
    assert step([23], 6, 1) == (20, 21, 22, 23)
    with pytest.raises(AssertionError, match="misses ids"):
        step([29], 12, 1)


def test_the_staging_buffer_grows_and_keeps_fields_apart():
    staging = StagingBuffer(CPU)
    layout = staging.lay_out({"a": (np.int64, (50_000,)), "b": (np.int32, (3, 5))})
    layout.host["a"][:] = 1
    layout.host["b"][:] = 2
    device = staging.upload(layout)
    assert device["a"].sum() == 50_000
    assert device["b"].tolist() == [[2] * 5] * 3


def test_steps_of_the_same_shapes_share_a_layout_and_others_get_their_own():
    staging = StagingBuffer(CPU)
    small = {"a": (np.int64, (3,)), "b": (np.int32, (2, 2))}
    large = {"a": (np.int64, (5,)), "b": (np.int32, (2, 2))}
    first = staging.lay_out(small)
    views = staging.upload(first)
    assert staging.lay_out(dict(small)) is first
    first.host["b"][:] = 7
    assert staging.upload(first)["b"].tolist() == [[7, 7], [7, 7]]
    assert staging.upload(first)["a"] is views["a"]
    other = staging.lay_out(large)
    assert staging.upload(other)["a"].shape == (5,)
    with pytest.raises(AssertionError, match="another layout"):
        staging.upload(first)
