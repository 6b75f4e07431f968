"""Piecewise graphs: any step, its attention run eagerly between graph segments."""

from __future__ import annotations

from typing import Any

import torch

from attention import BoundAttention

from .forward_model import ForwardModel
from .graph import GraphPool
from .piecewise_graph import Break, EagerCall, PiecewiseGraph
from .static_inputs import StaticInputs


class MixedGraph:
    """The forward of one number of tokens, of whatever sequences, in segments."""

    def __init__(self, pool: GraphPool, inputs: StaticInputs) -> None:
        self._graph = PiecewiseGraph(pool)
        self._inputs = inputs

    def capture(self, model: ForwardModel, attend: BoundAttention, hidden: torch.Tensor) -> None:
        """Capture model on hidden.shape[0] tokens, its result written to hidden.

        Args:
            model: the forward.
            attend: attention of a dummy step in the static inputs, for the warm-up run.
            hidden: [size, hidden_size], static.
        """
        size = hidden.shape[0]

        def forward(break_: Break) -> None:
            def attend_outside(
                layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
            ) -> torch.Tensor:
                out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
                return break_(out, layer, query, key, value)

            input_ids, positions = self._inputs.input_ids[:size], self._inputs.positions[:size]
            hidden.copy_(model(input_ids, positions, attend_outside))

        self._graph.capture(forward, _eager_call(attend))

    def replay(self, attend: BoundAttention) -> None:
        """Run the step in the static inputs, whose attention is `attend`, planned for it."""
        self._graph.replay(_eager_call(attend))


def _eager_call(attend: BoundAttention) -> EagerCall:
    def write_attention(out: torch.Tensor, *args: Any) -> None:
        layer, query, key, value = args
        attend(layer, query, key, value, out)

    return write_attention
