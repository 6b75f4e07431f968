"""Brings a decoder's weights into the CPU's layout, all in one piece of memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from attention.huge_pages import empty_in_huge_pages, huge_page_share

from .linear import pack, packed_bytes

if TYPE_CHECKING:
    from torch import nn

    from .decoder import Decoder

_logger = logging.getLogger("stepgraph.runtime")
_LAYER_WEIGHTS = ("qkv_weight", "o_weight", "gate_up_weight", "down_weight")


def pack_decoder(
    decoder: Decoder,
    *,
    int8: bool = False,
    level: str | None = None,
    cache_dir: Path | None = None,
) -> None:
    """Pack all projections of a bfloat16 decoder on the CPU, in the order of their use.

    The plain weights are freed as it goes, except for a tied head's, which is the embedding:
    there memory grows by one [vocab_size, hidden_size]. The arguments are as for `pack`, and so
    is what is raised.
    """
    places: list[tuple[nn.Module, str]] = [
        (layer, name) for layer in decoder.layers for name in _LAYER_WEIGHTS
    ]
    if decoder.lm_head is None:
        decoder.give_own_head(decoder.embed_tokens)
    places.append((decoder, "lm_head"))
    memory = empty_in_huge_pages(sum(packed_bytes(getattr(*place), int8=int8) for place in places))
    start = 0
    for module, name in places:
        weight = getattr(module, name)
        end = start + packed_bytes(weight, int8=int8)
        packed = pack(weight, int8=int8, memory=memory[start:end], level=level, cache_dir=cache_dir)
        delattr(module, name)
        setattr(module, name, packed)
        start = end
    share = huge_page_share(memory)
    _logger.info(
        "packed weights: %.1f MB, of that in huge pages: %s",
        *(memory.nbytes / 1e6, "unknown" if share is None else f"{share:.0%}"),
    )
