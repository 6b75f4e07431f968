"""HostGraph: a captured graph for the CPU, to test without a GPU what CUDA graphs freeze.

A recorded run is replayed leaf by leaf into the memory of the recording. Host numbers, Python's
decisions and addresses stay what they were, exactly as in a CUDA graph, and it refuses what
CUDA refuses during a capture. Beyond that it is stricter than CUDA:

- Before a replay, all memory of the pool that the replay may not rely on is poisoned: NaN, or
  a huge integer. That is every tensor any graph of the pool made, this one's outputs included.
- A replay raises when a tensor it refers to was freed or moved, where CUDA would read garbage.
- Outputs of a capture are poisoned too, since on CUDA a capture computes nothing.

Limits. Recording does run the function, so what it writes into tensors outside the pool (a KV
cache) is written. CPU tensors can't be told from "device" tensors: a copy from host memory is
seen by the operators that make such tensors (torch.tensor, torch.from_numpy), not by where they
live. torch.frombuffer and the function torch.utils.dlpack.to_dlpack leave no trace for any
mode; a tensor of the former is found out once it is freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .graph import Graph, GraphPool
from .host_memory import Arena
from .host_tape import HostAccessGuard, Recorder, Tape, leaf

__all__ = ["HostGraph", "HostGraphPool", "leaf"]


class HostGraphPool(GraphPool):
    """One arena for all graphs that are made from it."""

    def __init__(self) -> None:
        self.arena = Arena()

    def new_graph(self) -> HostGraph:
        """An empty graph of this pool."""
        return HostGraph(self)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Gradients off; what graphs of the pool made means nothing before, and nothing after."""
        with torch.inference_mode():
            self.arena.poison()
            yield
            self.arena.poison()

    def link(self, graphs: Sequence[Graph]) -> None:
        """See GraphPool.link: only what a later graph reads of earlier ones outlives them."""
        tapes = []
        for graph in graphs:
            assert isinstance(graph, HostGraph), "a HostGraphPool links HostGraphs"
            tapes.append(graph.tape)
        for index, graph in enumerate(graphs):
            assert isinstance(graph, HostGraph)
            made = set[int]().union(*(tape.made for tape in tapes[:index]))
            used = set[int]().union(*(tape.used for tape in tapes[index:]))
            graph.live_before = frozenset(made & used)

    def num_bytes(self) -> int:
        """Bytes of all that the graphs made; no two share any, since a tape keeps it all."""
        return self.arena.num_bytes

    def wait_idle(self) -> None:
        """Nothing to do: a host has finished what it returned from."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself: the arena holds its memory anyway."""
        return tensor


class HostGraph(Graph):
    """A tape of one run; see the module's docstring."""

    def __init__(self, pool: HostGraphPool) -> None:
        super().__init__(pool)
        self._arena = pool.arena
        self.tape = Tape()
        self.live_before: frozenset[int] = frozenset()
        """Storages that a replay finds as the graphs linked before this one left them."""
        self._recorded = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside; see Graph.recording."""
        assert not self._recorded, "a graph is recorded once"
        self._recorded = True
        guard = HostAccessGuard()
        with guard, Recorder(self.tape, self._arena, guard):
            yield

    @torch.inference_mode()
    def replay(self) -> None:
        """Poison, then run the tape. Raises CaptureError where a tensor was freed or moved."""
        assert self._recorded, "the graph has recorded nothing"
        self._arena.poison(self.live_before)
        self.tape.run()
