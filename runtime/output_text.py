"""placeholder until the sampling work is merged: the text of one output."""

from __future__ import annotations

from collections.abc import Sequence

from .detokenizer import DetokenizerFactory
from .sampling_params import SamplingParams


class OutputText:
    """Joined, its pieces are the output's text."""

    def __init__(self, detokenizers: DetokenizerFactory, params: SamplingParams) -> None:
        self._detokenizer = detokenizers.create(skip_special_tokens=params.skip_special_tokens)

    def push(self, token_ids: Sequence[int], *, is_ended_by_token: bool = False) -> str:
        """Take in the next ids; returns the text that became final, often none."""
        return self._detokenizer.push(token_ids)

    def finish(self) -> str:
        """The withheld rest. Call it once, last."""
        return self._detokenizer.finish()
