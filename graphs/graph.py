"""What a captured graph is, whatever device it replays on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

R = TypeVar("R")


class CaptureError(RuntimeError):
    """A function did what can't be captured, or a graph's memory isn't there any more."""


class Graph(ABC):
    """One recorded run of a function, replayed in place.

    A replay runs the same kernels on the same addresses: Python control flow, host numbers and
    the places of all tensors are those of the capture. What may change between replays is the
    contents of tensors that live outside the graph's pool.
    """

    def __init__(self, pool: GraphPool) -> None:
        self.pool = pool

    def capture(self, fn: Callable[..., R], static_inputs: Sequence[torch.Tensor]) -> R:
        """Run fn(*static_inputs) once to warm up, then record it.

        Args:
            fn: the work; called twice, with gradients off.
            static_inputs: the caller's buffers, to be kept and refilled in place.

        Returns:
            What the recorded call returned. Its tensors mean nothing before the first replay,
            and each replay of any graph of the pool overwrites them.
        """
        with self.pool.capturing():
            fn(*static_inputs)
            with self.recording():
                return fn(*static_inputs)

    @abstractmethod
    def recording(self) -> AbstractContextManager[None]:
        """Record what runs inside, once, within pool.capturing()."""

    @abstractmethod
    def replay(self) -> None:
        """Run the recorded work again. On CUDA it is queued on the current stream."""


class GraphPool(ABC):
    """Memory that the graphs of one runner share, since only one of them runs at a time.

    A tensor that a graph made is valid from its replay to the next one of any graph of the
    pool. What must live longer is copied out.
    """

    @abstractmethod
    def new_graph(self) -> Graph:
        """An empty graph of this pool."""

    @abstractmethod
    def capturing(self) -> AbstractContextManager[None]:
        """Holds warm-up runs and recordings: gradients off, on the stream for captures."""

    @abstractmethod
    def link(self, graphs: Sequence[Graph]) -> None:
        """Declare that graphs replay in this order as one launch.

        What an earlier one leaves for a later one stays valid between them.
        """

    @abstractmethod
    def num_bytes(self) -> int:
        """Memory in use, as far as captures change it: what one took is the growth meanwhile."""

    @abstractmethod
    def wait_idle(self) -> None:
        """Return when the device has nothing left to do: what a capture between steps needs."""

    @abstractmethod
    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as tensor, without keeping later captures from using it again."""
