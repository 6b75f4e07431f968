"""How often each running sequence has each token, on the device, and the penalties for that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .staging import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyBatch:
    """Penalties of the m rows of a step that have any. Device tensors."""

    places: torch.Tensor
    """[m] int64, ascending rows of the step's logits."""
    rows: torch.Tensor
    """[m] int64, their rows in the tables."""
    repetition: torch.Tensor
    """[m] float32; 1: off."""
    frequency: torch.Tensor
    """[m] float32; 0: off."""
    presence: torch.Tensor
    """[m] float32; 0: off."""
    any_repetition: bool
    """Some repetition penalty is on."""
    any_output: bool
    """Some frequency or presence penalty is on."""


class TokenCounts:
    """[max_num_seqs, vocab] int32 on the device: 2 * (times in the output) + (1 if in the prompt).

    A row is rebuilt when a sequence takes it; then each drawn token is added where it was drawn,
    without a copy to or from the host.

    Args:
        max_num_seqs: rows.
        vocab_size: tokens.
        device: where the logits are.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._counts = torch.zeros((max_num_seqs, vocab_size), dtype=torch.int32, device=device)

    def reset(self, row: int, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        """Count the tokens of the sequence that has `row` from now on.

        Args:
            prompt_ids: [p] int32.
            output_ids: [o] int32.
        """
        counts = self._counts[row].zero_()
        counts.index_fill_(0, to_device(prompt_ids.astype(np.int64), counts.device), 1)
        if len(output_ids):
            ids = to_device(output_ids.astype(np.int64), counts.device)
            counts.scatter_add_(0, ids, torch.full_like(ids, 2, dtype=torch.int32))

    def add(self, batch: PenaltyBatch, token_ids: torch.Tensor) -> None:
        """Count what was drawn.

        Args:
            batch: of the step.
            token_ids: [n] int64, device, the step's tokens.
        """
        places = batch.rows * self._vocab_size + token_ids[batch.places]
        twos = torch.full_like(places, 2, dtype=torch.int32)
        self._counts.view(-1).scatter_add_(0, places, twos)

    def penalise(self, logits: torch.Tensor, batch: PenaltyBatch) -> None:
        """Apply the penalties, repetition first, to [n, vocab] float32 logits, in place."""
        is_all = len(batch.places) == len(logits)
        counts = self._counts[batch.rows]
        changed = logits if is_all else logits[batch.places]
        if batch.any_repetition:
            factor = batch.repetition[:, None]
            repeated = torch.where(changed > 0, changed / factor, changed * factor)
            changed = torch.where(counts > 0, repeated, changed)
        if batch.any_output:
            # As vLLM: first the frequency penalty, then the presence penalty.
            changed = changed - batch.frequency[:, None] * (counts >> 1)
            changed -= batch.presence[:, None] * (counts > 1)
        if is_all:
            logits.copy_(changed)
        else:
            logits.index_copy_(0, batch.places, changed)
