"""What rounding the weights to int8 changes in a model's answers.

    python profiling/quantization_accuracy.py SHAREGPT.json [--conversations 200]

The first question and answer of each conversation, in the model's chat template and cut to
--prompt-tokens, are scored by the model in bfloat16 and by the same model in int8:

    perplexity   exp of the mean negative log-probability of a token
    likeliest    share of tokens for which both find the same one the likeliest
    greedy       answers to the questions alone, --max-tokens long: share of answers that are the
                 same to the end, and how many tokens are the same before the first that isn't
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from sharegpt import first_turns

from runtime import LLM, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What one model gave."""

    logprobs: list[float]
    """Of all scored tokens."""
    likeliest: list[int]
    """The model's choice at each of them."""
    greedy: list[list[int]]
    """[conversations] its own answers."""


def conversations(path: Path, count: int) -> list[list[dict[str, str]]]:
    """The first question and answer of the first `count` conversations that open with one."""
    chosen = []
    for turns in first_turns(path):
        roles = ("user", "assistant")
        chosen.append([{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)])
        if len(chosen) == count:
            return chosen
    raise SystemExit(f"{path} has only {len(chosen)} conversations that fit, {count} are needed")


def answers(args: argparse.Namespace, quantization: str | None) -> Answers:
    """Score and answer with one model."""
    chats = conversations(args.sharegpt, args.conversations)
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    reply = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    options = {"dtype": "bfloat16", "max_model_len": args.prompt_tokens + args.max_tokens}
    with LLM(args.model, quantization=quantization, **options) as llm:
        encode = llm.tokenizer.apply_chat_template
        whole = [encode(chat)[: args.prompt_tokens] for chat in chats]
        questions = [encode(chat[:1])[: args.prompt_tokens] for chat in chats]
        logprobs, likeliest = [], []
        for output in llm.generate(whole, score, use_tqdm=False):
            assert output.prompt_logprobs is not None
            ids = output.prompt_token_ids
            for token_id, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
                assert entry is not None
                logprobs.append(entry[token_id].logprob)
                likeliest.append(min(entry, key=lambda known: entry[known].rank))
        greedy = [o.outputs[0].token_ids for o in llm.generate(questions, reply, use_tqdm=False)]
    return Answers(logprobs=logprobs, likeliest=likeliest, greedy=list(map(list, greedy)))


def num_equal(one: list[int], other: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sharegpt", type=Path, help="JSON file of conversations")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    plain, int8 = answers(args, None), answers(args, "int8")
    perplexities = [math.exp(-statistics.fmean(a.logprobs)) for a in (plain, int8)]
    print(
        f"perplexity of {len(plain.logprobs)} tokens: bfloat16 {perplexities[0]:.4f}, int8 "
        f"{perplexities[1]:.4f} ({perplexities[1] / perplexities[0] - 1:+.2%})"
    )
    same = [a == b for a, b in zip(plain.likeliest, int8.likeliest, strict=True)]
    print(f"same likeliest token: {statistics.fmean(same):.2%}")
    pairs = list(zip(plain.greedy, int8.greedy, strict=True))
    equal = statistics.fmean(a == b for a, b in pairs)
    mean = statistics.fmean(num_equal(a, b) for a, b in pairs)
    length = statistics.fmean(len(a) for a, _ in pairs)
    print(f"greedy answers equal to the end: {equal:.1%}; {mean:.1f} of {length:.1f} tokens before")


if __name__ == "__main__":
    main()
