"""What the text of a request must be: a JSON schema, a regex, a list of choices or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import value_checks as checks
from .errors import InvalidRequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object")
_MAX_CHARACTERS = 2**20
_MAX_CHOICES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of a request's output; exactly one of the first five fields is to be given.

    Names and meanings are vLLM's. Tokens that the form doesn't allow are never drawn, and the end
    token only where the text so far is complete: so the text has this form unless `max_tokens`, a
    stop string or an abort cuts it off. Needs the package llguidance (the extra "structured").

    What the package can't enforce is refused when the request is added, not left out.

    Raises:
        TypeError: a field is of the wrong type.
        InvalidRequestError: none or several forms, or one that can't be read; a ValueError.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as a mapping or as JSON text; stored as text. Properties come in the schema's
    order."""

    regex: str | None = None
    r"""A regular expression that the whole text matches, in the syntax of Rust's regex crate: no
    look-around, no back-references; \d, \w and \s mean ASCII's."""

    choice: Sequence[str] | None = None
    """The texts to choose from, at most 65,536; stored as a tuple."""

    grammar: str | None = None
    """A context-free grammar, in Lark's syntax (from rule `start`) or, where it has `::=`, in the
    EBNF of llama.cpp's GBNF (from rule `root`)."""

    json_object: bool | None = None
    """True: any JSON object."""

    disable_any_whitespace: bool = False
    """Of JSON only the compact form, without spaces between its tokens. Small models need it, as
    JSON allows any number of spaces."""

    disable_additional_properties: bool = False
    """For a JSON schema: objects have no other properties than those it lists, where it doesn't
    say."""

    whitespace_pattern: str | None = None
    """For JSON: a regex of what may stand between its tokens."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly one of "
                f"{', '.join(KINDS)}"
            )
        values = {
            "json": self.json if self.json is None else _json_text(self.json),
            "choice": self._choices(),
            **{name: _text(name, getattr(self, name)) for name in ("regex", "grammar")},
            "whitespace_pattern": _text("whitespace_pattern", self.whitespace_pattern),
            "json_object": None
            if self.json_object is None
            else checks.flag("json_object", self.json_object),
        }
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            values[name] = checks.flag(name, getattr(self, name))
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_json_options(given[0])

    def _choices(self) -> tuple[str, ...] | None:
        if self.choice is None:
            return None
        if isinstance(self.choice, str):
            raise checks.wrong_type("choice", self.choice, "a sequence of strings")
        choices = checks.texts("choice", self.choice, _MAX_CHOICES)
        if not choices:
            raise InvalidRequestError("choice=() leaves nothing to choose: give at least one text")
        return choices

    def _check_json_options(self, kind: str) -> None:
        options: dict[str, object] = {
            "disable_any_whitespace": self.disable_any_whitespace,
            "whitespace_pattern": self.whitespace_pattern,
            "disable_additional_properties": self.disable_additional_properties,
        }
        used = [name for name, value in options.items() if value]
        if used and kind not in ("json", "json_object"):
            raise InvalidRequestError(
                f"{used[0]}={options[used[0]]!r:.80} has no effect on {kind}; leave it out"
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequestError(
                f"whitespace_pattern={self.whitespace_pattern!r:.80} has no place under "
                "disable_any_whitespace=True; give one of the two"
            )


def _text(name: str, value: object) -> str | None:
    """A text of bounded length that UTF-8 can hold, or None."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise checks.wrong_type(name, value, "a string")
    if len(value) > _MAX_CHARACTERS:
        raise InvalidRequestError(
            f"{name} has {len(value)} characters: give at most {_MAX_CHARACTERS}"
        )
    return checks.texts(name, value, 1)[0] if value else value


def _json_text(schema: object) -> str:
    """A schema as JSON text."""
    if isinstance(schema, str):
        text = _text("json", schema) or ""
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"json={text!r:.80} is not a JSON schema: {error}; give a mapping or JSON text"
            ) from None
        if not isinstance(parsed, dict):
            raise InvalidRequestError(f"json={text!r:.80} is not a JSON object, as a schema is")
        return text
    if not isinstance(schema, Mapping):
        raise checks.wrong_type("json", schema, "a JSON schema, as a mapping or JSON text")
    try:
        text = json.dumps(dict(schema), allow_nan=False, ensure_ascii=False)
    except TypeError as error:
        raise TypeError(f"json={schema!r:.80} can't be written as JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"json={type(schema).__name__} can't be written as JSON: {error}"
        ) from None
    return _text("json", text) or ""
