"""A KV block and the queue of free ones."""

from __future__ import annotations

from collections.abc import Iterator

UNREGISTERED = 0
"""`Block.uid` of a block whose content is not in the prefix cache."""


class Block:
    """`block_size` slots of the KV pool.

    A block is *registered* while its content can be found in the prefix cache, *owned* while
    sequences refer to it, and *free* otherwise. A free block may still be registered: it serves
    hits until it is reused.
    """

    __slots__ = (
        "block_id",
        "content",
        "key",
        "next",
        "previous",
        "ref_count",
        "registered_step",
        "uid",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.uid = UNREGISTERED  # names the content; never used twice by one manager
        self.key: tuple[int, int] = (0, 0)  # (uid of the parent's content, hash of content)
        self.content = b""  # token ids as int32 bytes, then the sequence's extra key
        self.registered_step = -1
        self.previous: Block = self  # neighbours in the free queue; itself while owned
        self.next: Block = self

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, uid={self.uid})"


class FreeBlockQueue:
    """Free blocks, next to be reused first, linked through the blocks themselves.

    Taking a block out of the middle, which every hit on a free block does, costs the same
    whatever the size of the pool, and no call allocates.

        head <-> unregistered blocks <-> least recently freed <-> ... <-> last freed <-> head
    """

    __slots__ = ("_head", "_length")

    def __init__(self) -> None:
        self._head = Block(-1)  # a sentinel: the list is a ring through it
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not self._head:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Put `block` last: all other free blocks are reused before it."""
        self._insert_before(self._head, block)

    def append_left(self, block: Block) -> None:
        """Put `block` first: it is the next to be reused."""
        self._insert_before(self._head.next, block)

    def pop_left(self) -> Block:
        """Take out the next block to reuse; the queue must not be empty."""
        block = self._head.next
        assert block is not self._head, "no free block: the caller must check first"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Take out `block`, wherever it stands."""
        block.previous.next = block.next
        block.next.previous = block.previous
        block.previous = block.next = block
        self._length -= 1

    def _insert_before(self, place: Block, block: Block) -> None:
        block.previous = place.previous
        block.next = place
        place.previous.next = block
        place.previous = block
        self._length += 1
