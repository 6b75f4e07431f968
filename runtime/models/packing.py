"""Brings a decoder's weights into the CPU's layout, all in one piece of memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from attention.huge_pages import empty_in_huge_pages, give_back_pages, huge_page_share

from .linear import PackedWeight, pack, packed_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from .decoder import Decoder

_logger = logging.getLogger("stepgraph.runtime")
_LAYER_WEIGHTS = ("qkv_weight", "o_weight", "gate_up_weight", "down_weight")
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"


class WeightPacker:
    """Packs a bfloat16 decoder's projections and head on the CPU, in whatever order they come.

    A tied head stays one with the embedding, which is read from its panels, unless the head is
    rounded: an embedding never is.

    Args:
        decoder: whose parameters are replaced; only their shapes are read, so they may be on
            "meta".
        int8: as for `pack`.
        level: as for `pack`.
        cache_dir: as for `pack`.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        int8: bool = False,
        level: str | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        self._decoder = decoder
        self._int8, self._level, self._cache_dir = int8, level, cache_dir
        weights = {
            f"registered_layers.{index}.{name}": getattr(layer, name)
            for index, layer in enumerate(decoder.layers)
            for name in _LAYER_WEIGHTS
        }
        is_tied = decoder.lm_head is None
        head = decoder.embed_tokens if is_tied else decoder.lm_head
        weights[_EMBEDDING if is_tied and not int8 else _HEAD] = head
        self._splits_head = is_tied and int8
        self._parts: dict[str, slice] = {}
        end = 0
        for name, weight in weights.items():  # in the order of their use
            start, end = end, end + packed_bytes(weight, int8=int8)
            self._parts[name] = slice(start, end)
        self._memory = empty_in_huge_pages(end)

    def put(self, name: str, weight: Tensor) -> None:
        """Make `weight`, packed or as it is, the decoder's parameter `name`.

        Raises NativeBuildError as `pack` does.
        """
        self._decoder.put(name, self._pack(name, weight) if name in self._parts else weight)
        if name == _EMBEDDING and self._splits_head:
            self._decoder.put(_HEAD, self._pack(_HEAD, weight))

    def release(self) -> None:
        """Give the packed weights' memory back to the system, until they are put again."""
        give_back_pages(self._memory)

    def log(self) -> None:
        """Say what the packed weights take."""
        share = huge_page_share(self._memory)
        _logger.info(
            "packed weights: %.1f MB, of that in huge pages: %s",
            *(self._memory.nbytes / 1e6, "unknown" if share is None else f"{share:.0%}"),
        )

    def _pack(self, name: str, weight: Tensor) -> PackedWeight:
        return pack(
            weight,
            int8=self._int8,
            memory=self._memory[self._parts[name]],
            level=self._level,
            cache_dir=self._cache_dir,
        )


def pack_decoder(
    decoder: Decoder,
    *,
    int8: bool = False,
    level: str | None = None,
    cache_dir: Path | None = None,
) -> None:
    """Pack the weights of a filled decoder; see WeightPacker. Plain ones are freed as it goes."""
    packer = WeightPacker(decoder, int8=int8, level=level, cache_dir=cache_dir)
    for name in [name for name, _ in decoder.named_parameters()]:
        packer.put(name, decoder.get_parameter(name))
    packer.log()
