"""The forms in which prompts, conversations and sampling parameters may come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from .errors import InvalidRequestError
from .sampling_params import SamplingParams
from .tokenizer import Message, Tokenizer

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"
Prompt: TypeAlias = "str | TokenIds"
Conversation: TypeAlias = Sequence[Message]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids, and its text if it came as one."""

    text: str | None
    token_ids: TokenIds


def encode_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer) -> list[EncodedPrompt]:
    """One entry per prompt; a lone string or flat list of ids is one prompt.

    Raises:
        TypeError: something is neither text nor token ids; its place is named.
    """
    listed: Sequence[Prompt]
    if isinstance(prompts, str) or is_token_ids(prompts):
        listed = [prompts]
    elif isinstance(prompts, Sequence):
        listed = cast("Sequence[Prompt]", prompts)
    else:
        raise TypeError(
            f"prompts is a {type(prompts).__name__}; give a string, a list of token ids, or a "
            f"list of either"
        )
    for index, prompt in enumerate(listed):
        if not (isinstance(prompt, str) or is_token_ids(prompt) or _is_empty(prompt)):
            raise TypeError(
                f"prompt {index} is {prompt!r:.80}; give a string or a list of token ids"
            )
    texts = [prompt for prompt in listed if isinstance(prompt, str)]
    encoded = iter(tokenizer.encode_batch(texts) if texts else [])
    return [
        EncodedPrompt(prompt, next(encoded))
        if isinstance(prompt, str)
        else EncodedPrompt(None, prompt)
        for prompt in listed
    ]


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
    return isinstance(value, Sequence) and not value
