"""What an engine has done so far, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np

from .block_manager import BlockManager
from .outputs import FinishReason
from .scheduler import Scheduler
from .sequence import Sequence
from .step import SequenceUpdates

LATENCY_BOUNDS = tuple(round(step * 10.0**power, 4) for power in range(-4, 3) for step in (1, 2, 5))
"""Upper bounds of the latency histograms, 0.0001 to 500 seconds."""


@dataclass(slots=True)
class EngineCounters:
    """Running totals since the engine was made."""

    num_steps: int = 0
    num_failed_steps: int = 0
    """Steps that raised; not in `num_steps`."""
    num_steps_ahead: int = 0
    """Steps launched while another was in flight."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed, recomputed ones included."""
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How often values fell into each range."""

    bounds: tuple[float, ...]
    """Rising; a value equal to a bound counts below it."""
    counts: tuple[int, ...]
    """[len(bounds) + 1] values up to each bound that are above the one before; the last place has
    those above all bounds."""
    sum: float
    """Of all values."""

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """A snapshot. Totals count from the engine's making; times are in seconds."""

    num_running: int
    """Sequences that own KV blocks now."""
    num_waiting: int
    """Unfinished sequences that own none, preempted ones included."""
    kv_cache_usage: float
    """Share of the KV blocks that sequences own, 0 to 1; cached blocks without owner are free."""
    prefix_cache_queries: int
    """Prompt tokens of sequences that got their first token, where the prefix cache serves them."""
    prefix_cache_hits: int
    """How many of those it had."""
    num_preemptions: int
    """How often a sequence lost its blocks and went back to the queue."""
    num_steps: int
    """Steps that ran."""
    num_failed_steps: int
    """Steps that raised."""
    num_prompt_tokens: int
    """Prompt tokens computed, recomputed ones included."""
    num_output_tokens: int
    """Tokens generated."""
    num_finished: Mapping[FinishReason, int]
    """Sequences that ended, by reason."""
    time_to_first_token: Histogram
    """From arrival to the first token, per sequence that got one."""
    inter_token_latency: Histogram
    """Each gap between two tokens of one sequence."""
    e2e_latency: Histogram
    """From arrival to the end, per sequence that ended, whatever the reason."""


class LatencyBins:
    """A histogram that grows."""

    _BOUNDS = np.array(LATENCY_BOUNDS)

    def __init__(self) -> None:
        self._counts = np.zeros(len(LATENCY_BOUNDS) + 1, dtype=np.int64)
        self._sum = 0.0

    def add(self, values: np.ndarray | list[float]) -> None:
        """Take in any number of times, in seconds."""
        seconds = np.asarray(values, dtype=np.float64)
        places = np.searchsorted(self._BOUNDS, seconds)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(seconds.sum())

    def snapshot(self) -> Histogram:
        """What it is now."""
        return Histogram(bounds=LATENCY_BOUNDS, counts=tuple(self._counts.tolist()), sum=self._sum)


class MetricsRecorder:
    """Keeps what is known only while it happens. A step costs a few numpy calls, not Python per
    token."""

    def __init__(self) -> None:
        self.num_tokens_looked_up = 0
        self.num_cached_tokens = 0
        self.time_to_first_token = LatencyBins()
        self.inter_token_latency = LatencyBins()
        self.e2e_latency = LatencyBins()
        self.num_finished: dict[FinishReason, int] = dict.fromkeys(get_args(FinishReason), 0)

    def observe(self, updates: SequenceUpdates) -> None:
        """Take in a step's tokens and endings."""
        is_first = np.isnan(updates.gaps)
        self.inter_token_latency.add(updates.gaps[~is_first])
        if is_first.any():
            self._observe_firsts([updates.sequences[i] for i in np.flatnonzero(is_first).tolist()])
        for sequence in updates.finished:
            self.observe_end(sequence)

    def _observe_firsts(self, sequences: list[Sequence]) -> None:
        times = [(s.first_token_time, s.arrival_time) for s in sequences]
        self.time_to_first_token.add([end - start for end, start in times if end is not None])
        for sequence in sequences:
            # One with prompt_logprobs looks nothing up, and siblings share what the first one has.
            if sequence.prompt_logprobs is None and sequence.index == 0:
                self.num_tokens_looked_up += sequence.num_prompt_tokens
                self.num_cached_tokens += sequence.num_cached_tokens

    def observe_end(self, sequence: Sequence) -> None:
        """Take in one sequence that has ended."""
        reason, finish_time = sequence.finish_reason, sequence.finish_time
        assert reason is not None and finish_time is not None, f"{sequence.request_id} goes on"
        self.num_finished[reason] += 1
        self.e2e_latency.add([finish_time - sequence.arrival_time])

    def snapshot(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        counters: EngineCounters,
        *,
        num_unfinished: int,
    ) -> EngineMetrics:
        """These latencies with what else there is to tell."""
        num_running, num_blocks = scheduler.num_running, blocks.num_usable_blocks
        return EngineMetrics(
            num_running=num_running,
            num_waiting=max(num_unfinished - num_running, 0),
            kv_cache_usage=(num_blocks - blocks.num_free_blocks) / num_blocks,
            prefix_cache_queries=self.num_tokens_looked_up * blocks.enable_prefix_caching,
            prefix_cache_hits=self.num_cached_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=counters.num_steps,
            num_failed_steps=counters.num_failed_steps,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_output_tokens=counters.num_output_tokens,
            num_finished=dict(self.num_finished),
            time_to_first_token=self.time_to_first_token.snapshot(),
            inter_token_latency=self.inter_token_latency.snapshot(),
            e2e_latency=self.e2e_latency.snapshot(),
        )
