"""How large a step gets: its prompt share, where its last chunk ends, and its bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from .scheduler_config import SchedulerConfig
from .step_cost import StepCost, chunk_pairs

if TYPE_CHECKING:
    from graphs.capture_sizes import CaptureSizes

Prompts: TypeAlias = Sequence[tuple[int, int]]
"""Of each how many tokens are computed, and how many are left."""

UNPADDED = 0
"""`ScheduledBatch.bucket` of a step that runs at its own size."""

_PROMPT_SHARE = 16
"""One in so many tokens of the budget is the least that prompts get at a time..."""
_MAX_HELD_STEPS = 4
"""...at least once in so many steps, whatever the latency target says."""


class BudgetPolicy:
    """Answers the scheduler's questions about a step's size. Owns no sequence.

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

    **Bucket.** What the ladders choose for the step, as the graph runner asks them too.

    Args:
        config: ladders, fitting and target are what counts here.
        step_cost: needed for fitting and target.
    """

    def __init__(self, config: SchedulerConfig, step_cost: StepCost | None = None) -> None:
        self.num_target_misses = 0
        """Steps that no bucket kept within the target, or that prompts were owed a share of."""
        self.ladders = config.ladders
        """Sizes that steps are padded to; None: no padding."""
        self._budget = config.max_num_batched_tokens
        self._target: float | None = None
        if config.itl_target_ms is not None:
            self._target = config.itl_target_ms / 1000
        self._fits = config.bucket_fitting
        self._num_held_steps = 0
        self._cost = step_cost
        needs_cost = self._fits or self._target is not None
        assert step_cost is not None or not needs_cost, "fitting and target need a step cost"

    @property
    def has_target(self) -> bool:
        """True if `prompt_tokens` has to be asked."""
        return self._target is not None

    @property
    def _mixed(self) -> CaptureSizes | None:
        return None if self.ladders is None else self.ladders.mixed

    def bucket(self, num_tokens: int, *, is_uniform_decode: bool) -> int:
        """The size that a step is padded to; UNPADDED without ladders and where no size fits."""
        if self.ladders is None or num_tokens == 0:
            return UNPADDED
        size = self.ladders.lookup(num_tokens, is_uniform_decode=is_uniform_decode)
        return UNPADDED if size is None else size

    def prompt_tokens(
        self, num_decodes: int, num_kv_tokens: int, under_way: Prompts = (), *, has_waiting: bool
    ) -> int:
        """Prompt tokens that a step may hold beside its decodes.

        Args:
            num_decodes: decodes of the step.
            num_kv_tokens: their context after the step.
            under_way: prompts that have begun, in their order.
            has_waiting: whether there are others.
        """
        room = self._budget - num_decodes
        if self._target is None or num_decodes == 0:
            return room
        largest = self._largest_step(num_decodes, num_kv_tokens, under_way, self._target)
        allowed = largest - num_decodes
        is_miss = allowed < 0
        share = min(room, max(2, self._budget // _PROMPT_SHARE))
        if not (under_way or has_waiting) or allowed >= share:
            self._num_held_steps = 0
        else:
            self._num_held_steps += 1
            if self._num_held_steps == _MAX_HELD_STEPS:
                self._num_held_steps = 0
                is_miss, allowed = True, share
        self.num_target_misses += is_miss
        return max(allowed, 0)

    def _largest_step(
        self, num_decodes: int, num_kv_tokens: int, under_way: Prompts, target: float
    ) -> int:
        """Tokens of the largest step within the target, decodes included; -1 if there is none."""

        def fits(size: int) -> bool:
            num_rows, num_pairs = _attended(under_way, size - num_decodes)
            seconds = self._seconds(
                *(size, num_kv_tokens + num_rows, num_kv_tokens + num_pairs),
                is_uniform_decode=size == num_decodes,
            )
            return seconds <= target

        if not fits(num_decodes):
            return -1
        if self._mixed is not None:
            larger = (size for size in reversed(self._mixed.sizes) if size > num_decodes)
            return next((size for size in larger if fits(size)), num_decodes)
        largest, above = num_decodes, self._budget + 1
        while above - largest > 1:
            middle = (largest + above) // 2
            if fits(middle):
                largest = middle
            else:
                above = middle
        return largest

    def num_beyond_size(self, num_new: int, *, num_before: int) -> int:
        """How much less of a chunk would fill a smaller size; 0 if there is none, or no fitting.

        Args:
            num_new: tokens of the chunk.
            num_before: tokens of the step before it.
        """
        if self._mixed is None or not self._fits:
            return 0
        size = self._mixed.floor(num_before + num_new)
        return 0 if size is None or size < num_before + 2 else num_before + num_new - size

    def shortening_pays(
        self,
        num_tokens: int,
        num_left: int,
        *,
        num_kv_tokens: int,
        num_pairs: int,
        num_left_pairs: int,
        num_next_decodes: int,
    ) -> bool:
        """Whether leaving the end of a prompt to the next step delays no sequence's token.

        Args:
            num_tokens: tokens of the whole step, which would end the prompt.
            num_left: how many of them the next step would run instead.
            num_kv_tokens: context of the whole step.
            num_pairs: pairs of a query and a key in it.
            num_left_pairs: those of what is left.
            num_next_decodes: sequences that decode in the next step besides.
        """
        padded = self._seconds(num_tokens, num_kv_tokens, num_pairs, is_uniform_decode=False)
        shortened = self._seconds(
            *(num_tokens - num_left, num_kv_tokens - num_left, num_pairs - num_left_pairs),
            is_uniform_decode=False,
        )
        num_next_kv_tokens = num_kv_tokens + num_next_decodes
        following = self._seconds(
            *(num_next_decodes + num_left, num_next_kv_tokens, num_next_kv_tokens + num_left_pairs),
            is_uniform_decode=num_left == 1,
        )
        if self._target is not None and following > self._target:
            return False  # the rest might be held back for some steps
        return shortened + following <= padded

    def _seconds(
        self, num_tokens: int, num_kv_tokens: int, num_pairs: int, *, is_uniform_decode: bool
    ) -> float:
        assert self._cost is not None, "a prediction needs a step cost"
        bucket = self.bucket(num_tokens, is_uniform_decode=is_uniform_decode)
        return self._cost.seconds(bucket or num_tokens, num_kv_tokens, num_pairs)


def _attended(under_way: Prompts, num_new: int) -> tuple[int, int]:
    """K/V rows and pairs of a step's prompt tokens: of prompts under way, then of a new one."""
    num_rows = num_pairs = 0
    for computed, left in (*under_way, (0, num_new)):
        if num_new == 0:
            break
        new = min(left, num_new)
        num_rows += computed + new
        num_pairs += chunk_pairs(computed, new)
        num_new -= new
    return num_rows, num_pairs
