"""The STEPGRAPH_ environment variables: one strict table."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError

PREFIX = "STEPGRAPH_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable: how it is read and what it does."""

    name: str
    parse: Callable[[str], Any]
    """Text without surrounding spaces to value; raises ValueError if it isn't allowed, with a
    message, if any, that says what is wrong and what is allowed."""
    allowed: str
    """What is allowed, for error messages and the table."""
    default: str
    """The value that holds if the variable is not set, as text."""
    help: str


def _parse_switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


def _parse_positive(text: str) -> int:
    # Longer ones are no count of anything; int() itself refuses thousands of digits.
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) < 1:
        raise ValueError
    return int(text)


def _parse_sizes(text: str) -> tuple[int, ...]:
    from graphs.capture_sizes import parse_capture_sizes  # its package imports torch

    return parse_capture_sizes(text)


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return parse


def _parse_path(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError
    return path


_LEVELS = ("debug", "info", "warning", "error")

VARIABLES: tuple[Variable, ...] = (
    Variable(
        name="STEPGRAPH_ATTENTION",
        parse=_choice("auto", "flashinfer", "flash_attn", "native", "torch"),
        allowed="auto | flashinfer | flash_attn | native | torch",
        default="auto",
        help="attention backend",
    ),
    Variable(
        name="STEPGRAPH_CAPTURE_SIZES",
        parse=_parse_sizes,
        allowed='sizes and ranges start-stop:step with commas between, as in "1,2,4,8-64:8,128"',
        default="chosen by the graph mode",
        help="sizes that steps are padded to: of decode steps in sequences, of others in tokens",
    ),
    Variable(
        name="STEPGRAPH_COMPILE",
        parse=_parse_switch,
        allowed="0 | 1",
        default="0 on a CPU, 1 on CUDA",
        help="compile what lies between attention calls",
    ),
    Variable(
        name="STEPGRAPH_GRAPH_MODE",
        parse=_choice("none", "full", "piecewise", "full_and_piecewise"),
        allowed="none | full | piecewise | full_and_piecewise",
        default="none on a CPU, full_and_piecewise on CUDA",
        help="which steps run under captured graphs",
    ),
    Variable(
        name="STEPGRAPH_LAZY_CAPTURE",
        parse=_parse_switch,
        allowed="0 | 1",
        default="0",
        help="capture each graph when a step first takes it, not all of them at the start",
    ),
    Variable(
        name="STEPGRAPH_MAX_NUM_BATCHED_TOKENS",
        parse=_parse_positive,
        allowed="a whole number from 1",
        default="512 on a CPU, 8192 on CUDA",
        help="token budget of a step",
    ),
    Variable(
        name="STEPGRAPH_NVTX",
        parse=_parse_switch,
        allowed="0 | 1",
        default="0",
        help="NVTX ranges around the stages of each step",
    ),
    Variable(
        name="STEPGRAPH_LOG_LEVEL",
        parse=_choice(*_LEVELS),
        allowed=" | ".join(_LEVELS),
        default="warning; info under stepgraph -v",
        help="least severe message of the stepgraph loggers that is shown",
    ),
    Variable(
        name="STEPGRAPH_CACHE_DIR",
        parse=_parse_path,
        allowed="an absolute path",
        default="stepgraph in the user's cache directory",
        help="where fetched and converted models, built libraries and compiled layers are kept",
    ),
)


def read_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Parsed values of the variables that are set, by name.

    Read when an engine is made, so a variable may be set after import.

    Raises:
        ConfigError: a value isn't allowed, or a STEPGRAPH_ name isn't known.
    """
    environ = os.environ if environ is None else environ
    known = {variable.name: variable for variable in VARIABLES}
    values = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown environment variable {name}={text!r}; {hint}")
        try:
            values[name] = known[name].parse(text.strip())
        except ValueError as error:
            reason = f": {error}" if str(error) else f"; allowed: {known[name].allowed}"
            raise ConfigError(
                f"environment variable {name}={text!r} is not allowed{reason}"
            ) from None
    return values


def describe_environment(environ: Mapping[str, str] | None = None) -> str:
    """The table that `stepgraph env` prints: value, source and meaning of each variable."""
    environ = os.environ if environ is None else environ
    values = read_environment(environ)
    lines = []
    for variable in VARIABLES:
        if variable.name in values:
            source = f"{environ[variable.name].strip()}  (environment)"
        else:
            source = f"{variable.default}  (default)"
        lines += [
            f"{variable.name} = {source}",
            f"    {variable.help}; allowed: {variable.allowed}",
        ]
    return "\n".join(lines)
