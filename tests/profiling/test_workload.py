"""Where requests come from and when they arrive."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from workload import Workload, read_azure, read_mooncake, read_sharegpt, uniform

DATA = Path(__file__).parents[1] / "data"
AZURE = DATA / "azure_conversation_head200.csv"
MOONCAKE = DATA / "mooncake_conversation_head12.jsonl"


@pytest.fixture
def azure() -> Workload:
    return read_azure(AZURE)


def test_an_azure_trace_is_read_with_its_own_times(azure):
    assert len(azure) == 200
    assert azure.num_prompt_tokens[:3].tolist() == [374, 396, 879]
    assert azure.num_output_tokens[:3].tolist() == [44, 109, 55]
    assert azure.arrivals[:3] == pytest.approx([0, 4.314579, 4.541877])


def test_equal_prefix_ids_of_a_mooncake_trace_are_equal_tokens():
    workload = read_mooncake(MOONCAKE)
    assert len(workload) == 12
    assert workload.prefix_ids is not None
    first, second = (workload.prompt(i, 1000) for i in (0, 1))
    assert [len(first), len(second)] == workload.num_prompt_tokens[:2].tolist() == [6758, 7322]
    assert workload.prefix_ids[0][0] == workload.prefix_ids[1][0]
    assert (first[:512] == second[:512]).all()
    assert (first[512:1024] != second[512:1024]).any()
    assert first.min() >= 0 and first.max() < 1000


def test_prefix_ids_that_do_not_cover_the_prompt_are_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match="request 0: 1 hash_ids don't cover 513 tokens"):
        read_mooncake(path)


def test_traces_out_of_order_and_empty_ones_are_refused(tmp_path):
    path = tmp_path / "trace.csv"
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    path.write_text(header)
    with pytest.raises(ValueError, match="holds no request"):
        read_azure(path)
    lines = "2023-11-16 18:15:47.0000000,1,1\n2023-11-16 18:15:46.0000000,1,1\n"
    path.write_text(header + lines)
    with pytest.raises(ValueError, match="not ordered by time"):
        read_azure(path)


def test_sharegpt_gives_first_questions_and_the_lengths_of_first_answers(tmp_path):
    def turns(*values):
        return {"conversations": [{"from": who, "value": text} for who, text in values]}

    path = tmp_path / "conversations.json"
    conversations = [
        turns(("human", "one two"), ("gpt", "three four five"), ("human", "six")),
        turns(("gpt", "an answer first"), ("human", "no")),
        turns(("human", "alone")),
        turns(("human", "nothing back"), ("gpt", "")),
        turns(("human", "a b c d"), ("gpt", "e")),
        turns(("human", "one too many"), ("gpt", "f")),
    ]
    path.write_text(json.dumps(conversations))
    workload = read_sharegpt(path, lambda text: [len(word) for word in text.split()], 2)
    assert workload.num_prompt_tokens.tolist() == [2, 4]
    assert workload.num_output_tokens.tolist() == [3, 1]
    assert workload.prompt(0, 100).tolist() == [3, 3]


def test_a_sharegpt_file_that_is_cut_off_gives_what_comes_before(tmp_path):
    path = tmp_path / "cut.json"
    whole = [{"conversations": [{"from": w, "value": w} for w in ("human", "gpt")]}] * 3
    path.write_text(json.dumps(whole, indent=1)[:-20])
    assert len(read_sharegpt(path, lambda text: [1], 2)) == 2
    with pytest.raises(ValueError, match=r"cut.json can't be read beyond character \d+"):
        read_sharegpt(path, lambda text: [1], 3)
    path.write_text('{"conversations": []}')
    with pytest.raises(ValueError, match="is not a JSON list of conversations"):
        read_sharegpt(path, lambda text: [1], 3)


def test_arrival_processes_have_their_rate_and_shape(azure):
    poisson = azure.arriving("poisson", 4.0, seed=1)
    gaps = np.diff(poisson.arrivals)
    assert gaps.mean() == pytest.approx(0.25, rel=0.2)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.3)
    assert (azure.arriving("poisson", 4.0, seed=1).arrivals == poisson.arrivals).all()
    assert (azure.arriving("poisson", 4.0, seed=2).arrivals != poisson.arrivals).all()
    assert np.diff(azure.arriving("fixed", 4.0).arrivals) == pytest.approx(0.25)
    burst = azure.arriving("burst", 4.0, burst=8).arrivals
    assert burst[:17].tolist() == [0.0] * 8 + [2.0] * 8 + [4.0]
    assert (azure.arriving("trace", 2.0).arrivals == azure.arrivals / 2).all()
    assert not azure.arriving("poisson", math.inf).arrivals.any()


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_rates_that_are_not_above_zero_are_refused(azure, rate):
    with pytest.raises(ValueError, match="is not above 0"):
        azure.arriving("fixed", rate)


def test_resampling_keeps_pairs_of_lengths(azure):
    pairs = set(zip(azure.num_prompt_tokens, azure.num_output_tokens, strict=True))
    drawn = azure.resampled(5000, 3)
    assert len(drawn) == 5000
    assert set(zip(drawn.num_prompt_tokens, drawn.num_output_tokens, strict=True)) == pairs


def test_limits_and_parts_keep_the_order(azure):
    short = azure.limited(1000)
    assert 0 < len(short) < 200
    assert (short.num_prompt_tokens + short.num_output_tokens).max() <= 1000
    assert (np.diff(short.arrivals) >= 0).all()
    assert azure.part(0, 3).arrivals.tolist() == azure.arrivals[:3].tolist()
    part = azure.part(197, 9)
    assert part.num_prompt_tokens.tolist() == azure.num_prompt_tokens[197:].tolist()
    assert part.arrivals == pytest.approx(azure.arrivals[197:] - azure.arrivals[197])
    with pytest.raises(ValueError, match="no request 200"):
        azure.part(200, 1)


def test_uniform_lengths_reach_both_ends():
    workload = uniform(2000, (3, 5), (1, 2), 0)
    assert sorted(set(workload.num_prompt_tokens.tolist())) == [3, 4, 5]
    assert sorted(set(workload.num_output_tokens.tolist())) == [1, 2]
