"""The forms in which prompts, conversations and sampling parameters may come."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from . import value_checks as checks
from .chat_format import ChatFormat, Message
from .errors import InvalidRequestError
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"
Prompt: TypeAlias = "str | TokenIds | Mapping[str, Any]"
"""Text, token ids, or a mapping with one of "prompt" and "prompt_token_ids" for them and optionally
"cache_salt", a text: only prompts with the same salt share cached K/V."""
Conversation: TypeAlias = Sequence[Message]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids, and its text if it came as one."""

    text: str | None
    token_ids: TokenIds
    cache_salt: str | None = None


def encode_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer) -> list[EncodedPrompt]:
    """One entry per prompt; a lone string, mapping or flat list of ids is one prompt.

    Raises:
        TypeError: something is neither text nor token ids; its place is named.
        InvalidRequestError: a mapping has other entries than it can; its place is named.
    """
    listed: Sequence[Prompt]
    if isinstance(prompts, str | Mapping) or is_token_ids(prompts):
        listed = [prompts]
    elif isinstance(prompts, Sequence) and not isinstance(prompts, bytes | bytearray):
        listed = cast("Sequence[Prompt]", prompts)
    else:
        raise TypeError(
            f"prompts is a {type(prompts).__name__}; give a string, a list of token ids, or a "
            f"list of either"
        )
    parsed = [_parse_prompt(prompt, f"prompt {index}") for index, prompt in enumerate(listed)]
    texts = [prompt.text for prompt in parsed if prompt.text is not None]
    encoded = iter(tokenizer.encode_batch(texts) if texts else [])
    return [
        prompt if prompt.text is None else dataclasses.replace(prompt, token_ids=next(encoded))
        for prompt in parsed
    ]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> EncodedPrompt:
    """One prompt; raises as `encode_prompts`."""
    parsed = _parse_prompt(prompt, "prompt")
    if parsed.text is None:
        return parsed
    return dataclasses.replace(parsed, token_ids=tokenizer.encode(parsed.text))


def check_cache_salt(cache_salt: object, name: str = "cache_salt") -> str | None:
    """The salt; raises TypeError or InvalidRequestError if it is not a text, or empty."""
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise TypeError(f"{name}={cache_salt!r:.80} is not a string")
    if cache_salt == "":
        raise InvalidRequestError(f"{name} is empty; give a text, or leave it out")
    return cache_salt


def check_request(
    *, request_id: object, priority: object, arrival_time: object, cache_salt: object
) -> None:
    """Raise TypeError or InvalidRequestError, which names the option, if one can't be used."""
    if request_id is not None and not isinstance(request_id, str):
        raise checks.wrong_type("request_id", request_id, "a string")
    checks.integer("priority", priority, -(2**63), 2**63 - 1)
    if arrival_time is not None:
        checks.number("arrival_time", arrival_time, -math.inf, math.inf)
    check_cache_salt(cache_salt)


def _parse_prompt(prompt: object, name: str) -> EncodedPrompt:
    """A prompt whose ids, if it is a text, are still missing."""
    salt, given = None, prompt
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids", "cache_salt")]
        if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise InvalidRequestError(
                f"{name} has the entries {list(prompt)!r:.80}; give prompt or prompt_token_ids, "
                f"and cache_salt if needed"
            )
        salt = check_cache_salt(prompt.get("cache_salt"), f"{name}: cache_salt")
        key = "prompt" if "prompt" in prompt else "prompt_token_ids"
        given = prompt[key]
        if isinstance(given, str) != (key == "prompt"):
            raise TypeError(
                f"{name}: {key} is {given!r:.80}; give a string as prompt, or a list of token ids "
                f"as prompt_token_ids"
            )
    if isinstance(given, str):
        return EncodedPrompt(given, (), salt)
    if is_token_ids(given) or _is_empty(given):
        return EncodedPrompt(None, cast("TokenIds", given), salt)
    raise TypeError(f"{name} is {given!r:.80}; give a string or a list of token ids")


def list_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """The conversations; a lone one, which is a list of messages, counts as one."""
    if is_conversation(messages):
        return [messages]
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(
            f"messages is a {type(messages).__name__}; give a list of messages, each with role "
            f"and content, or a list of such lists"
        )
    return list(messages)  # type: ignore[arg-type]


def encode_chats(
    conversations: Sequence[Conversation],
    chat_format: ChatFormat,
    tokenizer: Tokenizer,
    cache_salt: str | None,
) -> list[EncodedPrompt]:
    """One entry per conversation; what is wrong with one of several is named with its place."""
    prompts = []
    for index, conversation in enumerate(conversations):
        try:
            token_ids = tokenizer.apply_chat_template(conversation, chat_format)
        except InvalidRequestError as error:
            if len(conversations) == 1:
                raise
            raise InvalidRequestError(f"conversation {index}: {error}") from error
        prompts.append(EncodedPrompt(None, token_ids, cache_salt))
    return prompts


def list_priorities(priority: int | Sequence[int] | None, num_prompts: int) -> list[int]:
    """One number per prompt; None stands for 0.

    Raises:
        TypeError: something else than whole numbers.
        InvalidRequestError: out of range, or neither one number nor one for each prompt.
    """
    if priority is None:
        priority = 0
    if isinstance(priority, str | bytes | bytearray) or not isinstance(priority, Sequence):
        return [checks.integer("priority", priority, -(2**63), 2**63 - 1)] * num_prompts
    if len(priority) != num_prompts:
        raise InvalidRequestError(
            f"priority has {len(priority)} entries for {num_prompts} prompts; give one number for "
            "all or one for each"
        )
    return [
        checks.integer(f"priority[{index}]", value, -(2**63), 2**63 - 1)
        for index, value in enumerate(priority)
    ]


def one_sampling_params(sampling_params: SamplingParams | None) -> SamplingParams:
    """The value, or the default for None; raises TypeError for anything else."""
    if sampling_params is None:
        return SamplingParams()
    if not isinstance(sampling_params, SamplingParams):
        raise TypeError(f"sampling_params is {sampling_params!r:.80}, not a SamplingParams")
    return sampling_params


def list_sampling_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One value per prompt.

    Raises:
        TypeError: something else than SamplingParams.
        InvalidRequestError: neither one value nor one for each prompt.
    """
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence):
        raise TypeError(f"sampling_params is {sampling_params!r:.80}, not a SamplingParams")
    for index, value in enumerate(sampling_params):
        if not isinstance(value, SamplingParams):
            raise TypeError(f"sampling_params[{index}] is {value!r:.80}, not a SamplingParams")
    if len(sampling_params) != num_prompts:
        raise InvalidRequestError(
            f"{len(sampling_params)} sampling_params for {num_prompts} prompts; give one for all "
            f"or one for each"
        )
    return list(sampling_params)


def is_token_ids(value: object) -> TypeGuard[TokenIds]:
    """True for a flat, non-empty list, or an array, of whole numbers."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        return False
    return all(
        isinstance(token, int | np.integer) and not isinstance(token, bool) for token in value
    )


def is_conversation(value: object) -> TypeGuard[Conversation]:
    """True for a non-empty list of messages."""
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


def _is_empty(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, bytes | bytearray) and not value
