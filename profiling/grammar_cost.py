"""What structured outputs add to a step: the host's masks, and their use on the logits.

    python profiling/grammar_cost.py [--model smollm2-135m-instruct] [--rows 1 8 32]

`load` and `compile` are paid once for each model and form. For each number of rows: `prepare` is
the host's part, which runs while the device works on the forward pass and lets go of the
interpreter lock; `apply` is the part on the logits. Each row walks through a text of its form,
drawn at random, at its own place in it; medians and largest values over the steps, microseconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from runtime.config import EngineConfig
from runtime.grammar import Grammar, GrammarCompiler
from runtime.grammar_mask import GrammarWork, apply_mask, prepare_mask
from runtime.models import load_decoder_config
from runtime.structured_outputs import StructuredOutputsParams
from runtime.tokenizer import Tokenizer, load_end_token_ids, load_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "pattern": "^[a-z]{1,10}@[a-z]{1,10}\\.com$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["street", "number"],
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
}
FORMS = {
    "json schema": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "json object": StructuredOutputsParams(json_object=True),
    "regex": StructuredOutputsParams(regex=r"[A-Z][a-z]{2,20}, \d{4}-\d{2}-\d{2}( [a-z]{2,9}){40}"),
    "choice": StructuredOutputsParams(choice=[f"label {i} of many" for i in range(1000)]),
    "grammar": StructuredOutputsParams(
        grammar='start: term | start /[-+*]/ term\nterm: /[0-9]{1,4}/ | "(" start ")"'
    ),
}
MAX_WALK = 120


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and its microseconds."""
    start = time.perf_counter()
    found = work()
    return found, 1e6 * (time.perf_counter() - start)


def walk(grammar: Grammar, end_ids: tuple[int, ...], rng: random.Random) -> list[int]:
    """Ids of a random text of the grammar, up to its end."""
    matcher, ids = grammar.start(), []
    work = GrammarWork(place=0, row=0, matcher=matcher, output_ids=ids)
    while len(ids) < MAX_WALK:
        bits = np.unpackbits(prepare_mask([work]).bits[0], bitorder="little")
        allowed = np.flatnonzero(bits)
        token_id = int(rng.choice(allowed.tolist()))
        if token_id in end_ids:
            break
        ids.append(token_id)
    return ids


def measure(
    grammar: Grammar, texts: list[list[int]], num_steps: int, logits: torch.Tensor
) -> tuple[list[float], list[float]]:
    """Microseconds of `prepare` and of `apply` in each step."""
    prepared, applied = [], []
    places = [index * max(len(text), 1) // len(texts) for index, text in enumerate(texts)]
    rows = [(grammar.start(), text[:place]) for text, place in zip(texts, places, strict=True)]
    for step in range(num_steps):
        for index, text in enumerate(texts):
            place = (places[index] + step) % (len(text) + 1)
            if place == 0:
                rows[index] = (grammar.start(), [])
            else:
                rows[index][1][:] = text[:place]
        work = [
            GrammarWork(place=index, row=index, matcher=matcher, output_ids=ids)
            for index, (matcher, ids) in enumerate(rows)
        ]
        mask, microseconds = timed(lambda work=work: prepare_mask(work))
        assert not mask.row_errors, mask.row_errors
        prepared.append(microseconds)
        if logits.device.type == "cuda":
            torch.cuda.synchronize(logits.device)
        _, microseconds = timed(lambda mask=mask: _apply(logits, mask))
        applied.append(microseconds)
    return prepared, applied


def _apply(logits: torch.Tensor, mask: Any) -> None:
    apply_mask(logits, mask)
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)


def load(model: str) -> tuple[Tokenizer, GrammarCompiler, int, tuple[int, ...]]:
    """The model's tokenizer, a compiler for it, its vocabulary and its end tokens; no weights."""
    path = EngineConfig(model=model).resolve_model()
    tokenizer = load_tokenizer(path)
    vocab_size = load_decoder_config(path).vocab_size
    end_ids = load_end_token_ids(path, tokenizer)
    compiler = GrammarCompiler(tokenizer, vocab_size, end_ids)
    return tokenizer, compiler, vocab_size, end_ids


def main() -> None:
    """Print a line for each form and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _, compiler, vocab_size, end_ids = load(args.model)
    _, loading = timed(lambda: compiler.compile(StructuredOutputsParams(regex="a")))
    print(f"{args.model}, {vocab_size} tokens, {device}; load {loading / 1000:.0f} ms")
    print("form         compile  rows  prepare     max   apply     max   microseconds a step")
    for name, form in FORMS.items():
        grammar, compiling = timed(lambda form=form: compiler.compile(form))
        rng = random.Random(0)
        texts = [walk(grammar, end_ids, rng) for _ in range(max(args.rows))]
        for num_rows in args.rows:
            logits = torch.randn((num_rows, vocab_size), device=device)
            columns = measure(grammar, texts[:num_rows], args.steps, logits)
            numbers = "".join(f"{statistics.median(c):9.0f}{max(c):8.0f}" for c in columns)
            print(f"{name:11}{compiling:9.0f}{num_rows:6}{numbers}")


if __name__ == "__main__":
    main()
