"""The loop that feeds an engine, and the adapters that can be tried here."""

from __future__ import annotations

import peer_worker
import pytest


class FakeEngine:
    """Gives every request a token a step."""

    def __init__(self):
        self.left = {}
        self.most = 0

    def add(self, index, request):
        self.left[index] = request["max_tokens"]
        self.most = max(self.most, len(self.left))

    def step(self):
        served = []
        for index in list(self.left):
            self.left[index] -= 1
            served.append((index, 1, self.left[index] == 0))
            if self.left[index] == 0:
                del self.left[index]
        return served


def request(max_tokens, arrival=0.0):
    return {"max_tokens": max_tokens, "arrival": arrival}


def test_every_token_has_a_time_and_times_never_fall():
    times = peer_worker.serve(FakeEngine(), [request(3), request(5)])
    assert list(map(len, times)) == [3, 5]
    assert all(t == sorted(t) and t[0] > 0 for t in times)


def test_no_request_is_handed_in_before_it_arrives():
    engine = FakeEngine()
    times = peer_worker.serve(engine, [request(2, arrival=0.05), request(2)])
    assert times[0][0] >= 0.05
    assert engine.most == 1


@pytest.mark.parametrize("name", ["openvino", "llama"])
def test_engines_that_read_a_gguf_ask_for_one(name):
    with pytest.raises(SystemExit, match=f"{name}:gguf=FILE"):
        peer_worker.ENGINES[name]("model", {})


def test_stepgraph_serves_a_workload(checkpoint):
    engine = peer_worker.StepgraphEngine(
        str(checkpoint("llama")), {"dtype": "float32", "num_kv_blocks": 32}
    )
    shared = {"temperature": 0.6, "ignore_eos": True, "arrival": 0.0}
    requests = [
        shared | {"prompt": [5, 6, 7], "max_tokens": 3},
        shared | {"prompt": list(range(40)), "max_tokens": 6},
    ]
    assert list(map(len, peer_worker.serve(engine, requests))) == [3, 6]
