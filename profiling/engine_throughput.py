"""Output tokens/s of the whole engine, option sets side by side in one process.

    python profiling/engine_throughput.py --attention native torch [--rounds 3]

One: a sequence of 128 prompt and 128 output tokens. Many: 32 sequences at once, 128 to 1024 prompt
and 32 to 128 output tokens, uniform. Random ids below 10,000, temperature 0.6, end tokens ignored,
no prefix cache, seeded. Rounds are interleaved; medians and their ratio to the first are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from runtime import LLM, SamplingParams


def run(llm: LLM, prompts: list[list[int]], num_outputs: list[int]) -> float:
    """Output tokens a second of one call."""
    params = [
        SamplingParams(temperature=0.6, max_tokens=count, ignore_eos=True, seed=index)
        for index, count in enumerate(num_outputs)
    ]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return sum(num_outputs) / (time.perf_counter() - start)


def main() -> None:
    """Print a line per attention backend."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--attention", nargs="+", default=["auto"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths, counts = rng.integers(128, 1025, 32).tolist(), rng.integers(32, 129, 32).tolist()
    many = [rng.integers(3, 10_000, length).tolist() for length in lengths]
    one = [rng.integers(3, 10_000, 128).tolist()]
    llms = {
        name: LLM(
            args.model,
            attention_backend=name,
            enable_prefix_caching=False,
            max_model_len=2048,
            kv_cache_bytes=1 << 30,
        )
        for name in args.attention
    }
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in llms}
    for llm in llms.values():
        run(llm, one, [4])
    for _ in range(args.rounds):
        for name, llm in llms.items():
            speeds[name].append((run(llm, one, [128]), run(llm, many, counts)))
    first: tuple[float, float] | None = None
    for name, pairs in speeds.items():
        single, batch = (statistics.median(values) for values in zip(*pairs, strict=True))
        first = first or (single, batch)
        print(
            f"{name:10s} one {single:7.1f} tok/s ({single / first[0]:.2f}x)   "
            f"many {batch:7.1f} tok/s ({batch / first[1]:.2f}x)"
        )


if __name__ == "__main__":
    main()
