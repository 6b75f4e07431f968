"""A block manager for simulations in which nobody asks which block is whose."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.block import Block
from runtime.block_manager import BlockManager
from runtime.sequence import Sequence


class CountedBlocks(BlockManager):
    """Counts blocks and names none: all that a scheduler without a prefix cache asks for.

    What a sequence owns is a list of the right length, of one and the same block.

    Args:
        num_blocks: that sequences can own.
        block_size: token slots of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(2, block_size, enable_prefix_caching=False)
        self._num_usable = self._num_free = num_blocks
        self._any = Block(1)

    @property
    def num_usable_blocks(self) -> int:
        """As `BlockManager.num_usable_blocks`."""
        return self._num_usable

    @property
    def num_free_blocks(self) -> int:
        """As `BlockManager.num_free_blocks`."""
        return self._num_free

    def allocate(self, sequence: Sequence, num_blocks: int) -> None:
        """As `BlockManager.allocate`."""
        assert num_blocks <= self._num_free, f"{num_blocks} of {self._num_free} free blocks"
        self._num_free -= num_blocks
        sequence.blocks += [self._any] * num_blocks

    def free(self, sequence: Sequence) -> None:
        """As `BlockManager.free`."""
        self._num_free += len(sequence.blocks)
        sequence.blocks = []

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """As `BlockManager.check_integrity`."""
        num_owned = sum(len(sequence.blocks) for sequence in sequences)
        assert self._num_free + num_owned == self._num_usable, "blocks are lost or doubled"
