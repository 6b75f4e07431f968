"""The limits and the policy of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Policy = Literal["fcfs", "priority", "prefill_first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits and the policy that a scheduler keeps to."""

    max_num_seqs: int
    """Most sequences that own blocks at one time."""
    max_num_batched_tokens: int
    """Token budget of a step; at least `max_num_seqs`, so that every decode fits."""
    max_model_len: int
    """Most tokens of one sequence, prompt and output together."""
    policy: Policy = "fcfs"
    """"fcfs", "priority", or "prefill_first": the old way without mixing, as a baseline."""
    max_prefill_chunk: int | None = None
    """Most prompt tokens of one sequence in a step; None: what the budget leaves."""
    end_token_ids: tuple[int, ...] = ()
    """Ids that end a sequence unless it ignores them."""
