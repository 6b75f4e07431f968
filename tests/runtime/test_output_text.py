"""Stop strings in the text of an output: found over token borders, and never shown in part."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import AddedToken, decoders, models

from runtime.detokenizer import DetokenizerFactory
from runtime.output_text import OutputText
from runtime.sampling_params import SamplingParams


class Pieces:
    """A tokenizer whose tokens are given texts, joined as they are or with spaces."""

    def __init__(
        self, texts: list[str], special: tuple[str, ...] = (), *, fused: bool = True
    ) -> None:
        vocab = {text: id_ for id_, text in enumerate(texts)}
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=texts[0]))
        if fused:
            backend.decoder = decoders.Fuse()
        backend.add_special_tokens([AddedToken(text, special=True) for text in special])
        self.backend = backend
        self.special_token_ids = frozenset(backend.token_to_id(text) for text in special)

    def decode(self, ids: Any, /, *, skip_special_tokens: bool) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


def pieces_of(
    texts: list[str], *, sizes: list[int] | None = None, ended: bool = False, **options: Any
) -> tuple[list[str], str | None]:
    """Push one token a text, some at a time; the pieces that came, and the stop string."""
    vocabulary = sorted(set(texts)) or ["x"]
    factory = DetokenizerFactory(Pieces(vocabulary))  # type: ignore[arg-type]
    output = OutputText(factory, SamplingParams(**options))
    ids = [vocabulary.index(text) for text in texts]
    pieces, start = [], 0
    for size in sizes or [1] * len(ids):
        part = ids[start : start + size]
        start += size
        pieces.append(output.push(part, is_ended_by_token=ended and start >= len(ids)))
    return [*pieces, output.finish()], output.stop_string


def test_a_stop_string_over_several_tokens_is_cut_off_and_no_part_of_it_was_sent() -> None:
    pieces, stop = pieces_of(["ab", "cEN", "Dxyz"], stop=["END"])
    assert (pieces, stop) == (["ab", "c", "", ""], "END")
    pieces, stop = pieces_of(["ab", "cEN", "Dxyz"], stop=["END"], include_stop_str_in_output=True)
    assert (pieces, stop) == (["ab", "c", "END", ""], "END")


def test_what_only_looks_like_a_stop_string_comes_late_and_whole() -> None:
    assert pieces_of(["abE", "N", "dxE", "N"], stop=["END"]) == (["ab", "", "ENdx", "", "EN"], None)


def test_without_stop_strings_nothing_is_withheld() -> None:
    assert pieces_of(["a", "EN", "D"]) == (["a", "EN", "D", ""], None)


@pytest.mark.parametrize(
    ("texts", "stop", "text", "found"),
    [
        (["1END2", "END1"], ["END1", "END2"], "1", "END2"),
        (["xabc"], ["abc", "b"], "xa", "b"),
        (["xab"], ["b", "ab"], "x", "ab"),
        (["aab"], ["ab"], "a", "ab"),
        (["ababac"], ["abac"], "ab", "abac"),
        (["END"], ["END"], "", "END"),
        (["日本", "語です"], ["語"], "日本", "語"),
    ],
)
def test_the_string_that_is_complete_first_counts(
    texts: list[str], stop: list[str], text: str, found: str
) -> None:
    pieces, stop_string = pieces_of(texts, stop=stop)
    assert ("".join(pieces), stop_string) == (text, found)
    singles, stop_string = pieces_of(list("".join(texts)), stop=stop)
    assert ("".join(singles), stop_string) == (text, found)


def by_character(
    texts: list[str], stop: list[str], num_unstoppable: int, includes: bool
) -> tuple[str, str | None]:
    """The rule said slowly: look at the end of the text after each character."""
    text = ""
    for i, token in enumerate(texts):
        for character in token:
            text += character
            ending = [s for s in stop if text.endswith(s)]
            if ending and i >= num_unstoppable:
                longest = max(ending, key=len)
                return text if includes else text[: -len(longest)], longest
    return text, None


@settings(deadline=None, max_examples=300)
@given(
    texts=st.lists(st.text("abE", min_size=1, max_size=4), min_size=1, max_size=10),
    stop=st.lists(st.text("abE", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(0, 4), max_size=6),
    num_unstoppable=st.integers(0, 4),
    includes=st.booleans(),
)
def test_any_cut_into_pushes_gives_the_text_of_the_slow_rule(
    texts: list[str], stop: list[str], sizes: list[int], num_unstoppable: int, includes: bool
) -> None:
    options = {
        "stop": stop,
        "min_tokens": num_unstoppable,
        "include_stop_str_in_output": includes,
    }
    pieces, found = pieces_of(texts, sizes=[*sizes, len(texts)], **options)
    expected = by_character(texts, stop, num_unstoppable, includes)
    assert ("".join(pieces), found) == expected
    for sent in itertools.accumulate(pieces):
        assert expected[0].startswith(sent)


def test_a_stop_string_counts_only_if_it_ends_after_min_tokens() -> None:
    assert pieces_of(["END", "EN", "D"], stop=["END"], min_tokens=1)[1] == "END"
    pieces, found = pieces_of(["END", "xE", "ND"], stop=["END"], min_tokens=2)
    assert ("".join(pieces), found) == ("ENDx", "END"), "it begins before, and ends after"
    assert pieces_of(["END", "xE", "ND"], stop=["END"], min_tokens=3)[1] is None


def test_the_text_of_a_stop_token_is_left_out_unless_asked_for() -> None:
    assert pieces_of(["a", "b", "."], ended=True) == (["a", "b", "", ""], None)
    kept = pieces_of(["a", "b", "."], ended=True, include_stop_str_in_output=True)
    assert kept == (["a", "b", ".", ""], None)
    assert pieces_of(["a", "E", "ND"], ended=True, stop=["END"]) == (["a", "", "", "E"], None)


def test_nothing_follows_the_stop_string() -> None:
    assert pieces_of(["aEND", "more", "END"], stop=["END"]) == (["a", "", "", ""], "END")


def test_detokenize_false_gives_no_text() -> None:
    assert pieces_of(["a", "b"], detokenize=False) == (["", "", ""], None)


@pytest.mark.parametrize("sizes", [[1] * 6, [6], [2, 1, 3]])
def test_special_tokens_that_follow_each_other_can_be_joined_without_spaces(
    sizes: list[int],
) -> None:
    tokenizer = Pieces(["a", "b"], ("<s>", "</s>"), fused=False)
    factory = DetokenizerFactory(tokenizer)  # type: ignore[arg-type]
    ids = [tokenizer.backend.token_to_id(text) for text in ("a", "<s>", "</s>", "<s>", "b", "a")]

    def text(**options: Any) -> str:
        output = OutputText(factory, SamplingParams(**options))
        ends = list(itertools.accumulate(sizes))
        pushed = [output.push(ids[e - n : e]) for e, n in zip(ends, sizes, strict=True)]
        return "".join(pushed) + output.finish()

    spaced = "a <s> </s> <s> b a"
    assert text() == "a b a"
    assert text(skip_special_tokens=False) == spaced
    assert text(skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)
    joined = text(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert joined == "a <s></s><s> b a"
    assert text(spaces_between_special_tokens=False) == "a b a"
