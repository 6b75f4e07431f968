"""What goes between the callers of an engine thread and that thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from .live_request import LiveRequest
from .prompts import EncodedPrompt
from .sampling_params import SamplingParams
from .sequence import Sequence


class Outbox(Protocol):
    """Takes the engine thread's news to the thread that reads them."""

    def post(self, news: StepNews) -> bool:
        """Hand on what concerns this outbox's requests; False if nobody can read it any more."""


@dataclass(slots=True, eq=False, kw_only=True)
class Submission:
    """A request on its way through the engine thread."""

    request_id: str
    params: SamplingParams
    priority: int
    arrival_time: float
    """Seconds of time.monotonic()."""
    deadline: float
    """When the request is ended, by the same clock; may be inf."""
    outbox: Outbox
    """Where its news go."""
    prompt: EncodedPrompt | None = None
    """None until it has been tokenized."""
    live: LiveRequest | None = None
    """Its output, from when the engine has it."""
    is_cancelled: bool = False
    """The caller wants no more of it."""
    num_open: int = 0
    """Streams that have not ended; the engine thread's to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNews:
    """What a step brought, as parallel lists; an outbox picks out what is its own."""

    submissions: list[Submission | None] = field(default_factory=list)
    """Those that got a token; None for a request of the engine's own."""
    sequences: list[Sequence] = field(default_factory=list)
    """The stream of each..."""
    token_ids: list[int] = field(default_factory=list)
    """...and its token."""
    ended: list[tuple[Submission, Sequence]] = field(default_factory=list)
    """Streams that have ended, after these tokens."""
    failed: list[tuple[Submission, Exception]] = field(default_factory=list)
    """Requests that nothing will follow for, with the reason."""
