"""Ladders, fitting and latency target through the engine: other steps, the same tokens."""

from __future__ import annotations

import pytest

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.sampling_params import SamplingParams


def run(path, **options) -> tuple[list[list[int]], Engine]:
    """Greedy outputs of 12 prompts, the later ones added while the first decode."""
    engine = Engine(
        EngineConfig(
            model=str(path),
            device="cpu",
            dtype="float32",
            max_model_len=256,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            num_kv_blocks=300,
            **options,
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    sequences = []
    for i in range(12):
        sequences.append(engine.add_request([(7 * i + j) % 250 for j in range(9 + 6 * i)], params))
        engine.step()
        engine.check_integrity()
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
    return [s.output_token_ids for s in sequences], engine


@pytest.mark.parametrize(
    "options",
    [
        {"graph_mode": "piecewise", "capture_sizes": "1,2,4,8,16-64:16"},
        {"graph_mode": "full_and_piecewise", "capture_sizes": [8, 64], "bucket_fitting": True},
        {"itl_target_ms": 0.001},
        {
            "graph_mode": "piecewise",
            "capture_sizes": "4,32,64",
            "bucket_fitting": True,
            "itl_target_ms": 4,
        },
    ],
)
def test_the_size_of_steps_does_not_change_what_is_generated(checkpoint, options):
    path = checkpoint("llama")
    expected, _ = run(path)
    outputs, engine = run(path, **options)
    assert outputs == expected
    assert all(len(output) == 12 for output in outputs)
    assert (engine.config.ladders is not None) == ("capture_sizes" in options)


def test_the_cost_of_steps_is_learned_while_the_engine_runs(checkpoint):
    _, engine = run(checkpoint("llama"), itl_target_ms=1000)
    assert engine._step_cost.coefficients is not None
    assert 0 < engine._step_cost.seconds(16, 200, 200) < 10
    _, plain = run(checkpoint("llama"))
    assert plain._step_cost is None


def test_a_target_that_nothing_meets_is_counted(checkpoint):
    _, engine = run(checkpoint("llama"), itl_target_ms=0.001)
    assert engine.scheduler.sizing.num_target_misses > 10
