"""Compiles the forms that outputs must have, and follows each output through its own.

The work is llguidance's (https://github.com/guidance-ai/llguidance), which is imported when a
request first needs it. Of the two libraries of this kind, it refuses the parts of JSON schemas
that it can't enforce (xgrammar leaves "not", "uniqueItems" and others out without a word), needs
no other package, and one wheel serves all versions of Python.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import InvalidRequestError
from .structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from .tokenizer import Tokenizer

logger = logging.getLogger("stepgraph.runtime")

MAX_KEPT_GRAMMARS = 256
"""Compiled grammars that an engine keeps; the one that was asked for longest ago goes first."""

_MAX_THREADS = 8


class Grammar:
    """A form, compiled; shared by all requests that ask for it.

    Args:
        start: a matcher at the start of a text, which is only copied.
        mask_bytes: of the mask of one row and step.
        executor: the threads that fill masks.
    """

    def __init__(self, start: LLMatcher, mask_bytes: int, executor: LLExecutor) -> None:
        self._start = start
        self.mask_bytes = mask_bytes
        """A multiple of 4; bit i of byte b stands for token 8 * b + i."""
        self.executor = executor
        """One for all grammars of a compiler."""

    def start(self) -> GrammarMatcher:
        """Follow a new output."""
        return GrammarMatcher(self, self._start.deep_copy())


class GrammarMatcher:
    """Follows one output through its grammar. Only ids that were handed out advance it."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self.grammar = grammar
        self.matcher = matcher
        """llguidance's own, at the end of the first `num_consumed` ids of the output."""
        self.num_consumed = 0

    def follow(self, output_ids: list[int]) -> None:
        """Take in what the output has more than it had last time."""
        new = output_ids[self.num_consumed :]
        if new:
            self.matcher.consume_tokens(new)
            self.num_consumed += len(new)

    @property
    def error(self) -> str | None:
        """Why it can't go on: the grammar's states grew beyond the library's limits."""
        if not self.matcher.is_error():
            return None
        first_line: str = self.matcher.get_error().partition("\n")[0]
        return first_line


class GrammarCompiler:
    """Makes grammars for one tokenizer, each once. Any thread may ask.

    Args:
        tokenizer: of the model; None: everything is refused.
        vocab_size: rows of the model's logits.
        end_token_ids: allowed where a text is complete.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, end_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = [id_ for id_ in end_token_ids if id_ < vocab_size]
        self._backend: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._loading = threading.Lock()
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._lock = threading.Lock()  # never held while something is compiled

    def compile(self, form: StructuredOutputsParams) -> Grammar:
        """The grammar of a form; takes up to some tens of milliseconds, the first one more.

        Raises:
            InvalidRequestError: the form can't be read or enforced, the model has no tokenizer or
                no end token, or llguidance is missing.
        """
        with self._lock:
            if form in self._kept:
                self._kept.move_to_end(form)
                return self._kept[form]
        grammar = self._compile(form)
        with self._lock:
            self._kept[form] = grammar
            if len(self._kept) > MAX_KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar

    def _compile(self, form: StructuredOutputsParams) -> Grammar:
        with self._loading:
            if self._backend is None or self._executor is None:
                self._backend, self._executor = self._load()
            backend, executor = self._backend, self._executor
        from llguidance import LLMatcher, LLParserLimits

        name, text = _named_text(form)
        try:
            source = _SOURCES[name](form)
        except Exception as error:  # noqa: BLE001 - the EBNF reader raises classes of its own
            raise _refusal(name, text, str(error)) from None
        limits = LLParserLimits(verbose_errors=False)
        start = LLMatcher(backend, source, log_level=0, limits=limits)
        if start.is_error():
            raise _refusal(name, text, start.get_error())
        for warning in start.get_grammar_warnings():
            logger.warning("structured_outputs, %s=%.80r: %s", name, text, warning)
        return Grammar(start, 4 * (-(-backend.vocab_size // 32)), executor)

    def _load(self) -> tuple[LLTokenizer, LLExecutor]:
        try:
            import llguidance
        except ImportError as error:
            raise InvalidRequestError(
                "structured_outputs needs the package llguidance, which is not installed "
                f"({error}); run: pip install 'llguidance>=1.9,<2', or install the extra structured"
            ) from None
        if self._tokenizer is None:
            raise InvalidRequestError(
                "structured_outputs needs a tokenizer, and this engine has none; leave it out"
            )
        if not self._end_token_ids:
            raise InvalidRequestError(
                "structured_outputs needs a model with an end token, and this one names none; "
                "add eos_token_id to its generation_config.json"
            )
        try:
            tokenizer = llguidance.LLTokenizer(
                self._tokenizer.backend.to_str(),
                n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                eos_token=self._end_token_ids,
            )
        except ValueError as error:
            raise InvalidRequestError(
                f"structured_outputs: llguidance can't use the model's tokenizer: {error}"
            ) from None
        return tokenizer, llguidance.LLExecutor(min(os.cpu_count() or 1, _MAX_THREADS))


def _named_text(form: StructuredOutputsParams) -> tuple[str, object]:
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(form, name)) is not None:
            return name, value
    return "json_object", True


def _refusal(name: str, text: object, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured_outputs: {name}={text!r:.200} can't be used: {reason.strip():.1000}"
    )


def _json_source(form: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    schema = {"type": "object"} if form.json is None else json.loads(str(form.json))
    if form.disable_additional_properties:
        _close_objects(schema)
    overrides: dict[str, Any] = {"whitespace_flexible": not form.disable_any_whitespace}
    if form.whitespace_pattern is not None:
        overrides["whitespace_pattern"] = form.whitespace_pattern
    source: str = LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
    return source


_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_DATA = ("enum", "const", "default", "examples")


def _close_objects(schema: object) -> None:
    """Let objects have no other properties than the listed ones, where the schema is silent."""
    if isinstance(schema, list):
        for value in schema:
            _close_objects(value)
    if not isinstance(schema, dict):
        return
    if "properties" in schema or "patternProperties" in schema:
        schema.setdefault("additionalProperties", False)
    for key, value in schema.items():
        if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            _close_objects([*value.values()])
        elif key not in _DATA:
            _close_objects(value)


def _regex_source(form: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher, regex_to_lark

    text = form.regex or ""
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise ValueError("it ends in a lone backslash")  # which the library would drop
    source: str = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'dws')}/")
    return source


def _choice_source(form: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    quoted = (json.dumps(text, ensure_ascii=False) for text in form.choice or ())
    # As one terminal they make one automaton, whose size is no matter; as rules they would not.
    source: str = LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(quoted))
    return source


def _grammar_source(form: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = form.grammar or ""
    source: str = LLMatcher.grammar_from_lark(gbnf_to_lark(text) if "::=" in text else text)
    return source


_SOURCES: dict[str, Callable[[StructuredOutputsParams], str]] = {
    "json": _json_source,
    "json_object": _json_source,
    "regex": _regex_source,
    "choice": _choice_source,
    "grammar": _grammar_source,
}
