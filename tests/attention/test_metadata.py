from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from attention import AttentionMetadata, AttentionSpec


def test_spec_derives_layers_and_heads_per_kv_head(
    make_spec: Callable[..., AttentionSpec],
) -> None:
    spec = make_spec(num_heads=12, num_kv_heads=3, windows=(None, 8, None))
    assert spec.num_layers == 3
    assert spec.queries_per_kv == 4


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_spec_takes_powers_of_two_as_block_size(
    make_spec: Callable[..., AttentionSpec], block_size: int
) -> None:
    assert make_spec(block_size=block_size).block_size == block_size


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_size", 0, "block_size must be a power of two from 1 to 256, got 0"),
        ("block_size", -16, "got -16"),
        ("block_size", 7, "got 7"),
        ("block_size", 512, "got 512"),
        ("num_heads", 0, "num_heads must be at least 1, got 0"),
        ("num_kv_heads", 0, "num_kv_heads must be at least 1, got 0"),
        ("head_dim", -1, "head_dim must be at least 1, got -1"),
        ("num_heads", 5, "5 query heads for 2 key/value heads"),
        ("windows", (None, 0), "the window of layer 1 must be None or at least 1, got 0"),
        ("soft_cap", 0.0, "soft_cap must be None or positive, got 0.0"),
        ("max_num_seqs", 0, "max_num_seqs must be at least 1, got 0"),
    ],
)
def test_spec_names_the_field_that_is_wrong(
    make_spec: Callable[..., AttentionSpec], field: str, value: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make_spec(), **{field: value})


def test_metadata_counts_sequences_and_rows_with_padding(
    make_metadata: Callable[..., AttentionMetadata],
) -> None:
    metadata = make_metadata(
        [1, 3, 1], [5, 3, 0], [[4, 2], [1], []], block_size=4, num_decodes=1, padded_rows=2
    )
    assert metadata.num_seqs == 3
    assert metadata.num_tokens == 7
    assert metadata.slot_mapping.tolist() == [8, 4, 5, 6, 0, 0, 1]
    assert metadata.slot_mapping.dtype == torch.int64


def test_metadata_can_not_be_changed(make_metadata: Callable[..., AttentionMetadata]) -> None:
    metadata = make_metadata([1], [5], [[4, 2]], block_size=4, num_decodes=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        metadata.num_decodes = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_decodes": 3}, "num_decodes is 3 for 2 sequences"),
        ({"num_decodes": 2}, "the first 2 sequences must have one query row each"),
        ({"cu_seqlens_q_cpu": np.array([0, 1], np.int32)}, "cu_seqlens_q_cpu: wrong length"),
        ({"context_lens": torch.zeros(3, dtype=torch.int32)}, "context_lens: wrong length"),
        ({"block_tables": torch.zeros((2, 9), dtype=torch.int32)}, "differs in shape"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int64)}, "4 rows belong to sequences"),
    ],
)
def test_metadata_that_contradicts_itself_is_a_bug(
    make_metadata: Callable[..., AttentionMetadata], change: dict[str, object], message: str
) -> None:
    metadata = make_metadata([1, 3], [5, 3], [[4, 2], [1]], block_size=4, num_decodes=1)
    with pytest.raises(AssertionError, match=message):
        dataclasses.replace(metadata, **change)  # type: ignore[arg-type]
