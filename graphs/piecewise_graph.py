"""Breakable capture: one function as graph segments with eager calls between them.

    segment 0 | eager call 0 | segment 1 | eager call 1 | ... | segment n

The function runs once under capture. Each time it calls its break, the segment ends, the call
is noted, and the next segment opens in the same pool. No source is split and no operator is
registered, so any Python function can be captured (SGLang captures prefills this way).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from .graph import Graph, GraphPool

R = TypeVar("R")


class EagerCall(Protocol):
    """What runs between segments, with fresh state of its own at each replay."""

    def __call__(self, out: torch.Tensor, *args: Any) -> None:
        """Compute from args, whose tensors the segments filled, and write the result to out."""
        ...


class Break(Protocol):
    """Ends a segment and opens the next one."""

    def __call__(self, out: torch.Tensor, *args: Any) -> torch.Tensor:
        """Note an eager call, and return out, which the next segment may read.

        Args:
            out: a tensor made in the current segment, or a static one.
            args: tensors of this or earlier segments, and values that never change.
        """
        ...


class PiecewiseGraph:
    """Segments of one function, all in one pool."""

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._segments: list[Graph] = []
        self._calls: list[tuple[torch.Tensor, tuple[Any, ...]]] = []
        self._recording: AbstractContextManager[None] | None = None

    @property
    def num_segments(self) -> int:
        """Captured graphs: one more than there are eager calls."""
        return len(self._segments)

    def capture(self, fn: Callable[[Break], R], eager: EagerCall) -> R:
        """Run fn once with eager calls to warm up, then record it.

        While fn is recorded the eager calls do not run, and their results hold nothing: a
        capture computes nothing that a call could read.

        Returns:
            What the recorded call of fn returned; see Graph.capture.
        """
        assert not self._segments, "a graph is captured once"

        def run_eagerly(out: torch.Tensor, *args: Any) -> torch.Tensor:
            eager(out, *args)
            return out

        with self._pool.capturing():
            fn(run_eagerly)
            result = self._record(fn)
        self._pool.link(self._segments)
        return result

    @torch.inference_mode()
    def replay(self, eager: EagerCall) -> None:
        """Replay the segments in order, with `eager` called for each break between them."""
        first, *rest = self._segments
        first.replay()
        for segment, (out, args) in zip(rest, self._calls, strict=True):
            eager(out, *args)
            segment.replay()

    def _record(self, fn: Callable[[Break], R]) -> R:
        self._open_segment()
        try:
            result = fn(self._break)
        except BaseException as error:
            if self._recording is not None:
                self._recording.__exit__(type(error), error, error.__traceback__)
            raise
        self._close_segment()
        return result

    def _break(self, out: torch.Tensor, *args: Any) -> torch.Tensor:
        self._close_segment()
        aliases = tuple(
            self._pool.alias(arg) if isinstance(arg, torch.Tensor) else arg for arg in args
        )
        self._calls.append((self._pool.alias(out), aliases))
        self._open_segment()
        return out

    def _open_segment(self) -> None:
        graph = self._pool.new_graph()
        recording = graph.recording()
        recording.__enter__()
        self._segments.append(graph)
        self._recording = recording

    def _close_segment(self) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None, "no segment is open"
        recording.__exit__(None, None, None)
