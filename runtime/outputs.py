"""What callers get back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """How likely the model found a token, given the tokens before it."""

    logprob: float
    """Natural logarithm of the probability, by the model's own logits: before penalties, bias,
    temperature and filters."""
    rank: int
    """Place among all tokens, 1 for the likeliest."""
    decoded_token: str | None
    """The token's text by itself; None under detokenize=False."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated stream of a request."""

    index: int
    """Place among the request's streams."""
    text: str
    """The decoded output, up to the stop string or the stop token's text unless asked for; special
    tokens are left out unless asked for. Under output_kind DELTA this, `token_ids` and `logprobs`
    have what came since the last output."""
    token_ids: list[int]
    """Generated ids, an end token included."""
    finish_reason: FinishReason | None
    """"stop": an end token, stop token or stop string; "length": max_tokens, max_model_len or the
    KV pool's end; "abort"; "error": see `error`; None: not finished."""
    stop_reason: int | str | None = None
    """Under reason "stop", the id of `stop_token_ids` or the string of `stop` that ended it; None
    for the model's own end tokens and under all other reasons."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of `token_ids`; None if none were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids`: itself and the likeliest tokens, by id; None as above."""
    error: str | None = None
    """What went wrong, under reason "error"; why it was ended, if not on the caller's own word,
    under reason "abort"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of a request, in seconds of time.monotonic()."""

    arrival_time: float
    """When the request was handed in."""
    first_token_time: float | None
    """When its first token was known, of any stream; None if there was none."""
    finish_time: float | None
    """When it ended, all of it; None if it hasn't."""
    num_preemptions: int
    """How often it, or one of its streams, lost its blocks and was computed again."""

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
    """The generated streams by index, as many as `SamplingParams.n` says; under output_kind DELTA
    those with something new. One may end before the others, also by an error, which is its own."""
    finished: bool
    """True if nothing will follow."""
    num_cached_tokens: int
    """Prompt tokens whose K/V came from the prefix cache."""
    metrics: RequestMetrics
    """Times of the request."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each of `prompt_token_ids`: itself and the likeliest tokens, by id; None for the first,
    which nothing predicts; fewer if the request ended before its first token. Under output_kind
    DELTA in one output only, mostly the first. None if none were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScore:
    """How likely the model finds a text: the log-probabilities of its tokens but the first."""

    prompt_token_ids: list[int]
    """What the model saw."""
    logprobs: list[float]
    """Of each token from the second on, natural logarithms."""

    @property
    def sum_logprob(self) -> float:
        """Log-probability of the whole text after its first token."""
        return math.fsum(self.logprobs)

    @property
    def mean_logprob(self) -> float:
        """Per token."""
        return self.sum_logprob / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp(-mean_logprob); inf if that is past what a float holds."""
        try:
            return math.exp(-self.mean_logprob)
        except OverflowError:
            return math.inf
