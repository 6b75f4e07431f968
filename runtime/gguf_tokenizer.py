"""Builds a Hugging Face tokenizer out of the vocabulary that a GGUF file carries.

A GGUF names only the kind of pre-tokenizer (`tokenizer.ggml.pre`). The regular expressions behind
the names are those of the models' own tokenizer.json files and of llama.cpp's table; a name not
known here is refused, since a wrong split gives plausible but wrong token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ModelLoadError, UnsupportedModelError
from .gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2_SPLIT,),
    "llama-bpe": (_LLAMA3_SPLIT,),
    "qwen2": (_QWEN2_SPLIT,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
}
"""Regular expressions by `tokenizer.ggml.pre`; each splits the pieces that those before it left."""


class _TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """The tokens of a file by id, and the ids that have a role; None where the file fills none."""

    tokens: list[str]
    """Without the unused ones at the end, which only fill the embedding up to a round size."""

    types: list[int]
    """One `tokenizer.ggml.token_type` per token."""

    ids: dict[str, int]
    """The way back from a token to its id."""

    bos_id: int | None
    """Starts a text."""

    end_ids: tuple[int, ...]
    """End a generation: end of text, of turn and of message, in this order, without repeats."""

    pad_id: int | None
    """Fills a batch; never generated."""

    unknown_id: int | None
    """Stands for what the vocabulary can't express."""

    def of_type(self, *types: _TokenType) -> list[str]:
        """Tokens of some types, by id."""
        return [t for t, kind in zip(self.tokens, self.types, strict=True) if kind in types]


def read_vocabulary(file: GgufFile) -> GgufVocabulary:
    """Read and check the tokens; the file's tensors bound how many there may be."""
    tokens = file.require_list("tokenizer.ggml.tokens", str)
    types = file.require_list("tokenizer.ggml.token_type", int)
    if len(tokens) != len(types):
        raise ModelLoadError(f"{file.path}: {len(tokens)} tokens, but {len(types)} token types")
    used = len(tokens)
    while used and types[used - 1] == _TokenType.UNUSED:
        used -= 1
    tokens, types = tokens[:used], types[:used]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(t for i, t in enumerate(tokens) if ids[t] != i)
        raise ModelLoadError(f"{file.path}: token {twice!r} occurs twice in the vocabulary")

    def role(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = file.get(key, int)
        if value is not None and not 0 <= value < used:
            raise ModelLoadError(f"{file.path}: {key} is {value}, but there are {used} tokens")
        return value

    ends = (role(name) for name in ("eos", "eot", "eom"))
    return GgufVocabulary(
        tokens=tokens,
        types=types,
        ids=ids,
        bos_id=role("bos"),
        end_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad_id=role("padding"),
        unknown_id=role("unknown"),
    )


def save_tokenizer(
    file: GgufFile, vocabulary: GgufVocabulary, target: Path, *, max_length: int
) -> None:
    """Write tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja.

    `max_length` is the context length in tokens that the tokenizer states.
    """
    kind = file.require("tokenizer.ggml.model", str)
    builders: dict[str, Callable[[GgufFile, GgufVocabulary], Tokenizer]] = {
        "gpt2": _build_byte_level_bpe,
        "llama": _build_sentencepiece_bpe,
    }
    if kind not in builders:
        raise UnsupportedModelError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}; {' and '.join(builders)} can be read; "
            "use the Hugging Face directory of this model"
        )
    tokenizer = builders[kind](file, vocabulary)
    _add_special_tokens(tokenizer, vocabulary)
    _set_template(file, tokenizer, vocabulary)
    tokenizer.save(str(target / "tokenizer.json"))
    names = {
        "bos_token": vocabulary.bos_id,
        "eos_token": vocabulary.end_ids[0] if vocabulary.end_ids else None,
        "pad_token": vocabulary.pad_id,
        "unk_token": vocabulary.unknown_id,
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for name, token_id in names.items():  # null, too: left out, some classes assume a token
        settings[name] = None if token_id is None else vocabulary.tokens[token_id]
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    template = file.get("tokenizer.chat_template", str)
    if template:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def _build_byte_level_bpe(file: GgufFile, vocabulary: GgufVocabulary) -> Tokenizer:
    """GPT-2's tokenizer: text split by regular expressions, its bytes merged by rank."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = file.require("tokenizer.ggml.pre", str)
    if pre not in _SPLITS:
        raise UnsupportedModelError(
            f"{file.path}: tokenizer.ggml.pre is {pre!r}; these can be read: {', '.join(_SPLITS)}; "
            "use the Hugging Face directory of this model"
        )
    merges = _read_merges(file, vocabulary)
    # Llama 3 takes a piece that is a token as it is, whatever the merges would make of it.
    model = models.BPE(vocabulary.ids, merges, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits: list[PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_merges(file: GgufFile, vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    merges = []
    for rank, merge in enumerate(file.require_list("tokenizer.ggml.merges", str)):
        left, space, right = merge.partition(" ")
        if not space or any(token not in vocabulary.ids for token in (left, right, left + right)):
            raise ModelLoadError(
                f"{file.path}: merge {rank} is {merge!r}, which isn't two tokens that make a third"
            )
        merges.append((left, right))
    return merges


def _build_sentencepiece_bpe(file: GgufFile, vocabulary: GgufVocabulary) -> Tokenizer:
    """SentencePiece's BPE, as of Llama 2: spaces become U+2581, unknown characters their bytes.

    SentencePiece stores a score per token where BPE wants ranked merges: every way to split a token
    into two others is a merge, ranked by the token's score.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    if file.metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise UnsupportedModelError(
            f"{file.path}: tokenizer.ggml.precompiled_charsmap normalises text in a way that is "
            "not implemented; use the Hugging Face directory of this model"
        )
    unknown = vocabulary.of_type(_TokenType.UNKNOWN)
    model = models.BPE(
        vocabulary.ids,
        _rank_splits(file, vocabulary),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool) is not False
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _rank_splits(file: GgufFile, vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """All merges that make a normal token, best score first; equal scores prefer a long left."""
    scores = file.require_list("tokenizer.ggml.scores", float)
    if len(scores) < len(vocabulary.tokens):
        raise ModelLoadError(f"{file.path}: {len(vocabulary.tokens)} tokens, {len(scores)} scores")
    ids = {token: vocabulary.ids[token] for token in vocabulary.of_type(_TokenType.NORMAL)}
    ranked = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], -cut, ids[left], ids[right]))
    ranked.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for *_, left, right in ranked]


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Let the tokens that are never made by merging be found in text before it is split."""
    from tokenizers import AddedToken

    special = vocabulary.of_type(_TokenType.CONTROL, _TokenType.UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    plain = vocabulary.of_type(_TokenType.USER_DEFINED)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])


def _set_template(file: GgufFile, tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Put BOS before, or EOS after, every text where the model was trained so."""
    from tokenizers import processors

    kind, pre = file.get("tokenizer.ggml.model", str), file.get("tokenizer.ggml.pre", str)
    add_bos = file.get("tokenizer.ggml.add_bos_token", bool)
    if add_bos is None:  # what llama.cpp assumes
        add_bos = kind == "llama" or pre == "llama-bpe"
    parts, ids = ["$A"], []
    if add_bos and vocabulary.bos_id is not None:
        ids.append(vocabulary.bos_id)
        parts.insert(0, vocabulary.tokens[vocabulary.bos_id])
    if file.get("tokenizer.ggml.add_eos_token", bool) and vocabulary.end_ids:
        ids.append(vocabulary.end_ids[0])
        parts.append(vocabulary.tokens[vocabulary.end_ids[0]])
    if ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, special_tokens=[(vocabulary.tokens[i], i) for i in ids]
        )
