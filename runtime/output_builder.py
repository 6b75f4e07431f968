"""Finished sequences as what callers get back."""

from __future__ import annotations

from .detokenizer import DetokenizerFactory
from .output_text import OutputText
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
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

    def build(self, prompt: EncodedPrompt, sequence: Sequence) -> RequestOutput:
        """The output of a request as far as it has come."""
        prompt_logprobs = None
        if sequence.prompt_logprobs is not None:
            text_of = self._token_text if sequence.params.detokenize else None
            prompt_logprobs = [None, *sequence.prompt_logprobs.as_dicts(text_of)]
        return RequestOutput(
            request_id=sequence.request_id,
            prompt=prompt.text,
            prompt_token_ids=sequence.token_ids[: sequence.num_prompt_tokens].tolist(),
            outputs=[self._completion(sequence)],
            finished=sequence.is_finished,
            num_cached_tokens=sequence.num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=sequence.arrival_time,
                first_token_time=sequence.first_token_time,
                finish_time=sequence.finish_time,
                num_preemptions=sequence.num_preemptions,
            ),
            prompt_logprobs=prompt_logprobs,
        )

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        token_ids, record = sequence.output_token_ids, sequence.logprobs
        text = self.text(sequence.params)
        piece = text.push(token_ids, is_ended_by_token=sequence.is_ended_by_token)
        text_of = self._token_text if sequence.params.detokenize else None
        return CompletionOutput(
            index=0,
            text=piece + text.finish(),
            token_ids=token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            cumulative_logprob=None if record is None else record.total(),
            logprobs=None if record is None else record.as_dicts(text_of),
            error=None if sequence.error is None else str(sequence.error),
        )

    def _token_text(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text
