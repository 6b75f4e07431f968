"""The limits and the policy of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .errors import InvalidRequestError

if TYPE_CHECKING:
    from graphs.capture_sizes import CaptureLadders

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
    ladders: CaptureLadders | None = None
    """Captured sizes that steps are padded to; None: no padding."""
    bucket_fitting: bool = False
    """Shorten the last chunk of a mixed step to a captured size where that saves time."""
    itl_target_ms: float | None = None
    """Longest step that decodes should see, in milliseconds; None: the token budget alone."""

    def check_priority(self, priority: int) -> None:
        """Raise InvalidRequestError if the policy has no use for it."""
        if priority and self.policy != "priority":
            raise InvalidRequestError(
                f"priority={priority} has no effect under policy={self.policy!r}; make the engine "
                f"with policy='priority'"
            )

    def check_prompt(self, num_prompt_tokens: int, num_blocks: int, block_size: int) -> None:
        """Raise InvalidRequestError if a prompt of that length could never be served.

        Args:
            num_blocks: blocks that sequences can own.
            block_size: tokens of a block.
        """
        if num_prompt_tokens < 1:
            raise InvalidRequestError("the prompt has no tokens; give at least one")
        if num_prompt_tokens < min(self.max_model_len, num_blocks * block_size):
            return
        if num_prompt_tokens >= self.max_model_len:
            limit = f"max_model_len={self.max_model_len} tokens"
            remedy = "shorten the prompt or raise max_model_len"
        else:
            pool = num_blocks * block_size
            limit = f"the KV pool's {pool} tokens ({num_blocks} blocks of {block_size})"
            remedy = "shorten the prompt or give the KV pool more memory"
        raise InvalidRequestError(
            f"a prompt of {num_prompt_tokens} tokens leaves no room for output within {limit}; "
            f"{remedy}"
        )
