"""See what the steps did: times of requests, and steps by kind and size.

    python -m runtime.examples.profiling [--model MODEL]

Under nsys, STEPGRAPH_NVTX=1 shows each step and its parts as ranges; see profiling/nsys.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from runtime import LLM, SamplingParams


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args(argv)
    params = SamplingParams(max_tokens=16, ignore_eos=True, seed=1)
    prompts = ["word " * length for length in (8, 40, 100)]
    with LLM(args.model, max_model_len=640, kv_cache_bytes=1 << 26) as llm:
        for output in llm.generate(prompts, params, use_tqdm=False):
            times, num_tokens = output.metrics, len(output.outputs[0].token_ids)
            assert times.first_token_time is not None and times.finish_time is not None
            gap = (times.finish_time - times.first_token_time) / (num_tokens - 1)
            first = times.first_token_time - times.arrival_time
            print(
                f"{len(output.prompt_token_ids)} prompt tokens: first token after "
                f"{1000 * first:.1f} ms, then one each {1000 * gap:.1f} ms"
            )
        stats = llm.stats()  # in JSON's types: what profiling/tune_capture_sizes.py reads
        print(f"{stats['num_steps']} steps, {stats['num_output_tokens']} tokens of output")
        print(llm.engine.stats_table())


if __name__ == "__main__":
    main()
