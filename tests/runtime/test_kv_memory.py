"""The arithmetic that sizes the KV pool, and the largest step that it makes room for."""

from __future__ import annotations

import pytest
import torch

from graphs import TrialCapture
from runtime import ConfigError, EngineConfig
from runtime.input_batch import pack
from runtime.kv_memory import (
    GIB,
    available_memory,
    cpu_kv_bytes,
    cuda_kv_bytes,
    estimated_graph_bytes,
    largest_step,
    size_kv_pool,
)
from runtime.models import load_decoder_config
from runtime.row_table import RowTable
from runtime.staging import StagingBuffer


def size(**changes):
    arguments = {
        "num_bytes": 1000,
        "bytes_per_block": 100,
        "block_size": 16,
        "max_num_seqs": 4,
        "max_blocks_per_seq": 8,
    }
    return size_kv_pool(**{**arguments, **changes})


def test_the_null_block_comes_out_of_the_budget():
    pool = size()
    assert pool.num_blocks == 10
    assert "9 blocks of 16 tokens + the null block" in pool.arithmetic
    assert "room for 144 tokens" in pool.arithmetic


def test_no_more_blocks_than_all_rows_can_use():
    pool = size(num_bytes=1 << 20)
    assert pool.num_blocks == 33
    assert "cut to what 4 sequences can use" in pool.arithmetic


def test_an_explicit_number_of_blocks_is_taken_as_it_is():
    assert size(num_blocks=5).num_blocks == 6


def test_a_budget_without_one_usable_block_is_refused():
    with pytest.raises(ConfigError, match=r"199 bytes hold no KV block.* raise kv_cache_bytes"):
        size(num_bytes=199)


def test_a_gpus_pool_is_what_the_share_leaves_after_use_and_activations():
    arguments = {"total": 80 * GIB, "utilization": 0.9, "in_use": 20 * GIB, "graphs": 0}
    small_step = cuda_kv_bytes(**arguments, activation_peak=1 * GIB)
    assert small_step == 51 * GIB
    assert cuda_kv_bytes(**arguments, activation_peak=4 * GIB) < small_step
    arguments["graphs"] = 2 * GIB
    assert cuda_kv_bytes(**arguments, activation_peak=1 * GIB) == small_step - 2 * GIB


def test_graphs_are_estimated_as_the_largest_of_each_kind_and_an_increment_for_every_further_one():
    full = TrialCapture(kind="full", num_graphs=9, first_bytes=100, next_bytes=3)
    piecewise = TrialCapture(kind="piecewise", num_graphs=23, first_bytes=1000, next_bytes=20)
    alone = TrialCapture(kind="full", num_graphs=1, first_bytes=7, next_bytes=0)
    assert estimated_graph_bytes([full, piecewise]) == (100 + 8 * 3) + (1000 + 22 * 20)
    assert estimated_graph_bytes([alone]) == 7
    assert estimated_graph_bytes([]) == 0


def test_a_cpus_pool_is_a_quarter_of_what_is_free_up_to_4_gib():
    assert cpu_kv_bytes(available=8 * GIB) == 2 * GIB
    assert cpu_kv_bytes(available=100 * GIB) == 4 * GIB
    assert available_memory() > 0


@pytest.mark.parametrize(("budget", "num_seqs"), [(1024, 256), (1000, 7), (64, 64)])
def test_the_largest_step_is_the_budget_whatever_the_model_length(checkpoint, budget, num_seqs):
    path = checkpoint("llama")
    options = EngineConfig(
        model=str(path), device="cpu", max_num_batched_tokens=budget, max_num_seqs=num_seqs
    )
    config = options.resolve(load_decoder_config(path), path, None, {})
    step = largest_step(config)
    assert (step.num_tokens, step.num_seqs) == (budget, num_seqs)
    table = RowTable(config.max_num_seqs, config.max_blocks_per_seq, config.block_size)
    table.apply(step)
    batch = pack(table, step, StagingBuffer(torch.device("cpu")))
    assert len(batch.logits_indices) == num_seqs
    assert batch.metadata.slot_mapping.max() < config.block_size, "only the null block is written"
