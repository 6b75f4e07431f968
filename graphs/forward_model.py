"""A decoder as the runners call it."""

from __future__ import annotations

from typing import Protocol

import torch

from attention import LayerAttention


class ForwardModel(Protocol):
    """A decoder as the runners call it: everything that a forward needs is an argument."""

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attend: LayerAttention
    ) -> torch.Tensor:
        """[num_tokens] ids and positions to [num_tokens, hidden_size] hidden states."""
        ...
