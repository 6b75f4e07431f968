"""The study of padding and fitting, on the first 200 requests of its trace."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "tests" / "data" / "azure_conversation_head200.csv"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    path = ROOT / "profiling" / "bucket_fitting_study.py"
    spec = importlib.util.spec_from_file_location("bucket_fitting_study", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(study: ModuleType) -> dict[str, object]:
    """Of all policies, the trace at three times its rate."""
    requests = study.read_trace(TRACE, 3.0, 900.0)
    assert len(requests) == 200
    return {name: study.Simulation(p).run(requests) for name, p in study.policies().items()}


def median_ttft(result) -> float:
    return float(np.percentile(result.ttft, 50))


def test_the_trace_is_read_with_its_times_divided_by_the_rate(study):
    requests = study.read_trace(TRACE, 2.0, 2.28)
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in requests] == [
        (374, 44),
        (396, 109),
        (879, 55),
    ]
    assert [r.arrival for r in requests] == pytest.approx([0, 4.314579 / 2, 4.541877 / 2])


def test_every_policy_serves_every_token(study, results):
    requests = study.read_trace(TRACE, 3.0, 900.0)
    for result in results.values():
        assert len(result.ttft) == 200
        assert result.ttft.min() > 0
        assert len(result.gaps) == sum(r.num_output_tokens - 1 for r in requests)
        assert result.gaps.min() > 0


def test_no_step_leaves_the_default_ladders_and_exact_steps_are_not_padded(results):
    assert results["default"].num_off_ladder == 0
    assert results["default+fitting"].num_off_ladder == 0
    assert results["vllm 51"].num_off_ladder > 0
    assert results["exact"].token_padding == 0 == results["exact"].time_padding
    assert results["default"].token_padding > 0


def test_default_ladders_have_at_most_24_sizes_and_stay_within_a_tenth_of_exact_shapes(
    study, results
):
    assert study.policies()["default"].ladders.num_sizes <= 24
    assert median_ttft(results["default"]) <= 1.1 * median_ttft(results["exact"])


def test_fitting_wins_back_most_of_a_coarse_ladders_padded_time(results):
    assert results["geometric+fitting"].num_shortened > 0
    assert results["geometric+fitting"].time_padding < 0.5 * results["geometric"].time_padding
    assert median_ttft(results["geometric+fitting"]) < median_ttft(results["geometric"])


def test_fitting_makes_no_percentile_worse_on_the_default_ladders(study, results):
    fitted, plain = results["default+fitting"], results["default"]
    assert study.worse_percentiles(fitted.ttft, plain.ttft)[0] == 0
    assert study.worse_percentiles(fitted.gaps, plain.gaps)[0] == 0


def test_percentiles_that_grew_are_counted(study):
    plain = np.linspace(0, 1, 101)
    num_worse, by = study.worse_percentiles(np.where(plain > 0.895, plain + 0.5, plain), plain)
    assert (num_worse, by) == (10, pytest.approx(0.5))
