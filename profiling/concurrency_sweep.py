"""Output tokens/s of the engine with more and more sequences at once.

    python profiling/concurrency_sweep.py [--sequences 1 2 4 8 16 32 64 128 256 512]
        [--quantization int8] [--rounds 3] [--plot FILE.png] [--json FILE]

Each point runs so many requests together, all there from the start: prompts of --inputs random
ids, --outputs tokens each, temperature 0.6, end tokens ignored, no prefix cache. Printed are
medians of interleaved rounds; the plot has the spread as well. A good engine's line rises to
its plateau and stays there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from plots import pyplot

from runtime import LLM, SamplingParams


def run(llm: LLM, count: int, num_inputs: int, num_outputs: int, seed: int) -> float:
    """Output tokens a second of `count` requests at once."""
    rng = np.random.default_rng(seed)
    last = min(10_000, llm.engine.vocab_size)
    prompts = rng.integers(17, last, (count, num_inputs)).tolist()
    params = [
        SamplingParams(temperature=0.6, max_tokens=num_outputs, ignore_eos=True, seed=index)
        for index in range(count)
    ]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return count * num_outputs / (time.perf_counter() - start)


def plot(path: Path, speeds: dict[int, list[float]], title: str) -> bool:
    """Throughput over sequences as a PNG; False without matplotlib."""
    plt = pyplot()
    if plt is None:
        return False
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    counts = list(speeds)
    medians = [statistics.median(values) for values in speeds.values()]
    bounds = [[f(values) for values in speeds.values()] for f in (min, max)]
    rounds = len(speeds[counts[0]])
    axes.fill_between(counts, *bounds, alpha=0.2, label=f"least to most of {rounds} rounds")
    axes.plot(counts, medians, "o-", label="median")
    for count, median in zip(counts, medians, strict=True):
        place = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
        axes.annotate(f"{median:.0f}", (count, median), **place)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, labels=list(map(str, counts)))
    axes.set(xlabel="sequences at once", ylabel="output tokens per second", title=title)
    axes.set_ylim(0, 1.15 * max(bounds[1]))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def main() -> None:
    """Print a line per number of sequences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    )
    parser.add_argument("--inputs", type=int, default=32)
    parser.add_argument("--outputs", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    most = max(args.sequences)
    llm = LLM(
        args.model,
        dtype="bfloat16",
        quantization=args.quantization,
        max_model_len=args.inputs + args.outputs,
        max_num_seqs=most,
        max_num_batched_tokens=max(512, most),
        enable_prefix_caching=False,
    )
    speeds: dict[int, list[float]] = {count: [] for count in sorted(args.sequences)}
    run(llm, min(2, most), args.inputs, 2, seed=0)
    for number in range(args.rounds):
        for count, values in speeds.items():
            values.append(run(llm, count, args.inputs, args.outputs, seed=number))
    for count, values in speeds.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"{count:5d} sequences: {statistics.median(values):8.1f} output tokens/s ({spread})")
    if args.json:
        args.json.write_text(json.dumps(speeds, indent=1))
    if args.plot:
        kind = "bfloat16" if args.quantization is None else args.quantization
        name = Path(args.model).name
        plot(args.plot, speeds, f"{name}, {kind}: {args.inputs} tokens in, {args.outputs} out")


if __name__ == "__main__":
    main()
