"""A captured step equals the eager one on the same padded inputs, in any traffic.

The same tests run on a CPU under HostGraph, and on a CUDA device under its own graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from attention import AttentionMetadata, AttentionSpec, PagedKVCache
from attention.native_plan import CapturableNativePlan
from graphs import GraphSupport, Launch
from runtime.models import load_decoder, load_decoder_config
from tests.graphs.runner_setup import (
    CPU,
    CUDA,
    DECODE_SIZES,
    MIXED_SIZES,
    MODES,
    Setup,
    decode_traffic,
    kinds_of,
    make_backend,
    on_device,
)
from tests.graphs.traffic import (
    BLOCK_SIZE,
    BUDGET,
    MAX_MODEL_LEN,
    MAX_SEQS,
    Traffic,
    tiny_model,
    tiny_spec,
)


class Case(NamedTuple):
    """Where a test runs. The narrow one has shapes that every CUDA kernel takes."""

    device: torch.device
    backend: str
    dtype: torch.dtype = torch.float32
    head_dim: int = 8

    def setup(self, mode: str, **options) -> Setup:
        spec = tiny_spec(self.device, self.dtype, head_dim=self.head_dim)
        model = tiny_model(self.device, self.dtype, head_dim=self.head_dim)
        # float16 through three layers, on results of about unit size; logits are larger.
        compared = {} if self.dtype == torch.float32 else {"tolerance": 0.05, "tie": 0.2}
        backend = make_backend(self.backend, spec)
        return Setup(model, mode, backend=backend, compared=compared, **options)

    def __str__(self) -> str:
        return f"{self.device.type}-{self.backend}-{str(self.dtype).removeprefix('torch.')}"


CASES = [
    *(Case(CPU, "padded"), Case(CPU, "native")),
    *(
        pytest.param(case, marks=on_device)
        for case in (Case(CUDA, "padded"), Case(CUDA, "auto"), Case(CUDA, "auto", torch.half, 64))
    ),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_captured_size_equals_eager_bit_for_bit(case, mode):
    setup = case.setup(mode)
    taken = set()

    def serve(*args, **options):
        launches = setup.serve(decode_traffic(*args, device=case.device, **options))
        taken.update((launch.mode, launch.size) for launch in launches)

    for num_seqs in [*range(1, MAX_SEQS + 1), *range(MAX_SEQS, 0, -1)]:
        serve(num_seqs)
    for num_tokens in [*range(1, BUDGET + 1), *range(BUDGET, 0, -3)]:
        serve(1, length=num_tokens, max_tokens=1)
    has_full = mode != "piecewise" and isinstance(setup.backend, GraphSupport)
    wanted = set()
    if has_full:
        wanted |= {("full", size) for size in DECODE_SIZES}
    if mode != "full":
        # A prompt of one token is a uniform step, so it takes the full graph where there is one.
        wanted |= {("piecewise", size) for size in MIXED_SIZES[has_full:]}
    assert wanted <= taken


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_mixed_traffic_equals_eager(case, mode, seed):
    """With preemption and prefix hits; free blocks hold NaN until they are written."""
    setup = case.setup(mode)
    rng = np.random.default_rng(seed)
    traffic = Traffic(case.device, num_blocks=13)
    launches = []
    for _ in range(3):
        for _ in range(8):
            traffic.add_random(rng)
        launches += setup.serve(traffic)
    assert traffic.scheduler.num_preemptions > 0
    assert traffic.num_cached_tokens > 0
    kinds = {
        "full": {"full", "eager"},
        "piecewise": {"piecewise"},
        "full_and_piecewise": {"full", "piecewise"},
    }[mode]
    if not isinstance(setup.backend, GraphSupport):
        kinds -= {"full"}
    assert kinds_of(launches) == kinds


@pytest.mark.parametrize("case", CASES, ids=str)
def test_short_steps_after_long_ones_in_one_bucket_touch_no_block_of_others(case):
    """Six long sequences end, then four short ones run in the same bucket. All that is free, and
    what the long ones left in the result's padded rows, is NaN, and the free blocks stay it."""
    setup = case.setup("full_and_piecewise", decode_sizes=(MAX_SEQS,))
    setup.serve(decode_traffic(6, length=2, max_tokens=12, device=case.device))
    for tensor in (*setup.cache.keys, *setup.cache.values):
        tensor[1:] = torch.nan
    with torch.inference_mode():
        setup.runner._graphs.hidden.fill_(torch.nan)
    setup.comparison.start_over()
    launches = setup.serve(decode_traffic(4, length=2, max_tokens=6, device=case.device))
    is_full = isinstance(setup.backend, GraphSupport)
    full, piecewise = Launch(mode="full", size=MAX_SEQS), Launch(mode="piecewise", size=4)
    assert launches[-1] == (full if is_full else piecewise)
    is_untouched = setup.cache.keys[0].isnan().flatten(1).all(1)
    assert (~is_untouched[1:]).sum() == 4 * 2, "four sequences of seven tokens, blocks of four"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["padded", "native"])
def test_smollm2_on_three_sizes_equals_eager(smollm2, backend):
    """A real model; only three sizes, since a tape keeps every intermediate."""
    config = dataclasses.replace(
        load_decoder_config(smollm2), max_position_embeddings=MAX_MODEL_LEN
    )
    model = load_decoder(config, smollm2, dtype=torch.float32, device=CPU)
    spec = AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=CPU,
        block_size=BLOCK_SIZE,
        windows=config.windows,
        scale=config.head_dim**-0.5,
    )
    setup = Setup(
        model,
        "full_and_piecewise",
        backend=make_backend(backend, spec),
        compared={"tolerance": 1e-3},
        decode_sizes=(2, 4),
        mixed_sizes=(BUDGET,),
    )
    launches = setup.serve(decode_traffic(4, length=4)) + setup.serve(decode_traffic(2, length=6))
    assert {launch.size for launch in launches if launch.mode != "eager"} == {2, 4, BUDGET}


# Lengths that change within one bucket

LONG = 5000


class DecodeBatch(NamedTuple):
    """What a runner takes of a decode step over blocks that each sequence has to itself."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    logits_indices: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], max_blocks: int) -> DecodeBatch:
        num_seqs, contexts = len(lengths), np.array(lengths, dtype=np.int32)
        tables = 1 + np.arange(num_seqs * max_blocks, dtype=np.int32).reshape(num_seqs, -1)
        tables = tables[:, : -(-int(contexts.max()) // BLOCK_SIZE)]
        positions = contexts.astype(np.int64) - 1
        blocks = tables[np.arange(num_seqs), positions // BLOCK_SIZE]
        bounds = np.arange(num_seqs + 1, dtype=np.int32)
        metadata = AttentionMetadata(
            cu_seqlens_q=torch.from_numpy(bounds),
            cu_seqlens_k=torch.from_numpy(np.append(0, contexts.cumsum()).astype(np.int32)),
            max_seqlen_q=1,
            max_seqlen_k=int(contexts.max()),
            slot_mapping=torch.from_numpy(blocks * BLOCK_SIZE + positions % BLOCK_SIZE),
            context_lens=torch.from_numpy(contexts),
            block_tables=torch.from_numpy(tables.copy()),
            num_decodes=num_seqs,
            block_size=BLOCK_SIZE,
            cu_seqlens_q_cpu=bounds,
            context_lens_cpu=contexts,
            block_tables_cpu=tables.copy(),
        )
        rows = torch.arange(num_seqs)
        return cls((rows + 3).int(), torch.from_numpy(positions), metadata, rows)


@pytest.mark.parametrize("is_refreshed", [True, False])
def test_the_plan_follows_lengths_from_10_to_5000_and_across_a_blocks_end(
    is_refreshed, monkeypatch
):
    """Two kinds of layers, one with a window; a random cache in place of computed tokens."""
    spec, max_blocks = tiny_spec(CPU), -(-(LONG + 1) // BLOCK_SIZE)
    backend = make_backend("native", spec)
    model = tiny_model(CPU, max_model_len=LONG + 1)
    cache = PagedKVCache.allocate(spec, 1 + 4 * max_blocks)
    torch.manual_seed(0)
    for tensor in (*cache.keys, *cache.values):
        tensor[1:].normal_()
    sizes = {"decode_sizes": (4,), "max_blocks_per_seq": max_blocks}
    setup = Setup(
        model, "full", backend=backend, cache=cache, compared={"tolerance": 1e-4}, **sizes
    )
    if not is_refreshed:
        monkeypatch.setattr(CapturableNativePlan, "refresh", lambda self, metadata: True)
    setup.comparison.start_over()
    for lengths in (
        *((10,) * 4, (LONG,) * 4, (LONG, 10, 700)),
        *((15, 16, 17, LONG - 1), (16, 17, 18, LONG), (3,) * 3),
    ):
        batch = DecodeBatch.of(lengths, max_blocks)
        if not is_refreshed:
            with pytest.raises(AssertionError, match="not close"):
                setup.comparison.compare(batch, len(lengths), True)
            return
        setup.comparison.compare(batch, len(lengths), True)
        assert setup.comparison.steps[-1].launch == Launch(mode="full", size=4)
