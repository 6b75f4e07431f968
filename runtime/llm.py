"""The offline Python API."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .config import EngineConfig
from .engine import Engine
from .errors import InvalidRequestError
from .interrupts import deferred_interrupts
from .log import configure_logging
from .outputs import PromptScore, RequestOutput
from .progress import Progress
from .prompts import (
    Conversation,
    EncodedPrompt,
    Prompt,
    encode_prompts,
    list_conversations,
    list_sampling_params,
)
from .sampling_params import SamplingParams
from .sequence import Sequence as TokenSequence
from .tokenizer import load_tokenizer

logger = logging.getLogger("stepgraph.runtime")


class LLM:
    """A model ready to generate.

        with LLM("smollm2-135m-instruct") as llm:
            outputs = llm.generate(["The sky is"], SamplingParams(temperature=0))

    One thread may use it at a time. Several can live in one process.

    Args:
        model: a local Hugging Face directory, a hub id, a .gguf file, or
            "smollm2-135m-instruct", the small model that is fetched on first use.
        config: fields of `EngineConfig`.

    Raises:
        TypeError: an option that doesn't exist.
        ConfigError: an option's value isn't allowed.
        ModelLoadError: the model can't be found or read.
    """

    def __init__(self, model: str | Path, **config: Any) -> None:
        self._engine: Engine | None = None
        configure_logging()
        options = EngineConfig(model=str(model), **config)
        options = dataclasses.replace(options, model=str(options.resolve_model()))
        self.tokenizer = load_tokenizer(options.resolve_tokenizer())
        self._engine = Engine(options, tokenizer=self.tokenizer)
        assert self._engine.outputs is not None, "the engine has a tokenizer"
        self._outputs = self._engine.outputs

    @property
    def engine(self) -> Engine:
        """The engine underneath; RuntimeError once closed."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed; make a new one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete the prompts, all in one mixed batch.

        Ctrl-C is raised between two steps, after the call's requests were aborted.

        Args:
            prompts: a string, a list of token ids, or a list of either.
            sampling_params: one for all prompts, or one for each; None: `SamplingParams()`.
            use_tqdm: show a progress bar.

        Returns:
            One output per prompt, in the order of the prompts. A sequence whose logits became
            NaN, or whose own logits processor failed, ends with finish_reason "error" and leaves
            the others alone.

        Raises:
            InvalidRequestError: a prompt can't be served; its place is named, none was queued.
            TypeError: something is of the wrong type.
        """
        return self._run(encode_prompts(prompts, self.tokenizer), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations, through the model's chat template.

        Args:
            messages: one conversation, as a list of {"role": ..., "content": ...}, or a list of
                conversations.
            sampling_params: as in `generate`.
            use_tqdm: show a progress bar.
            add_generation_prompt: open the assistant's turn after the last message.

        Returns and raises: as `generate`.
        """
        prompts = [
            EncodedPrompt(
                None,
                self.tokenizer.apply_chat_template(
                    conversation, add_generation_prompt=add_generation_prompt
                ),
            )
            for conversation in list_conversations(messages)
        ]
        return self._run(prompts, sampling_params, use_tqdm)

    def score(self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True) -> list[PromptScore]:
        """How likely the model finds the prompts, without generating from them.

        Each runs with `prompt_logprobs` and the one output token that a request has at least.

        Args:
            prompts: as in `generate`; each needs at least two tokens.
            use_tqdm: show a progress bar.

        Returns and raises: one score per prompt; as `generate`.
        """
        encoded = encode_prompts(prompts, self.tokenizer)
        for index, prompt in enumerate(encoded):
            if len(prompt.token_ids) == 1:
                raise InvalidRequestError(
                    f"prompt {index}: nothing predicts the only token; give at least two"
                )
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        scores = []
        for output in self._run(encoded, params, use_tqdm):
            assert output.prompt_logprobs is not None, "they were asked for"
            ids = output.prompt_token_ids
            pairs = zip(ids, output.prompt_logprobs, strict=True)
            own = [found[id_].logprob for id_, found in pairs if found is not None]
            scores.append(PromptScore(prompt_token_ids=ids, logprobs=own))
        return scores

    def stream_chat(
        self, messages: Conversation, sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Answer one conversation piece by piece; the joined pieces are the answer's text.

        Leaving the iteration early aborts the request.

        Raises:
            InvalidRequestError: params that ask for what a stream of text doesn't have.
        """
        engine, (params,) = self.engine, list_sampling_params(sampling_params, 1)
        for name, off in (("logprobs", None), ("prompt_logprobs", None), ("detokenize", True)):
            if (value := getattr(params, name)) != off:
                raise InvalidRequestError(
                    f"{name}={value!r} has no place in a stream of text; use chat"
                )
        prompt = self.tokenizer.apply_chat_template(messages)
        text = self._outputs.text(params)
        sequence = engine.add_request(prompt, params)
        try:
            while not sequence.is_finished:
                with deferred_interrupts():
                    updates = engine.step()
                for updated, token_id in zip(updates.sequences, updates.token_ids, strict=True):
                    if updated is sequence:
                        is_ended = sequence.is_ended_by_token
                        yield text.push([int(token_id)], is_ended_by_token=is_ended)
            if sequence.error is not None:
                raise sequence.error
            yield text.finish()
        finally:
            engine.abort(sequence.request_id)

    def stats(self) -> dict[str, Any]:
        """How the steps so far were launched, in JSON's types; see `Engine.stats`."""
        return self.engine.stats()

    def close(self) -> None:
        """Give back the weights' and the KV pool's memory. Closing twice is fine."""
        if self._engine is None:
            return
        logger.info("steps:\n%s", self._engine.stats_table())
        on_cuda = self._engine.config.device.type == "cuda"
        self._engine = None
        gc.collect()
        if on_cuda:
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        engine, arrival_time = self.engine, time.monotonic()
        params = list_sampling_params(sampling_params, len(prompts))
        checked = []
        for index, prompt in enumerate(prompts):
            try:
                checked.append(engine.check(prompt.token_ids, params[index]))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {index}: {error}") from None
        sequences: list[TokenSequence] = []
        try:
            with (
                deferred_interrupts() as raise_if_interrupted,
                Progress(len(prompts), engine.counters, enabled=use_tqdm) as progress,
            ):
                for token_ids, own_params in zip(checked, params, strict=True):
                    sequences.append(
                        engine.add_request(token_ids, own_params, arrival_time=arrival_time)
                    )
                num_left, mine = len(sequences), set(map(id, sequences))
                while num_left:
                    raise_if_interrupted()
                    num_finished = sum(id(s) in mine for s in engine.step().finished)
                    num_left -= num_finished
                    progress.update(num_finished)
        finally:
            for sequence in sequences:
                engine.abort(sequence.request_id)  # none is left unless something was raised
        with engine.ranges("detokenize", sum(len(s.token_ids) for s in sequences)):
            return [self._outputs.build(*pair) for pair in zip(prompts, sequences, strict=True)]
