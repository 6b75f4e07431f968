"""The offline Python API."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from . import value_checks as checks
from .chat_format import ChatFormat
from .config import EngineConfig
from .engine import Engine
from .engine_access import EngineAccess
from .errors import InvalidRequestError
from .generation_defaults import default_sampling_params
from .interrupts import deferred_interrupts
from .live_request import LiveRequest
from .log import configure_logging
from .outputs import PromptScore, RequestOutput
from .progress import Progress
from .prompts import (
    Conversation,
    EncodedPrompt,
    Prompt,
    check_cache_salt,
    encode_chats,
    encode_prompts,
    list_conversations,
    list_priorities,
    list_sampling_params,
    one_sampling_params,
)
from .sampling_params import RequestOutputKind, SamplingParams
from .sequence import Sequence as TokenSequence
from .step import SequenceUpdates
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger("stepgraph.runtime")


class LLM(EngineAccess):
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
        self._streamed: dict[TokenSequence, LiveRequest] = {}

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
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts, all in one mixed batch.

        Ctrl-C is raised between two steps, after the call's requests were aborted.

        Args:
            prompts: a string, a list of token ids, or a list of either.
            sampling_params: one for all prompts, or one for each; None: `SamplingParams()`.
            use_tqdm: show a progress bar.
            priority: one for all prompts, or one for each; under policy "priority", lower runs
                first; None: 0, the only one under other policies.

        Returns:
            One output per prompt, in the order of the prompts, with `SamplingParams.n` streams. A
            stream whose logits became NaN, or whose own logits processor failed, ends with
            finish_reason "error" and leaves all others alone.

        Raises:
            InvalidRequestError: a prompt can't be served; its place is named, none was queued.
            TypeError: something is of the wrong type.
        """
        encoded = encode_prompts(prompts, self.tokenizer)
        return self._run(encoded, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        **chat_format: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, through a chat template.

        Args:
            messages: one conversation, as a list of {"role": ..., "content": ...}, or a list of
                conversations.
            sampling_params: as in `generate`.
            use_tqdm: show a progress bar.
            priority: as in `generate`.
            cache_salt: only requests with the same one share cached K/V.
            chat_format: fields of `ChatFormat`: chat_template, add_generation_prompt,
                continue_final_message, tools, chat_template_kwargs.

        Returns and raises: as `generate`.
        """
        prompts = encode_chats(
            list_conversations(messages),
            ChatFormat(**chat_format),
            self.tokenizer,
            check_cache_salt(cache_salt),
        )
        return self._run(prompts, sampling_params, use_tqdm, priority)

    def generate_iter(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete the prompts in one mixed batch and give their outputs as they grow.

        All is checked at once; the prompts are queued when the first output is asked for, and a
        step runs only when the next one is. Leaving the iteration early aborts what is left. Other
        calls may come in between: their steps serve this one's requests too.

        Args:
            prompts: as in `generate`.
            sampling_params: as in `generate`; `output_kind` says what each output has.

        Returns:
            Outputs of all prompts in turn, told apart by `prompt_index`; the last of each prompt
            is `finished`.

        Raises:
            As `generate`; an error of one sequence is in its output.
        """
        encoded = encode_prompts(prompts, self.tokenizer)
        params = list_sampling_params(sampling_params, len(encoded))
        return self._stream(encoded, self._check(encoded, params), params)

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
        for output in self._run(encoded, params, use_tqdm, None):
            assert output.prompt_logprobs is not None, "they were asked for"
            ids = output.prompt_token_ids
            pairs = zip(ids, output.prompt_logprobs, strict=True)
            own = [found[id_].logprob for id_, found in pairs if found is not None]
            scores.append(PromptScore(prompt_token_ids=ids, logprobs=own))
        return scores

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **chat_format: Any,
    ) -> Iterator[str]:
        """Answer one conversation piece by piece; the joined pieces are the answer's text.

        Leaving the iteration early aborts the request. `chat_format` is as in `chat`.

        Raises:
            InvalidRequestError: params that ask for what a stream of text doesn't have.
            NonFiniteLogitsError, LogitsProcessorError: the answer can't go on; raised after what
                there was of it.
        """
        params = one_sampling_params(sampling_params)
        offs = {"logprobs": None, "prompt_logprobs": None, "detokenize": True, "n": 1}
        for name, off in offs.items():
            if (value := getattr(params, name)) != off:
                raise InvalidRequestError(
                    f"{name}={value!r} has no place in a stream of text; use chat"
                )
        params = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)
        salt, options = check_cache_salt(cache_salt), ChatFormat(**chat_format)
        prompts = encode_chats([messages], options, self.tokenizer, salt)
        return self._pieces(prompts, self._check(prompts, [params]), params)

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """The model's tokenizer as transformers has it, for callers that format prompts."""
        return self.tokenizer.loaded

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's own files recommend; see `default_sampling_params`."""
        return default_sampling_params(self.engine.config.model_path)

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
        priority: int | Sequence[int] | None,
    ) -> list[RequestOutput]:
        engine, arrival_time = self.engine, time.monotonic()
        use_tqdm = checks.flag("use_tqdm", use_tqdm)
        params = list_sampling_params(sampling_params, len(prompts))
        priorities = list_priorities(priority, len(prompts))
        for value in priorities:
            engine.scheduler.config.check_priority(value)
        checked = self._check(prompts, params)
        sequences: list[TokenSequence] = []
        try:
            with (
                deferred_interrupts() as raise_if_interrupted,
                Progress(sum(p.n for p in params), engine.counters, enabled=use_tqdm) as progress,
            ):
                for index, prompt in enumerate(prompts):
                    sequences.append(
                        engine.add_request(
                            checked[index],
                            params[index],
                            priority=priorities[index],
                            arrival_time=arrival_time,
                            cache_salt=prompt.cache_salt,
                        )
                    )
                mine = {stream for sequence in sequences for stream in sequence.streams}
                num_left = len(mine)
                while num_left:
                    raise_if_interrupted()
                    num_finished = sum(s in mine for s in self._step().finished)
                    num_left -= num_finished
                    progress.update(num_finished)
        finally:
            for sequence in sequences:
                engine.abort(sequence.request_id)  # none is left unless something was raised
        with engine.ranges("detokenize", sum(len(s.token_ids) for s in sequences)):
            return [
                self._outputs.build(*pair, prompt_index=index)
                for index, pair in enumerate(zip(prompts, sequences, strict=True))
            ]

    def _check(
        self, prompts: list[EncodedPrompt], params: list[SamplingParams]
    ) -> list[npt.NDArray[np.int32]]:
        """The prompts' ids; InvalidRequestError names the place of one that can't be served."""
        checked = []
        for index, prompt in enumerate(prompts):
            try:
                checked.append(self.engine.check(prompt.token_ids, params[index]))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {index}: {error}") from None
        return checked

    def _stream(
        self,
        prompts: list[EncodedPrompt],
        checked: list[npt.NDArray[np.int32]],
        params: list[SamplingParams],
        *,
        raises: bool = False,
    ) -> Iterator[RequestOutput]:
        engine, arrival_time = self.engine, time.monotonic()
        sequences: list[TokenSequence] = []
        try:
            for index, prompt in enumerate(prompts):
                sequence = engine.add_request(
                    checked[index],
                    params[index],
                    arrival_time=arrival_time,
                    cache_salt=prompt.cache_salt,
                )
                sequences.append(sequence)
                live = self._outputs.start(prompt, sequence, prompt_index=index)
                self._streamed.update(dict.fromkeys(sequence.streams, live))
            unfinished = [self._streamed[sequence] for sequence in sequences]
            while unfinished:
                for live in unfinished:
                    live.end_finished()
                    if live.has_news:
                        yield live.take()
                    if raises and live.error is not None:
                        raise live.error
                unfinished = [live for live in unfinished if not live.is_ended]
                if unfinished:
                    with deferred_interrupts():
                        self._step()
        finally:
            for sequence in sequences:
                engine.abort(sequence.request_id)
                for stream in sequence.streams:
                    self._streamed.pop(stream, None)

    def _pieces(
        self,
        prompts: list[EncodedPrompt],
        checked: list[npt.NDArray[np.int32]],
        params: SamplingParams,
    ) -> Iterator[str]:
        for output in self._stream(prompts, checked, [params], raises=True):
            yield output.outputs[0].text

    def _step(self) -> SequenceUpdates:
        """One step; what is being streamed learns of it, whoever asked for the step."""
        updates = self.engine.step()
        if self._streamed:
            pairs = zip(updates.sequences, updates.token_ids.tolist(), strict=True)
            for sequence, token_id in pairs:
                if sequence in self._streamed:
                    self._streamed[sequence].append(sequence, token_id)
        return updates
