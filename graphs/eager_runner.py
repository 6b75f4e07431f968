"""Runs a forward pass as ordinary PyTorch calls, at the batch's own size."""

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


class EagerRunner:
    """The launcher that captures nothing: right for every batch, and the twin of all others."""

    def __init__(self, model: ForwardModel) -> None:
        self._model = model

    @torch.inference_mode()
    def run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attend: LayerAttention
    ) -> torch.Tensor:
        """Hidden states after the final norm.

        Args:
            input_ids: [num_tokens] int32 or int64, device.
            positions: [num_tokens] int64, device.
            attend: attention of one step, its plan made.

        Returns:
            [num_tokens, hidden_size], in the model's dtype, device.
        """
        return self._model(input_ids, positions, attend)
