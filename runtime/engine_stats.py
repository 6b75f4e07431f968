"""What an engine did so far, as profiling's tools read it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .metrics import EngineCounters
    from .model_runner import ModelRunner
    from .resolved_config import ResolvedConfig
    from .scheduler import Scheduler

STATS_SCHEMA_VERSION = 1
"""Of what `engine_stats` returns: raised when a key goes or changes its meaning."""


def engine_stats(
    config: ResolvedConfig, runner: ModelRunner, scheduler: Scheduler, counters: EngineCounters
) -> dict[str, Any]:
    """Totals since the start, in JSON's types.

    `ladders` has the sizes of full graphs (decode) and of piecewise ones (mixed), as they are
    now; `buckets` has, by graph mode and size, steps, real and padded tokens, and seconds of
    the steps that were waited for; `step_sizes` has, by kind of step, pairs of a size before
    padding and its steps; `falls` counts the steps that ran eagerly though graphs are on, by
    reason, `dropped` names sizes without a graph, and `captures` has what each one took.
    `num_target_misses` counts steps that could not keep itl_target_ms. `compile` has what
    each compiled region took, and why layers run uncompiled.
    """
    ladders = runner.ladders
    return {
        "schema_version": STATS_SCHEMA_VERSION,
        "graph_mode": config.graph_mode,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "num_kv_blocks": runner.num_kv_blocks,
        "ladders": {
            "decode": list(ladders.decode.sizes) if ladders.decode else [],
            "mixed": list(ladders.mixed.sizes) if ladders.mixed else [],
        },
        "num_preemptions": scheduler.num_preemptions,
        "num_target_misses": scheduler.sizing.num_target_misses,
        **dataclasses.asdict(counters),
        **runner.statistics.as_dict(),
        "dropped": runner.dropped_graphs,
        "compile": runner.compilation,
        "graph_bytes": runner.graph_bytes,
        "estimated_graph_bytes": runner.estimated_graph_bytes,
    }
