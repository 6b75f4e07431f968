"""The graphs of one runner: how each is captured, and what capturing them takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from attention import AttentionBackend, AttentionPlan, BoundAttention, PagedKVCache

from .decode_graph import DecodeGraph, GraphSupport
from .forward_model import ForwardModel
from .graph import GraphPool
from .mixed_graph import MixedGraph
from .static_inputs import StaticInputs

logger = logging.getLogger("stepgraph.graphs")

GraphKind = Literal["full", "piecewise"]
Bucket = tuple[GraphKind, int]
"""What is captured: a kind of graph and a size."""

CAPTURE_ERRORS = (RuntimeError, MemoryError)
"""How captures fail; torch's out of memory and CaptureError are RuntimeErrors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCapture:
    """What the graphs of one kind take, from captures of its two largest sizes."""

    kind: GraphKind
    num_graphs: int
    """Sizes to be captured."""
    first_bytes: int
    """What the largest one took."""
    next_bytes: int
    """What the next one took beside it: it runs in the first one's memory."""


class CapturedGraphs:
    """Captures a model's forward by kind and size, and holds what was captured.

    All graphs read `inputs` and write their result to one buffer, since only one runs at a time.

    Args:
        model: the forward, captured as it is.
        backend: computes attention.
        cache: the KV pool, whose addresses full graphs hold.
        inputs: the static inputs.
        pool: memory that all graphs share.
        support: the backend's offer for full graphs.
    """

    def __init__(
        self,
        model: ForwardModel,
        backend: AttentionBackend,
        cache: PagedKVCache,
        inputs: StaticInputs,
        pool: GraphPool,
        support: GraphSupport | None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._cache = cache
        self._inputs = inputs
        self._pool = pool
        self._support = support
        self._hidden: torch.Tensor | None = None
        self.full: dict[int, DecodeGraph] = {}
        """By number of sequences."""
        self.piecewise: dict[int, MixedGraph] = {}
        """By number of tokens."""

    def __contains__(self, bucket: Bucket) -> bool:
        kind, size = bucket
        return size in (self.full if kind == "full" else self.piecewise)

    @property
    def hidden(self) -> torch.Tensor:
        """[largest size, hidden_size], where every replay leaves its result."""
        assert self._hidden is not None, "nothing is captured"
        return self._hidden

    @torch.inference_mode()
    def capture(self, bucket: Bucket) -> None:
        """Capture one graph; raises one of CAPTURE_ERRORS if it can't be had."""
        kind, size = bucket
        if self._hidden is None:
            self._hidden = self._new_hidden(size)
        hidden = self._hidden[:size]
        if kind == "full":
            assert self._support is not None, "a full graph without the backend's support"
            decode = DecodeGraph(self._pool, self._support, self._inputs)
            decode.capture(self._model, self._backend, self._cache, hidden)
            self.full[size] = decode
        else:
            mixed = MixedGraph(self._pool, self._inputs)
            mixed.capture(self._model, self._bind_dummy(size), hidden)
            self.piecewise[size] = mixed

    def measure(self, buckets: Sequence[Bucket]) -> list[TrialCapture]:
        """Capture the two largest sizes of each kind that can be had, and see what they take.

        Args:
            buckets: all that are wanted, the largest size first.
        """
        trials = []
        for kind in dict.fromkeys(kind for kind, _ in buckets):
            left = [bucket for bucket in buckets if bucket[0] == kind]
            taken: list[int] = []
            while left and len(taken) < 2:
                before = self._pool.num_bytes()
                try:
                    self.capture(left.pop(0))
                except CAPTURE_ERRORS as error:
                    logger.debug("a trial capture failed: %s", error)  # its size will be named
                else:
                    taken.append(max(0, self._pool.num_bytes() - before))
            if taken:
                trials.append(
                    TrialCapture(
                        kind=kind,
                        num_graphs=len(taken) + len(left),
                        first_bytes=taken[0],
                        next_bytes=taken[1] if len(taken) > 1 else 0,
                    )
                )
        return trials

    def bind(self, plan: AttentionPlan) -> BoundAttention:
        """Attention of a step with that plan."""
        return BoundAttention(backend=self._backend, plan=plan, cache=self._cache)

    def _bind_dummy(self, size: int) -> BoundAttention:
        return self.bind(self._backend.plan(self._inputs.dummy_mixed(size)))

    def _new_hidden(self, size: int) -> torch.Tensor:
        """The result buffer of all sizes; one run of the forward tells its width and dtype."""
        attend, inputs = self._bind_dummy(size), self._inputs
        hidden = self._model(inputs.input_ids[:size], inputs.positions[:size], attend)
        return hidden.new_zeros(inputs.input_ids.shape[0], hidden.shape[1])
