"""A forward in one native call: bit for bit what its regions and attention give one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention import AttentionMetadata, AttentionSpec, BoundAttention, PagedKVCache
from attention.native_backend import NativeBackend
from attention.native_build import usable_levels
from graphs.host_graph import HostGraphPool
from runtime.models import NativeForward, pack_decoder, pack_refusal
from tests.runtime.models.random_decoders import CPU, make_decoder

REFUSAL = pack_refusal(torch.bfloat16, CPU)
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))

OWN_LEVELS = [level for level in usable_levels() if level != "amx"]
BLOCK_SIZE = 16
BLOCKS_PER_SEQ = 8
NUM_SEQS = 6


def metadata(lengths, computed, num_padding=0):
    """A step of new rows by sequence; sequence s owns BLOCKS_PER_SEQ blocks in a row."""
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    contexts = np.array([n + c if n else 0 for n, c in zip(lengths, computed, strict=True)])
    tables = 1 + np.arange(len(lengths) * BLOCKS_PER_SEQ, dtype=np.int32)
    tables = tables.reshape(len(lengths), BLOCKS_PER_SEQ)
    positions = [
        (s, c + i) for s, (n, c) in enumerate(zip(lengths, computed, strict=True)) for i in range(n)
    ]
    slots = [int(tables[s, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for s, p in positions]
    num_decodes = 0
    while num_decodes < len(lengths) and lengths[num_decodes] == 1:
        num_decodes += 1
    made = AttentionMetadata(
        cu_seqlens_q=torch.from_numpy(bounds),
        cu_seqlens_k=torch.from_numpy(np.cumsum([0, *contexts], dtype=np.int32)),
        max_seqlen_q=max(lengths),
        max_seqlen_k=int(contexts.max()),
        slot_mapping=torch.tensor(slots + [0] * num_padding),
        context_lens=torch.from_numpy(contexts.astype(np.int32)),
        block_tables=torch.from_numpy(tables),
        num_decodes=num_decodes,
        block_size=BLOCK_SIZE,
        cu_seqlens_q_cpu=bounds,
        context_lens_cpu=contexts.astype(np.int32),
        block_tables_cpu=tables,
    )
    return made, torch.tensor([p for _, p in positions] + [0] * num_padding)


class Model:
    """A packed decoder, and twins of attention: the whole forward's and the regions'."""

    def __init__(self, shape="qwen3", windows=None, level=None, int8=False, **options):
        self.decoder = make_decoder(shape, **options)
        pack_decoder(self.decoder, int8=int8, level=level)
        self.forward = NativeForward(self.decoder)
        config = self.decoder.config
        self.spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.bfloat16,
            device=CPU,
            block_size=BLOCK_SIZE,
            windows=windows or (None,) * config.num_layers,
            scale=config.head_dim**-0.5,
        )
        self.backend = NativeBackend(self.spec, level=level)
        self.caches = [
            PagedKVCache.allocate(self.spec, 1 + NUM_SEQS * BLOCKS_PER_SEQ) for _ in range(2)
        ]

    def run(self, lengths, computed, num_padding=0, twin=0, seed=0, rows=None):
        made, positions = metadata(lengths, computed, num_padding)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(100, positions.shape, generator=generator, dtype=torch.int32)
        bound = BoundAttention(
            backend=self.backend, plan=self.backend.plan(made), cache=self.caches[twin]
        )
        if twin == 0:
            return self.forward(ids, positions, bound, rows=rows)
        return self.decoder(ids, positions, bound, self.forward.regions, rows=rows)

    def assert_twins(self, *step, **options):
        whole, apart = (self.run(*step, twin=twin, **options) for twin in (0, 1))
        assert torch.equal(whole, apart)
        for one, other in zip(self.caches[0].keys, self.caches[1].keys, strict=True):
            assert torch.equal(one, other)
        assert whole.float().std() > 0.1


STEPS = (
    ([1], [0]),
    ([70, 3, 20], [0, 0, 0]),
    ([1, 1, 1], [70, 3, 20]),
    ([1, 1, 30, 41], [71, 4, 21, 0]),
    ([1, 1, 1, 1, 1, 1], [72, 5, 51, 41, 0, 0]),
)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("level", OWN_LEVELS)
@pytest.mark.parametrize("shape", ["llama", "biases everywhere", "heads of 80, one for keys"])
@torch.inference_mode()
def test_mixed_steps_give_what_their_parts_give_bit_for_bit(shape, level, int8):
    model = Model(shape, level=level, int8=int8)
    for seed, (lengths, computed) in enumerate(STEPS):
        model.assert_twins(lengths, computed, num_padding=seed, seed=seed)


@torch.inference_mode()
def test_each_layer_has_its_own_window():
    model = Model(windows=(None, 5, 20))
    model.assert_twins([90, 30], [0, 0])
    model.assert_twins([1, 1], [90, 30], seed=1)
    same = Model()
    for made in (model, same):
        made.run([90, 30], [0, 0])
    assert not torch.equal(model.run([1, 1], [90, 30]), same.run([1, 1], [90, 30]))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("num_threads", [2, 3, 5])
@torch.inference_mode()
def test_results_are_the_same_for_any_number_of_threads(num_threads, int8):
    """With more threads than cores some come late to a phase whose tasks are all done."""
    model = Model("larger", int8=int8, hidden_size=384, intermediate_size=1024)
    expected = [model.run(*step) for step in STEPS]
    torch.set_num_threads(num_threads)
    for _ in range(12):
        for step, right in zip(STEPS, expected, strict=True):
            assert torch.equal(model.run(*step), right)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rows", [[], [0], [6, 9, 28], [28, 0, 0], list(range(28, -1, -1))])
@torch.inference_mode()
def test_wanted_rows_are_what_they_are_among_all(rows, int8):
    model = Model(int8=int8)
    everything = model.run([7, 3, 19], [0, 0, 0])
    wanted = torch.tensor(rows, dtype=torch.int64)
    expected = everything.index_select(0, wanted)
    for twin in (0, 1):
        assert torch.equal(model.run([7, 3, 19], [0, 0, 0], twin=twin, rows=wanted), expected)


@torch.inference_mode()
def test_one_layer_is_enough():
    Model(num_hidden_layers=1).assert_twins([5, 40], [0, 0])


@pytest.mark.parametrize("what", ["slot", "block"])
@torch.inference_mode()
def test_what_lies_outside_the_cache_is_an_error_and_the_next_step_goes_on(what):
    model = Model()
    expected = model.run([1, 1], [17, 4])
    made, positions = metadata([1, 1], [17, 4])
    wrong = made.slot_mapping if what == "slot" else made.block_tables
    wrong[0] = 10_000
    bound = BoundAttention(
        backend=model.backend, plan=model.backend.plan(made), cache=model.caches[0]
    )
    with pytest.raises(IndexError, match=rf"{what} 10000 is outside the cache of 49 blocks"):
        model.forward(torch.zeros(2, dtype=torch.int32), positions, bound)
    assert torch.equal(model.run([1, 1], [17, 4]), expected)


@pytest.mark.parametrize(("token", "position"), [(100, 0), (-1, 0), (0, 128), (0, -1)])
@torch.inference_mode()
def test_ids_and_positions_outside_their_tables_are_never_read(token, position):
    model = Model()
    made, _ = metadata([1], [0])
    bound = BoundAttention(
        backend=model.backend, plan=model.backend.plan(made), cache=model.caches[0]
    )
    with pytest.raises(AssertionError, match="outside the model's tables"):
        model.forward(torch.tensor([token], dtype=torch.int32), torch.tensor([position]), bound)


@pytest.mark.parametrize("options", [{"tie_word_embeddings": True}, {"hidden_size": 96}])
@pytest.mark.parametrize("int8", [False, True])
@torch.inference_mode()
def test_embeddings_are_read_from_plain_and_from_packed_weights(options, int8):
    Model(int8=int8, **options).assert_twins([9, 33], [0, 0])


@torch.inference_mode()
def test_another_attention_is_called_layer_by_layer():
    model, layers = Model(), []

    def attend(layer, query, key, value):
        layers.append(layer)
        return query + key.repeat_interleave(2, 1) - value.repeat_interleave(2, 1)

    ids, positions = torch.arange(7, dtype=torch.int32), torch.arange(7)
    hidden = model.forward(ids, positions, attend)
    assert layers == [0, 1, 2]
    assert torch.equal(hidden, model.decoder(ids, positions, attend, model.forward.regions))


@torch.inference_mode()
def test_a_captured_step_replays_on_new_inputs_and_plans():
    model = Model()
    model.run([60, 9, 33], [0, 0, 0])
    model.run([60, 9, 33], [0, 0, 0], twin=1)
    made, positions = metadata([1, 1, 1], [60, 9, 33])
    plan = model.backend.capturable_plan(made)
    bound = BoundAttention(backend=model.backend, plan=plan.plan, cache=model.caches[0])
    ids = torch.zeros(3, dtype=torch.int32)
    graph = HostGraphPool().new_graph()
    hidden = graph.capture(
        lambda ids, positions: model.forward(ids, positions, bound), (ids, positions)
    )
    for step in range(4):
        computed = [60 + step, 9 + step, 33 + step]
        now, now_at = metadata([1, 1, 1], computed)
        made.slot_mapping.copy_(now.slot_mapping)
        positions.copy_(now_at)
        ids.copy_(torch.randint(100, (3,), generator=torch.Generator().manual_seed(step)))
        plan.refresh(
            AttentionMetadata(
                **{name: getattr(now, name) for name in now.__slots__}
                | {"slot_mapping": made.slot_mapping, "block_tables": made.block_tables}
            )
        )
        graph.replay()
        assert torch.equal(hidden, model.run([1, 1, 1], computed, twin=1, seed=step))
