"""A forward of the whole decoder on a CPU: plain, with prepacked weights, and with compiled layers.

    python profiling/region_benchmark.py [--rounds 15] [--context 512]

Three steps: one prefills 512 tokens, the others decode 1 and 32 sequences at a context. Forwards,
compiled regions, attention and its plans are the engine's own; logits and sampling are left out.
The ways are interleaved; medians in milliseconds and ratios to plain are printed. Compiling happens
before, and what it took is printed too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    BoundAttention,
    PagedKVCache,
    select_backend,
)
from runtime.compiled_layers import compile_layers
from runtime.model_source import resolve_model
from runtime.models import (
    PLAIN_REGIONS,
    Decoder,
    DecoderConfig,
    Regions,
    load_decoder,
    load_decoder_config,
)

BLOCK_SIZE = 16
MAX_TOKENS = 512
STEPS = {"prefill 512": (512, 1), "decode 1": (1, 1), "decode 32": (1, 32)}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def make_backend(config: DecoderConfig, dtype: torch.dtype) -> AttentionBackend:
    """The attention that an engine would choose."""
    spec = AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
        block_size=BLOCK_SIZE,
        windows=config.windows,
        scale=config.head_dim**-0.5,
    )
    return select_backend("auto", spec)


def make_metadata(query_len: int, num_seqs: int, context_len: int) -> AttentionMetadata:
    """A step of equal sequences, their blocks in order."""
    blocks_per_seq = -(-context_len // BLOCK_SIZE)
    tables = np.arange(1, num_seqs * blocks_per_seq + 1, dtype=np.int32).reshape(num_seqs, -1)
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


def make_step(
    decoder: Decoder, regions: Regions, backend: AttentionBackend, metadata: AttentionMetadata
) -> Callable[[], torch.Tensor]:
    """One planned forward over a KV pool of its own."""
    query_len, contexts = metadata.max_seqlen_q, metadata.context_lens_cpu
    ids = torch.randint(0, 1000, (metadata.num_tokens,), dtype=torch.int32)
    positions = torch.cat([torch.arange(c - query_len, c) for c in contexts.tolist()])
    cache = PagedKVCache.allocate(backend.spec, 1 + metadata.block_tables.numel())
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    attend = BoundAttention(backend=backend, plan=backend.plan(metadata), cache=cache)

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return decoder(ids, positions, attend, regions)

    return step


def main() -> None:
    """Print a line per step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--context", type=int, default=512, help="tokens of each decode's context")
    args = parser.parse_args()
    path, dtype, cpu = resolve_model(args.model), DTYPES[args.dtype], torch.device("cpu")
    config = load_decoder_config(path)
    plain, packed = (load_decoder(config, path, dtype=dtype, device=cpu) for _ in range(2))
    with tempfile.TemporaryDirectory() as directory:
        layers = compile_layers(plain, max_tokens=MAX_TOKENS, cache_dir=Path(directory))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.rounds} rounds")
    print(f"compiled layers: {layers.as_dict()}")
    ways = {"plain": (plain, PLAIN_REGIONS), "compiled": (plain, layers.regions)}
    if dtype == torch.bfloat16:
        packed.prepack()
        ways["prepacked"] = (packed, PLAIN_REGIONS)
    backend = make_backend(config, dtype)
    for name, (query_len, num_seqs) in STEPS.items():
        context_len = query_len if query_len > 1 else args.context
        metadata = make_metadata(query_len, num_seqs, context_len)
        steps = {way: make_step(*pair, backend, metadata) for way, pair in ways.items()}
        times: dict[str, list[float]] = {way: [] for way in steps}
        for round_ in range(args.rounds + 1):
            for way, step in steps.items():
                start = time.perf_counter()
                step()
                if round_ > 0:  # the first round warms up
                    times[way].append(1e3 * (time.perf_counter() - start))
        medians = {way: statistics.median(values) for way, values in times.items()}
        columns = "   ".join(
            f"{way} {median:6.1f} ms ({medians['plain'] / median:.2f}x)"
            for way, median in medians.items()
        )
        print(f"{name:12s} {columns}")
    print(f"compiled layers: {layers.as_dict()}")


if __name__ == "__main__":
    main()
