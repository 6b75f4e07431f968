"""The `stepgraph` command: generate, chat, env, backends."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .embedded_model import EMBEDDED_MODEL
from .environment import describe_environment
from .errors import NonFiniteLogitsError
from .log import configure_logging

if TYPE_CHECKING:
    from .llm import LLM

_ENGINE_FLAGS = (
    "tokenizer",
    "load_format",
    "dtype",
    "device",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_bytes",
    "policy",
    "attention_backend",
    "quantization",
)
_SAMPLING_FLAGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 for a refused input, 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        configure_logging("info" if args.verbose else "warning")
        status: int = args.run(args)
    except (ValueError, TypeError, OSError, NonFiniteLogitsError) as error:
        print(f"stepgraph: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stepgraph", description=__doc__)
    parser.add_argument("-v", "--verbose", action="store_true", help="show what was chosen and why")
    commands = parser.add_subparsers(required=True, metavar="command")

    generate = commands.add_parser("generate", help="complete prompts")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="answer a message, or talk until end of input")
    chat.add_argument("message", nargs="?", help="one message; without it, lines are read")
    chat.add_argument("--system", help="system message")
    chat.set_defaults(run=_chat)

    for command in (generate, chat):
        command.add_argument("--model", default=EMBEDDED_MODEL, help="default: %(default)s")
        command.add_argument("--stop", action="append", help="end at this text; may be repeated")
        command.add_argument(
            "--stats", type=Path, metavar="FILE", help="write how steps were launched, as JSON"
        )
        _add_fields(command, "sampling", _SAMPLING_FLAGS)
        _add_fields(command, "engine", _ENGINE_FLAGS)

    env = commands.add_parser("env", help="show the environment variables")
    env.set_defaults(run=_env)

    backends = commands.add_parser("backends", help="show which attention backends can run a model")
    backends.add_argument("--model", default=EMBEDDED_MODEL, help="default: %(default)s")
    _add_fields(backends, "engine", ("dtype", "device", "block_size"))
    backends.set_defaults(run=_backends)
    return parser


def _add_fields(parser: argparse.ArgumentParser, title: str, names: tuple[str, ...]) -> None:
    group = parser.add_argument_group(f"{title} options, as in the Python API")
    for name in names:
        group.add_argument(f"--{name.replace('_', '-')}", dest=name, type=_number_or_text)


def _number_or_text(text: str) -> int | float | str:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _generate(args: argparse.Namespace) -> int:
    from .llm import LLM
    from .sampling_params import SamplingParams

    params = SamplingParams(**_given(args, (*_SAMPLING_FLAGS, "stop")))
    with LLM(args.model, **_given(args, _ENGINE_FLAGS)) as llm:
        start = time.monotonic()
        outputs = llm.generate(args.prompts, params, use_tqdm=sys.stderr.isatty())
        seconds = time.monotonic() - start
        _write_stats(args.stats, llm)
    for output in outputs:
        print(f"{output.prompt}{output.outputs[0].text}\n")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    first = [output.metrics.time_to_first_token for output in outputs]
    _print_speed(num_tokens, seconds, min((t for t in first if t is not None), default=0.0))
    return int(any(output.outputs[0].finish_reason == "error" for output in outputs))


def _chat(args: argparse.Namespace) -> int:
    from .llm import LLM
    from .sampling_params import SamplingParams

    params = SamplingParams(**_given(args, (*_SAMPLING_FLAGS, "stop")))
    messages = [{"role": "system", "content": args.system}] if args.system else []
    with LLM(args.model, **_given(args, _ENGINE_FLAGS)) as llm:
        for message in _messages(args.message):
            messages.append({"role": "user", "content": message})
            start, first, pieces = time.monotonic(), None, []
            before = llm.engine.counters.num_output_tokens
            for piece in llm.stream_chat(messages, params):
                first = first or time.monotonic()
                pieces.append(piece)
                print(piece, end="", flush=True)
            print()
            num_tokens = llm.engine.counters.num_output_tokens - before
            _print_speed(num_tokens, time.monotonic() - start, (first or start) - start)
            messages.append({"role": "assistant", "content": "".join(pieces)})
        _write_stats(args.stats, llm)
    return 0


def _write_stats(path: Path | None, llm: LLM) -> None:
    if path is not None:
        path.write_text(json.dumps(llm.stats(), indent=2) + "\n", encoding="utf-8")


def _messages(message: str | None) -> Iterator[str]:
    if message is not None:
        yield message
        return
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line:
            yield line


def _print_speed(num_tokens: int, seconds: float, first: float) -> None:
    rate = num_tokens / max(seconds, 1e-9)
    print(
        f"[{num_tokens} tokens, {rate:.1f} tokens/s, time to first token {first * 1000:.0f} ms]",
        file=sys.stderr,
    )


def _env(args: argparse.Namespace) -> int:
    print(describe_environment())
    return 0


def _backends(args: argparse.Namespace) -> int:
    from attention import backend_names, rejected_backends

    from .config import EngineConfig
    from .models import load_decoder_config, stored_dtype

    options = EngineConfig(model=args.model, **_given(args, ("dtype", "device", "block_size")))
    path = options.resolve_model()
    decoder = load_decoder_config(path)
    config = options.resolve(decoder, path, stored_dtype(path))
    rejected = rejected_backends(config.attention_spec(decoder), cache_dir=config.cache_dir)
    for name in backend_names():
        reasons = rejected.get(name)
        print(f"{name}: {'can run' if reasons is None else '; '.join(reasons)}")
    return 0
