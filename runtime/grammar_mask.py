"""Keeps logits to what grammars allow: a mask from the host, and its use on the device.

A step has two parts that may lie apart. `prepare_mask` needs the ids of all steps before, and no
device: it runs while the device works on the forward pass. `apply_mask` is one look at the packed
bits, on the device, just before the draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .grammar import GrammarMatcher
from .staging import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarWork:
    """One row of a step whose output has a grammar."""

    place: int
    """Row of the logits."""
    row: int
    """Row in the tables."""
    matcher: GrammarMatcher
    """Follows the row's output."""
    output_ids: list[int]
    """All ids generated so far, as the table has them when the mask is prepared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarMask:
    """What the grammars of r rows allow in one step. Host memory."""

    places: np.ndarray
    """[r] int64, rows of the logits."""
    bits: np.ndarray
    """[r, mask_bytes] uint8; bit i of byte b is 1 where token 8 * b + i may be drawn."""
    row_errors: dict[int, str] = field(default_factory=dict)
    """By row of the tables: why nothing is allowed there."""


def prepare_mask(work: Sequence[GrammarWork]) -> GrammarMask:
    """Let each matcher follow its output, and fill the mask of what may come next.

    The same again, for a step that is tried again, gives the same mask.

    Args:
        work: at least one row, all of one tokenizer.
    """
    grammar = work[0].matcher.grammar
    bits = np.zeros((len(work), grammar.mask_bytes), dtype=np.uint8)
    for item in work:
        item.matcher.follow(item.output_ids)
    # Both let go of the interpreter lock; the second works on several threads.
    if len(work) == 1:
        work[0].matcher.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    else:
        pairs = [(item.matcher.matcher, index) for index, item in enumerate(work)]
        grammar.executor.unsafe_compute_mask_ptr(
            pairs, bits.ctypes.data, grammar.mask_bytes, len(work)
        )
    errors = {}
    for index, item in enumerate(work):
        if (error := item.matcher.error) is not None:
            bits[index] = 0
            errors[item.row] = f"structured_outputs can't be followed any further: {error}"
    places = np.array([item.place for item in work])
    return GrammarMask(places=places, bits=bits, row_errors=errors)


def apply_mask(logits: torch.Tensor, mask: GrammarMask) -> None:
    """Set what the grammars forbid to -inf in [n, vocab] float32 logits, in place.

    All of a row in `row_errors` is forbidden. The host doesn't wait for the device.
    """
    if logits.device.type == "cpu":
        _apply_on_host(logits, mask)
    else:
        _apply_batched(logits, mask)


def _apply_batched(logits: torch.Tensor, mask: GrammarMask) -> None:
    """All rows at once, from bits unpacked on the device: a byte a token would be 8 times the
    transfer."""
    places, bits = to_device(mask.places, logits.device), to_device(mask.bits, logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_forbidden = (bits[:, :, None] >> shifts & 1 == 0).flatten(1)[:, : logits.shape[-1]]
    logits.index_copy_(0, places, logits[places].masked_fill_(is_forbidden, -torch.inf))


def _apply_on_host(logits: torch.Tensor, mask: GrammarMask) -> None:
    """Row by row, by numpy's way of unpacking bits: a tenth of the time on a CPU."""
    rows, vocab = logits.numpy(), logits.shape[-1]
    for place, bits in zip(mask.places.tolist(), mask.bits, strict=True):
        is_forbidden = np.unpackbits(~bits, bitorder="little")[:vocab].view(np.bool_)
        np.copyto(rows[place], -np.inf, where=is_forbidden)
