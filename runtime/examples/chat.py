"""Chat: one conversation, several at once, and an answer that is begun for the model.

    python -m runtime.examples.chat [--model MODEL]

MODEL is a directory, a hub id or a .gguf file; the small default model is fetched once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from runtime import LLM, SamplingParams

SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
QUESTIONS = ("What is the capital of France?", "Name a primary colour.")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args(argv)
    params = SamplingParams(temperature=0, max_tokens=24)
    conversations = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
    with LLM(args.model, max_model_len=512, kv_cache_bytes=1 << 26) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
        for question, output in zip(QUESTIONS, outputs, strict=True):
            print(f"user: {question}\nassistant: {output.outputs[0].text}")

        # The model goes on with an answer whose beginning is given.
        begun = [*conversations[0], {"role": "assistant", "content": "The capital is"}]
        (output,) = llm.chat(
            begun,
            params,
            use_tqdm=False,
            add_generation_prompt=False,
            continue_final_message=True,
        )
        print(f"assistant: The capital is{output.outputs[0].text}")


if __name__ == "__main__":
    main()
