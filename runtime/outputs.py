"""What callers get back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated stream of a request."""

    index: int
    """Place among the request's streams."""
    text: str
    """The decoded output; special tokens are left out unless asked for. Under output_kind DELTA,
    what came since the last output; `token_ids` too."""
    token_ids: list[int]
    """Generated ids, an end token included."""
    finish_reason: FinishReason | None
    """"stop": an end or stop token; "length": max_tokens, max_model_len or the KV pool's end;
    "abort"; "error": see `error`; None: not finished."""
    error: str | None = None
    """What went wrong, under reason "error"; why it was ended, if not on the caller's own word,
    under reason "abort"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of a request, in seconds of time.monotonic()."""

    arrival_time: float
    """When the request was handed in."""
    first_token_time: float | None
    """When its first token was known; None if there was none."""
    finish_time: float | None
    """When it ended; None if it hasn't."""
    num_preemptions: int
    """How often it lost its blocks and was computed again."""

    @property
    def time_to_first_token(self) -> float | None:
        """TTFT, seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request and what was generated for it."""

    request_id: str
    """Unique among the unfinished requests of an engine."""
    prompt_index: int = 0
    """Place of the prompt in the list of the call."""
    prompt: str | None
    """The prompt's text; None if it came as token ids or messages."""
    prompt_token_ids: list[int]
    """What the model saw."""
    outputs: list[CompletionOutput]
    """The generated streams."""
    finished: bool
    """True if nothing will follow."""
    num_cached_tokens: int
    """Prompt tokens whose K/V came from the prefix cache."""
    metrics: RequestMetrics
    """Times of the request."""
