"""Conversations as chat templates take them, and how one is formatted. Imports no library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import InvalidRequestError

Message = Mapping[str, Any]
"""One turn of a chat: "role" (system, user, assistant, tool, or what the template knows), "content"
(a text, or parts {"type": "text", "text": ...}, which are joined by line ends) and whatever else
the model's template knows, as "tool_calls" of an assistant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """How a conversation becomes a prompt. Names and meanings are vLLM's.

    Raises:
        TypeError: a field is of the wrong type, or there is no such field.
        InvalidRequestError: fields that don't go together.
    """

    chat_template: str | None = None
    """A Jinja template in place of the model's own."""

    add_generation_prompt: bool = True
    """Open the assistant's turn after the last message."""

    continue_final_message: bool = False
    """Leave the last message open, for the model to go on with. Needs add_generation_prompt=False,
    and a template that gives the message's text as it is."""

    tools: Sequence[Mapping[str, Any]] | None = None
    """Descriptions of functions that the model may call, handed to the template."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More variables for the template, as enable_thinking of Qwen3; None: none."""

    def __post_init__(self) -> None:
        if not isinstance(self.chat_template, str | None):
            raise _wrong_type("chat_template", self.chat_template, "a Jinja template, as a string")
        for name in ("add_generation_prompt", "continue_final_message"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong_type(name, getattr(self, name), "True or False")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message=True needs add_generation_prompt=False: the last message "
                "can't be both continued and answered"
            )
        object.__setattr__(self, "tools", _tools(self.tools))
        object.__setattr__(self, "chat_template_kwargs", _variables(self.chat_template_kwargs))


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A conversation's messages as templates take them: content as text, arguments as mappings.

    Raises:
        InvalidRequestError: something is missing or of another shape; its place is named.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequestError(
            f"a chat must be a list of at least one message, but is {messages!r:.80}"
        )
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"message {index} is a {type(message).__name__}, but must be a mapping"
        )
    found = dict(message)
    if "role" not in found:
        raise InvalidRequestError(f"message {index} has no 'role': {found!r:.80}")
    role, tool_calls = found["role"], found.get("tool_calls")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(
            f"message {index} has role {role!r:.80}; give a text, as user, assistant, system or "
            "tool"
        )
    if tool_calls:
        found["tool_calls"] = _tool_calls(index, tool_calls)
        found.setdefault("content", None)
    if "content" not in found:
        raise InvalidRequestError(f"message {index} has no 'content': {found!r:.80}")
    content = found["content"]
    if isinstance(content, list | tuple):
        found["content"] = "\n".join(
            _part(f"message {index}, part {place}", part) for place, part in enumerate(content)
        )
    elif not isinstance(content, str) and not (content is None and tool_calls):
        raise InvalidRequestError(
            f"message {index} has content of type {type(content).__name__}, but must have a "
            "string or a list of text parts"
        )
    return found


def _part(name: str, part: object) -> str:
    """The text of one part of a message."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequestError(
            f"{name} is a {type(part).__name__}, but must be a text or a mapping"
        )
    kind = part.get("type", "text")
    if kind != "text":
        raise InvalidRequestError(
            f"{name} is of type {kind!r:.80}, and the models here take text only; give parts of "
            "type 'text'"
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{name} has no 'text' that is a string: {dict(part)!r:.80}")
    return str(part["text"])


def _tool_calls(index: int, calls: object) -> list[dict[str, Any]]:
    """Calls that an assistant made; arguments that came as JSON text, as APIs give them, parsed."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequestError(
            f"message {index} has tool_calls {calls!r:.80}; give a list of mappings"
        )
    found = []
    for place, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(
                    f"message {index}, tool call {place}: arguments "
                    f"{function['arguments']!r:.80} are not JSON: {error}"
                ) from None
            call = {**call, "function": {**function, "arguments": arguments}}
        found.append(dict(call))
    return found


def _tools(tools: object) -> tuple[dict[str, Any], ...] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise _wrong_type("tools", tools, "a list of mappings")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise _wrong_type(f"tools[{index}]", tool, "a mapping")
    return tuple(dict(tool) for tool in tools) or None


def _variables(given: object) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise _wrong_type("chat_template_kwargs", given, "a mapping of names to values")
    return dict(given)


def _wrong_type(name: str, value: object, expected: str) -> TypeError:
    return TypeError(f"{name}={value!r:.80} is of type {type(value).__name__}: give {expected}")
