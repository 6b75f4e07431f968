"""Token ids to text as they are generated: no character split, lost, repeated or taken back.

A character may be spread over several tokens, so what is incomplete is withheld until its rest
comes. The cost of a token doesn't depend on how much text there is already.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tokenizers

_MARK = "\N{REPLACEMENT CHARACTER}"
_NO_IDS: frozenset[int] = frozenset()


class DecodingTokenizer(Protocol):
    """What detokenization needs of a tokenizer."""

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer of the tokenizers library."""

    @property
    def special_token_ids(self) -> Collection[int]:
        """Ids that `decode` leaves out if it is told to skip special tokens."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """The text of all ids at once; ids that no token has count for nothing."""


class Detokenizer(ABC):
    """The text of one sequence. Joined, its pieces are the decoded text of all ids."""

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Take in the next ids; returns the text that became final, often none."""

    @abstractmethod
    def finish(self) -> str:
        """The withheld rest, an incomplete character as replacement marks. Call it once, last."""


class DetokenizerFactory:
    """Makes the detokenizers of one tokenizer, which share what is made once of its vocabulary."""

    def __init__(self, tokenizer: DecodingTokenizer) -> None:
        from tokenizers import decoders

        self._tokenizer = tokenizer
        self._special_token_ids = frozenset(tokenizer.special_token_ids)
        self._token_bytes: dict[int, bytes] | None = None
        if isinstance(tokenizer.backend.decoder, decoders.ByteLevel):
            self._token_bytes = _byte_level_table(tokenizer.backend)

    def create(
        self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> Detokenizer:
        """A detokenizer for one sequence.

        Args:
            skip_special_tokens: leave them out of the text.
            spaces_between_special_tokens: False: special tokens that follow each other are joined
                as they are, whatever the tokenizer's decoder would put between them.
        """
        skipped_ids = self._special_token_ids if skip_special_tokens else _NO_IDS
        if self._token_bytes is not None:  # these tokens are never joined by anything
            return ByteLevelDetokenizer(self._token_bytes, skipped_ids)
        joined_ids = _NO_IDS if spaces_between_special_tokens else self._special_token_ids
        return WindowedDetokenizer(self._tokenizer, skipped_ids, joined_ids)


def make_detokenizer(
    tokenizer: DecodingTokenizer, *, skip_special_tokens: bool = True
) -> Detokenizer:
    """A detokenizer for one sequence; a `DetokenizerFactory` is cheaper for several."""
    return DetokenizerFactory(tokenizer).create(skip_special_tokens=skip_special_tokens)


class ByteLevelDetokenizer(Detokenizer):
    """For tokenizers whose tokens are strings of bytes (GPT-2's byte-level BPE).

    Python's UTF-8 decoder and that of the tokenizers library replace the same bytes by a mark:
    each maximal part of a sequence that can't go on (the Unicode standard, section 3.9).

    Args:
        token_bytes: bytes by token id; other ids have no text.
        skipped_ids: ids without text.
    """

    def __init__(self, token_bytes: Mapping[int, bytes], skipped_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`. At most three bytes are withheld."""
        table, skipped = self._token_bytes, self._skipped_ids
        return self._decoder.decode(
            b"".join([table.get(id_, b"") for id_ in token_ids if id_ not in skipped])
        )

    def finish(self) -> str:
        """See `Detokenizer.finish`. At most one mark."""
        return self._decoder.decode(b"", final=True)


def _byte_level_table(backend: tokenizers.Tokenizer) -> dict[int, bytes]:
    """Bytes of each token: one a character, or UTF-8 where some character stands for no byte."""
    byte_of = _byte_of_character()
    table = {}
    for id_ in backend.get_vocab(with_added_tokens=True).values():
        token = backend.id_to_token(id_)
        assert token is not None, "an id of the vocabulary has a token"
        try:
            table[id_] = bytes([byte_of[character] for character in token])
        except KeyError:
            table[id_] = token.encode()
    return table


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: visible Latin-1 characters stand for themselves, the rest follow 255."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + i): byte for i, byte in enumerate(hidden)
    }


class WindowedDetokenizer(Detokenizer):
    """For all other decoders: decodes the last few tokens with and without the newest.

    Exact for decoders that treat the first token apart, strip the ends of the text, or let the
    text of a token depend on up to three tokens before it, as long as more tokens only add text.
    A replacement mark at the end is withheld for one token: it may be part of a character.

    Byte fallback, where a run of tokens <0x00> to <0xFF> is one mark a byte unless all of it is
    UTF-8, breaks that rule: a late bad byte takes back good characters. Here characters are
    final once complete. So the text is the decoded text if each run is UTF-8 or has its first bad
    byte before its first complete character; in other runs the characters before the bad byte
    stay, and each byte from there on is a mark. At most three bytes are withheld.

    Args:
        tokenizer: decodes.
        skipped_ids: ids without text.
        joined_ids: ids that follow each other as they are, whatever the decoder puts between them.
    """

    _CONTEXT = 3
    """Units kept when the window is cut: enough for the bytes of an incomplete character."""

    def __init__(
        self,
        tokenizer: DecodingTokenizer,
        skipped_ids: frozenset[int],
        joined_ids: frozenset[int] = _NO_IDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend
        self._skipped_ids = skipped_ids
        self._joined_ids = joined_ids
        self._is_last_joined = False
        decoder = self._backend.decoder
        self._has_byte_fallback = decoder is not None and decoder.decode(["<0x41>"]) == "A"
        self._window: list[list[int]] = []
        """Last units: a token, or the byte tokens of one character."""
        self._num_sent = 0
        """Characters of the window's text that were returned."""
        self._withheld = ""
        """The window's text after those."""
        self._byte_ids: list[int] = []
        """Byte tokens of the incomplete character."""
        self._byte_decoder = codecs.getincrementaldecoder("utf-8")(errors="strict")
        self._is_run_broken = False
        """The byte tokens since the last token of another kind are not UTF-8."""

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        return "".join([self._push(id_) for id_ in token_ids if id_ not in self._skipped_ids])

    def finish(self) -> str:
        """See `Detokenizer.finish`. One mark for each byte of an incomplete character."""
        withheld, self._withheld = self._withheld, ""
        return withheld + self._end_run()

    def _push(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return ""
        was_last_joined, self._is_last_joined = self._is_last_joined, token_id in self._joined_ids
        if self._has_byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return self._push_byte(token_id, bytes.fromhex(token[3:5]))
        piece = self._end_run() + self._append([token_id])
        return token if was_last_joined and self._is_last_joined else piece

    def _push_byte(self, token_id: int, byte: bytes) -> str:
        self._byte_ids.append(token_id)
        if self._is_run_broken:
            return self._give_up_bytes()
        try:
            is_complete = bool(self._byte_decoder.decode(byte))
        except UnicodeDecodeError:
            self._is_run_broken = True
            return self._give_up_bytes()
        if not is_complete:
            return ""
        unit, self._byte_ids = self._byte_ids, []
        return self._append(unit)

    def _end_run(self) -> str:
        self._is_run_broken = False
        self._byte_decoder.reset()
        return self._give_up_bytes()

    def _give_up_bytes(self) -> str:
        """A mark for each byte token; they don't enter the window, where they would spoil others.

        Only a text that begins with them needs one there, to have its next token not come first.
        """
        marks = _MARK * len(self._byte_ids)
        if marks and not self._window:
            self._append(self._byte_ids[:1])
            self._num_sent, self._withheld = 1, ""
        self._byte_ids = []
        return marks

    def _append(self, unit: list[int]) -> str:
        self._window.append(unit)
        text = self._decode_window()
        end = max(self._num_sent, len(text) - text.endswith(_MARK))
        piece, self._withheld = text[self._num_sent : end], text[end:]
        self._num_sent = end
        if len(self._window) >= 2 * self._CONTEXT:
            self._window = self._window[-self._CONTEXT :]
            self._num_sent = len(self._decode_window()) - len(self._withheld)
        return piece

    def _decode_window(self) -> str:
        token_ids = [id_ for unit in self._window for id_ in unit]
        # Special tokens that are to be skipped never come here.
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
