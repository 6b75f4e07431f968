"""How large a step gets: its prompt share, where its last chunk ends, and its bucket."""

from __future__ import annotations

from .scheduler_config import SchedulerConfig
from .step_cost import StepCost

UNPADDED = 0
"""`ScheduledBatch.bucket` of a step that runs at its own size."""

_PROMPT_SHARE = 16
"""One in so many tokens of the budget is the least that prompts get at a time..."""
_MAX_HELD_STEPS = 4
"""...at least once in so many steps, whatever the latency target says."""


class BudgetPolicy:
    """Answers the scheduler's three questions about a step's size. Owns no sequence.

    **Prompt share.** Under `itl_target_ms` a step that decodes is at most as large as the largest
    bucket (without ladders: the largest number of tokens) whose predicted time meets the target.
    Where that leaves prompts less than a sixteenth of the budget they get that sixteenth in one
    step of four, so they advance however tight the target is.

    **Bucket fitting.** The last chunk of a mixed step may be shortened so that the step fills a
    smaller captured size. What is left of its prompt then goes first into the next step, and its
    first token comes with that one. It is done only if both steps together are predicted to end
    no later than the padded step alone would, so that no sequence of the step waits longer for
    any token. A shortened chunk keeps at least two tokens, so its prompt gets shorter with every
    step that it is in, and runs at most as many steps as it has tokens.

    **Bucket.** The smallest captured size of the step's kind that holds it.

    Args:
        config: ladders, fitting and target are what counts here.
        step_cost: needed for fitting and target.
    """

    def __init__(self, config: SchedulerConfig, step_cost: StepCost | None = None) -> None:
        self.num_target_misses = 0
        """Steps that no bucket kept within the target, or that prompts were owed a share of."""
        self._budget = config.max_num_batched_tokens
        self._ladders = config.ladders
        self._target: float | None = None
        if config.itl_target_ms is not None:
            self._target = config.itl_target_ms / 1000
        self._fits = config.bucket_fitting and config.ladders is not None
        self._num_held_steps = 0
        self._cost = step_cost
        needs_cost = self._fits or self._target is not None
        assert step_cost is not None or not needs_cost, "fitting and target need a step cost"

    @property
    def has_target(self) -> bool:
        """True if `prompt_tokens` has to be asked."""
        return self._target is not None

    @property
    def fits(self) -> bool:
        """True if `fitted_chunk` has to be asked."""
        return self._fits

    def bucket(self, num_tokens: int, *, is_uniform_decode: bool) -> int:
        """The size that a step is padded to; UNPADDED without ladders and above their top."""
        if self._ladders is None or num_tokens == 0:
            return UNPADDED
        size = self._ladders.lookup(num_tokens, is_uniform_decode=is_uniform_decode)
        return UNPADDED if size is None else size

    def prompt_tokens(self, num_decodes: int, num_kv_tokens: int, *, has_prompts: bool) -> int:
        """Prompt tokens that a step may hold beside its decodes.

        Args:
            num_decodes: decodes of the step.
            num_kv_tokens: their context after the step, and what prompts under way have computed.
            has_prompts: whether any sequence could use them.
        """
        room = self._budget - num_decodes
        if self._target is None or num_decodes == 0:
            return room
        allowed = self._largest_step(num_decodes, num_kv_tokens, self._target) - num_decodes
        is_miss = allowed < 0
        share = min(room, max(2, self._budget // _PROMPT_SHARE))
        if not has_prompts or allowed >= share:
            self._num_held_steps = 0
        else:
            self._num_held_steps += 1
            if self._num_held_steps == _MAX_HELD_STEPS:
                self._num_held_steps = 0
                is_miss, allowed = True, share
        self.num_target_misses += is_miss
        return max(allowed, 0)

    def _largest_step(self, num_decodes: int, num_kv_tokens: int, target: float) -> int:
        """Tokens of the largest step within the target, decodes included; -1 if there is none."""
        if self._seconds(num_decodes, num_kv_tokens, is_uniform_decode=True) > target:
            return -1
        largest = num_decodes
        if self._ladders is not None:
            for size in reversed(self._ladders.mixed.sizes):
                num_new = size - num_decodes
                if num_new <= 0:
                    return largest
                if self._seconds(size, num_kv_tokens + num_new, is_uniform_decode=False) <= target:
                    return size
            return largest
        above = self._budget + 1
        while above - largest > 1:
            middle = (largest + above) // 2
            num_kv = num_kv_tokens + middle - num_decodes
            if self._seconds(middle, num_kv, is_uniform_decode=False) <= target:
                largest = middle
            else:
                above = middle
        return largest

    def fitted_chunk(
        self, num_new: int, *, num_before: int, num_kv_tokens: int, num_next_decodes: int
    ) -> int:
        """How much of the step's last chunk should run; `num_new` itself if all of it.

        Args:
            num_new: tokens of the chunk, which end its prompt.
            num_before: tokens of the step before it.
            num_kv_tokens: context of the whole step, the chunk included.
            num_next_decodes: sequences that decode in the next step besides that of the chunk.
        """
        assert self._ladders is not None, "fitting needs ladders"
        total, mixed = num_before + num_new, self._ladders.mixed
        lower = mixed.floor(total)
        if lower is None or lower == total or lower - num_before < 2:
            return num_new
        rest = total - lower
        padded = self._seconds(total, num_kv_tokens, is_uniform_decode=False)
        shortened = self._seconds(lower, num_kv_tokens - rest, is_uniform_decode=False)
        following = self._seconds(
            num_next_decodes + rest,
            num_kv_tokens + num_next_decodes,
            is_uniform_decode=rest == 1,
        )
        return num_new - rest if shortened + following <= padded else num_new

    def _seconds(self, num_tokens: int, num_kv_tokens: int, *, is_uniform_decode: bool) -> float:
        assert self._cost is not None, "a prediction needs a step cost"
        bucket = self.bucket(num_tokens, is_uniform_decode=is_uniform_decode)
        return self._cost.seconds(bucket or num_tokens, num_kv_tokens)
