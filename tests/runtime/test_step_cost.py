"""Predicted step times: the roofline, the fit, and when the one gives way to the other."""

from __future__ import annotations

import random

import pytest

from runtime.step_cost import MeasuredCost, RooflineCost, chunk_pairs

ROOFLINE = RooflineCost(
    flops_per_token=2.0,
    weight_bytes=300.0,
    kv_bytes_per_token=3.0,
    flop_rate=4.0,
    bandwidth=6.0,
    flops_per_pair=0.5,
    overhead=1.0,
)


class Constant:
    """A cost that no measurement would give."""

    def seconds(self, num_tokens: int, num_kv_tokens: int, num_pairs: int) -> float:
        return 777.0


def linear(num_tokens: int, num_kv_tokens: int, num_pairs: int) -> float:
    return 0.004 + 2e-5 * num_tokens + 3e-8 * num_kv_tokens + 1e-9 * num_pairs


def steps(count: int, *, seed: int = 0) -> list[tuple[int, int, int]]:
    rng = random.Random(seed)
    return [
        (rng.randint(1, 2000), rng.randint(1, 200_000), rng.randint(1, 2_000_000))
        for _ in range(count)
    ]


def test_a_roofline_is_flat_while_reading_weights_takes_longer():
    assert ROOFLINE.ridge == 100
    assert ROOFLINE.seconds(1, 0, 0) == ROOFLINE.seconds(100, 0, 0) == 51.0
    assert ROOFLINE.seconds(200, 0, 0) == 101.0
    assert ROOFLINE.seconds(200, 100, 0) == 101.0, "reading the context hides behind computing"
    assert ROOFLINE.seconds(1, 100, 0) == 101.0
    assert ROOFLINE.seconds(200, 0, 800) == 201.0, "pairs are computed too"


def test_pairs_of_a_chunk_are_those_of_each_token_with_all_up_to_itself():
    assert chunk_pairs(0, 1) == 1
    assert chunk_pairs(7, 1) == 8
    assert chunk_pairs(5, 3) == 6 + 7 + 8
    assert chunk_pairs(5, 0) == 0


def test_the_fallback_predicts_until_enough_steps_were_seen():
    cost = MeasuredCost(Constant())
    for step in steps(15):
        cost.observe(*step, linear(*step))
    assert cost.coefficients is None
    assert cost.seconds(123, 456, 789) == 777.0
    cost.observe(50, 1000, 9000, linear(50, 1000, 9000))
    assert cost.seconds(123, 456, 789) == pytest.approx(linear(123, 456, 789), rel=1e-6)


def test_the_fit_finds_the_coefficients_through_noise():
    rng = random.Random(1)
    cost = MeasuredCost(Constant())
    for step in steps(400):
        cost.observe(*step, linear(*step) * rng.uniform(0.9, 1.1))
    for step in steps(20, seed=2):
        assert cost.seconds(*step) == pytest.approx(linear(*step), rel=0.1)


def test_equal_steps_alone_do_not_make_a_fit():
    cost = MeasuredCost(Constant())
    for _ in range(100):
        cost.observe(8, 800, 800, 0.005)
    assert cost.coefficients is None
    assert cost.seconds(2000, 0, 0) == 777.0


@pytest.mark.parametrize("kv", [0, 5000])
def test_what_never_varies_is_left_out_of_the_fit(kv):
    cost = MeasuredCost(Constant())
    for tokens, _, _ in steps(50):
        cost.observe(tokens, kv, kv, 0.004 + 2e-5 * tokens)
    expected = pytest.approx(0.004 + 2e-5 * 1234, rel=1e-6)
    assert cost.seconds(1234, kv, kv) == expected


def test_decodes_alone_whose_pairs_are_their_context_make_a_fit():
    cost = MeasuredCost(Constant())
    for tokens, kv, _ in steps(50):
        cost.observe(tokens, kv, kv, linear(tokens, kv, 0))
    assert cost.seconds(60, 9000, 9000) == pytest.approx(linear(60, 9000, 0), rel=1e-6)


def test_a_prediction_never_falls_with_anything():
    cost = MeasuredCost(Constant())
    for tokens, kv, pairs in steps(200):
        cost.observe(tokens, kv, pairs, 0.1 - 2e-5 * tokens + 1e-9 * kv - 1e-10 * pairs)
    _, per_token, per_kv_token, per_pair = cost.coefficients
    assert per_token == per_pair == 0
    assert per_kv_token >= 0


def test_a_size_that_ran_often_is_predicted_by_its_own_mean():
    cost = MeasuredCost(Constant())
    for step in steps(100):
        cost.observe(*step, linear(*step))
    size = (5000, 1000, 20_000)
    for _ in range(3):
        cost.observe(*size, 2 * linear(*size))
    before = cost.seconds(*size)
    cost.observe(*size, 2 * linear(*size))
    assert before < 1.9 * linear(*size)
    assert cost.seconds(*size) == pytest.approx(2 * linear(*size))
    more = cost.seconds(5000, 101_000, 50_000) - cost.seconds(*size)
    _, _, per_kv_token, per_pair = cost.coefficients
    assert more == pytest.approx(100_000 * per_kv_token + 30_000 * per_pair)


def test_a_step_that_stalls_hardly_moves_the_fit_and_a_slower_device_does():
    cost = MeasuredCost(Constant())
    for step in steps(200):
        cost.observe(*step, linear(*step))
    cost.observe(64, 1000, 5000, 60.0)
    known = (900, 50_000, 900_000)
    assert cost.seconds(*known) == pytest.approx(linear(*known), rel=0.05)
    for step in steps(1500, seed=3):
        cost.observe(*step, 3 * linear(*step))
    assert cost.seconds(*known) == pytest.approx(3 * linear(*known), rel=0.05)
