"""An engine's metrics for Prometheus, under vLLM's names where they mean the same."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from .metrics import EngineMetrics, Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "stepgraph:"


class HasMetrics(Protocol):
    """An `LLM`, `AsyncLLM` or `Engine`."""

    def metrics(self) -> EngineMetrics:
        """What was done so far."""


class MetricsCollector:
    """Reads the metrics of engines when Prometheus asks, and costs nothing between.

        prometheus_client.REGISTRY.register(MetricsCollector({"smollm2": engine}))

    Each name is vLLM's with the prefix "stepgraph:" for "vllm:": num_requests_running,
    num_requests_waiting, kv_cache_usage_perc (0 to 1, as there), prefix_cache_queries and
    prefix_cache_hits (tokens), num_preemptions, prompt_tokens, generation_tokens, request_success
    by finished_reason, time_to_first_token_seconds, inter_token_latency_seconds and
    e2e_request_latency_seconds. Two differ from vLLM's: prompt_tokens counts recomputed tokens too
    and no cached ones, and request_success counts every reason, "error" among them. Beyond them
    there are engine_steps and engine_failed_steps. Counters get their "_total" from Prometheus.

    Needs prometheus-client (the extra "metrics").

    Args:
        engines: by what becomes the label model_name. They aren't kept alive; one that is gone or
            shut down is left out.
    """

    def __init__(self, engines: Mapping[str, HasMetrics]) -> None:
        self._engines = {name: weakref.ref(engine) for name, engine in engines.items()}

    def collect(self) -> Iterable[Metric]:
        """The metric families with samples of each engine; Prometheus' registry calls it."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        found = self._read()
        for name, help_text, field in _GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            for model, metrics in found.items():
                gauge.add_metric([model], getattr(metrics, field))
            yield gauge
        for name, help_text, field in _COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            for model, metrics in found.items():
                counter.add_metric([model], getattr(metrics, field))
            yield counter
        ends = CounterMetricFamily(
            f"{PREFIX}request_success",
            "Sequences that ended.",
            labels=["model_name", "finished_reason"],
        )
        for model, metrics in found.items():
            for reason, number in metrics.num_finished.items():
                ends.add_metric([model, reason], number)
        yield ends
        for name, help_text, field in _HISTOGRAMS:
            family = HistogramMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            for model, metrics in found.items():
                histogram: Histogram = getattr(metrics, field)
                family.add_metric([model], _cumulative(histogram), histogram.sum)
            yield family

    def _read(self) -> dict[str, EngineMetrics]:
        found = {}
        for name, reference in self._engines.items():
            engine = reference()
            if engine is not None:
                try:
                    found[name] = engine.metrics()
                except RuntimeError:  # it is closed
                    continue
        return found


_GAUGES = (
    ("num_requests_running", "Sequences that own KV blocks.", "num_running"),
    ("num_requests_waiting", "Unfinished sequences that own none.", "num_waiting"),
    ("kv_cache_usage_perc", "Share of the KV blocks in use, 1 is all.", "kv_cache_usage"),
)
_COUNTERS = (
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_cache_hits"),
    ("num_preemptions", "Sequences that lost their blocks.", "num_preemptions"),
    ("prompt_tokens", "Prompt tokens computed.", "num_prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "num_output_tokens"),
    ("engine_steps", "Steps that ran.", "num_steps"),
    ("engine_failed_steps", "Steps that raised.", "num_failed_steps"),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From arrival to the first token.", "time_to_first_token"),
    ("inter_token_latency_seconds", "Between two tokens of a sequence.", "inter_token_latency"),
    ("e2e_request_latency_seconds", "From arrival to the end.", "e2e_latency"),
)


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(histogram.counts)), strict=True))
