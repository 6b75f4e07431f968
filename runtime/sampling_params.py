"""What one request asks of the sampler, and when it stops."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from . import value_checks as checks
from .errors import InvalidRequestError
from .structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    import torch

_MAX_INT32 = 2**31 - 1
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_MAX_ENTRIES = 1024
_MAX_ALLOWED_IDS = 2**20

LogitsProcessor: TypeAlias = "Callable[[list[int], torch.Tensor], torch.Tensor]"
"""A function of the caller's: (ids generated so far, [vocab] float32 logits) to [vocab] logits.
It gets copies, which it may change and return, and is called once per token of its request."""


class RequestOutputKind(enum.Enum):
    """What the outputs of one request tell while it is streamed."""

    CUMULATIVE = 0
    """Each output has everything so far."""
    DELTA = 1
    """Each output has what came since the last one. A slow reader gets fewer, longer ones."""
    FINAL_ONLY = 2
    """One output, when all is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Checked when built, immutable after that.

    Names and meanings are vLLM's, and so is the order in which they act on a row of logits, each
    on what the one before it left: `logits_processors`, `structured_outputs`, `allowed_token_ids`,
    `bad_words`, `min_tokens`, `logit_bias`, the repetition, frequency and presence penalties,
    `temperature`, `min_p`, `top_k`, `top_p`. Log-probabilities are those of the model itself,
    before all of this (vLLM's default, "raw_logprobs").

    Numbers may be numpy scalars; they are stored as plain Python values, sequences as tuples.

    Raises:
        TypeError: a field is of the wrong type.
        InvalidRequestError: a field is out of range; a ValueError.
    """

    n: int = 1
    """Streams per prompt. Only 1 is supported: for more, send the prompt as often."""

    temperature: float = 1.0
    """0 to 3.4e38; logits are divided by it. 0 is exactly greedy, whatever the filters say."""

    top_k: int = 0
    """Keep the k likeliest tokens and those equal to the k-th; 0 or -1 (stored as 0) keeps all."""

    top_p: float = 1.0
    """0 < top_p <= 1: keep the fewest likeliest tokens that hold this much probability."""

    min_p: float = 0.0
    """0 to 1: drop tokens less likely than this fraction of the likeliest one's probability."""

    presence_penalty: float = 0.0
    """-2 to 2, taken from the logit of each token that the output has already."""

    frequency_penalty: float = 0.0
    """-2 to 2, taken from a token's logit once for each time that the output has it."""

    repetition_penalty: float = 1.0
    """0.01 to 100: the logit of a token that prompt or output have is divided by it where positive,
    multiplied where negative (Keskar et al., "CTRL", 2019)."""

    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    """Numbers from -100 to 100 to add to logits, by token id; at most 1024. Stored as pairs."""

    allowed_token_ids: Sequence[int] | None = None
    """The only ids that may be drawn, at least one; None: all."""

    bad_words: Sequence[str] = ()
    """Texts that are not to be generated, at most 1024: the last token of each is not drawn where
    the output has the ones before it. As a word's tokens are those that its text is encoded to,
    with and without a space before it, other spellings of the word get through."""

    logits_processors: Sequence[LogitsProcessor] = ()
    """Functions that change the request's logits, on the host and one row at a time: slow. One
    that raises or gives something unusable ends its own request with an error. At most 1024."""

    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output's text must have, as a JSON schema; None: any."""

    seed: int | None = None
    """-2**63 to 2**64 - 1: equal seeds draw equal tokens, whatever else is in the batch. Negative
    seeds stand for themselves plus 2**64. None: the engine picks one."""

    max_tokens: int = 256
    """At least 1: most tokens to generate."""

    min_tokens: int = 0
    """0 to max_tokens: end and stop tokens are not drawn before this many tokens, and stop strings
    don't count in their text."""

    ignore_eos: bool = False
    """Go on past the model's end tokens. `stop_token_ids` still stop."""

    stop: str | Sequence[str] = ()
    """Texts that end the request as soon as the output has one, also one spread over several
    tokens; at most 1024. The output's text ends before it."""

    stop_token_ids: Sequence[int] = ()
    """Ids that end the request besides the model's end tokens, at most 1024."""

    include_stop_str_in_output: bool = False
    """Leave in the output's text what ended it, a stop string or the text of a stop token."""

    logprobs: int | None = None
    """For each output token, give its log-probability and those of this many likeliest tokens; -1:
    of all tokens. At most the engine's max_logprobs. None: give none."""

    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt but the first, which nothing predicts. The prompt is
    computed without the prefix cache."""

    truncate_prompt_tokens: int | None = None
    """At least 1: use only this many last tokens of the prompt; -1: as many as the engine takes.
    None: a prompt that is too long is refused."""

    detokenize: bool = True
    """False: token ids only; texts stay empty."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    spaces_between_special_tokens: bool = True
    """False: no spaces between special tokens that follow each other, where the tokenizer's
    decoder would put some. Without effect if special tokens are left out."""

    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of a stream has. `LLM.generate` and `chat` give final outputs always."""

    def __post_init__(self) -> None:
        if not isinstance(self.output_kind, RequestOutputKind):
            raise checks.wrong_type("output_kind", self.output_kind, "a RequestOutputKind")
        for name, value in (self._numbers() | self._sequences() | self._flags()).items():
            object.__setattr__(self, name, value)
        self._check_structure()
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                "lower the first or raise the second"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                f"stop={self.stop!r} can't be found in a text that detokenize=False leaves out; "
                "give stop_token_ids, or detokenize=True"
            )

    def _check_structure(self) -> None:
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise checks.wrong_type(
                "structured_outputs", self.structured_outputs, "a StructuredOutputsParams"
            )
        if self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos=True would go on past the end that structured_outputs sets; leave out "
                "one of the two"
            )

    def _numbers(self) -> dict[str, object]:
        number, integer = checks.number, checks.integer
        found: dict[str, object] = {
            "n": integer("n", self.n, 1, None),
            "temperature": number("temperature", self.temperature, 0.0, _MAX_FLOAT32),
            "top_k": max(integer("top_k", self.top_k, -1, _MAX_INT32), 0),
            "top_p": number("top_p", self.top_p, 0.0, 1.0, above_minimum=True),
            "min_p": number("min_p", self.min_p, 0.0, 1.0),
            "presence_penalty": number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": number(
                "repetition_penalty", self.repetition_penalty, 0.01, 100.0
            ),
            "max_tokens": integer("max_tokens", self.max_tokens, 1, None),
            "min_tokens": integer("min_tokens", self.min_tokens, 0, _MAX_INT32),
        }
        if found["n"] != 1:
            raise InvalidRequestError(
                f"n={self.n} is not supported: give n=1, and send the prompt {self.n} times"
            )
        for name, minimum, maximum in (
            ("seed", -(2**63), 2**64 - 1),
            ("logprobs", -1, _MAX_INT32),
            ("prompt_logprobs", -1, _MAX_INT32),
            ("truncate_prompt_tokens", -1, _MAX_INT32),
        ):
            value = getattr(self, name)
            found[name] = None if value is None else integer(name, value, minimum, maximum)
        if found["truncate_prompt_tokens"] == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens=0 leaves nothing of the prompt: give at least 1, or -1"
            )
        return found

    def _sequences(self) -> dict[str, object]:
        allowed = None
        if self.allowed_token_ids is not None:
            name = "allowed_token_ids"
            allowed = checks.token_ids(name, self.allowed_token_ids, _MAX_ALLOWED_IDS)
            if not allowed:
                raise InvalidRequestError(
                    "allowed_token_ids=() allows no token: give at least one, or None for all"
                )
        processors = checks.functions("logits_processors", self.logits_processors, _MAX_ENTRIES)
        return {
            "logit_bias": checks.biases("logit_bias", self.logit_bias, _MAX_ENTRIES, 100.0),
            "allowed_token_ids": allowed,
            "bad_words": checks.texts("bad_words", self.bad_words, _MAX_ENTRIES),
            "logits_processors": processors,
            "stop": checks.texts("stop", self.stop, _MAX_ENTRIES),
            "stop_token_ids": checks.token_ids("stop_token_ids", self.stop_token_ids, _MAX_ENTRIES),
        }

    def _flags(self) -> dict[str, object]:
        names = (
            "ignore_eos",
            "include_stop_str_in_output",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        )
        return {name: checks.flag(name, getattr(self, name)) for name in names}
