"""placeholder until the sampling work is merged: makes outputs of ids."""

from __future__ import annotations

from .detokenizer import DetokenizerFactory
from .live_request import LiveRequest
from .output_text import OutputText
from .outputs import RequestOutput
from .prompts import EncodedPrompt
from .sampling_params import SamplingParams
from .sequence import Sequence
from .tokenizer import Tokenizer


class OutputBuilder:
    """Turns ids into text, for the outputs of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizers = DetokenizerFactory(tokenizer)

    def text(self, params: SamplingParams) -> OutputText:
        """The text of an output that is still to come."""
        return OutputText(self._detokenizers, params)

    def start(
        self, prompt: EncodedPrompt, sequence: Sequence, *, prompt_index: int = 0
    ) -> LiveRequest:
        """The output of a request that has just been queued, to be fed as it grows."""
        return LiveRequest(
            prompt.text, [sequence], [self.text(sequence.params)], prompt_index=prompt_index
        )

    def build(
        self, prompt: EncodedPrompt, sequence: Sequence, *, prompt_index: int = 0
    ) -> RequestOutput:
        """The whole output of a finished request."""
        live = self.start(prompt, sequence, prompt_index=prompt_index)
        live.extend(sequence, sequence.output_token_ids)
        live.end(sequence)
        return live.take()
