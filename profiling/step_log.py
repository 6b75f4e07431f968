"""What each step of a run held, for plots and traces."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """A step, or several like it that follow one another."""

    start: float
    """Seconds."""
    end: float
    num_steps: int = 1
    num_decodes: int
    """Of each step, as all numbers below."""
    num_prompt_tokens: int
    bucket: int
    """Tokens that the step was padded to; 0: not padded."""
    num_waiting: int
    """After the step, as the numbers below."""
    num_running: int
    num_free_blocks: int

    @property
    def num_padding(self) -> int:
        """Tokens that padding added to each step."""
        num_tokens = self.num_decodes + self.num_prompt_tokens
        return self.bucket - num_tokens if self.bucket else 0

    def as_dict(self) -> dict[str, float | int]:
        """In JSON's types."""
        return dataclasses.asdict(self)


StepLog = list[LoggedStep]
"""In order of time."""
