"""Reads files of ShareGPT conversations: a JSON list of
{"conversations": [{"from": "human" or "gpt", "value": text}, ...]}."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def first_turns(path: Path) -> Iterator[tuple[str, str]]:
    """Question and answer of each conversation that opens with both.

    Conversations are parsed as they are asked for: a published copy is cut off in its last one.

    Raises ValueError where the file is no such list, or is cut off.
    """
    for conversation in _entries(path):
        turns = conversation.get("conversations") or []
        if [turn.get("from") for turn in turns[:2]] == ["human", "gpt"]:
            yield turns[0]["value"], turns[1]["value"]


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    text, decoder = path.read_text(encoding="utf-8"), json.JSONDecoder()
    place = _skip_space(text, 0)
    if text[place : place + 1] != "[":
        raise ValueError(f"{path} is not a JSON list of conversations")
    place = _skip_space(text, place + 1)
    while text[place : place + 1] != "]":
        try:
            entry, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} can't be read beyond character {place}: {error}") from error
        yield entry
        place = _skip_space(text, place)
        if text[place : place + 1] == ",":
            place = _skip_space(text, place + 1)


def _skip_space(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place
