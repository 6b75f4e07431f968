"""Step times from data sheets and fitted ones."""

from __future__ import annotations

import numpy as np
import pytest
from fitted_step_time import FittedStepTime, fit
from step_time import HARDWARE, MODELS, RooflineStepTime, StepShape

QWEN = MODELS["qwen3-8b"]


def decode(num_seqs: int, context: int, **changes: object) -> StepShape:
    fields = {
        "num_tokens": num_seqs,
        "num_sampled": num_seqs,
        "num_kv_tokens": num_seqs * context,
        "num_pairs": num_seqs * context,
        "is_uniform_decode": True,
        "is_captured": True,
    }
    return StepShape(**{**fields, **changes})


def prefill(num_tokens: int) -> StepShape:
    return StepShape(
        num_tokens=num_tokens,
        num_sampled=1,
        num_kv_tokens=num_tokens,
        num_pairs=num_tokens * (num_tokens + 1) // 2,
        is_captured=True,
    )


def test_shapes_have_the_sizes_that_their_models_are_named_after():
    assert QWEN.weight_bytes == pytest.approx(2 * 8.19e9, rel=0.01)
    assert QWEN.kv_bytes_per_token == 147456
    assert MODELS["llama-3.1-8b"].weight_bytes == pytest.approx(2 * 8.03e9, rel=0.01)
    assert MODELS["qwen3-0.6b"].weight_bytes == pytest.approx(2 * 0.6e9, rel=0.01)
    assert MODELS["smollm2-135m"].weight_bytes == pytest.approx(2 * 0.135e9, rel=0.01)


def test_small_steps_read_the_weights_and_large_ones_compute():
    time = RooflineStepTime(model=QWEN, hardware=HARDWARE["rtx4090"], host_seconds=0.0)
    read = 2 * (QWEN.layer_weights + QWEN.head_weights) / (0.85 * 1008e9)
    assert time.step_seconds(decode(1, 1)) == pytest.approx(read, rel=1e-3)
    assert time.step_seconds(decode(32, 1)) == pytest.approx(read, rel=2e-2)
    computed = 2 * QWEN.layer_weights * 4096 / (0.75 * 165.2e12)
    assert time.step_seconds(prefill(4096)) == pytest.approx(computed, rel=0.25)
    ridge = time.ridge
    ratio = time.step_seconds(prefill(4 * ridge)) / time.step_seconds(prefill(2 * ridge))
    assert ratio == pytest.approx(2, rel=0.1)


def test_context_costs_its_bytes():
    time = RooflineStepTime(model=QWEN, hardware=HARDWARE["h100"])
    more = float(time.step_seconds(decode(64, 2000)) - time.step_seconds(decode(64, 1000)))
    assert more == pytest.approx(64_000 * 147456 / (0.85 * 3.35e12))


def test_eager_steps_take_at_least_their_launches():
    time = RooflineStepTime(model=MODELS["qwen3-0.6b"], hardware=HARDWARE["b200"])
    eager, captured = (time.step_seconds(decode(1, 10, is_captured=c)) for c in (False, True))
    assert eager == pytest.approx(500e-6 + 28 * 14 * 12e-6)
    assert captured < 0.3 * eager


def test_faster_hardware_is_faster():
    steps = [decode(32, 1000), prefill(2048)]
    for slow, fast in (("rtx4090", "a100"), ("a100", "h100"), ("h100", "h200"), ("h200", "b200")):
        times = [RooflineStepTime(model=QWEN, hardware=HARDWARE[name]) for name in (slow, fast)]
        assert all(times[0].step_seconds(s) >= times[1].step_seconds(s) for s in steps)


def test_the_pool_takes_what_the_weights_leave():
    time = RooflineStepTime(model=QWEN, hardware=HARDWARE["rtx4090"])
    num_tokens = 16 * time.num_kv_blocks(16)
    assert num_tokens * 147456 == pytest.approx(
        0.9 * 24 * 2**30 - QWEN.weight_bytes - 1e9, rel=1e-3
    )
    with pytest.raises(ValueError, match="leaves no memory"):
        time.num_kv_blocks(16, utilization=0.5)


def fitted() -> FittedStepTime:
    return FittedStepTime(
        base=2e-3,
        knots=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
        per_token=(0.0, 0.0, 1e-5, 1e-5, 2e-5, 2e-5, 3e-5, 3e-5, 3e-5, 3e-5),
        per_kv_token=2e-8,
        per_pair=3e-9,
    )


def random_shapes(rng: np.random.Generator, count: int) -> list[StepShape]:
    shapes = []
    for _ in range(count):
        num_decodes, chunk = (
            int(rng.integers(0, 32)),
            int(rng.integers(0, 2) * rng.integers(1, 500)),
        )
        num_kv = int(rng.integers(0, 1000) * num_decodes + chunk * rng.integers(1, 4))
        shapes.append(
            StepShape(
                num_tokens=num_decodes + chunk + 1,
                num_sampled=num_decodes + 1,
                num_kv_tokens=num_kv,
                num_pairs=num_kv + chunk * chunk // 2,
            )
        )
    return shapes


def test_fit_finds_the_times_that_steps_took_also_of_steps_not_seen():
    rng = np.random.default_rng(0)
    seen, unseen = random_shapes(rng, 600), random_shapes(rng, 200)
    truth = fitted()
    noise = rng.normal(1, 0.03, len(seen))
    found = fit(seen, noise * np.array([truth.step_seconds(s) for s in seen]))
    errors = [found.step_seconds(s) / truth.step_seconds(s) - 1 for s in unseen]
    assert np.abs(errors).max() < 0.06
    assert min(found.base, found.per_kv_token, found.per_pair, *found.per_token) >= 0


def test_fit_passes_over_steps_that_something_disturbed():
    rng = np.random.default_rng(1)
    seen, unseen = random_shapes(rng, 600), random_shapes(rng, 200)
    truth = fitted()
    seconds = np.array([truth.step_seconds(s) for s in seen])
    seconds[::20] *= 4
    found = fit(seen, seconds)
    errors = [found.step_seconds(s) / truth.step_seconds(s) - 1 for s in unseen]
    assert np.abs(errors).max() < 0.06


def test_fitted_times_survive_a_file(tmp_path):
    path = tmp_path / "times.json"
    fitted().save(path)
    assert FittedStepTime.load(path) == fitted()


@pytest.mark.parametrize(
    "time", [fitted(), RooflineStepTime(model=QWEN, hardware=HARDWARE["a100"])], ids=["fit", "roof"]
)
def test_many_steps_at_once_take_the_same_to_the_last_bit(time):
    contexts = 3 * np.arange(400, 30_000, 7)
    together = time.step_seconds(decode(3, 1, num_kv_tokens=contexts, num_pairs=contexts))
    one_by_one = [
        float(time.step_seconds(decode(3, 1, num_kv_tokens=n, num_pairs=n)))
        for n in contexts.tolist()
    ]
    assert together.tolist() == one_by_one
