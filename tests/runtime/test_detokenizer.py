"""Incremental detokenization: the joined pieces against the decoded text of all ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    DetokenizerFactory,
    WindowedDetokenizer,
    make_detokenizer,
)

MARK = "\N{REPLACEMENT CHARACTER}"
TEXTS = [
    "hello world, it's 12345  o'clock\n\tand  so on ",
    " leading space and trailing \n\n",
    "naïve café, Füße, Ελληνικά, русский",
    "日本語の文字と한국어",
    "emoji 🙂👩‍👩‍👧🏳️‍🌈 done",
    f"a literal {MARK} mark and {MARK}{MARK}",
    "",
]


class CountingTokenizer:
    """The least that a detokenizer asks for, counting what it costs."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = [id_ for id_, token in added.items() if token.special]
        self.num_decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_of(self, token: str) -> int:
        id_ = self.backend.token_to_id(token)
        assert id_ is not None
        return id_


@cache
def byte_level() -> CountingTokenizer:
    """All 256 bytes, a few merges, special tokens, and added ones with and without byte letters.

    The library takes the added letter "ÿ" for the byte 0xFF.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_tokens([AddedToken("<tool>"), AddedToken("两 个"), AddedToken("ÿ")])
    return CountingTokenizer(backend)


@cache
def byte_letters() -> dict[int, str]:
    """The library's letter for each byte: itself if visible, the others in order after 255."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = {ord(letter): letter for letter in alphabet if ord(letter) < 256}
    hidden = [byte for byte in range(256) if byte not in letters]
    return letters | dict(zip(hidden, alphabet[len(letters) :], strict=True))


def byte_level_id(byte: int) -> int:
    return byte_level().id_of(byte_letters()[byte])


PIECES = [
    "▁",
    "a",
    "b",
    "e",
    "h",
    "l",
    "o",
    "r",
    "w",
    "▁h",
    "▁he",
    "llo",
    "▁world",
    "日",
    ".",
    "▁▁",
]


def sentencepiece_like(decoder: decoders.Decoder) -> CountingTokenizer:
    """A Unigram vocabulary with 256 byte tokens, as Llama 2 has."""
    tokens = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], *PIECES, MARK]
    backend = Tokenizer(
        models.Unigram([(token, -1.0) for token in tokens], unk_id=0, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    return CountingTokenizer(backend)


@cache
def llama2_like() -> CountingTokenizer:
    return sentencepiece_like(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )


def llama2_byte_ids(text_or_bytes: str | bytes) -> list[int]:
    data = text_or_bytes.encode() if isinstance(text_or_bytes, str) else text_or_bytes
    return [llama2_like().id_of(f"<0x{byte:02X}>") for byte in data]


def join(detokenizer: Detokenizer, ids: Sequence[int], sizes: Sequence[int] = (1,)) -> list[str]:
    """Pieces of all pushes, of the given sizes in turn, and of the finish."""
    pieces, start, i = [], 0, 0
    while start < len(ids):
        size = sizes[i % len(sizes)]
        pieces.append(detokenizer.push(ids[start : start + size]))
        start, i = start + size, i + 1
    return [*pieces, detokenizer.finish()]


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


# -- byte-level ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=40), SIZES)
def test_any_bytes_split_anywhere_join_to_the_whole_decode(data: bytes, sizes: list[int]) -> None:
    ids = [byte_level_id(byte) for byte in data]
    pieces = join(make_detokenizer(byte_level()), ids, sizes)
    assert "".join(pieces) == byte_level().decode(ids, skip_special_tokens=True)


UTF8_PARTS = [
    *[b"a", "🙂".encode(), "日".encode(), MARK.encode()],
    *[b"\x80", b"\xbf", b"\xa9", b"\xac", b"\x98\x80"],  # continuations
    *[b"\xc3", b"\xe2\x82", b"\xf0\x9f", b"\xf0\x9f\x98"],  # incomplete
    *[b"\xc0", b"\xe0\x80", b"\xed\xa0", b"\xf4\x90", b"\xf5", b"\xff"],  # impossible
]
BAD_UTF8 = st.lists(st.sampled_from(UTF8_PARTS), max_size=12).map(b"".join)


@settings(deadline=None, max_examples=500)
@given(BAD_UTF8)
def test_bad_utf8_gets_the_same_marks_as_in_the_whole_decode(data: bytes) -> None:
    ids = [byte_level_id(byte) for byte in data]
    pieces = join(make_detokenizer(byte_level()), ids)
    assert "".join(pieces) == byte_level().decode(ids, skip_special_tokens=True)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 345), max_size=40), st.booleans(), SIZES)
def test_any_tokens_special_added_and_unknown_ones_too_join_to_the_whole_decode(
    ids: list[int], skip: bool, sizes: list[int]
) -> None:
    detokenizer = make_detokenizer(byte_level(), skip_special_tokens=skip)
    pieces = join(detokenizer, ids, sizes)
    assert "".join(pieces) == byte_level().decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_and_only_an_incomplete_character_is_ever_withheld(text: str) -> None:
    ids = byte_level().backend.encode(text).ids
    detokenizer, sent = make_detokenizer(byte_level()), ""
    for i, id_ in enumerate(ids, 1):
        sent += detokenizer.push([id_])
        so_far = byte_level().decode(ids[:i], skip_special_tokens=True)
        assert so_far in (sent, sent + MARK)
    assert sent + detokenizer.finish() == text


def test_special_tokens_are_left_out_or_shown_as_asked() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.id_of("<|im_start|>"), tokenizer.id_of("h"), tokenizer.id_of("<|end|>")]
    assert join(make_detokenizer(tokenizer), ids) == ["", "h", "", ""]
    shown = join(make_detokenizer(tokenizer, skip_special_tokens=False), ids)
    assert shown == ["<|im_start|>", "h", "<|end|>", ""]


def test_an_added_token_that_is_not_byte_letters_decodes_as_its_own_text() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.id_of("两 个"), tokenizer.id_of("<tool>")]
    assert join(make_detokenizer(tokenizer), ids) == ["两 个", "<tool>", ""]


def test_ids_past_the_vocabulary_decode_to_nothing() -> None:
    for tokenizer in (byte_level(), llama2_like()):
        size = tokenizer.backend.get_vocab_size()
        known = tokenizer.id_of("h")
        assert join(make_detokenizer(tokenizer), [size, known, size + 1000]) == ["", "h", "", ""]
    word = llama2_like().id_of("▁he")
    ids = [word, *[llama2_like().backend.get_vocab_size()] * 10, word]
    assert "".join(join(make_detokenizer(llama2_like()), ids)) == "he he"


def test_a_character_cut_by_the_end_is_one_mark_after_the_text_before_it() -> None:
    emoji = [byte_level_id(byte) for byte in "🙂".encode()]
    hello = [byte_level_id(byte) for byte in b"hello "]
    word = [byte_level_id(byte) for byte in b"wor"]
    detokenizer = make_detokenizer(byte_level())
    assert detokenizer.push(hello) == "hello "
    assert detokenizer.push(word + emoji[:2]) == "wor"
    assert detokenizer.finish() == MARK
    assert byte_level().decode(hello + word + emoji[:2], skip_special_tokens=True) == (
        f"hello wor{MARK}"
    )


def test_characters_that_overlap_tokens_are_sent_once_each() -> None:
    backend = Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    data = [b"A ", "日".encode() + b"\xc3", b"\xa9" + "🙂".encode()[:3], b"\x82!"]
    backend.add_tokens(["".join(byte_letters()[byte] for byte in token) for token in data])
    tokenizer = CountingTokenizer(backend)
    pieces = join(make_detokenizer(tokenizer), [0, 1, 2, 3])
    assert pieces == ["A ", "日", "é", "🙂!", ""]
    assert tokenizer.decode([0, 1, 2, 3], skip_special_tokens=True) == "A 日é🙂!"


def test_byte_level_never_decodes_and_sends_marks_at_once() -> None:
    tokenizer = CountingTokenizer(byte_level().backend)
    pieces = join(make_detokenizer(tokenizer), [byte_level_id(0x80)] * 4000)
    assert pieces == [MARK] * 4000 + [""]
    assert tokenizer.num_decoded == 0


def test_sequences_of_one_factory_share_the_table_but_no_state() -> None:
    factory = DetokenizerFactory(byte_level())
    first, second = factory.create(), factory.create(skip_special_tokens=False)
    assert isinstance(first, ByteLevelDetokenizer)
    assert isinstance(second, ByteLevelDetokenizer)
    assert first._token_bytes is second._token_bytes
    emoji = [byte_level_id(byte) for byte in "🙂".encode()]
    assert first.push(emoji[:2]) == ""
    assert second.push(emoji) == "🙂"
    assert first.push(emoji[2:]) == "🙂"


# -- other decoders --------------------------------------------------------------------------------

DECODERS = {
    "llama 2": llama2_like,
    "byte fallback without strip": cache(
        lambda: sentencepiece_like(
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            )
        )
    ),
    "metaspace and byte fallback": cache(
        lambda: sentencepiece_like(
            decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        )
    ),
    "metaspace": cache(lambda: sentencepiece_like(decoders.Metaspace())),
    "word pieces": cache(lambda: sentencepiece_like(decoders.WordPiece(prefix="▁"))),
    "suffixes": cache(lambda: sentencepiece_like(decoders.BPEDecoder(suffix="."))),
}


def segments(tokenizer: CountingTokenizer) -> st.SearchStrategy[list[int]]:
    """Ids whose byte runs are UTF-8: plain and special tokens, unknown ids, characters in bytes."""
    plain = [tokenizer.id_of(piece) for piece in PIECES] + [tokenizer.id_of(MARK)]
    others = [*tokenizer.special_token_ids, tokenizer.backend.get_vocab_size() + 3]
    characters = st.sampled_from([" ", "A", "é", "日", "🙂", MARK]).map(llama2_byte_ids)
    one = st.one_of(
        st.sampled_from(plain).map(lambda id_: [id_]),
        st.sampled_from(others).map(lambda id_: [id_]),
        characters,
    )
    return st.lists(one, max_size=30).map(lambda parts: [id_ for part in parts for id_ in part])


@pytest.mark.parametrize("name", DECODERS)
@settings(deadline=None, max_examples=200)
@given(st.data())
def test_other_decoders_join_to_the_whole_decode(name: str, data: st.DataObject) -> None:
    tokenizer = DECODERS[name]()
    ids, sizes = data.draw(segments(tokenizer)), data.draw(SIZES)
    skip = data.draw(st.booleans())
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip)
    assert isinstance(detokenizer, WindowedDetokenizer)
    pieces = join(detokenizer, ids, sizes)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.sampled_from(TEXTS), st.text(max_size=30)), SIZES)
def test_any_text_comes_back_through_byte_fallback(text: str, sizes: list[int]) -> None:
    ids = llama2_like().backend.encode(text).ids
    whole = llama2_like().decode(ids, skip_special_tokens=True)
    assert "".join(join(make_detokenizer(llama2_like()), ids, sizes)) == whole


@settings(deadline=None, max_examples=300)
@given(BAD_UTF8, st.booleans())
def test_a_byte_level_decoder_inside_a_sequence_joins_to_the_whole_decode(
    data: bytes, with_words: bool
) -> None:
    backend = Tokenizer.from_str(byte_level().backend.to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer = CountingTokenizer(backend)
    ids = [byte_level_id(byte) for byte in b" " + data]
    if with_words:
        ids = backend.encode("  word").ids + ids + backend.encode(" 日本語 🙂").ids
    detokenizer = make_detokenizer(tokenizer)
    assert isinstance(detokenizer, WindowedDetokenizer)
    assert "".join(join(detokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_tokens_without_a_decoder_are_joined_by_spaces_as_the_whole_decode_does() -> None:
    backend = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2}, unk_token="one"))
    tokenizer = CountingTokenizer(backend)
    ids = [0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 2]
    pieces = join(make_detokenizer(tokenizer), ids)
    assert pieces[:3] == ["one", " two", " three"]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_characters_in_byte_tokens_are_sent_as_soon_as_they_are_complete() -> None:
    hello, world = llama2_like().id_of("▁he"), llama2_like().id_of("▁world")
    ids = [hello, *llama2_byte_ids("日é"), world]
    pieces = join(make_detokenizer(llama2_like()), ids)
    assert pieces == ["he", "", "", "日", "", "é", " world", ""]


def test_a_byte_run_that_is_bad_before_its_first_character_is_one_mark_a_byte() -> None:
    o = llama2_like().id_of("o")
    for prefix in ([], [o], [*llama2_byte_ids("é"), o]):
        for run in (b"\x80", b"\xe2\x82A", b"\xc3\xc3\xa9", b"\xf0\x9f\x98", b"\xff A\xe2\x82\xac"):
            for suffix in ([], [o], [llama2_like().id_of("▁world"), o]):
                ids = [*prefix, *llama2_byte_ids(run), *suffix]
                pieces = join(make_detokenizer(llama2_like()), ids)
                whole = llama2_like().decode(ids, skip_special_tokens=True)
                assert "".join(pieces) == whole
                assert whole.count(MARK) == len(run)


@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x82"])
def test_a_byte_run_after_a_bad_one_starts_afresh(bad: bytes) -> None:
    o = llama2_like().id_of("o")
    ids = [*llama2_byte_ids(bad), o, *llama2_byte_ids("日é"), o]
    assert "".join(join(make_detokenizer(llama2_like()), ids)) == f"{MARK * len(bad)}o日éo"


def test_a_bad_byte_run_before_tokens_without_text_is_sent_once() -> None:
    tokenizer = sentencepiece_like(
        decoders.Sequence(
            [decoders.Replace("b", ""), decoders.ByteFallback(), decoders.Fuse()],
        )
    )
    ids = [tokenizer.id_of("<0x80>"), tokenizer.id_of("b"), tokenizer.id_of("a")]
    assert join(make_detokenizer(tokenizer), ids) == [MARK, "", "a", ""]


def test_byte_tokens_are_plain_text_to_a_decoder_without_byte_fallback() -> None:
    tokenizer = DECODERS["metaspace"]()
    ids = [tokenizer.id_of("<0x80>"), tokenizer.id_of("<0xC3>")]
    assert join(make_detokenizer(tokenizer), ids) == ["<0x80>", "<0xC3>", ""]


def test_a_byte_run_that_turns_bad_keeps_its_sent_characters_and_marks_each_later_byte() -> None:
    world = llama2_like().id_of("▁world")
    ids = [*llama2_byte_ids("日é".encode() + b"\xe2\x82" + b"A" + "é".encode()), world, world]
    pieces = join(make_detokenizer(llama2_like()), ids)
    assert "".join(pieces) == f"日é{MARK * 5} world world"
    whole = llama2_like().decode(ids, skip_special_tokens=True)
    assert whole == f"{MARK * 10} world world", "the library takes the good characters back"


def test_a_byte_run_cut_by_the_end_is_one_mark_a_byte_after_the_text_before_it() -> None:
    hello = llama2_like().id_of("▁he")
    detokenizer = make_detokenizer(llama2_like())
    ids = [hello, *llama2_byte_ids("🙂".encode()[:3])]
    assert detokenizer.push(ids) == "he"
    assert detokenizer.finish() == MARK * 3
    assert llama2_like().decode(ids, skip_special_tokens=True) == f"he{MARK * 3}"


@pytest.mark.parametrize("kind", ["bad byte tokens", "good byte tokens", "marks", "words", "lossy"])
def test_the_cost_of_4000_tokens_is_linear_and_text_is_sent_all_along(kind: str) -> None:
    tokenizer = CountingTokenizer(llama2_like().backend)
    ids = {
        "bad byte tokens": llama2_byte_ids(b"\x80") * 4000,
        "good byte tokens": llama2_byte_ids("é") * 2000,
        "marks": [llama2_like().id_of(MARK)] * 4000,
        "words": [llama2_like().id_of("▁world")] * 4000,
        "lossy": [byte_level_id(0x80)] * 4000,
    }[kind]
    if kind == "lossy":
        backend = Tokenizer.from_str(byte_level().backend.to_str())
        backend.decoder = decoders.Sequence([decoders.ByteLevel()])
        tokenizer = CountingTokenizer(backend)
    pieces = join(make_detokenizer(tokenizer), ids)
    assert tokenizer.num_decoded <= 16 * len(ids)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) == whole
    half = "".join(pieces[: len(ids) // 2])
    assert len(half) >= len(whole) // 2 - 2


def test_finish_gives_the_rest_once() -> None:
    detokenizer = make_detokenizer(llama2_like())
    assert detokenizer.push([llama2_like().id_of(MARK)]) == ""
    assert detokenizer.finish() == MARK
    assert detokenizer.finish() == ""
