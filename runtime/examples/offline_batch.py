"""Complete many prompts in one call: they share steps, and one cached beginning.

    python -m runtime.examples.offline_batch [--model MODEL]

MODEL is a directory, a hub id or a .gguf file; the small default model is fetched once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from runtime import LLM, SamplingParams

BEGINNING = "Here is what a careful teacher once told her class about the world. "
TOPICS = ("The sea is", "The moon was", "A good soup needs", "The capital of France is")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args(argv)
    prompts = [BEGINNING + topic for topic in TOPICS]
    # One value for all prompts; a list gives each its own.
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, seed=1)
    with LLM(args.model, max_model_len=256, kv_cache_bytes=1 << 26) as llm:
        for output in llm.generate(prompts, params, use_tqdm=False):
            completion = output.outputs[0]
            print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")
        # What the first call computed of the common beginning serves the second.
        again = llm.generate(prompts[0], params, use_tqdm=False)[0]
        print(f"cached: {again.num_cached_tokens} of {len(again.prompt_token_ids)} prompt tokens")


if __name__ == "__main__":
    main()
