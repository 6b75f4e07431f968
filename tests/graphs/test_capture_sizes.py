"""Which text is a list of sizes, what the default ladders hold, and where a step lands."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs.capture_sizes import (
    MAX_NUM_SIZES,
    MAX_SIZE,
    CaptureLadders,
    CaptureSizes,
    Launch,
    default_sizes,
    parse_capture_sizes,
)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1", (1,)),
        ("1,2,4,8-64:8,128", (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 128)),
        ("128,1,2", (1, 2, 128)),
        ("4,4,2,2-6:2", (2, 4, 6)),
        ("  1 ,\t2,\n8 - 24 : 8 ", (1, 2, 8, 16, 24)),
        ("5-5:1", (5,)),
        ("5-9:100", (5,)),
        ("8-30:8", (8, 16, 24)),
        ("007", (7,)),
        (str(MAX_SIZE), (MAX_SIZE,)),
    ],
)
def test_lists_and_ranges_in_any_order_become_ascending_sizes(text, sizes):
    assert parse_capture_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "an empty entry"),
        ("1,,2", "an empty entry"),
        ("1,2,", "an empty entry"),
        ("1 2", "'1 2' is neither"),
        ("0", "0 in '0' is not from 1 to"),
        ("-4", "'-4' is neither"),
        ("1.5", "'1.5' is neither"),
        ("1e3", "'1e3' is neither"),
        ("0x10", "'0x10' is neither"),
        ("1_000", "'1_000' is neither"),
        ("\u0664", "is neither"),
        ("8-64", "'8-64' is neither"),
        ("8:64", "'8:64' is neither"),
        ("8-64:", "'8-64:' is neither"),
        ("8-64:0", "0 in '8-64:0' is not from 1"),
        ("0-64:8", "0 in '0-64:8' is not from 1"),
        ("64-8:8", "'64-8:8' starts above its stop"),
        ("8-64:8:2", "is neither"),
        ("1;2", "is neither"),
        ("[1,2]", "'[1' is neither"),
        (str(MAX_SIZE + 1), "is not from 1 to"),
        ("9" * 5000, "is not from 1 to"),
        (f"1-{MAX_NUM_SIZES + 1}:1", f"more than {MAX_NUM_SIZES} sizes"),
        ("1-1000:1,1001-1100:1", f"more than {MAX_NUM_SIZES} sizes"),
    ],
)
def test_malformed_text_is_refused_with_what_is_wrong_and_what_is_allowed(text, what):
    with pytest.raises(ValueError) as caught:
        parse_capture_sizes(text)
    message = str(caught.value)
    assert what in message
    assert "start-stop:step" in message
    assert "\n" not in message


@given(st.sets(st.integers(1, 300), min_size=1, max_size=20))
def test_lookup_is_the_smallest_size_that_holds_and_floor_the_largest_that_is_filled(sizes):
    ladder = CaptureSizes(tuple(sizes))
    assert ladder.largest == max(sizes)
    for count in range(1, 320):
        assert ladder.lookup(count) == min((s for s in sizes if s >= count), default=None)
        assert ladder.floor(count) == max((s for s in sizes if s <= count), default=None)


@pytest.mark.parametrize("sizes", [(), (0,), (-1, 4), (2.0,), (True,), ("8",), (MAX_SIZE + 1,)])
def test_a_ladder_of_no_sizes_or_of_wrong_ones_is_refused(sizes):
    with pytest.raises(ValueError, match="size"):
        CaptureSizes(sizes)


def test_sizes_beyond_the_limit_become_the_limit():
    assert CaptureSizes.up_to(20, (1, 8, 16, 24, 64)).sizes == (1, 8, 16, 20)
    assert CaptureSizes.up_to(20, (64, 128)).sizes == (20,)
    assert CaptureSizes.up_to(20, (1, 8)).sizes == (1, 8)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 7, 10, 15, 20, 33, 100, 256, 1000])
@pytest.mark.parametrize("ridge", [1, 5, 40, 175, 900])
@pytest.mark.parametrize("budget", [1000, 2048, 8192])
@pytest.mark.parametrize("restrict", [None, "without_full_graphs", "without_piecewise_graphs"])
def test_default_ladders_hold_every_step_within_twofold_padding_and_nothing_larger(
    max_num_seqs, ridge, budget, restrict
):
    ladders = CaptureLadders.default(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, ridge=ridge
    )
    assert ladders.decode.largest == max_num_seqs
    assert ladders.mixed.largest == budget
    assert max_num_seqs in ladders.mixed.sizes
    if restrict is not None:
        ladders = getattr(ladders, restrict)()
    for is_uniform_decode, limit in ((True, max_num_seqs), (False, budget)):
        for count in range(1, limit + 1):
            launch = ladders.choose(count, is_uniform_decode=is_uniform_decode)
            if restrict == "without_piecewise_graphs" and not is_uniform_decode:
                assert launch == Launch(mode="eager", size=count)
                continue
            is_full = is_uniform_decode and restrict != "without_full_graphs"
            assert launch.mode == ("full" if is_full else "piecewise")
            assert count <= launch.size <= min(limit if is_full else budget, 2 * count)
            assert ladders.lookup(count, is_uniform_decode=is_uniform_decode) == launch.size
    assert ladders.lookup(budget + 1, is_uniform_decode=True) is None
    assert ladders.lookup(budget + 1, is_uniform_decode=False) is None


@pytest.mark.parametrize("limit", [1, 2, 15, 16, 17, 31, 63, 175, 176, 177, 400])
@pytest.mark.parametrize("ridge", [1, 31, 33, 100])
def test_tiny_budgets_have_ladders_too(limit, ridge):
    sizes = default_sizes(limit, ridge=ridge)
    assert sizes[-1] == limit
    assert sizes[0] == 1
    assert all(b <= 2 * (a + 1) for a, b in itertools.pairwise(sizes))


def test_the_number_of_default_sizes_grows_slower_than_the_budget():
    def num_sizes(budget: int) -> int:
        return CaptureLadders.default(
            max_num_seqs=256, max_num_batched_tokens=budget, ridge=175
        ).num_sizes

    assert num_sizes(2048) <= 24
    assert num_sizes(2048) < num_sizes(8192) <= 40
    assert num_sizes(1 << 17) <= 80


def test_default_sizes_double_below_the_ridge_then_keep_their_spaces_then_let_them_grow():
    sizes = default_sizes(8192, ridge=264)
    assert [size for size in sizes if size <= 256] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert all(size % 8 == 0 for size in sizes if size > 4)
    for size, following in itertools.pairwise(size for size in sizes if size >= 256):
        assert following - size <= max(132, size / 12) + 8
        assert following - size >= max(132, size / 12) * 0.9 - 8


def test_sizes_below_the_ridge_are_no_nearer_than_pays():
    assert default_sizes(128, ridge=4) == (1, 2, 4, 8, 16, 32, 64, 96, 128)


def test_an_explicit_list_serves_both_kinds_of_step_up_to_their_limits():
    ladders = CaptureLadders.explicit((1, 2, 4, 96), max_num_seqs=20, max_num_batched_tokens=64)
    assert ladders.decode.sizes == (1, 2, 4, 20)
    assert ladders.mixed.sizes == (1, 2, 4, 64)
    assert ladders.num_sizes == 5, "sizes of both kinds count once"


def test_the_bucket_follows_the_kind_of_the_step_not_only_its_token_count():
    ladders = CaptureLadders(decode=CaptureSizes((4, 16)), mixed=CaptureSizes((8, 32)))
    assert ladders.lookup(13, is_uniform_decode=True) == 16
    assert ladders.lookup(13, is_uniform_decode=False) == 32


def test_decode_that_no_full_graph_fits_is_piecewise_and_what_nothing_fits_is_eager():
    ladders = CaptureLadders(decode=CaptureSizes((4,)), mixed=CaptureSizes((8, 32)))
    for count, launch in {
        4: Launch(mode="full", size=4),
        1: Launch(mode="eager", size=1, fall="padding above 2x"),
        5: Launch(mode="piecewise", size=8),
        12: Launch(mode="eager", size=12, fall="padding above 2x"),
        33: Launch(mode="eager", size=33, fall="above the largest size"),
    }.items():
        assert ladders.choose(count, is_uniform_decode=True) == launch
        size = ladders.lookup(count, is_uniform_decode=True)
        assert size == (None if launch.mode == "eager" else launch.size)
    assert ladders.choose(4, is_uniform_decode=False) == Launch(mode="piecewise", size=8)


def test_decode_steps_bring_their_sizes_to_the_piecewise_ladder_where_full_graphs_are_missing():
    ladders = CaptureLadders(decode=CaptureSizes((1, 3)), mixed=CaptureSizes((2, 8)))
    merged = ladders.without_full_graphs()
    assert (merged.decode, merged.mixed) == (None, CaptureSizes((1, 2, 3, 8)))
    assert merged.without_full_graphs() == merged
    only_full = ladders.without_piecewise_graphs()
    assert only_full == CaptureLadders(decode=CaptureSizes((1, 3)), mixed=None)
    assert only_full.without_full_graphs() == CaptureLadders(decode=None, mixed=None)


def test_padding_statistics_count_tokens_time_and_steps_off_the_ladder():
    padding = CaptureSizes((4, 10)).padding([1, 4, 7, 11], lambda tokens: max(4, tokens))
    assert (padding.num_steps, padding.num_off_ladder) == (4, 1)
    assert (padding.num_tokens, padding.num_padding_tokens) == (23, 6)
    assert padding.fraction == pytest.approx(6 / 29)
    assert padding.padding_seconds == 3, "padding 1 to 4 is free, 7 to 10 is not"
    assert padding.seconds == 4 + 4 + 10 + 11
    assert padding.time_fraction == pytest.approx(3 / 29)
    nothing = CaptureSizes((4,)).padding([])
    assert (nothing.fraction, nothing.time_fraction, nothing.seconds) == (0, 0, 0)


def test_the_module_itself_needs_no_torch():
    code = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('c', sys.argv[1]);"
        "m = u.module_from_spec(s); sys.modules['c'] = m; s.loader.exec_module(m);"
        "assert 'torch' not in sys.modules"
    )
    path = sys.modules[CaptureSizes.__module__].__file__
    subprocess.run([sys.executable, "-c", code, path], check=True)
