"""Full graphs of uniform decode steps, and what a backend must offer for them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    BoundAttention,
    PagedKVCache,
)

from .forward_model import ForwardModel
from .graph import Graph, GraphPool
from .static_inputs import StaticInputs


class CapturablePlan(Protocol):
    """A backend's plan for one number of decoding sequences, in buffers that never move."""

    @property
    def plan(self) -> AttentionPlan:
        """What the backend's run() is captured with. It reads nothing that isn't in a buffer."""
        ...

    def refresh(self, metadata: AttentionMetadata) -> bool:
        """Plan one step, into the same buffers. Called once before each replay.

        Args:
            metadata: as many sequences as at capture, padded ones (context length 0) included;
                its tensors are the very ones of the capture, its host arrays are only good
                until the call returns.

        Returns:
            False if the step needs a launch that differs from the captured one, whose graph
            is of no use any more then.
        """
        ...


@runtime_checkable
class GraphSupport(Protocol):
    """Offered by a backend whose decode attention can be part of a full graph."""

    def capturable_plan(self, metadata: AttentionMetadata) -> CapturablePlan:
        """Make the buffers for metadata.num_seqs decoding sequences, and plan this first step.

        Args:
            metadata: a uniform decode step. Its tensors are the runner's static ones, so the
                plan may read them in place; block_tables has all columns that can ever occur.
        """
        ...


class DecodeGraph:
    """The whole forward of one number of decoding sequences as one graph."""

    def __init__(self, pool: GraphPool, support: GraphSupport, inputs: StaticInputs) -> None:
        self._graph: Graph = pool.new_graph()
        self._support = support
        self._inputs = inputs
        self._plan: CapturablePlan | None = None

    def capture(
        self,
        model: ForwardModel,
        backend: AttentionBackend,
        cache: PagedKVCache,
        hidden: torch.Tensor,
    ) -> None:
        """Capture model on hidden.shape[0] sequences, its result written to hidden.

        Args:
            model: the forward.
            backend: whose run() is captured.
            cache: the KV pool, whose addresses the graph holds from now on.
            hidden: [size, hidden_size], static.
        """
        size = hidden.shape[0]
        inputs = self._inputs
        self._plan = self._support.capturable_plan(inputs.dummy_decode(size))
        attend = BoundAttention(backend=backend, plan=self._plan.plan, cache=cache)

        def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> None:
            hidden.copy_(model(input_ids, positions, attend))

        self._graph.capture(forward, (inputs.input_ids[:size], inputs.positions[:size]))

    def refresh(self, metadata: AttentionMetadata) -> AttentionPlan | None:
        """Plan a padded step; None if the captured graph can't run it."""
        assert self._plan is not None, "the graph isn't captured"
        return self._plan.plan if self._plan.refresh(metadata) else None

    def replay(self) -> None:
        """Run the step that `refresh` planned."""
        self._graph.replay()
