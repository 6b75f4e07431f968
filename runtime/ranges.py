"""NVTX ranges around the stages of a step, as nsys shows them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

DOMAIN = "stepgraph"

Opener = Callable[[str, int, int], AbstractContextManager[None]]
"""Makes a range of a name, a number of tokens and a bucket."""


class _NoRange:
    """Enters and leaves without a trace."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _Range:
    """One pushed range; popped even when the body raises."""

    __slots__ = ("_attributes", "_domain")

    def __init__(self, domain: Any, attributes: Any) -> None:
        self._domain = domain
        self._attributes = attributes

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._domain.pop_range()


class Ranges:
    """Opens ranges in the NVTX domain "stepgraph", or does nothing when switched off.

    Each range carries a payload: the number of tokens that the stage handles. Its category is
    the step's bucket, 0 where a step isn't padded, so that nsys can group by it. Works without
    a profiler and without CUDA, where the calls go nowhere.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.opener: Opener | None = None
        """Opens the ranges in place of NVTX, for another profiler; also where NVTX is off."""
        self._off = _NoRange()
        self._domain: Any = None
        if enabled:
            import nvtx

            self._domain = nvtx.get_domain(DOMAIN)

    def __call__(
        self, name: str, num_tokens: int = 0, bucket: int = 0
    ) -> AbstractContextManager[None]:
        """A context manager that is open as range `name` while its body runs."""
        if self.opener is not None:
            return self.opener(name, num_tokens, bucket)
        if not self.enabled:
            return self._off
        attributes = self._domain.get_event_attributes(
            message=name, category=bucket or None, payload=num_tokens
        )
        return _Range(self._domain, attributes)

    def step(self, num_tokens: int, num_seqs: int, bucket: int) -> AbstractContextManager[None]:
        """The range around all that a scheduled step does; under NVTX its name has both counts."""
        if self.opener is not None:
            return self.opener("step", num_tokens, bucket)
        if not self.enabled:
            return self._off
        return self(f"step: {num_tokens} tokens, {num_seqs} sequences", num_tokens, bucket)
