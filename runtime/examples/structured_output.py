"""Answers in a form that programs can read: a JSON schema, a regex, choices, a grammar.

    python -m runtime.examples.structured_output [--model MODEL]

Needs the extra structured: pip install -e '.[structured]'
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from runtime import LLM, SamplingParams, StructuredOutputsParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "hobbies": {"type": "array", "items": {"enum": ["chess", "music"]}, "maxItems": 2},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
FORMS = {
    # Compact, since a small model may like spaces without end, and bounded: max_tokens suffices.
    "Describe a person in JSON.": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "When did it happen?": StructuredOutputsParams(regex=r"(19|20)\d{2}-[01]\d-[0-3]\d"),
    "Is 'I love it' positive?": StructuredOutputsParams(choice=["positive", "negative"]),
    "Add some numbers.": StructuredOutputsParams(
        grammar='root ::= number (" + " number){1,3}\nnumber ::= [1-9] [0-9]?'
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args(argv)
    conversations = [[{"role": "user", "content": question}] for question in FORMS]
    params = [
        SamplingParams(structured_outputs=form, temperature=0.7, max_tokens=200, seed=2)
        for form in FORMS.values()
    ]
    with LLM(args.model, max_model_len=512, kv_cache_bytes=1 << 26) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
    answers = [output.outputs[0].text for output in outputs]
    for question, answer in zip(FORMS, answers, strict=True):
        print(f"{question} -> {answer}")
    print("the person's age:", json.loads(answers[0])["age"])


if __name__ == "__main__":
    main()
