"""Sequences as what callers get back."""

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
    """Turns ids into text, for the outputs of one model.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizers = DetokenizerFactory(tokenizer)
        self._token_texts: dict[int, str] = {}

    def text(self, params: SamplingParams) -> OutputText:
        """The text of an output that is still to come."""
        return OutputText(self._detokenizers, params)

    def start(
        self, prompt: EncodedPrompt, sequence: Sequence, *, prompt_index: int = 0
    ) -> LiveRequest:
        """The output of a request that was just queued, to be fed while it grows.

        Args:
            prompt: its prompt.
            sequence: the first of its streams.
            prompt_index: the prompt's place in its call.
        """
        return LiveRequest(
            prompt.text,
            sequence.streams,
            [self.text(sequence.params) for _ in sequence.streams],
            token_text=self._token_text if sequence.params.detokenize else None,
            prompt_index=prompt_index,
        )

    def build(
        self, prompt: EncodedPrompt, sequence: Sequence, *, prompt_index: int = 0
    ) -> RequestOutput:
        """The whole output of a finished request."""
        live = self.start(prompt, sequence, prompt_index=prompt_index)
        for stream in sequence.streams:
            live.extend(stream, stream.output_token_ids)
            live.end(stream)
        return live.take()

    def _token_text(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text
