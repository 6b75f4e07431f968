"""What a request does to its logits besides filtering: in token ids, made when it is added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import InvalidRequestError
from .sampling_params import LogitsProcessor, SamplingParams

if TYPE_CHECKING:
    from .grammar import Grammar, GrammarCompiler
    from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitsRules:
    """The part of `SamplingParams` that changes logits before the temperature does."""

    bias_ids: np.ndarray
    """[b] int64: ids whose logits are changed in every step..."""
    bias_values: np.ndarray
    """[b] float32: ...by adding this; -inf for bad words of one token."""
    allowed_ids: np.ndarray | None
    """[a] int64, the only ids that may be drawn; None: all."""
    early_ids: np.ndarray
    """[e] int64: end and stop tokens, not drawn before `min_tokens`."""
    min_tokens: int
    """0 if nothing is to be held back."""
    phrases: tuple[tuple[int, ...], ...]
    """Bad words of several tokens: the last is not drawn after the others."""
    processors: tuple[LogitsProcessor, ...]
    """The request's own functions."""
    grammar: Grammar | None
    """What the output must be like; None: anything."""
    repetition_penalty: float
    """1: off."""
    frequency_penalty: float
    """0: off."""
    presence_penalty: float
    """0: off."""

    @property
    def has_penalties(self) -> bool:
        """Whether the sequence's tokens have to be counted."""
        penalises_output = self.frequency_penalty != 0 or self.presence_penalty != 0
        return self.repetition_penalty != 1 or penalises_output

    @property
    def has_edits(self) -> bool:
        """Whether single logits are changed in every step, or may be."""
        return bool(len(self.bias_ids) or self.allowed_ids is not None or self.needs_output_ids)

    @property
    def forbids(self) -> bool:
        """Whether some tokens may never be drawn, or not yet."""
        has_words = bool(np.isneginf(self.bias_values).any() or self.phrases)
        has_ids = self.allowed_ids is not None or self.min_tokens > 0
        return has_words or has_ids or self.grammar is not None

    @property
    def needs_output_ids(self) -> bool:
        """Whether the host must know all ids so far before it can prepare the next draw."""
        return bool(self.phrases or self.processors or self.grammar is not None)


def make_logits_rules(
    params: SamplingParams,
    *,
    vocab_size: int,
    end_token_ids: tuple[int, ...],
    tokenizer: Tokenizer | None,
    grammars: GrammarCompiler | None = None,
) -> LogitsRules | None:
    """The rules of one request; None if it has none, which costs nothing in a step.

    `grammars` may be left out where no `structured_outputs` occur.

    Raises:
        InvalidRequestError: an id is not in the vocabulary, bad words can't be encoded, a grammar
            can't be compiled, or the rules together forbid every token.
    """
    bias = dict(params.logit_bias or ())
    check_vocabulary("logit_bias", bias, vocab_size)
    check_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
    words = _encode_words(params.bad_words, tokenizer)
    for ids in words:
        check_vocabulary("a token of bad_words", ids, vocab_size)
    bias |= {ids[0]: -np.inf for ids in words if len(ids) == 1}
    early = {*params.stop_token_ids, *(() if params.ignore_eos else end_token_ids)}
    early = {id_ for id_ in early if id_ < vocab_size} if params.min_tokens else set()
    if params.allowed_token_ids is not None:
        check_vocabulary("allowed_token_ids", params.allowed_token_ids, vocab_size)
        if all(id_ in early or bias.get(id_) == -np.inf for id_ in params.allowed_token_ids):
            raise InvalidRequestError(
                "allowed_token_ids holds only bad_words and, under min_tokens, end tokens, so no "
                "token could be drawn: allow one more, or forbid less"
            )
    rules = LogitsRules(
        bias_ids=np.array(list(bias), dtype=np.int64),
        bias_values=np.array(list(bias.values()), dtype=np.float32),
        allowed_ids=_unique(params.allowed_token_ids),
        early_ids=np.array(sorted(early), dtype=np.int64),
        min_tokens=params.min_tokens if early else 0,
        phrases=tuple(ids for ids in words if len(ids) > 1),
        processors=tuple(params.logits_processors),
        grammar=_compile(params, grammars),
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
    )
    is_used = rules.has_edits or rules.has_penalties or rules.min_tokens
    return rules if is_used else None


def check_vocabulary(what: str, ids: Iterable[int] | np.ndarray, vocab_size: int) -> None:
    """Raise InvalidRequestError, which names `what`, if an id is not from 0 to vocab_size - 1."""
    given = ids if isinstance(ids, np.ndarray) else np.fromiter(ids, dtype=np.int64)
    bad = np.flatnonzero((given < 0) | (given >= vocab_size))
    if len(bad):
        raise InvalidRequestError(
            f"{what} {int(given[bad[0]])} at place {int(bad[0])} is not in the model's "
            f"vocabulary, 0 to {vocab_size - 1}"
        )


def _compile(params: SamplingParams, grammars: GrammarCompiler | None) -> Grammar | None:
    if params.structured_outputs is None:
        return None
    assert grammars is not None, "structured outputs without a compiler"
    return grammars.compile(params.structured_outputs)


def _unique(ids: Sequence[int] | None) -> np.ndarray | None:
    return None if ids is None else np.unique(np.array(ids, dtype=np.int64))


def _encode_words(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word at the start of a text and, if that differs, after a space.

    As in vLLM: the second form counts only if it has as many tokens and another first one, which
    is so where the space is a part of the word's first token.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise InvalidRequestError(
            f"bad_words={tuple(words)!r:.80} needs a tokenizer, and this engine has none; "
            "give -100 in logit_bias to the ids instead"
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (tokenizer.encode_piece(start + word.lstrip()) for start in ("", " "))
        if not plain:
            raise InvalidRequestError(f"bad_words: {word!r} has no token; leave it out")
        found[tuple(plain)] = None
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found[tuple(spaced)] = None
    return tuple(found)
