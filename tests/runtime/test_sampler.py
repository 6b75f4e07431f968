"""The sampler: its distribution, its independence of the batch, and rows of bad logits.

The batched way of drawing, which accelerators use, runs on a CPU as well; tests of what is drawn
run with it, with the row-by-row way of CPUs, and with the native library for each level of vector
instructions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from attention.native_build import NativeBuildError, find_compiler, usable_levels
from runtime import sampler
from runtime.native_sampler import sampler_library
from runtime.sampler import SampledTokens, SamplingBatch, stateless_uniforms

Options = dict[str, Any]
_NATIVE = []  # names of levels; none without a compiler
try:
    find_compiler()
    _NATIVE = ["native " + level for level in usable_levels()]
except NativeBuildError:
    pass
ALL_WAYS = pytest.mark.parametrize("way", ["row_by_row", "batched", *_NATIVE], indirect=True)
_library: str | None = None  # the way's

MIXED_OPTIONS: list[Options] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.6},
    {"temperature": 1.5, "top_k": 7, "min_p": 0.2},
    {"temperature": 1.1, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 2.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
]


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "batched":
        monkeypatch.setattr(sampler, "_draw_on_host", sampler._draw_batched)
    elif request.param.startswith("native"):
        monkeypatch.setitem(globals(), "_library", sampler_library(level=request.param.split()[1]))


def sample(logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
    return sampler.sample(logits, batch, _library)


def make_batch(
    options: Sequence[Options],
    uniforms: Sequence[float] | np.ndarray | None = None,
    device: str = "cpu",
) -> SamplingBatch:
    """A batch with the flags that the options call for."""
    columns = {
        name: np.array([row.get(name, default) for row in options], dtype=dtype)
        for name, default, dtype in (
            ("temperature", 1.0, np.float32),
            ("top_k", 0, np.int32),
            ("top_p", 1.0, np.float32),
            ("min_p", 0.0, np.float32),
        )
    }
    if uniforms is None:
        uniforms = stateless_uniforms(
            np.arange(len(options), dtype=np.uint64), np.zeros(len(options), dtype=np.int64)
        )
    return SamplingBatch(
        **{name: torch.from_numpy(column).to(device) for name, column in columns.items()},
        uniforms=torch.from_numpy(np.array(uniforms, dtype=np.float32)).to(device),
        all_greedy=not columns["temperature"].any(),
        max_top_k=int(columns["top_k"].max(initial=0)),
        any_top_p=bool((columns["top_p"] < 1).any()),
        any_min_p=bool((columns["min_p"] > 0).any()),
    )


def draw(logits: torch.Tensor, options: Sequence[Options], **kwargs: Any) -> list[int]:
    sampled = sample(logits, make_batch(options, **kwargs))
    assert sampled.is_valid.all()
    return sampled.token_ids.tolist()


def random_logits(n: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed))


def expected_probabilities(logits: torch.Tensor, options: Options) -> torch.Tensor:
    """[vocab] float64, by transformers' own processors; `logits` is one row."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(options["temperature"])])
    if "min_p" in options:
        processors.append(MinPLogitsWarper(options["min_p"]))
    if options.get("top_k"):
        processors.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        processors.append(TopPLogitsWarper(options["top_p"]))
    scores: torch.Tensor = processors(torch.zeros(1, 1, dtype=torch.int64), logits[None].clone())
    return scores.double().softmax(dim=-1)[0]


def chi_squared_is_plausible(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Pearson's statistic within five standard deviations; both ends would be suspicious."""
    expected = counts.sum() * probabilities
    used = expected >= 5
    assert not counts[probabilities == 0].any()
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    return bool(abs(statistic - freedom) < 5 * math.sqrt(2 * freedom))


# -- the distribution ------------------------------------------------------------------------------


@ALL_WAYS
@pytest.mark.parametrize("options", [row for row in MIXED_OPTIONS if row["temperature"]], ids=str)
def test_each_token_gets_the_share_of_uniforms_that_transformers_gives_it(
    way: None, options: Options
) -> None:
    # Inverse-CDF sampling maps an even grid of uniforms to counts within 1 of the probability.
    num_points, vocab = 4000, 60
    logits = random_logits(1, vocab, seed=5, scale=1.5)
    grid = (np.arange(num_points) + 0.5) / num_points
    ids = draw(logits.expand(num_points, vocab), [options] * num_points, uniforms=grid)
    counts = np.bincount(ids, minlength=vocab)
    expected = num_points * expected_probabilities(logits[0], options).numpy()
    np.testing.assert_allclose(counts, expected, atol=1.01)
    assert ((counts > 0) == (expected > 0)).all() or (expected[counts == 0] < 1).all()


FILTERS: list[tuple[str, list[float]]] = [
    ("top_k", [1, 2, 50, 999, 1000, 5000]),
    ("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 1.0]),
    ("min_p", [0.0, 1e-4, 0.01, 0.1, 0.7, 1.0]),
]


@pytest.mark.parametrize(("name", "values"), FILTERS, ids=[name for name, _ in FILTERS])
@pytest.mark.parametrize("scale", [0.1, 3.0, 10.0])
def test_each_filter_keeps_the_tokens_that_transformers_keeps(
    name: str, values: list[float], scale: float
) -> None:
    logits = random_logits(len(values), 1000, seed=1, scale=scale)
    options = [{"temperature": 0.5 + i / 4, name: value} for i, value in enumerate(values)]
    weights = sampler._kept_weights(logits, *logits.max(dim=-1), make_batch(options)).double()
    for row, row_options, row_weights in zip(logits, options, weights, strict=True):
        expected = expected_probabilities(row, row_options)
        # A probability below 2**-50 is rounded to nothing.
        visible = expected > 2.0**-49
        assert torch.equal((row_weights > 0)[visible], (expected > 0)[visible])
        assert not row_weights[expected == 0].any()
        torch.testing.assert_close(row_weights / row_weights.sum(), expected, atol=1e-9, rtol=1e-5)


DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "wide": lambda x: x,
    "peaked": lambda x: 10 * x,
    "flat": lambda x: 1e-4 * x,
    "many ties": lambda x: x.round(),
    "equal": torch.zeros_like,
    "masked": lambda x: x.masked_fill(x < x.mean(dim=-1, keepdim=True), -torch.inf),
}


@pytest.mark.parametrize("vocab", [5, 128, 1000, 4099])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_row_by_row_way_draws_what_the_batched_way_draws(
    vocab: int, distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [row for row in MIXED_OPTIONS for _ in range(20)]
    logits = DISTRIBUTIONS[distribution](random_logits(len(options), vocab, seed=2))
    row_by_row = draw(logits, options)
    monkeypatch.setattr(sampler, "_draw_on_host", sampler._draw_batched)
    assert row_by_row == draw(logits, options)


@pytest.mark.parametrize("way", _NATIVE, indirect=True)
@pytest.mark.parametrize("vocab", [1, 15, 127, 1000, 49152])
def test_the_native_way_draws_what_the_batched_way_draws(way: None, vocab: int) -> None:
    logits = random_logits(64, vocab)
    logits[::3, ::5] = -math.inf
    batch = make_batch([{"temperature": 0.2 * (i % 11)} for i in range(64)])
    batched, native = sampler.sample(logits, batch), sample(logits, batch)
    assert torch.equal(native.is_valid, batched.is_valid)
    ends = (logits / batch.temperature[:, None]).double().softmax(dim=-1).cumsum(dim=-1)
    for row in (native.token_ids != batched.token_ids).nonzero()[:, 0].tolist():
        # The uniform is at the border of the two tokens, up to the roundings of a sum.
        lower = min(int(native.token_ids[row]), int(batched.token_ids[row]))
        assert float(ends[row, lower]) == pytest.approx(float(batch.uniforms[row]), abs=1e-6)


@ALL_WAYS
def test_frequencies_of_seeded_draws_follow_the_filtered_distribution(way: None) -> None:
    num_draws, vocab = 6000, 200
    logits = random_logits(1, vocab, seed=3, scale=1.0)
    options = {"temperature": 0.8, "top_k": 60, "top_p": 0.9, "min_p": 0.02}
    uniforms = stateless_uniforms(
        np.full(num_draws, 42, dtype=np.uint64), np.arange(num_draws, dtype=np.int64)
    )
    ids = draw(logits.expand(num_draws, vocab), [options] * num_draws, uniforms=uniforms)
    counts = np.bincount(ids, minlength=vocab)
    assert chi_squared_is_plausible(counts, expected_probabilities(logits[0], options).numpy())


@ALL_WAYS
@pytest.mark.parametrize("vocab", [7, 128, 300])
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9999}, {"min_p": 1e-30}])
def test_the_extreme_uniforms_never_draw_a_token_of_no_probability(
    way: None, vocab: int, options: Options
) -> None:
    # The first and last tokens are impossible, and float32 sums of the others miss 1 by a little.
    logits = random_logits(50, vocab, seed=4)
    logits[:, 0] = logits[:, -1] = -torch.inf
    for uniform in (0.0, 2.0**-24, 1 - 2.0**-24):
        ids = draw(logits, [options] * 50, uniforms=[uniform] * 50)
        assert logits.gather(-1, torch.tensor(ids)[:, None]).isfinite().all()
    lowest = draw(logits, [{}] * 50, uniforms=[0.0] * 50)
    assert lowest == [1] * 50


@ALL_WAYS
@pytest.mark.parametrize("options", [{}, {"top_k": 100}, {"top_p": 0.99}, {"min_p": 0.5}])
def test_uniform_0_draws_the_first_possible_token_however_far_it_is(
    way: None, options: Options
) -> None:
    logits = torch.full((1, 400), -torch.inf)
    logits[0, 300:303] = 0.0
    assert draw(logits, [options], uniforms=[0.0]) == [300]


@ALL_WAYS
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"min_p": 0.5}])
def test_a_token_owns_the_lower_end_of_its_interval_and_not_the_upper(
    way: None, options: Options
) -> None:
    logits = torch.zeros(8, 4)
    borders = np.repeat([0.25, 0.5, 0.75, 1.0], 2) - [0.0, 2.0**-24] * 4
    ids = draw(logits[:7], [options] * 7, uniforms=[*borders[:6], borders[7]])
    assert ids == [1, 0, 2, 1, 3, 2, 3]


# -- greedy rows, temperatures, ties ---------------------------------------------------------------


@ALL_WAYS
def test_temperature_zero_is_the_exact_argmax_whatever_the_neighbours_and_filters(
    way: None,
) -> None:
    logits = random_logits(40, 500, seed=6)
    best = logits.argmax(dim=-1).tolist()
    filters = {"temperature": 0.0, "top_k": 3, "top_p": 0.1, "min_p": 0.9}
    for _ in range(10):
        assert draw(logits, [{"temperature": 0.0}] * 40) == best
        mixed = draw(logits, [filters, {"temperature": 1.0, "top_p": 0.9}] * 20)
        assert mixed[::2] == best[::2]


@ALL_WAYS
def test_a_greedy_row_of_half_minus_infinity_beside_a_top_p_row(way: None) -> None:
    logits = random_logits(2, 100, seed=7)
    logits[0, ::2] = -torch.inf
    best = int(logits[0].argmax())
    allowed = expected_probabilities(logits[1], {"temperature": 1.0, "top_p": 0.9}) > 0
    for uniform in np.linspace(0, 0.999, 50):
        options = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}]
        ids = draw(logits, options, uniforms=[uniform] * 2)
        assert ids[0] == best
        assert allowed[ids[1]]


@ALL_WAYS
@pytest.mark.parametrize("temperature", [1e-40, 1e-7, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_a_tiny_temperature_draws_the_likeliest_token(
    way: None, temperature: float, scale: float
) -> None:
    logits = random_logits(20, 300, seed=8, scale=scale)
    logits[:, 5] = -torch.inf
    logits[:, 9] = logits.amax(dim=-1) + 0.1 * scale
    options = {"temperature": temperature}
    for filters in ({}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert draw(logits, [{**options, **filters}] * 20) == [9] * 20


@ALL_WAYS
@pytest.mark.parametrize("temperature", [1e3, 3.4e38])
def test_a_huge_temperature_draws_evenly_from_the_finite_tokens(
    way: None, temperature: float
) -> None:
    vocab, num_points = 64, 640
    logits = random_logits(1, vocab, seed=9, scale=0.1)
    logits[:, ::4] = -torch.inf
    grid = (np.arange(num_points) + 0.5) / num_points
    options = [{"temperature": temperature}] * num_points
    ids = draw(logits.expand(num_points, vocab), options, uniforms=grid)
    counts = np.bincount(ids, minlength=vocab)
    assert not counts[::4].any()
    np.testing.assert_allclose(counts[logits[0].isfinite().numpy()], num_points / 48, atol=1.01)


@ALL_WAYS
def test_ties_go_to_the_lowest_id_in_greedy_rows_and_at_the_edge_of_top_p(way: None) -> None:
    logits = torch.zeros(1, 10)
    logits[0, 0] = -1.0
    assert draw(logits, [{"temperature": 0.0}]) == [1]
    grid = (np.arange(100) + 0.5) / 100
    rows = logits.expand(100, 10)

    def drawn(**options: float) -> set[int]:
        return set(draw(rows, [options] * 100, uniforms=grid))

    assert drawn(top_k=3) == set(range(1, 10)), "top_k keeps all that equal the k-th"
    assert drawn(top_p=0.45) == {1, 2, 3, 4, 5}
    assert drawn(top_k=3, top_p=0.5) == {1, 2, 3, 4, 5}
    assert drawn(min_p=1.0) == drawn(top_k=3, min_p=1.0) == set(range(1, 10))
    assert drawn(top_p=1e-300) == {1}, "this top_p is 0 in float32"


# -- independence of the batch ---------------------------------------------------------------------


@ALL_WAYS
@pytest.mark.parametrize("vocab", [97, 1000, 1024])
def test_a_row_draws_the_same_alone_among_others_and_shuffled(way: None, vocab: int) -> None:
    options = MIXED_OPTIONS * 4
    logits = random_logits(len(options), vocab, seed=10)
    uniforms = np.random.default_rng(0).random(len(options), dtype=np.float32)
    together = draw(logits, options, uniforms=uniforms)
    alone = [
        draw(logits[i : i + 1], [options[i]], uniforms=uniforms[i : i + 1])[0]
        for i in range(len(options))
    ]
    order = np.random.default_rng(1).permutation(len(options))
    shuffled = draw(logits[order], [options[i] for i in order], uniforms=uniforms[order])
    assert together == alone
    assert [together[i] for i in order] == shuffled


def test_weights_are_whole_numbers_whose_sum_has_no_rounding() -> None:
    logits = random_logits(20, 5000, seed=16, scale=8.0)
    temperature = torch.linspace(0, 3, 20)
    weights = sampler._weights(logits, logits.amax(dim=-1), temperature)
    assert not weights.isnan().any(), "not even for temperature 0"
    assert torch.equal(weights, weights.floor())
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(17))
    sums = weights.double().cumsum(dim=-1)[:, -1]
    assert torch.equal(sums, weights[:, order].double().cumsum(dim=-1)[:, -1])
    assert sums.max() < 2**53


def test_the_weights_of_a_row_are_bit_for_bit_those_of_the_row_alone() -> None:
    logits = random_logits(33, 1003, seed=11)
    best, temperature = logits.amax(dim=-1), torch.linspace(0.1, 3, 33)
    together = sampler._weights(logits, best, temperature)
    for i in range(33):
        one = slice(i, i + 1)
        assert torch.equal(
            together[one], sampler._weights(logits[one], best[one], temperature[one])
        )


@ALL_WAYS
def test_flags_set_without_need_change_no_token(way: None) -> None:
    logits = random_logits(8, 300, seed=12)
    plain = make_batch([{"temperature": t} for t in (0.0, 1.0) * 4])
    flagged = SamplingBatch(
        **{
            **{name: getattr(plain, name) for name in SamplingBatch.__slots__},
            "max_top_k": 20,
            "any_top_p": True,
            "any_min_p": True,
        }
    )
    assert torch.equal(sample(logits, plain).token_ids, sample(logits, flagged).token_ids)


# -- bad logits, edges -----------------------------------------------------------------------


@ALL_WAYS
@pytest.mark.parametrize("options", MIXED_OPTIONS, ids=str)
def test_rows_of_bad_logits_are_marked_and_leave_the_others_alone(
    way: None, options: Options
) -> None:
    logits = random_logits(8, 200, seed=13)
    all_options = [options] * 8
    good = draw(logits, all_options)
    logits[1, 17] = torch.nan
    logits[3] = -torch.inf
    logits[4, 100] = torch.inf
    logits[6] = torch.nan
    sampled = sample(logits, make_batch(all_options))
    assert sampled.is_valid.tolist() == [i not in (1, 3, 4, 6) for i in range(8)]
    assert [sampled.token_ids[i] for i in (1, 3, 4, 6)] == [0, 0, 0, 0]
    assert [sampled.token_ids[i] for i in (0, 2, 5, 7)] == [good[i] for i in (0, 2, 5, 7)]


@ALL_WAYS
def test_a_batch_of_only_bad_logits_gives_token_0_everywhere(way: None) -> None:
    logits = torch.full((3, 50), torch.nan)
    sampled = sample(logits, make_batch([{}, {"top_p": 0.5}, {"temperature": 0.0}]))
    assert not sampled.is_valid.any()
    assert sampled.token_ids.tolist() == [0, 0, 0]


@ALL_WAYS
def test_the_callers_logits_are_not_changed(way: None) -> None:
    logits = random_logits(len(MIXED_OPTIONS), 300, seed=14)
    before = logits.clone()
    draw(logits, MIXED_OPTIONS)
    assert torch.equal(logits, before)


@ALL_WAYS
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_no_rows_give_no_tokens(way: None, options: Options) -> None:
    batch = make_batch([options])
    empty = {n: getattr(batch, n) for n in SamplingBatch.__slots__}
    empty = {n: v[:0] if isinstance(v, torch.Tensor) else v for n, v in empty.items()}
    sampled = sample(torch.empty(0, 30), SamplingBatch(**empty))
    assert sampled.token_ids.shape == sampled.is_valid.shape == (0,)
    assert sampled.token_ids.dtype == torch.int64


def test_logits_of_another_type_or_row_count_are_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="float32"):
        sample(torch.zeros(1, 4, dtype=torch.bfloat16), make_batch([{}]))
    with pytest.raises(AssertionError, match="row"):
        sample(torch.zeros(2, 4), make_batch([{}]))


def test_stages_that_no_row_uses_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("this stage is not needed")

    logits = random_logits(4, 100, seed=15)
    for name in ("_draw_row", "_keep_top_k", "_keep_top_p"):
        monkeypatch.setattr(sampler, name, refuse)
    draw(logits, [{"temperature": 1.0}] * 4)
    sampler._draw_batched(logits, *logits.max(dim=-1), make_batch([{"temperature": 1.0}] * 4))
    monkeypatch.setattr(sampler, "_weights", refuse)
    assert draw(logits, [{"temperature": 0.0}] * 4) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("options", [MIXED_OPTIONS, [{"temperature": 0.0}] * 3], ids=["all", "0"])
def test_a_device_is_never_asked_for_a_value(options: list[Options]) -> None:
    # Meta tensors have no values: item(), nonzero() and boolean indexing raise on them.
    batch = make_batch(options, device="meta")
    sampled = sample(torch.empty(len(options), 1000, device="meta"), batch)
    assert isinstance(sampled, SampledTokens)
    assert sampled.token_ids.shape == sampled.is_valid.shape == (len(options),)
    assert (sampled.token_ids.dtype, sampled.is_valid.dtype) == (torch.int64, torch.bool)


# -- stateless uniforms ----------------------------------------------------------------------------


def splitmix64(seed: int) -> Iterator[int]:
    """The published generator, one output after another."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def uniforms_of(seeds: object, positions: object) -> np.ndarray:
    pairs = np.broadcast_arrays(np.asarray(seeds, np.uint64), np.asarray(positions, np.int64))
    return stateless_uniforms(*pairs)


def test_uniforms_are_splitmix64_with_one_stream_a_seed() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert list(islice(splitmix64(1234567), 3)) == published
    for seed in (0, 1, 42, 2**63, 2**64 - 1):
        stream = splitmix64(next(splitmix64(seed)))
        expected = [(value >> 40) / 2**24 for value in islice(stream, 100)]
        assert uniforms_of(seed, np.arange(100)).tolist() == expected


def test_uniforms_are_float32_below_one_and_depend_on_seed_and_position_only() -> None:
    seeds = np.random.default_rng(2).integers(0, 2**64, 1000, dtype=np.uint64)
    positions = np.random.default_rng(3).integers(0, 10**6, 1000)
    uniforms = stateless_uniforms(seeds, positions)
    assert uniforms.dtype == np.float32
    assert (uniforms >= 0).all()
    assert (uniforms < 1).all()
    assert (uniforms * np.float32(2**24) % 1 == 0).all(), "24 bits: the next is 1 - 2**-24"
    alone = [stateless_uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(1000)]
    assert uniforms.tolist() == alone
    assert stateless_uniforms(seeds[:0], positions[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [(7, np.arange(100_000)), (np.arange(100_000), 0), (np.arange(100_000) * 2**40, 3)],
    ids=["positions", "seeds", "high seed bits"],
)
def test_uniforms_are_even_and_uncorrelated_over_neighbours(
    seeds: np.ndarray, positions: np.ndarray
) -> None:
    uniforms = uniforms_of(seeds, positions)
    singles = np.bincount((uniforms * 256).astype(int), minlength=256)
    assert chi_squared_is_plausible(singles, np.full(256, 1 / 256))
    pairs = (uniforms[:-1] * 16).astype(int) * 16 + (uniforms[1:] * 16).astype(int)
    assert chi_squared_is_plausible(np.bincount(pairs, minlength=256), np.full(256, 1 / 256))
    for lag in (1, 2, 3, 64):
        correlation = np.corrcoef(uniforms[:-lag], uniforms[lag:])[0, 1]
        assert abs(correlation) < 5 / math.sqrt(len(uniforms))


def test_streams_of_adjacent_seeds_are_uncorrelated_and_do_not_overlap() -> None:
    streams = uniforms_of(np.arange(64)[:, None], np.arange(2000)[None, :])
    correlations = np.corrcoef(streams)[np.triu_indices(64, 1)]
    assert np.abs(correlations).max() < 5.5 / math.sqrt(2000)
    starts = {tuple(row[:4]) for row in streams}
    windows = {tuple(row[i : i + 4]) for row in streams for i in range(1, 1990)}
    assert len(starts) == 64
    assert not starts & windows
