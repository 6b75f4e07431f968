"""A decoder as the runners call it."""

from __future__ import annotations

from typing import Protocol

import torch

from attention import LayerAttention


class ForwardModel(Protocol):
    """A decoder as the runners call it: everything that a forward needs is an argument."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: LayerAttention,
        *,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[num_tokens] ids and positions to hidden states [n, hidden_size].

        `rows` [n] int64 are the tokens whose states are wanted, None: all of them. What the last
        layer does after its attention need not be done for the others.
        """
        ...
