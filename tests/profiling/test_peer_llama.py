"""The serving loop over llama.cpp's batch interface, on a double that checks what it is given."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace

import peer_llama
import pytest

END = 5
OPTIONS = {"gguf": "m.gguf", "sequences": 3, "context": 64, "max_num_batched_tokens": 8}


def next_token(ids):
    """Depends on every token and its place."""
    return sum((i + 1) * token for i, token in enumerate(ids)) % 97 + 10


class FakeLlama:
    """Remembers each sequence's tokens in place of keys and values."""

    def __init__(self, *, end_after=None, status=0):
        self.memory = defaultdict(list)
        self.decoded = []
        self.numbers = []
        self.sampled = []
        self.samplers = {}
        self.end_after, self.status = end_after, status

    def llama_backend_init(self):
        pass

    def llama_log_callback(self, function):
        return function

    def llama_log_set(self, callback, data):
        self.log = callback

    def llama_model_default_params(self):
        return SimpleNamespace()

    llama_context_default_params = llama_sampler_chain_default_params = llama_model_default_params

    def llama_model_load_from_file(self, path, params):
        return None if path == b"missing.gguf" else "model"

    def llama_init_from_model(self, model, params):
        self.params = params
        return "context"

    def llama_get_memory(self, context):
        return "memory"

    def llama_model_get_vocab(self, model):
        return "vocab"

    def llama_batch_init(self, size, num_embeddings, num_sequences):
        names = ("token", "pos", "n_seq_id", "logits")
        fields = {name: [None] * size for name in names}
        return SimpleNamespace(n_tokens=0, seq_id=[[None] for _ in range(size)], **fields)

    def llama_decode(self, context, batch):
        self.rows = {}
        self.numbers.append({batch.seq_id[row][0] for row in range(batch.n_tokens)})
        assert 0 < batch.n_tokens <= self.params.n_batch
        for row in range(batch.n_tokens):
            sequence = self.memory[batch.seq_id[row][0]]
            assert batch.n_seq_id[row] == 1
            assert batch.pos[row] == len(sequence)
            sequence.append(batch.token[row])
            if batch.logits[row]:
                self.rows[row] = list(sequence)
        self.decoded.append(batch.n_tokens)
        return self.status

    def llama_memory_seq_rm(self, memory, number, start, end):
        assert end == -1
        del self.memory[number][max(start, 0) :]
        return True

    def llama_memory_seq_cp(self, memory, source, target, start, end):
        assert (start, end) == (-1, -1)
        assert not self.memory[target]
        self.memory[target] = list(self.memory[source])

    def llama_sampler_init_greedy(self):
        return self._sampler(["greedy"])

    def llama_sampler_chain_init(self, params):
        return self._sampler([])

    def llama_sampler_init_temp(self, temperature):
        return ("temperature", temperature)

    def llama_sampler_init_dist(self, seed):
        return ("seed", seed)

    def llama_sampler_chain_add(self, chain, part):
        self.samplers[chain].append(part)

    def llama_sampler_free(self, sampler):
        del self.samplers[sampler]

    def llama_sampler_sample(self, sampler, context, row):
        ids = self.rows[row]
        self.sampled.append((list(self.samplers[sampler]), ids))
        return END if len(ids) == self.end_after else next_token(ids)

    def llama_vocab_is_eog(self, vocab, token):
        return token == END

    def _sampler(self, parts):
        name = f"sampler {len(self.sampled)} {len(self.samplers)}"
        self.samplers[name] = parts
        return name


@pytest.fixture
def make(monkeypatch):
    def make(fake, **options):
        monkeypatch.setitem(sys.modules, "llama_cpp", fake)
        return peer_llama.LlamaCppEngine("ignored", OPTIONS | options)

    return make


def request(prompt, max_tokens, *, temperature=0.6, ignore_eos=True):
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "ignore_eos": ignore_eos,
    }


def run(engine, requests):
    """Token counts of the requests, all there from the start."""
    counts = [0] * len(requests)
    for index, item in enumerate(requests):
        engine.add(index, item)
    unfinished = set(range(len(requests)))
    while unfinished:
        for index, count, finished in engine.step():
            assert index in unfinished
            counts[index] += count
            unfinished -= {index} if finished else set()
    return counts


def alone(item):
    """What must have been computed before each output token of a request, slowly."""
    ids, contexts = list(item["prompt"]), []
    for _ in range(item["max_tokens"]):
        contexts.append(list(ids))
        ids.append(next_token(ids))
    return contexts


def test_many_sequences_share_steps_and_each_gets_what_it_would_get_alone(make):
    fake = FakeLlama()
    requests = [request(list(range(n, 2 * n)), count) for n, count in [(3, 6), (20, 4), (7, 9)]]
    requests += [request([1] * 5, 2), request([2], 12)]
    assert run(make(fake), requests) == [6, 4, 9, 2, 12]
    found = sorted(ids for _, ids in fake.sampled)
    assert found == sorted(ids for item in requests for ids in alone(item))
    assert len(fake.decoded) < len(found)
    assert not fake.samplers


def test_options_reach_llama(make):
    fake = FakeLlama()
    make(fake)
    params = fake.params
    assert (params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch) == (192, 3, 8, 8)
    assert not params.kv_unified
    assert params.n_threads == params.n_threads_batch >= 1


def test_a_sequence_that_is_served_gives_its_prefix_to_a_later_one(make):
    fake = FakeLlama()
    prefix = list(range(30, 46))
    requests = [request([*prefix, end], 8) for end in (50, 60)]
    run(make(fake), requests)
    # The second copies the sixteen, and computes its last prompt token and seven outputs.
    assert sum(fake.decoded) == (17 + 7) + (1 + 7)
    assert sorted(ids for _, ids in fake.sampled) == sorted(
        ids for item in requests for ids in alone(item)
    )


def test_a_repeated_prompt_computes_one_prompt_token(make):
    fake = FakeLlama()
    engine, item = make(fake), request(list(range(20)), 3)
    run(engine, [item])
    fake.decoded.clear()
    run(engine, [item])
    assert fake.decoded == [1, 1, 1]
    assert [ids for _, ids in fake.sampled] == alone(item) * 2


def test_a_new_prompt_takes_the_sequence_that_was_idle_longest(make):
    fake = FakeLlama()
    engine = make(fake)
    prompts = [[number] * 4 for number in (1, 2, 3, 4)]
    for prompt in prompts:
        run(engine, [request(prompt, 1)])
    assert [fake.memory[number] for number in range(3)] == [prompts[3], prompts[1], prompts[2]]


def test_sequences_move_together_when_one_ends(make):
    fake = FakeLlama()
    requests = [request([number] * 2, count) for number, count in [(1, 3), (2, 2), (3, 6)]]
    assert run(make(fake), requests) == [3, 2, 6]
    assert fake.numbers == [{0, 1, 2}, {0, 1, 2}, {0, 1}, {0}, {0}, {0}]
    assert sorted(ids for _, ids in fake.sampled) == sorted(
        ids for item in requests for ids in alone(item)
    )


def test_only_warnings_and_errors_are_shown(make, capsys):
    fake = FakeLlama()
    make(fake)
    for level in range(1, 6):
        fake.log(level, b"level %d\n" % level, None)
    assert capsys.readouterr().err == "level 3\nlevel 4\n"


@pytest.mark.parametrize(("ignore_eos", "expected"), [(True, 9), (False, 4)])
def test_an_end_token_ends_a_request_unless_it_is_ignored(make, ignore_eos, expected):
    fake = FakeLlama(end_after=6)
    assert run(make(fake), [request([1, 2, 3], 9, ignore_eos=ignore_eos)]) == [expected]


def test_sampling_is_seeded_by_the_request_or_greedy(make):
    fake = FakeLlama()
    run(make(fake), [request([1], 1), request([2], 1), request([3], 1, temperature=0)])
    parts = {ids[0]: parts for parts, ids in fake.sampled}
    assert parts == {
        1: [("temperature", 0.6), ("seed", 0)],
        2: [("temperature", 0.6), ("seed", 1)],
        3: ["greedy"],
    }


def test_what_cannot_work_is_said(make):
    with pytest.raises(SystemExit, match="llama:gguf=FILE"):
        peer_llama.LlamaCppEngine("ignored", {})
    with pytest.raises(SystemExit, match=r"can't load missing\.gguf"):
        make(FakeLlama(), gguf="missing.gguf")
    engine = make(FakeLlama(status=1))
    engine.add(0, request([1], 1))
    with pytest.raises(SystemExit, match="llama_decode gave 1"):
        engine.step()
