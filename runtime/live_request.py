"""A request's output while it grows, for whoever reads it: a loop, a stream, one final call."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from .output_text import OutputText
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from .sampling_params import RequestOutputKind
from .sequence import Sequence


@dataclass(slots=True, eq=False)
class _Growth:
    """One sequence: what came in, and what its readers have."""

    sequence: Sequence
    text: OutputText
    new_ids: list[int] = field(default_factory=list)
    """Came in since the last reading."""
    is_ended: bool = False
    is_end_read: bool = False
    token_ids: list[int] = field(default_factory=list)
    """All that was read, unless only differences are wanted."""
    read_text: str = ""
    num_read: int = 0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class _News:
    growth: _Growth
    token_ids: list[int]
    is_ended: bool


class LiveRequest:
    """Gathers the tokens of a request and turns them into outputs when they are asked for.

    Taking a token in costs an append: text is made by the reader, in one piece for all tokens
    since the last reading. So a reader that is slow, or wants only the end, costs less, and what
    is kept for it is never more than the output itself.

    `append`, `end` and `collect` belong to one thread; `render` may run on another, one call at
    a time.

    Args:
        prompt: the prompt's text, if it came as one.
        sequences: the request's streams, just queued.
        texts: one for each.
        token_text: gives the text of one token id, for log-probabilities; None: they have none.
        prompt_index: the prompt's place in its call.
    """

    def __init__(
        self,
        prompt: str | None,
        sequences: Ordered[Sequence],
        texts: Ordered[OutputText],
        *,
        token_text: Callable[[int], str] | None,
        prompt_index: int = 0,
    ) -> None:
        self._prompt = prompt
        self._prompt_index = prompt_index
        self._first = sequences[0]
        self._kind = self._first.params.output_kind
        self._growths = {
            sequence: _Growth(sequence, text)
            for sequence, text in zip(sequences, texts, strict=True)
        }
        self._token_text = token_text
        self._prompt_ids: list[int] | None = None
        self._has_prompt_logprobs = False
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_unended = len(self._growths)
        self._has_news = False

    @property
    def sequences(self) -> list[Sequence]:
        """The request's streams, in order."""
        return list(self._growths)

    @property
    def is_ended(self) -> bool:
        """True once all streams have ended, whether that was read or not."""
        return self._num_unended == 0

    @property
    def has_news(self) -> bool:
        """True if the next reading gives an output."""
        return self._has_news and (self._kind is not RequestOutputKind.FINAL_ONLY or self.is_ended)

    @property
    def error(self) -> Exception | None:
        """Why a stream that has ended did so, if it was no ordinary end."""
        ended = (growth.sequence for growth in self._growths.values() if growth.is_ended)
        return next((s.error for s in ended if s.error is not None), None)

    @property
    def num_unread(self) -> int:
        """Tokens that the next reading turns into text."""
        return sum(len(growth.new_ids) for growth in self._growths.values())

    def append(self, sequence: Sequence, token_id: int) -> None:
        """`sequence` got a token."""
        self._growths[sequence].new_ids.append(token_id)
        self._has_news = True

    def extend(self, sequence: Sequence, token_ids: list[int]) -> None:
        """`sequence` got several tokens."""
        self._growths[sequence].new_ids += token_ids
        self._has_news = True

    def end(self, sequence: Sequence) -> None:
        """`sequence` has finished and all of its tokens were appended."""
        growth = self._growths[sequence]
        assert sequence.is_finished and not growth.is_ended, f"{sequence.request_id} can't end"
        growth.is_ended = True
        self._num_unended -= 1
        self._has_news = True

    def end_finished(self) -> None:
        """`end` each that has finished; for callers who take tokens in before the next step."""
        for sequence, growth in self._growths.items():
            if sequence.is_finished and not growth.is_ended:
                self.end(sequence)

    def collect(self) -> list[_News]:
        """Take out what is new, for `render`."""
        news = []
        for growth in self._growths.values():
            token_ids, growth.new_ids = growth.new_ids, []
            news.append(_News(growth, token_ids, growth.is_ended))
        self._has_news = False
        return news

    def render(self, news: list[_News]) -> RequestOutput:
        """The output that `output_kind` asks for, now that `news` have come."""
        sequence, is_delta = self._first, self._kind is RequestOutputKind.DELTA
        prompt_logprobs = None if is_delta else self._prompt_logprobs
        if self._prompt_ids is None:
            self._prompt_ids = sequence.token_ids[: sequence.num_prompt_tokens].tolist()
        record = sequence.prompt_logprobs
        if record is not None and not self._has_prompt_logprobs:
            # After a step that failed, another stream may come before the one that computes them.
            is_whole = len(record) >= sequence.num_prompt_tokens - 1
            if is_whole or news[0].is_ended:
                prompt_logprobs = [None, *record.as_dicts(self._token_text)]
                self._has_prompt_logprobs = True
                self._prompt_logprobs = None if is_delta else prompt_logprobs
        outputs = []
        for index, new in enumerate(news):
            has_end = new.is_ended and not new.growth.is_end_read
            if new.token_ids or has_end or not is_delta:
                outputs.append(self._completion(index, new, is_delta=is_delta))
        finished = all(new.is_ended for new in news)
        streams = self.sequences
        first_times = [s.first_token_time for s in streams if s.first_token_time is not None]
        end_times = [s.finish_time for s in streams if s.finish_time is not None]
        return RequestOutput(
            request_id=sequence.request_id,
            prompt_index=self._prompt_index,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            outputs=outputs,
            finished=finished,
            num_cached_tokens=sequence.num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=sequence.arrival_time,
                first_token_time=min(first_times, default=None),
                finish_time=max(end_times) if finished else None,
                num_preemptions=sum(stream.num_preemptions for stream in streams),
            ),
            prompt_logprobs=prompt_logprobs,
        )

    def take(self) -> RequestOutput:
        """`render` what `collect` gives."""
        return self.render(self.collect())

    def _completion(self, index: int, new: _News, *, is_delta: bool) -> CompletionOutput:
        growth, sequence, token_ids = new.growth, new.growth.sequence, new.token_ids
        # Of an unfinished stream nothing is asked that the engine may change meanwhile.
        is_ended_by_token = new.is_ended and sequence.is_ended_by_token
        text = growth.text.push(token_ids, is_ended_by_token=is_ended_by_token)
        if new.is_ended and not growth.is_end_read:
            text += growth.text.finish()
            growth.is_end_read = True
        logprobs = self._logprobs(growth, token_ids)
        growth.num_read += len(token_ids)
        if not is_delta:
            growth.read_text = text = growth.read_text + text
            growth.token_ids += token_ids
            growth.logprobs += logprobs or ()
            token_ids = list(growth.token_ids)
            logprobs = None if logprobs is None else list(growth.logprobs)
        error = sequence.error if new.is_ended else None
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            finish_reason=sequence.finish_reason if new.is_ended else None,
            stop_reason=sequence.stop_reason if new.is_ended else None,
            cumulative_logprob=None if logprobs is None else growth.cumulative_logprob,
            logprobs=logprobs,
            error=None if error is None else str(error),
        )

    def _logprobs(self, growth: _Growth, token_ids: list[int]) -> list[dict[int, Logprob]] | None:
        record, start = growth.sequence.logprobs, growth.num_read
        if record is None:
            return None
        found = record.as_dicts(self._token_text, start, start + len(token_ids))
        for token_id, entry in zip(token_ids, found, strict=True):
            growth.cumulative_logprob += entry[token_id].logprob
        return found
