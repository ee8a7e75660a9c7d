"""Whole tables at once: blocks of a pool that are held or given back in array operations, where no `facts` follow.

It owns no rule. Callers know that nothing is leased or reserved; what is not so plain goes block by block.
"""

from __future__ import annotations

from array import array

import numpy as np

from kvlab.memory.block_pool import HOLE, INDEX_MASK, LAST_POSITION, BlockPool


def hold_all(pool: BlockPool, indices: list[int]) -> None:
    """One more table names each of these blocks, of which those that are free have identities.

    The short way, where no `facts` follow and nothing is leased: O(1) array operations, a lookup a block.
    """
    blocks, shared = np.array(indices, np.int64), pool.shared
    positions = pool.place.column[blocks]
    free = positions >= 0
    if not free.all():
        for i in blocks[~free].tolist():
            shared[i] = shared.get(i, 0) + 1
        blocks, positions = blocks[free], positions[free]
    if len(blocks):
        pool.place.leave(blocks)
        pool.ring[positions % pool.size] = HOLE
        pool.holes += len(blocks)
        pool.spare -= len(blocks)
        pool.pass_holes()


def drop_cached(pool: BlockPool, words: array | np.ndarray) -> np.ndarray:
    """One table less names each of these blocks; the words of those that went back to the queue, in order.

    As `drop_all`, for blocks that others may name too and that may carry identities.
    """
    gone, shared = np.array(words, np.int64), pool.shared
    indices = (gone & INDEX_MASK).tolist()
    if shared and not shared.keys().isdisjoint(indices):
        gone = gone[[i not in shared for i in indices]]
        for i in indices:
            if more := shared.get(i, 0):
                shared[i] = more - 1
                if more == 1:
                    del shared[i]
        indices = (gone & INDEX_MASK).tolist()
    for i in indices if pool.rows else ():
        pool.rows.pop(i, None)
    if indices:
        drop_all(pool, gone)
        blocks = gone & INDEX_MASK
        named = np.flatnonzero(pool.keys.have(blocks))
        pool.place.put(blocks[named], named + (pool.tail - len(blocks)))
    return gone


def drop_all(pool: BlockPool, words: array | np.ndarray) -> None:
    """Blocks that one table alone names, without identity or lease, go back to the queue in this order.

    The short way, where no `facts` follow: O(1) array operations.
    """
    count, size = len(words), pool.size
    if pool.rows:
        pool.rows.pop(int(words[-1]) & INDEX_MASK, None)
    if pool.tail - pool.head + count > size or pool.tail + count > LAST_POSITION:
        pool.squeeze()
    at = pool.tail % size
    fits = min(count, size - at)
    if fits == count:
        pool.ring[at : at + count] = words
    else:
        pool.ring[at:] = words[:fits]
        pool.ring[: count - fits] = words[fits:]
    pool.tail += count
    pool.spare += count
