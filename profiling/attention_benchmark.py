"""CPU attention against this machine's limits and against its rivals.

    python profiling/attention_benchmark.py [--threads 2] [--rounds 15] [--shuffled]

Two steps with the heads of SmolLM2-135M (9 query, 3 key/value, size 64) in bfloat16: 32 sequences
decode at context 1024, and one prefills 512 tokens on top of 1024. Each round measures everything
once, one after the other, so that a busy machine slows all of it alike; medians are printed.

Decoding is bound by memory: the K/V bytes read per second, as a share of what summing a large
float32 tensor reads in the same round. Prefill is bound by arithmetic: the products that causal
attention needs, as a share of the rate of a large bfloat16 product. Every call takes another
layer's cache, and all layers together exceed the processor's caches.

Rivals: the torch backend, and scaled_dot_product_attention on K/V that already lies contiguous,
so without pages, gathering or the write of new keys and values.

With one thread the times are CPU time, which other programs disturb less; else wall time.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    PagedKVCache,
    select_backend,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
BLOCK_SIZE = 16
CONTEXT = 1024
BATCH = 32
CHUNK = 512
NUM_LAYERS = 8
DTYPE = torch.bfloat16
READ_BYTES = 1 << 28
PRODUCT_SIZE = 2048


def make_spec() -> AttentionSpec:
    """SmolLM2's attention with fewer layers."""
    return AttentionSpec(
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=DTYPE,
        device=torch.device("cpu"),
        block_size=BLOCK_SIZE,
        windows=(None,) * NUM_LAYERS,
        scale=HEAD_DIM**-0.5,
    )


def make_metadata(
    query_len: int, context_len: int, num_seqs: int, shuffled: bool
) -> AttentionMetadata:
    """A step of equal sequences, whose blocks lie in order or at random."""
    blocks_per_seq = -(-context_len // BLOCK_SIZE)
    order = np.arange(num_seqs * blocks_per_seq)
    if shuffled:
        order = np.random.default_rng(0).permutation(order)
    tables = (order + 1).astype(np.int32).reshape(num_seqs, blocks_per_seq)
    positions = np.arange(context_len - query_len, context_len)
    slots = tables[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
    bounds = np.arange(num_seqs + 1, dtype=np.int32) * query_len
    contexts = np.full(num_seqs, context_len, dtype=np.int32)
    return AttentionMetadata(
        cu_seqlens_q=torch.from_numpy(bounds),
        cu_seqlens_k=torch.arange(num_seqs + 1, dtype=torch.int32) * context_len,
        max_seqlen_q=query_len,
        max_seqlen_k=context_len,
        slot_mapping=torch.from_numpy((slots + positions % BLOCK_SIZE).ravel()),
        context_lens=torch.from_numpy(contexts),
        block_tables=torch.from_numpy(tables),
        num_decodes=num_seqs if query_len == 1 else 0,
        block_size=BLOCK_SIZE,
        cu_seqlens_q_cpu=bounds,
        context_lens_cpu=contexts,
        block_tables_cpu=tables,
    )


def paged(
    backend: AttentionBackend, metadata: AttentionMetadata, cache: PagedKVCache
) -> Callable[[], None]:
    """One step of a backend over all layers, planned beforehand."""
    plan = backend.plan(metadata)
    heads = [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
    rows = torch.randn(metadata.num_tokens, sum(heads), HEAD_DIM).to(DTYPE)
    query, key, value = torch.split(rows, heads, 1)

    def step() -> None:
        for layer in range(NUM_LAYERS):
            backend.run(layer, query, key, value, cache, plan)

    return step


def contiguous(query_len: int, context_len: int, num_seqs: int) -> Callable[[], None]:
    """The fused operator over all layers, on K/V [sequences, heads, context, head size]."""
    shape = (NUM_LAYERS, num_seqs, NUM_KV_HEADS, context_len, HEAD_DIM)
    keys, values = torch.randn(shape).to(DTYPE), torch.randn(shape).to(DTYPE)
    # Query heads of one key/value head as rows of it, which is faster than enable_gqa.
    group = NUM_HEADS // NUM_KV_HEADS
    query = torch.randn(num_seqs, NUM_KV_HEADS, query_len * group, HEAD_DIM).to(DTYPE)
    mask = None
    if query_len > 1:
        hidden = torch.ones(query_len, context_len).triu(context_len - query_len + 1) > 0
        mask = torch.zeros(query_len, context_len, dtype=DTYPE)
        mask = mask.masked_fill_(hidden, float("-inf")).repeat_interleave(group, 0)

    def step() -> None:
        for key, value in zip(keys, values, strict=True):
            F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return step


def measure(
    functions: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of each function, all of them called in each round."""
    times = defaultdict(list)
    for number in range(rounds + 1):
        for name, function in functions.items():
            start = clock()
            function()
            if number > 0:  # the first round warms up
                times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shuffled", action="store_true", help="blocks in random order")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    decode = make_metadata(1, CONTEXT, BATCH, args.shuffled)
    prefill = make_metadata(CHUNK, CONTEXT + CHUNK, 1, args.shuffled)
    large = torch.zeros(READ_BYTES // 4)
    factor = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(DTYPE)
    functions: dict[str, Callable[[], object]] = {
        "read": large.sum,
        "product": lambda: factor @ factor,
    }
    for name in ("native", "torch"):
        backend = select_backend(name, make_spec())
        cache = backend.allocate_cache(1 + decode.block_tables.numel())
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()
        functions[f"decode {name}"] = paged(backend, decode, cache)
        functions[f"prefill {name}"] = paged(backend, prefill, cache)
    functions["decode sdpa"] = contiguous(1, CONTEXT, BATCH)
    functions["prefill sdpa"] = contiguous(CHUNK, CONTEXT + CHUNK, 1)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    with torch.inference_mode():
        seconds = measure(functions, args.rounds, clock)
    report(seconds, args)


def report(seconds: dict[str, float], args: argparse.Namespace) -> None:
    """Print rates, shares of the machine's, and times in units of the native backend's."""
    bandwidth = READ_BYTES / seconds["read"]
    rate = 2 * PRODUCT_SIZE**3 / seconds["product"]
    num_bytes = NUM_LAYERS * BATCH * CONTEXT * 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
    pairs = sum(range(CONTEXT + 1, CONTEXT + CHUNK + 1))
    num_flops = NUM_LAYERS * 4 * HEAD_DIM * NUM_HEADS * pairs
    order = "shuffled" if args.shuffled else "in order"
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"{args.threads} threads, {args.rounds} rounds, blocks {order}"
    )
    print(f"reading {bandwidth / 1e9:.1f} GB/s, bfloat16 product {rate / 1e9:.0f} GFLOP/s")
    for step, amount, limit, unit in (
        ("decode", num_bytes, bandwidth, "GB/s"),
        ("prefill", num_flops, rate, "GFLOP/s"),
    ):
        for name in ("native", "torch", "sdpa"):
            time_taken = seconds[f"{step} {name}"]
            print(
                f"{step:8}{name:8}{time_taken / NUM_LAYERS * 1e3:8.2f} ms a layer"
                f"{amount / time_taken / 1e9:8.1f} {unit:8}{amount / time_taken / limit:6.0%} of "
                f"the limit, {time_taken / seconds[f'{step} native']:5.2f} x native's time"
            )


if __name__ == "__main__":
    main()
