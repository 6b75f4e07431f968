"""Ownership of KV blocks, and the prefix cache over their contents."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import xxhash

from .block import UNREGISTERED, Block, FreeBlockQueue
from .sequence import BROKEN_CHAIN, ROOT_UID, Sequence

NULL_BLOCK_ID = 0
"""The block that padding writes to and padded table entries name; no sequence ever owns it."""

ContentHash = Callable[[bytes], int]


def seeded_content_hash() -> ContentHash:
    """xxh3_64 with a seed of its own per manager, so that collisions can't be prepared."""
    seed = int.from_bytes(os.urandom(8), "little")

    def content_hash(content: bytes) -> int:
        return xxhash.xxh3_64_intdigest(content, seed)

    return content_hash


class BlockManager:
    """Hands out blocks and finds the blocks that already hold the start of a prompt.

    The prefix cache maps (uid of the parent's content, hash of the own content) to a block and
    compares the content's bytes on a hit. The uid names the whole chain of contents up to the
    parent, so a colliding hash costs a miss and can never serve another prompt's K/V. Contents
    are token ids and the sequence's extra key.

    Blocks are registered when their last slot is scheduled, before the step has run, so equal
    prompts share within one step. `commit(step)` makes that final; `rollback(step)` takes back
    what steps that failed had registered.

    Args:
        num_blocks: blocks of the KV pool, the null block included.
        block_size: token slots of a block.
        enable_prefix_caching: False: nothing is registered, so nothing is found.
        content_hash: bytes to int; the tests replace it by a constant.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        content_hash: ContentHash | None = None,
    ) -> None:
        assert num_blocks >= 2, f"{num_blocks=}: the null block and one more are needed"
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._hash = content_hash or seeded_content_hash()
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeBlockQueue()
        for block in self._blocks[NULL_BLOCK_ID + 1 :]:
            self._free.append(block)
        self._registered: dict[tuple[int, int], Block] = {}
        self._pending: dict[int, list[Block]] = {}  # step -> blocks it registered
        self._last_uid = ROOT_UID

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences can own: all but the null block."""
        return len(self._blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns; those still registered are among them."""
        return len(self._free)

    @property
    def num_registered_blocks(self) -> int:
        """Blocks whose content the prefix cache can find, owned or free."""
        return len(self._registered)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    # -- the prefix cache -------------------------------------------------------------------

    def find_prefix(self, token_ids: np.ndarray, extra_key: bytes = b"") -> list[Block]:
        """Blocks that hold the leading tokens, without claiming them.

        At least one token is left over, since its logits are what the caller wants.

        Args:
            token_ids: [num_tokens] int32.
            extra_key: what else the K/V depends on (a tenant's salt).
        """
        hits: list[Block] = []
        if not self.enable_prefix_caching:
            return hits
        num_blocks = (len(token_ids) - 1) // self.block_size
        parent = ROOT_UID
        for index in range(num_blocks):
            content = self._content(token_ids, index, extra_key)
            block = self._registered.get((parent, self._hash(content)))
            if block is None or block.content != content:
                break
            hits.append(block)
            parent = block.uid
        return hits

    def num_free_hits(self, hits: Iterable[Block]) -> int:
        """How many of `hits` are free now: claiming those shrinks the free queue."""
        return sum(block.ref_count == 0 for block in hits)

    def claim(self, sequence: Sequence, hits: list[Block]) -> None:
        """Make `hits`, in order, the first blocks of a sequence that owns none.

        They are what `find_prefix` gave, or blocks of a sibling, which need not be registered.
        """
        assert not sequence.blocks, f"{sequence.request_id} owns blocks already"
        for block in hits:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1
        sequence.blocks = list(hits)
        if hits and hits[-1].uid != UNREGISTERED:
            sequence.num_chained_blocks = len(hits)
            sequence.chain_uid = hits[-1].uid

    def register(
        self, sequence: Sequence, token_ids: np.ndarray, num_scheduled: int, step: int
    ) -> None:
        """Put the sequence's newly full blocks into the prefix cache.

        Args:
            token_ids: the sequence's tokens, int32, at least `num_scheduled` of them.
            num_scheduled: tokens whose K/V is in the pool once `step` has run.
        """
        first, last = sequence.num_chained_blocks, num_scheduled // self.block_size
        if not self.enable_prefix_caching or sequence.chain_uid == BROKEN_CHAIN or first >= last:
            return
        chain = sequence.chain_uid
        for index in range(first, last):
            content = self._content(token_ids, index, sequence.extra_key)
            key = (chain, self._hash(content))
            known = self._registered.get(key)
            if known is None:
                chain = self._register_block(sequence.blocks[index], key, content, step)
            elif known.content == content:
                # Equal prompts that ran side by side: the first copy stays the one that is
                # found, and this sequence goes on under the same chain.
                chain = known.uid
            else:
                # Another content holds this key. What follows could never be found.
                chain = BROKEN_CHAIN
                break
        sequence.chain_uid = chain
        sequence.num_chained_blocks = last

    def commit(self, step: int) -> None:
        """`step` ran: what it registered stays."""
        self._pending.pop(step, None)

    def rollback(self, step: int) -> None:
        """`step` failed: forget what it registered, since its K/V may be unwritten.

        Every sequence of the step must give up its blocks too, and so must those of later steps,
        latest step first, since they may have hit a block registered here.
        """
        for block in self._pending.pop(step, ()):
            if block.registered_step == step:
                self._forget(block)
                if block.ref_count == 0:
                    self._free.remove(block)
                    self._free.append_left(block)

    def reset_prefix_cache(self) -> None:
        """Forget all contents; blocks that sequences own stay theirs."""
        for block in list(self._registered.values()):
            self._forget(block)

    # -- ownership --------------------------------------------------------------------------

    def allocate(self, sequence: Sequence, num_blocks: int) -> None:
        """Give the sequence `num_blocks` more blocks; the caller saw to it that they are free."""
        for _ in range(num_blocks):
            block = self._free.pop_left()
            if block.uid != UNREGISTERED:
                self._forget(block)
            block.ref_count = 1
            sequence.blocks.append(block)

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks of a sequence; their contents stay findable until reused.

        The tail goes first into the queue, so it is also reused first: a prefix whose head is
        gone is worth nothing. Blocks that hold nothing findable are reused before all others.
        """
        for block in reversed(sequence.blocks):
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.uid == UNREGISTERED:
                    self._free.append_left(block)
                else:
                    self._free.append(block)
        sequence.blocks = []
        sequence.num_chained_blocks = 0
        sequence.chain_uid = ROOT_UID

    def forget(self, sequence: Sequence) -> None:
        """Take the sequence's blocks out of the prefix cache; it still owns them."""
        for block in sequence.blocks:
            if block.uid != UNREGISTERED:
                self._forget(block)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recount everything from the sequences that own blocks; raise AssertionError if off."""
        owners = Counter(block.block_id for s in sequences for block in s.blocks)
        free = list(self._free)
        assert len(free) == len(self._free), "the free queue's length is wrong"
        assert len({block.block_id for block in free}) == len(free), "a block is free twice"
        assert NULL_BLOCK_ID not in owners, "a sequence owns the null block"
        assert self._blocks[NULL_BLOCK_ID] not in free, "the null block is free"
        assert len(free) + len(owners) == self.num_usable_blocks, "blocks are lost or doubled"
        for block in self._blocks:
            assert block.ref_count == owners[block.block_id], f"{block}: refs are off"
        for block in free:
            assert block.ref_count == 0, f"{block} is free and owned"
        for key, block in self._registered.items():
            assert block.key == key and block.uid != UNREGISTERED, f"{block} is misfiled"
            assert key[1] == self._hash(block.content), f"{block}: content changed"
        registered = sum(block.uid != UNREGISTERED for block in self._blocks)
        assert registered == len(self._registered), "a registered block can't be found"

    def _content(self, token_ids: np.ndarray, index: int, extra_key: bytes) -> bytes:
        start = index * self.block_size
        return token_ids[start : start + self.block_size].tobytes() + extra_key

    def _register_block(self, block: Block, key: tuple[int, int], content: bytes, step: int) -> int:
        if block.uid != UNREGISTERED:
            # Under a parent that was forgotten since, where nobody can find it; a sibling that
            # shares it registers it under what is there now.
            self._forget(block)
        self._last_uid += 1
        block.uid = self._last_uid
        block.key = key
        block.content = content
        block.registered_step = step
        self._registered[key] = block
        self._pending.setdefault(step, []).append(block)
        return block.uid

    def _forget(self, block: Block) -> None:
        del self._registered[block.key]
        block.uid = UNREGISTERED
        block.content = b""
        block.registered_step = -1
