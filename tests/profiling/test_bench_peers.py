"""The comparison's workloads, its arithmetic and its table, and one engine's process."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import bench_peers
import pytest


class FakeWorker:
    """Answers every workload at once: a token each tenth of a second from its arrival on."""

    made: list[FakeWorker]

    def __init__(self, spec, python, model):
        self.spec, self.python = spec, python
        self.start_seconds = 1.0
        self.serves_many = spec != "memory"
        self.has_latencies = self.serves_many and spec != "transformers"
        self.workloads = []
        self.closed = False
        FakeWorker.made.append(self)

    def run(self, requests):
        self.workloads.append(requests)
        return [[r["arrival"] + (i + 1) / 10 for i in range(r["max_tokens"])] for r in requests]

    def close(self):
        self.closed = True


def lengths(requests):
    return [(len(r["prompt"]), r["max_tokens"]) for r in requests]


def test_workloads_have_the_shapes_they_say():
    assert lengths(bench_peers.single(1)) == [(128, 128)]
    many = lengths(bench_peers.many(1))
    assert len(many) == 32
    assert all(128 <= prompt <= 1024 and 32 <= output <= 128 for prompt, output in many)
    assert lengths(bench_peers.many(2)) == many
    shared = bench_peers.shared_prefix(1)
    assert lengths(shared) == [(544, 32)] * 16
    assert len({tuple(r["prompt"][:512]) for r in shared}) == 1
    assert len({tuple(r["prompt"][512:]) for r in shared}) == 16
    ids = [token for r in bench_peers.many(1) + shared for token in r["prompt"]]
    assert 17 <= min(ids) <= max(ids) < 10_000
    assert all(r["ignore_eos"] and r["temperature"] == 0.6 for r in shared)


def test_rounds_have_ids_of_their_own_and_engines_the_same():
    assert bench_peers.single(1) == bench_peers.single(1)
    assert bench_peers.single(1)[0]["prompt"] != bench_peers.single(2)[0]["prompt"]


def test_arrivals_are_the_same_in_all_rounds_and_of_the_rate_asked_for():
    one, other = (bench_peers.poisson(seed, 2.0, 1000) for seed in (1, 2))
    arrivals = [r["arrival"] for r in one]
    assert arrivals == [r["arrival"] for r in other] == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(500, rel=0.1)


def test_conversations_are_greedy_and_fit_the_model(tmp_path):
    path = tmp_path / "conversations.json"
    texts = ["fits well", "x" * 3000, "no", "fits too"]
    turns = [[{"from": "human", "value": t}, {"from": "gpt", "value": "."}] for t in texts]
    path.write_text(json.dumps([{"conversations": t} for t in turns]))

    def tokenize(messages):
        return list(messages[0]["content"].encode())

    found = bench_peers.conversations(path, tokenize, 2)
    assert [bytes(r["prompt"]).decode() for r in found] == ["fits well", "fits too"]
    assert all(r["temperature"] == 0 and not r["ignore_eos"] for r in found)
    with pytest.raises(SystemExit, match="only 2 conversations that fit, 3 are needed"):
        bench_peers.conversations(path, tokenize, 3)


def test_speed_counts_to_the_last_token():
    assert bench_peers.tokens_per_second([[0.5, 1.0], [0.5, 1.0, 2.0]]) == 2.5


def test_latencies_count_from_the_intended_arrival():
    requests = [{"arrival": 1.0}, {"arrival": 2.0}]
    found = bench_peers.latencies(requests, [[1.5, 1.6, 1.7], [2.5]])
    assert found["TTFT p50"] == pytest.approx(500)
    assert found["TPOT p99"] == found["ITL p50"] == pytest.approx(100)


def run_main(monkeypatch, checkpoint, arguments):
    FakeWorker.made = []
    monkeypatch.setattr(bench_peers, "Worker", FakeWorker)
    command = ["bench_peers.py", *arguments, "--model", str(checkpoint("llama"))]
    monkeypatch.setattr(sys, "argv", command)
    bench_peers.main()
    return FakeWorker.made


def test_engines_take_turns_at_the_same_work(monkeypatch, capsys, tmp_path, checkpoint):
    values = tmp_path / "values.json"
    engines = ["stepgraph", "vllm", "transformers"]
    options = ["--workloads", "W1", "W2", "W3", "W4", "--rounds", "2", "--num-requests", "5"]
    python = ["--python", "vllm=/venv/bin/python", "--json", str(values)]
    made = run_main(monkeypatch, checkpoint, engines + options + python)
    assert [w.python for w in made] == [sys.executable, "/venv/bin/python", sys.executable]
    assert made[0].workloads == made[1].workloads
    assert len(made[0].workloads) == 1 + 2 * 4 + 2
    assert made[2].workloads == made[0].workloads[:9]  # no latencies, no W4
    assert all(worker.closed for worker in made)
    lines = capsys.readouterr().out.splitlines()
    (speed,) = [line for line in lines if line.startswith("W1") and "vllm" in line]
    assert speed.split() == ["W1", "tok/s", "vllm", "10", "1.00x", "10..10"]
    assert "W4 TTFT p99 ms" in "".join(lines)
    figures = json.loads(values.read_text())
    assert {engine: len(v) for engine, v in figures["W3 warm s"].items()} == dict.fromkeys(
        engines, 2
    )


def test_the_memory_takes_its_turn_at_one_sequence_alone(monkeypatch, capsys, checkpoint):
    options = ["--workloads", "W1", "W2", "W4", "--rounds", "2", "--num-requests", "5"]
    ours, memory = run_main(monkeypatch, checkpoint, ["stepgraph", "memory", *options])
    assert len(ours.workloads) == 1 + 2 * 2 + 2
    assert memory.workloads == [ours.workloads[0], ours.workloads[1], ours.workloads[3]]
    lines = [line for line in capsys.readouterr().out.splitlines() if " memory " in line]
    assert [line.split()[0] for line in lines] == ["W1"]


def test_each_round_has_conversations_of_its_own(monkeypatch, tmp_path, checkpoint):
    path = tmp_path / "conversations.json"
    turns = [
        [{"from": "human", "value": f"Question {n}"}, {"from": "gpt", "value": "."}]
        for n in range(9)
    ]
    path.write_text(json.dumps([{"conversations": t} for t in turns]))
    options = ["--workloads", "W5", "--rounds", "3", "--num-conversations", "2"]
    (worker,) = run_main(monkeypatch, checkpoint, ["stepgraph", *options, "--sharegpt", str(path)])
    prompts = [tuple(r["prompt"]) for requests in worker.workloads[1:] for r in requests]
    assert len(prompts) == len(set(prompts)) == 6


def test_ratios_are_to_the_first_engine(capsys):
    report = bench_peers.Report(["ours", "theirs"])
    for value in (3.0, 4.0, 5.0):
        report.add("W1 tok/s", "ours", value)
        report.add("W1 tok/s", "theirs", value / 2)
    report.print()
    ours, theirs = capsys.readouterr().out.splitlines()
    assert ours.split()[3:] == ["4", "1.00x", "3..5"]
    assert theirs.split()[3:] == ["2", "0.50x", "1.5..2.5"]


def test_an_unknown_engine_is_refused():
    with pytest.raises(SystemExit, match="no engine 'tgi'; use one of stepgraph, vllm"):
        bench_peers.Worker("tgi:a=1", sys.executable, "model")


def test_only_engines_that_stream_have_latencies(monkeypatch):
    answer = json.dumps({"start_seconds": 0.0})
    process = SimpleNamespace(stdout=SimpleNamespace(readline=lambda: answer))
    monkeypatch.setattr(bench_peers.subprocess, "Popen", lambda *_, **__: process)
    specs = ["vllm", "transformers", "transformers:continuous=true", "llama:gguf=f", "memory"]
    found = [bench_peers.Worker(s, "/venv/bin/python", "model").has_latencies for s in specs]
    assert found == [True, False, True, True, False]


@pytest.mark.parametrize(
    "spec", ["stepgraph:dtype=float32,max_model_len=64,kv_cache_bytes=1000000", "memory:threads=2"]
)
def test_an_engine_serves_in_a_process_of_its_own(checkpoint, spec):
    worker = bench_peers.Worker(spec, sys.executable, str(checkpoint("llama")))
    assert worker.start_seconds > 0
    times = worker.run([bench_peers.request([5, 6, 7], 4), bench_peers.request([9] * 20, 2)])
    assert list(map(len, times)) == [4, 2]
    worker.close()
