"""Whole tables at once: blocks of a pool that are held or given back in array operations, where no `facts` follow.

It owns no rule. Callers know that nothing is leased or reserved; what is not so plain goes block by block.
"""

from __future__ import annotations

from array import array

import numpy as np

from kvlab.memory.block_pool import HOLE, INDEX_MASK, BlockPool


def hold_all(pool: BlockPool, indices: list[int]) -> None:
    """One more table names each of these blocks, of which those that are free have identities.

    The short way, where no `facts` follow and nothing is leased: O(1) array operations, a lookup a block.
    """
    place, shared = pool.place, pool.shared
    positions = [place.pop(i) for i in indices if i in place]
    if len(positions) < len(indices):
        free = set(pool.ring[np.array(positions, np.int64) % pool.size] & INDEX_MASK)
        for i in indices:
            if i not in free:
                shared[i] = shared.get(i, 0) + 1
    if positions:
        pool.ring[np.array(positions) % pool.size] = HOLE
        pool.holes += len(positions)
        pool.spare -= len(positions)
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
        keys = pool.keys
        pool.place.update([(i, at) for at, i in enumerate(indices, pool.tail - len(indices)) if i in keys])
    return gone


def drop_all(pool: BlockPool, words: array | np.ndarray) -> None:
    """Blocks that one table alone names, without identity or lease, go back to the queue in this order.

    The short way, where no `facts` follow: O(1) array operations.
    """
    count, size = len(words), pool.size
    if pool.rows:
        pool.rows.pop(int(words[-1]) & INDEX_MASK, None)
    if pool.tail - pool.head + count > size:
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
