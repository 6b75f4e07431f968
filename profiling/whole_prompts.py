"""The scheduler of small engines that neither mix nor cut: a baseline for simulations."""

from __future__ import annotations

from skipping_scheduler import SkippingScheduler

from runtime.sequence import Sequence
from runtime.step_builder import StepBuilder


class WholePromptScheduler(SkippingScheduler):
    """A step holds whole prompts up to the token budget, or else all decodes; for "prefill_first".

    As nano-vllm does it: the next prompt is admitted as soon as its blocks are free, with none set
    aside for those that decode, and who was preempted for blocks waits for nothing but blocks.
    The engine's own "prefill_first" is kinder: it cuts the last prompt of a step at the budget,
    sets blocks aside, and lets a preempted sequence wait until another one has ended.
    """

    def add(self, sequence: Sequence) -> None:
        """As `Scheduler.add`; the budget must hold the sequence, since it may start again."""
        budget, longest = self.config.max_num_batched_tokens, sequence.max_total_tokens
        assert longest <= budget, f"{longest} tokens are more than a step's budget of {budget}"
        super().add(sequence)

    def _reserved_blocks(self) -> int:
        return 0

    def _preempt_for_blocks(self, sequence: Sequence) -> None:
        self._preempt(sequence)

    def _admit(self, step: StepBuilder) -> None:
        room = step.budget
        while (sequence := self._waiting.peek()) is not None:
            num_tokens = len(sequence.token_ids)
            if num_tokens > room:
                break
            step.budget = num_tokens  # so much room admits this one and none beside it
            super()._admit(step)
            if step.budget:
                break  # there was no row, or too few blocks
            room -= num_tokens
        step.budget = room
