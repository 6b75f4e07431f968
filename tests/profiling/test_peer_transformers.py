"""transformers behind the peer worker, on a tiny model."""

from __future__ import annotations

import peer_transformers
import pytest
from transformers import AutoModelForCausalLM

OPTIONS = {"continuous": False, "max_num_batched_tokens": 16, "cache_tokens": 2048}


def request(prompt, max_tokens, *, greedy=False):
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0 if greedy else 0.6,
        "ignore_eos": not greedy,
    }


def run(engine, requests):
    counts = [0] * len(requests)
    for index, item in enumerate(requests):
        engine.add(index, item)
    unfinished = set(range(len(requests)))
    while unfinished:
        for index, count, finished in engine.step():
            counts[index] += count
            unfinished -= {index} if finished else set()
    return counts


@pytest.fixture(params=[False, True], ids=["generate", "continuous"])
def engine(request, checkpoint):
    options = OPTIONS | {"continuous": request.param}
    engine = peer_transformers.transformers_engine(str(checkpoint("llama")), options)
    yield engine
    if request.param:
        engine.close()


def test_each_request_gets_the_tokens_it_asked_for(engine):
    requests = [request([5, 6, 7], 4), request(list(range(40, 60)), 7), request([9], 1)]
    assert run(engine, requests) == [4, 7, 1]
    assert run(engine, requests[:1]) == [4]


def test_greedy_requests_end_at_the_end_token(engine, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype="bfloat16")
    import torch

    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=12, eos_token_id=None
        )[0, 3:].tolist()
    end = ids[3]
    engine._model.generation_config.eos_token_id = end
    assert run(engine, [request([5, 6, 7], 12)]) == [12]
    assert run(engine, [request([5, 6, 7], 12, greedy=True)]) == [ids.index(end) + 1]


def test_tokens_count_up_to_the_first_end_token():
    assert peer_transformers.num_until_end([4, 2, 3, 2, 0], {2, 3}) == 2
    assert peer_transformers.num_until_end([4, 5], {2}) == 2
    assert peer_transformers.num_until_end([4, 5], set()) == 2
