"""The regions between attention calls on a CPU: plain, prepacked and compiled weights' products.

    python profiling/region_benchmark.py [--rounds 15] [--tokens 1 32 512]

All regions of the model in turn, as a step runs them, bfloat16. The three ways are interleaved;
medians in milliseconds and ratios to plain are printed. The first compilation is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

from runtime.model_source import resolve_model
from runtime.models import Decoder, load_decoder, load_decoder_config
from runtime.models.decoder import between


def make_runner(decoder: Decoder, region: Callable, num_tokens: int) -> Callable[[], None]:
    """All regions of a decoder on `num_tokens` made-up rows."""
    config = decoder.config
    attended = torch.randn(num_tokens, config.num_heads, config.head_dim).bfloat16()
    residual = torch.randn(num_tokens, config.hidden_size).bfloat16()
    ids = torch.zeros(num_tokens, dtype=torch.int32)
    _, rotary = decoder.enter(ids, torch.arange(num_tokens))

    def run() -> None:
        for layer, next_layer in pairwise(decoder.layers):
            region(layer, next_layer, attended, residual, rotary)

    return run


@torch.inference_mode()
def main() -> None:
    """Print a line per number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 512])
    args = parser.parse_args()
    path = resolve_model(args.model)
    config, cpu = load_decoder_config(path), torch.device("cpu")
    plain, packed = (load_decoder(config, path, dtype=torch.bfloat16, device=cpu) for _ in range(2))
    packed.prepack()
    compiled = torch.compile(between, dynamic=True, fullgraph=True)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.rounds} rounds")
    for num_tokens in args.tokens:
        ways = {
            "plain": make_runner(plain, between, num_tokens),
            "prepacked": make_runner(packed, between, num_tokens),
            "compiled": make_runner(plain, compiled, num_tokens),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way()
        for _ in range(args.rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                times[name].append(1e3 * (time.perf_counter() - start))
        medians = {name: statistics.median(values) for name, values in times.items()}
        columns = "   ".join(
            f"{name} {median:6.1f} ms ({medians['plain'] / median:.2f}x)"
            for name, median in medians.items()
        )
        print(f"{num_tokens:5d} tokens   {columns}")


if __name__ == "__main__":
    main()
