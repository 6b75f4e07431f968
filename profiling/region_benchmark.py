"""Products and regions between attention calls on a CPU: the ways to compute them, side by side.

    python profiling/region_benchmark.py [--rounds 15] [--tokens 1 8 32 128 512]

All layers of the model in turn, as a step runs them, bfloat16, without attention. Ways are
interleaved, each after a nap, so that other processes disturb them less; the least of all rounds is
printed in milliseconds, with its ratio to the first way. The first compilation is not counted.

products: the four projections of every layer. plain: F.linear. onednn: with weights in oneDNN's own
layout, as torch.compile freezes them. packed: `linear` with packed weights.
forward: from token ids to hidden states, attention's result taken for its queries. plain: operator
by operator. compiled: layers as the engine compiles them. packed: plain with packed weights. both:
compiled layers with packed weights. native: each region as one native call.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from runtime.compiled_layers import CompiledLayers, compile_layers
from runtime.model_source import resolve_model
from runtime.models import (
    Decoder,
    NativeForward,
    load_decoder,
    load_decoder_config,
    pack_decoder,
)
from runtime.models.linear import linear

Way = Callable[[], object]
NAP_SECONDS = 0.02


def layer_weights(decoder: Decoder) -> list:
    """The weights of all projections, in the order of their use."""
    names = ("qkv_weight", "o_weight", "gate_up_weight", "down_weight")
    return [getattr(layer, name) for layer in decoder.layers for name in names]


def product_ways(plain: Decoder, packed: Decoder, num_tokens: int) -> dict[str, Way]:
    """The ways to compute all projections of made-up rows."""
    weights = layer_weights(plain)
    ours = layer_weights(packed)
    onednn = [torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None) for weight in weights]
    widths = {weight.shape[1] for weight in weights}
    rows = {width: torch.randn(num_tokens, width).bfloat16() for width in widths}
    inputs = [rows[weight.shape[1]] for weight in weights]
    multiply = torch.ops.mkldnn._linear_pointwise
    return {
        "plain": lambda: [F.linear(x, w) for x, w in zip(inputs, weights, strict=True)],
        "onednn": lambda: [
            multiply(x, w, None, "none", [], "") for x, w in zip(inputs, onednn, strict=True)
        ],
        "packed": lambda: [linear(x, w) for x, w in zip(inputs, ours, strict=True)],
    }


def compiled_layers(decoder: Decoder, max_tokens: int) -> CompiledLayers:
    """Warm compiled layers, which are not kept; what compiling took is printed."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        layers = compile_layers(decoder, max_tokens=max_tokens, cache_dir=Path(directory))
    print(f"compiled in {time.perf_counter() - start:.1f} s: {layers.as_dict()}", flush=True)
    return layers


def forward_ways(
    plain: Decoder,
    packed: Decoder,
    compiled: CompiledLayers,
    compiled_packed: CompiledLayers,
    num_tokens: int,
) -> dict[str, Way]:
    """The ways to compute a forward."""
    ids, positions = torch.zeros(num_tokens, dtype=torch.int32), torch.arange(num_tokens)

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return query.contiguous()

    native = NativeForward(packed).regions
    return {
        "plain": lambda: plain(ids, positions, attend),
        "compiled": lambda: plain(ids, positions, attend, compiled.regions),
        "packed": lambda: packed(ids, positions, attend),
        "both": lambda: packed(ids, positions, attend, compiled_packed.regions),
        "native": lambda: packed(ids, positions, attend, native),
    }


@torch.inference_mode()
def compare(label: str, ways: dict[str, Way], rounds: int) -> None:
    """Print one line of least times."""
    least = dict.fromkeys(ways, float("inf"))
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            time.sleep(NAP_SECONDS)
            torch.ones(1 << 16).sum()  # wakes the threads
            start = time.perf_counter()
            way()
            least[name] = min(least[name], 1e3 * (time.perf_counter() - start))
    first = next(iter(least.values()))
    columns = "   ".join(
        f"{name} {best:6.2f} ms ({first / best:.2f}x)" for name, best in least.items()
    )
    print(f"{label}   {columns}", flush=True)


def main() -> None:
    """Print a line per number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    args = parser.parse_args()
    path = resolve_model(args.model)
    config, cpu = load_decoder_config(path), torch.device("cpu")
    plain, packed = (load_decoder(config, path, dtype=torch.bfloat16, device=cpu) for _ in range(2))
    pack_decoder(packed)
    compiled = [compiled_layers(decoder, max(args.tokens)) for decoder in (plain, packed)]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.rounds} rounds")
    for num_tokens in args.tokens:
        compare(f"products {num_tokens:4d}", product_ways(plain, packed, num_tokens), args.rounds)
        ways = forward_ways(plain, packed, *compiled, num_tokens)
        compare(f"forward  {num_tokens:4d}", ways, args.rounds)
    for layers in compiled:
        print(f"compiled, at the end: {layers.as_dict()}")


if __name__ == "__main__":
    main()
