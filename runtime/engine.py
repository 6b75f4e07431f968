"""The engine: requests in, one step at a time, tokens out."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .block_manager import BlockManager
from .config import EngineConfig
from .cpu_threads import limit_threads
from .device_rates import device_rates
from .engine_stats import engine_stats
from .errors import EngineStateError, InvalidRequestError
from .grammar import GrammarCompiler
from .logits_rules import LogitsRules, check_vocabulary, make_logits_rules
from .logprobs import LogprobsRecord, new_record
from .metrics import EngineCounters, EngineMetrics, MetricsRecorder
from .model_runner import ModelRunner
from .models import load_decoder_config, stored_dtype
from .output_builder import OutputBuilder
from .output_text import OutputText
from .outputs import FinishReason
from .pipeline import StepPipeline
from .prompts import TokenIds, check_request, one_sampling_params
from .ranges import Ranges
from .residency import ResidencyManager
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .scheduler_config import SchedulerConfig
from .sequence import Sequence
from .siblings import make_streams
from .step import ScheduledBatch, SequenceUpdates, StepFailure, StepOutput
from .step_cost import MeasuredCost, estimated_cost
from .tokenizer import Tokenizer, load_end_token_ids

logger = logging.getLogger("stepgraph.runtime")


class Engine:
    """Serves token ids; text is the business of `LLM`, but for what has to be watched in each step.

    Args:
        config: the options.
        tokenizer: its end token ends sequences too, beside those that the model's files name.
            Requests with `stop`, `bad_words` or `structured_outputs` need it.

    Raises:
        ConfigError: options that don't go together or don't suit the model.
        ModelLoadError: the model can't be read.
    """

    def __init__(self, config: EngineConfig, *, tokenizer: Tokenizer | None = None) -> None:
        path = config.resolve_model()
        decoder = load_decoder_config(path)
        stored = stored_dtype(path) if config.load_format == "auto" else None
        self.config = config.resolve(decoder, path, stored)
        logger.info("configuration:\n%s", self.config.describe())
        if self.config.device.type == "cpu":
            limit_threads()
        self.vocab_size = decoder.vocab_size
        self.end_token_ids = load_end_token_ids(path, tokenizer)
        self._tokenizer = tokenizer
        self.outputs = None if tokenizer is None else OutputBuilder(tokenizer)
        """Makes text of ids; None without a tokenizer."""
        self.grammars = GrammarCompiler(tokenizer, self.vocab_size, self.end_token_ids)
        """Compiles what `structured_outputs` ask for."""
        self.counters = EngineCounters()
        self._recorder = MetricsRecorder()
        self.on_step: Callable[[ScheduledBatch], None] | None = None
        """Called with each batch once its tokens are in: for who measures steps."""
        self.ranges = Ranges(enabled=self.config.nvtx)
        self._runner = ModelRunner(self.config, decoder, self.ranges)
        self._blocks = BlockManager(
            self._runner.num_kv_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )
        self._residency = ResidencyManager(self._runner, self._blocks, self.config.cache_dir)
        self._step_cost: MeasuredCost | None = None
        if self.config.bucket_fitting or self.config.itl_target_ms is not None:
            self._step_cost = MeasuredCost(
                estimated_cost(
                    decoder,
                    bytes_per_value=self.config.dtype.itemsize,
                    rates=device_rates(self.config.device),
                )
            )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=self.config.max_num_seqs,
                max_num_batched_tokens=self.config.max_num_batched_tokens,
                max_model_len=self.config.max_model_len,
                policy=self.config.policy,
                max_prefill_chunk=self.config.max_prefill_chunk,
                end_token_ids=self.end_token_ids,
                ladders=self._runner.ladders,
                bucket_fitting=self.config.bucket_fitting,
                itl_target_ms=self.config.itl_target_ms,
            ),
            self._blocks,
            step_cost=self._step_cost,
        )
        self._pipeline = StepPipeline(
            self.scheduler, self._runner, self.ranges, self.counters, self._step_cost
        )
        self.runs_ahead = True
        """False: under overlap_scheduling too no step is launched while another is in flight."""
        self._sequences: dict[str, Sequence] = {}  # the first of each unfinished request
        self._num_unfinished = 0  # sequences
        self._watched_texts: dict[Sequence, OutputText] = {}  # of requests with stop strings
        self._last_rules: tuple[SamplingParams, LogitsRules | None] | None = None
        self._num_requests = self._num_arrivals = 0  # the second counts sequences
        self._seeds = random.Random(self.config.seed)

    @property
    def has_unfinished(self) -> bool:
        """True while `step` has something to do."""
        return self.scheduler.has_unfinished

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no sequence owns."""
        return self._blocks.num_free_blocks

    def check(self, token_ids: TokenIds, params: SamplingParams) -> np.ndarray:
        """The prompt as [n] int32, truncated as `params` ask for.

        Raises:
            InvalidRequestError: it can't be served, or not with these params.
            EngineStateError: nothing can be served now.
            TypeError: `params` are none.
        """
        self._residency.check_ready()
        params = one_sampling_params(params)
        given = np.asarray(token_ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise InvalidRequestError(
                f"the prompt {token_ids!r:.80} is not a flat list of whole numbers of 64 bits"
            )
        ids = given.astype(np.int64)
        if params.truncate_prompt_tokens is not None:
            num_last = params.truncate_prompt_tokens
            ids = ids[-(self.scheduler.max_sequence_tokens - 1 if num_last == -1 else num_last) :]
        self.scheduler.check(len(ids))
        check_vocabulary("the prompt's token id", ids, self.vocab_size)
        self._rules_of(params)
        self._new_record("logprobs", params.logprobs)
        self._new_record("prompt_logprobs", params.prompt_logprobs)
        if params.stop and self.outputs is None:
            raise InvalidRequestError(
                f"stop={params.stop!r:.80} needs a tokenizer, and this engine has none; give "
                "stop_token_ids instead"
            )
        return ids.astype(np.int32)

    def add_request(
        self,
        token_ids: TokenIds,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
    ) -> Sequence:
        """Queue a request; it starts with one of the next steps.

        Args:
            token_ids: the prompt, ids below `vocab_size`.
            params: how to sample, and when to stop.
            request_id: a name of the caller's; None: a number is given.
            priority: under policy "priority", lower runs first; 0 under others.
            arrival_time: seconds of time.monotonic(); None: now.
            cache_salt: only requests with the same one share cached blocks.

        Returns:
            The request's first sequence, whose `streams` are all `params.n`.

        Raises:
            InvalidRequestError, EngineStateError, TypeError: nothing was queued.
        """
        params = one_sampling_params(params)
        check_request(
            request_id=request_id,
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
        )
        ids = self.check(token_ids, params)
        self.scheduler.config.check_priority(priority)
        rules = self._rules_of(params)
        logprobs = self._new_record("logprobs", params.logprobs)
        if logprobs is not None:
            params = dataclasses.replace(params, logprobs=logprobs.num_top)
        if request_id is None:
            names = (f"request-{number}" for number in itertools.count(self._num_requests))
            request_id = next(name for name in names if name not in self._sequences)
        if request_id in self._sequences:
            raise InvalidRequestError(
                f"request_id={request_id!r} is in use by an unfinished request; give another"
            )
        first = Sequence(
            request_id=request_id,
            token_ids=ids,
            num_prompt_tokens=len(ids),
            params=params,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed % 2**64,
            max_total_tokens=len(ids) + params.max_tokens,
            arrival_index=self._num_arrivals,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            priority=priority,
            extra_key=b"" if cache_salt is None else cache_salt.encode("utf-8", "surrogatepass"),
            rules=rules,
            logprobs=logprobs,
            prompt_logprobs=self._new_record("prompt_logprobs", params.prompt_logprobs),
        )
        for sequence in make_streams(first):
            self.scheduler.add(sequence)
            if params.stop and self.outputs is not None:
                self._watched_texts[sequence] = self.outputs.text(params)
        self._sequences[request_id] = first
        self._num_requests += 1
        self._num_arrivals += params.n
        self._num_unfinished += params.n
        return first

    def step(self) -> SequenceUpdates:
        """Schedule one batch, run it, and take in its tokens.

        Under overlap_scheduling the call before has launched that batch already, and the next one
        is launched before its tokens are waited for.

        If the batch fails, its sequences go back to the queue with all their tokens, and the
        error is raised: the engine is as it was, and the caller may retry or abort.
        """
        outcome = self.try_step()
        if isinstance(outcome, StepFailure):
            raise outcome.error
        return outcome

    def try_step(self) -> SequenceUpdates | StepFailure:
        """As `step`, but a batch that fails is returned with its sequences.

        What is raised nonetheless comes from the scheduler: the engine can't be used further.
        """
        if self.config.overlap_scheduling:
            outcome = self._pipeline.step_overlapped(self._update, ahead=self.runs_ahead)
        else:
            outcome = self._pipeline.step_alone(self._update)
        if isinstance(outcome, StepFailure):
            if outcome.sequences:
                return outcome
            logger.error("a step failed after all its requests had left", exc_info=outcome.error)
            outcome = None
        if outcome is None:
            return SequenceUpdates.nothing()
        scheduled, updates = outcome.scheduled, outcome.updates
        self.counters.num_steps += 1
        self.counters.num_prompt_tokens += scheduled.num_tokens - scheduled.num_decodes
        self.counters.num_output_tokens += len(updates.sequences)
        self._recorder.observe(updates)
        for sequence in updates.finished:
            self._forget(sequence)
        if self.on_step is not None:
            self.on_step(scheduled)
        return updates

    def _update(self, scheduled: ScheduledBatch, output: StepOutput) -> SequenceUpdates:
        updates = self.scheduler.update(scheduled, output)
        if self._watched_texts and (stopped := self._end_at_stop_strings(updates)):
            finished = [*updates.finished, *stopped]
            updates = dataclasses.replace(updates, finished=finished)
        return updates

    def _end_at_stop_strings(self, updates: SequenceUpdates) -> list[Sequence]:
        """End the sequences whose text got a stop string; those that had not ended already."""
        stopped = []
        for sequence, token_id in zip(updates.sequences, updates.token_ids, strict=True):
            text = self._watched_texts.get(sequence)
            if text is None:
                continue
            text.push([int(token_id)], is_ended_by_token=sequence.is_ended_by_token)
            if text.stop_string is not None:
                if not sequence.is_finished:
                    stopped.append(sequence)
                self.scheduler.stop(sequence, text.stop_string)
        return stopped

    def abort(
        self,
        request_id: str,
        *,
        reason: FinishReason = "abort",
        error: Exception | None = None,
    ) -> Sequence | None:
        """End a request, all of its sequences, for `error` if one is given.

        Returns:
            Its first sequence; None if no such request is unfinished.
        """
        first = self._sequences.get(request_id)
        for sequence in () if first is None else first.streams:
            if not sequence.is_finished:
                self.scheduler.abort(sequence, reason, error)
                self._recorder.observe_end(sequence)
                self._forget(sequence)
        return first

    def _forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._num_unfinished -= 1
        self._watched_texts.pop(sequence, None)
        if all(stream.is_finished for stream in sequence.streams):
            self._sequences.pop(sequence.request_id, None)

    def unfinished_sequences(self) -> list[Sequence]:
        """All sequences that have not ended, in order of arrival."""
        firsts = self._sequences.values()
        return [s for first in firsts for s in first.streams if not s.is_finished]

    def reset_prefix_cache(self) -> None:
        """Forget the K/V of past prompts and outputs; running sequences keep their own."""
        self._blocks.reset_prefix_cache()

    @property
    def is_sleeping(self) -> bool:
        """True between `sleep` and `wake_up`."""
        return self._residency.is_sleeping

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`; see ResidencyManager."""
        self._settle("sleep")
        self._residency.sleep(level)

    def wake_up(self) -> None:
        """Take the memory back; see ResidencyManager."""
        self._residency.wake_up()

    def reload_weights(self, path: str | os.PathLike[str] | None = None) -> None:
        """Read other weights of the same model in place; see ResidencyManager."""
        self._settle("reload_weights")
        self._residency.reload_weights(path)

    def _settle(self, purpose: str) -> None:
        """Bring in the steps in flight; EngineStateError while requests are unfinished."""
        if self._sequences:
            raise EngineStateError(
                f"{len(self._sequences)} requests are unfinished; let them end, or abort them, "
                f"before {purpose}()"
            )
        while len(self._pipeline):  # their sequences have ended
            self.try_step()

    def metrics(self) -> EngineMetrics:
        """What was done so far. Any thread may ask; while a step runs, some of the numbers may
        have it counted already and others not."""
        return self._recorder.snapshot(
            self.scheduler, self._blocks, self.counters, num_unfinished=self._num_unfinished
        )

    def stats(self) -> dict[str, Any]:
        """Totals since the start, in JSON's types; see `engine_stats`."""
        return engine_stats(self.config, self._runner, self.scheduler, self.counters)

    def stats_table(self) -> str:
        """What `stats` says of steps and captures, to be read by people."""
        return self._runner.statistics.table()

    def check_integrity(self) -> None:
        """Recount all rows and blocks; AssertionError if anything is off."""
        self.scheduler.check_integrity()

    def _rules_of(self, params: SamplingParams) -> LogitsRules | None:
        # The requests of one call mostly share their params.
        if self._last_rules is None or self._last_rules[0] is not params:
            rules = make_logits_rules(
                params,
                vocab_size=self.vocab_size,
                end_token_ids=self.end_token_ids,
                tokenizer=self._tokenizer,
                grammars=self.grammars,
            )
            self._last_rules = (params, rules)
        return self._last_rules[1]

    def _new_record(self, name: str, asked: int | None) -> LogprobsRecord | None:
        return new_record(name, asked, self.vocab_size, self.config.max_logprobs)
