"""What the native kernel takes for 64 keys of one key/value head, for each number of query heads.

    python profiling/decode_tile_benchmark.py

One sequence decodes in bfloat16 with heads of size 64, on one thread, with keys and values in the
processor's second-level cache. Least times of many calls; those of two contexts are subtracted, so
what a call costs by itself drops out, and is printed besides: a whole call with 200 keys.
"""

from __future__ import annotations

import time

import torch
from attention_benchmark import make_metadata

from attention import AttentionSpec
from attention.native_backend import NativeBackend

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 3, 64, 16
TILE_KEYS = 64
CONTEXTS = (192, 200, 576)
ROUNDS, CALLS = 200, 20


def least_times(group: int) -> dict[int, float]:
    """Seconds of one layer's call, by context."""
    spec = AttentionSpec(
        num_heads=group * NUM_KV_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        block_size=BLOCK_SIZE,
        windows=(None,),
        scale=HEAD_DIM**-0.5,
    )
    backend = NativeBackend(spec)
    cache = backend.allocate_cache(1 + max(CONTEXTS) // BLOCK_SIZE)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    plans = {n: backend.plan(make_metadata(1, n, 1, shuffled=False)) for n in CONTEXTS}
    query = torch.randn(1, spec.num_heads, HEAD_DIM).to(spec.dtype)
    key, value = torch.randn(2, 1, NUM_KV_HEADS, HEAD_DIM).to(spec.dtype)
    out = torch.empty_like(query)
    times = dict.fromkeys(CONTEXTS, float("inf"))
    for _ in range(ROUNDS):
        for context, plan in plans.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                backend.run(0, query, key, value, cache, plan, out)
            times[context] = min(times[context], (time.perf_counter() - start) / CALLS)
    return times


def main() -> None:
    torch.set_num_threads(1)
    for group in range(1, 10):
        times = least_times(group)
        tiles = (CONTEXTS[2] - CONTEXTS[0]) // TILE_KEYS * NUM_KV_HEADS
        tile = (times[CONTEXTS[2]] - times[CONTEXTS[0]]) / tiles
        print(
            f"{group} query heads: {tile * 1e6:.2f} us a tile and key/value head, "
            f"{times[CONTEXTS[1]] * 1e6:.1f} us a call with {CONTEXTS[1]} keys"
        )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
