"""Predicted step times: the roofline, the fit, and when the one gives way to the other."""

from __future__ import annotations

import random

import pytest

from runtime.step_cost import MeasuredCost, RooflineCost

ROOFLINE = RooflineCost(
    flops_per_token=2.0,
    weight_bytes=300.0,
    kv_bytes_per_token=3.0,
    flop_rate=4.0,
    bandwidth=6.0,
    overhead=1.0,
)


class Constant:
    """A cost that no measurement would give."""

    def seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        return 777.0


def linear(num_tokens: int, num_kv_tokens: int) -> float:
    return 0.004 + 2e-5 * num_tokens + 3e-8 * num_kv_tokens


def steps(count: int, *, seed: int = 0) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(rng.randint(1, 2000), rng.randint(1, 200_000)) for _ in range(count)]


def test_a_roofline_is_flat_while_reading_weights_takes_longer():
    assert ROOFLINE.ridge == 100
    assert ROOFLINE.seconds(1, 0) == ROOFLINE.seconds(100, 0) == 51.0
    assert ROOFLINE.seconds(200, 0) == 101.0
    assert ROOFLINE.seconds(200, 100) == 101.0, "reading the context hides behind computing"
    assert ROOFLINE.seconds(1, 100) == 101.0


def test_the_fallback_predicts_until_enough_steps_were_seen():
    cost = MeasuredCost(Constant())
    for tokens, kv in steps(15):
        cost.observe(tokens, kv, linear(tokens, kv))
    assert cost.coefficients is None
    assert cost.seconds(123, 456) == 777.0
    cost.observe(50, 1000, linear(50, 1000))
    assert cost.seconds(123, 456) == pytest.approx(linear(123, 456), rel=1e-6)


def test_the_fit_finds_the_coefficients_through_noise():
    rng = random.Random(1)
    cost = MeasuredCost(Constant())
    for tokens, kv in steps(400):
        cost.observe(tokens, kv, linear(tokens, kv) * rng.uniform(0.9, 1.1))
    for tokens, kv in steps(20, seed=2):
        assert cost.seconds(tokens, kv) == pytest.approx(linear(tokens, kv), rel=0.1)


def test_equal_steps_alone_do_not_make_a_fit():
    cost = MeasuredCost(Constant())
    for _ in range(100):
        cost.observe(8, 800, 0.005)
    assert cost.coefficients is None
    assert cost.seconds(2000, 0) == 777.0


def test_context_that_never_varies_is_left_out_of_the_fit():
    cost = MeasuredCost(Constant())
    for tokens, _ in steps(50):
        cost.observe(tokens, 0, 0.004 + 2e-5 * tokens)
    assert cost.seconds(1234, 0) == pytest.approx(0.004 + 2e-5 * 1234, rel=1e-6)


def test_a_prediction_never_falls_with_tokens_or_context():
    cost = MeasuredCost(Constant())
    for tokens, kv in steps(200):
        cost.observe(tokens, kv, 0.1 - 2e-5 * tokens + 1e-9 * kv)
    _, per_token, per_kv_token = cost.coefficients
    assert per_token == 0
    assert per_kv_token >= 0


def test_a_size_that_ran_often_is_predicted_by_its_own_mean():
    cost = MeasuredCost(Constant())
    for tokens, kv in steps(100):
        cost.observe(tokens, kv, linear(tokens, kv))
    for _ in range(3):
        cost.observe(5000, 1000, 2 * linear(5000, 1000))
    before = cost.seconds(5000, 1000)
    cost.observe(5000, 1000, 2 * linear(5000, 1000))
    assert before < 1.9 * linear(5000, 1000)
    assert cost.seconds(5000, 1000) == pytest.approx(2 * linear(5000, 1000))
    more = cost.seconds(5000, 101_000) - cost.seconds(5000, 1000)
    assert more == pytest.approx(100_000 * cost.coefficients[2])


def test_a_step_that_stalls_hardly_moves_the_fit_and_a_slower_device_does():
    cost = MeasuredCost(Constant())
    for tokens, kv in steps(200):
        cost.observe(tokens, kv, linear(tokens, kv))
    cost.observe(64, 1000, 60.0)
    assert cost.seconds(900, 50_000) == pytest.approx(linear(900, 50_000), rel=0.05)
    for tokens, kv in steps(1500, seed=3):
        cost.observe(tokens, kv, 3 * linear(tokens, kv))
    assert cost.seconds(900, 50_000) == pytest.approx(3 * linear(900, 50_000), rel=0.05)
