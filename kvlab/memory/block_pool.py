"""One cache group's blocks: the free queue, lifetimes, shared references and weak identities, in packed form.

It owns where a free block stands in line and how many references a block has. It refuses to know requests:
who holds a block, and whether a change is allowed, is the allocator's business.

A block is either in the free queue or in some block table, each time as one word (generation, index). So the
pool writes down only what a table does not say: second references, identities, rows that differ from the view.

    free queue, a ring of words      hole: taken out of the middle, skipped when the head passes it
        head                                tail
         | 3@4 | 7@1 | hole | 0@9 | 5@2 |    |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvlab.contract import Rejected
from kvlab.memory.facts import PoolFacts
from kvlab.memory.identities import Identities, Name, Places

GENERATION_SHIFT = 32
INDEX_MASK = (1 << GENERATION_SHIFT) - 1
NEXT_LIFETIME = 1 << GENERATION_SHIFT
_NEXT = np.int64(NEXT_LIFETIME)
HOLE = -1
LAST_POSITION = (1 << 31) - 1
BORN_KEPT = 64
"""How many allocations may wait until the generation column is brought up to date in one go."""


def pack(index: int, generation: int) -> int:
    """A handle as one 64-bit word: generation above, block index below."""
    return generation << GENERATION_SHIFT | index


def index_of(word: int) -> int:
    return word & INDEX_MASK


def generation_of(word: int) -> int:
    return word >> GENERATION_SHIFT


@dataclass(frozen=True, slots=True)
class PhysicalBlockHandle:
    """A block in one of its lifetimes (article 0x05F). Two lifetimes of one block are different handles."""

    pool_id: str
    cache_group_id: str
    block_id: int
    generation: int

    def __str__(self) -> str:
        return f"{self.block_id}@{self.generation}"


class BlockPool:
    """`num_blocks` blocks of one cache group. Every operation costs O(blocks it names), whatever the pool holds.

    41 bytes a block (ring 16, generation 4, identity 21). Dictionary entries exist only for blocks that are shared,
    are reserved or leased, or hold other rows than their table says. `spare` counts the free blocks that no
    open transaction has reserved or leased. Passing a hole and squeezing holes
    out of the ring is paid for by the operation that made them (amortised). `facts` mirrors each committed change
    where the whole state is audited.
    """

    __slots__ = ("_born", "_generation", "block_size", "cursor", "facts", "first_block_id", "group", "head", "holes",
                 "keys", "leases", "num_blocks", "parked", "place", "reserved", "ring", "rows", "shared", "size",
                 "spare", "spoiled", "tail", "written")

    def __init__(self, group: str, num_blocks: int, first_block_id: int, block_size: int,
                 facts: PoolFacts | None = None) -> None:
        self.group, self.num_blocks, self.first_block_id = group, num_blocks, first_block_id
        self.block_size, self.facts = block_size, facts
        self.size = 2 * num_blocks
        self.ring = np.empty(self.size, np.int64)
        self.ring[:num_blocks] = np.arange(num_blocks)
        self._generation, self._born = np.zeros(num_blocks, np.int32), []
        self.head, self.tail, self.holes, self.cursor, self.spare = 0, num_blocks, 0, 0, num_blocks
        self.shared: dict[int, int] = {}
        self.rows: dict[int, int] = {}
        self.keys, self.place = Identities(num_blocks), Places(num_blocks)
        self.reserved: dict[int, int] = {}
        self.leases: dict[int, int] = {}
        self.parked: dict[int, int] = {}
        self.spoiled: set[int] = set()
        self.written: set[int] = set()

    def restore(self, generation: Sequence[int], order: Sequence[int], keys: dict[int, str]) -> None:
        """Fill an empty pool: generations by index, the free queue next one first, identities. O(pool)."""
        self._generation = np.array(generation, np.int32)
        self.head, self.tail, self.holes, self.cursor, self.spare = 0, len(order), 0, 0, len(order)
        at = np.array(order, np.int64)
        self.ring[: len(order)] = self._generation[at].astype(np.int64) << GENERATION_SHIFT | at
        self.keys, self.place = Identities(self.num_blocks), Places(self.num_blocks)
        self.keys.update(keys)
        self.place.update((i, position) for position, i in enumerate(order) if i in keys)

    # ------------------------------------------------------------------ names
    def text(self, word: int) -> str:
        """The printed handle, for example `1002@9`."""
        return f"{self.first_block_id + index_of(word)}@{generation_of(word)}"

    def word(self, text: str) -> int:
        """The inverse of `text`; `malformed_snapshot` where it is no handle of this pool."""
        number, _, generation = str(text).partition("@")
        if not (number.isdigit() and generation.isdigit() and int(generation) <= INDEX_MASK >> 1):
            raise Rejected("malformed_snapshot", f"{text!r} is not a handle")
        index = int(number) - self.first_block_id
        if not 0 <= index < self.num_blocks:
            raise Rejected("malformed_snapshot", f"group {self.group} has no block {number}")
        return pack(index, int(generation))

    def handle(self, word: int) -> PhysicalBlockHandle:
        return PhysicalBlockHandle(self.group, self.group, self.first_block_id + index_of(word), generation_of(word))

    def generations(self) -> np.ndarray:
        """The present generation of each block, `int32[num_blocks]`. O(lifetimes begun since the last look)."""
        if self._born:
            words = np.concatenate(self._born)
            self._generation[words & INDEX_MASK] = words >> GENERATION_SHIFT
            self._born.clear()
        return self._generation

    def current(self, word: int) -> bool:
        """Whether the handle names the block's present lifetime."""
        return int(self.generations()[word & INDEX_MASK]) == word >> GENERATION_SHIFT

    # ------------------------------------------------------------------ the free queue
    @property
    def free_count(self) -> int:
        return self.tail - self.head - self.holes

    def queue(self) -> Iterator[int]:
        """Free block indices, next one first. O(free blocks): for snapshots and checks only."""
        for word in self._words(self.head, self.tail):
            if word != HOLE:
                yield word & INDEX_MASK

    def _words(self, start: int, end: int) -> list[int]:
        size = self.size
        a, b = start % size, start % size + end - start
        return self.ring[a:b].tolist() + (self.ring[: b - size].tolist() if b > size else [])

    def take(self, count: int, evicted: list[Name]) -> np.ndarray | None:
        """The next `count` free blocks begin new lifetimes at once; their words, or None if too few are free.

        The short way, for an allocation that nobody has staged and no `facts` follow: O(1) array operations.
        `evicted` collects the identities that end by it.
        """
        if self.reserved or self.parked:
            words = self.reserve(count)
            evicted.extend(key for word in words if (key := self.begin(word, self.block_size)))
            return np.array(words, np.int64) if words else None
        if self.spare < count:
            return None
        self.spare -= count
        words, passed = self._segment(count), count
        if self.holes:
            words, passed = self._over_holes(count)
            self.holes -= passed - count
        words = np.add(words, _NEXT)
        self.head = self.cursor = self.head + passed
        if self.holes:
            self.pass_holes()
        if self.place.count:
            self._end_identities(words & INDEX_MASK, evicted)
        self._born.append(words)
        if len(self._born) > BORN_KEPT:
            self.generations()
        return words

    def _end_identities(self, indices: np.ndarray, evicted: list[Name]) -> None:
        """What free blocks stood for until now ends with their new lifetimes."""
        named = indices[self.keys.have(indices)]
        if len(named):
            evicted.extend(self.keys.end(named))
            self.place.leave(named)
            if self.spoiled:
                self.spoiled.difference_update(named.tolist())

    def _segment(self, count: int) -> np.ndarray:
        """The next `count` entries of the ring, holes among them."""
        ring, size, at = self.ring, self.size, self.head % self.size
        return ring[at : at + count] if at + count <= size else np.concatenate((ring[at:], ring[: at + count - size]))

    def _over_holes(self, count: int) -> tuple[np.ndarray, int]:
        """The next `count` words and how many entries they stand among. O(entries), which the holes have paid for."""
        span = count
        while True:
            span = min(2 * span, self.tail - self.head)
            entries = self._segment(span)
            full = np.flatnonzero(entries != HOLE)
            if len(full) >= count:
                return entries[full[:count]], int(full[count - 1]) + 1 if count else 0

    def pass_holes(self) -> None:
        """The head moves on to the first entry that is no hole."""
        size = self.size
        while self.holes and self.ring[self.head % size] == HOLE:
            self.head += 1
            self.holes -= 1
        self.cursor = max(self.cursor, self.head)

    def reserve(self, count: int) -> list[int]:
        """The next `count` free blocks that nobody has reserved or leased, marked; an empty list if too few.

        Given as the words that they will have. They keep their places in the queue until `begin`, so that
        `unreserve` has nothing to restore.
        """
        if self.spare < count:
            return []
        self.spare -= count
        found: list[int] = []
        marked, leased, position = self.reserved, self.leases, self.cursor
        while len(found) < count:
            for word in self._words(position, min(position + count, self.tail)):
                index = word & INDEX_MASK
                if word != HOLE and index not in marked and index not in leased:
                    marked[index] = position
                    found.append(word + NEXT_LIFETIME)
                position += 1
                if len(found) == count:
                    break
        self.cursor = position
        return found

    def unreserve(self, words: Iterable[int]) -> None:
        for word in words:
            self._spare_again(self.reserved.pop(word & INDEX_MASK, None))

    def _spare_again(self, position: int | None) -> None:
        if position is not None:
            self.spare += 1
            self.cursor = min(self.cursor, position)

    def spoil(self, words: Iterable[int]) -> None:
        """Rows of these free blocks may have been overwritten by a transaction that then broke off.

        What is committed stays as it was, but nobody may find a block by an identity that its rows no longer have.
        """
        self.spoiled.update(i for i in map(index_of, words) if i in self.keys)

    def _unlink(self, position: int) -> None:
        """Take the entry at a position out of the queue; the head passes the holes that it meets. Amortised O(1)."""
        self.ring[position % self.size] = HOLE
        self.holes += 1
        self.pass_holes()

    def _link(self, word: int) -> int:
        """Append one word at the end of the queue; its position. Amortised O(1)."""
        if self.tail - self.head == self.size or self.tail == LAST_POSITION:
            self.squeeze()
        position = self.tail
        self.ring[position % self.size] = word
        self.tail += 1
        return position

    def squeeze(self) -> None:
        """Close the holes in the ring. O(pool), once every `num_blocks` holes at the most."""
        words = [w for w in self._words(self.head, self.tail) if w != HOLE]
        moved = {w & INDEX_MASK: position for position, w in enumerate(words)}
        for places in (self.place, self.reserved, self.parked):
            places.update([(i, moved[i]) for i in places])
        self.ring[: len(words)] = words
        self.head, self.tail, self.holes, self.cursor = 0, len(words), 0, 0

    # ------------------------------------------------------------------ lifetimes and references
    def begin(self, word: int, rows: int) -> str | None:
        """A reserved block begins the lifetime that its word names: out of the queue, one reference, `rows` rows.

        Returns the cached identity that the block loses by it, if any.
        """
        index = word & INDEX_MASK
        if self.facts is not None:
            self.facts.begin(index, word >> GENERATION_SHIFT, rows)
        self._unlink(self.reserved.pop(index))
        self.generations()[index] = word >> GENERATION_SHIFT
        self.spoiled.discard(index)
        self.place.pop(index, None)
        return self.keys.pop(index, None)

    def refs(self, index: int) -> int:
        """References of a block that some table names."""
        return 1 + self.shared.get(index, 0)

    def is_free(self, index: int) -> bool:
        """Whether a block with an identity or a lease stands in the free queue."""
        return index in self.place or index in self.parked

    def add_ref(self, word: int) -> None:
        """One more table names the block. A cached block that nobody held leaves the queue and is live again."""
        index = word & INDEX_MASK
        if self.facts is not None:
            self.facts.add_ref(index)
        position = self.place.pop(index, None)
        if position is None:
            self.shared[index] = self.shared.get(index, 0) + 1
        else:
            self.spare -= self.parked.pop(index, None) is None
            self._unlink(position)

    def drop_ref(self, word: int) -> bool:
        """One table less names the block; True if it went back to the free queue."""
        index = word & INDEX_MASK
        if self.facts is not None:
            self.facts.drop_ref(index)
        more = self.shared.get(index, 0)
        if more:
            if more == 1:
                del self.shared[index]
            else:
                self.shared[index] = more - 1
            return False
        self.rows.pop(index, None)
        position = self._link(word)
        if index in self.keys:
            self.place[index] = position
        if index in self.leases:
            self.parked[index] = position
        else:
            self.spare += 1
        return True

    def lease(self, word: int) -> None:
        """Keep a block from being given away while its rows are read or written, whoever lets go of it.

        One that stands in the free queue, or loses its last reference meanwhile, keeps its place there, marked. So
        the end of a lease, like that of a reservation, changes nothing that is committed.
        """
        index = word & INDEX_MASK
        self.leases[index] = self.leases.get(index, 0) + 1
        if index in self.place and index not in self.parked:
            self.parked[index] = self.place[index]
            self.spare -= 1

    def unlease(self, word: int) -> None:
        index = word & INDEX_MASK
        left = self.leases.pop(index) - 1
        if left:
            self.leases[index] = left
        else:
            self._spare_again(self.parked.pop(index, None))

    def valid_rows(self, index: int, seen: int) -> int:
        """Rows that a held block holds, where one table sees `seen` of them. A shared block is full or noted."""
        return self.rows.get(index, self.block_size if index in self.shared else seen)

    def set_rows(self, index: int, rows: int) -> None:
        """A block that one table alone names now holds as many rows as that table says."""
        self.rows.pop(index, None)
        if self.facts is not None:
            self.facts.set_rows(index, rows)

    def set_key(self, index: int, key: Name | None) -> None:
        """Give the block a cached identity, or take it away. It adds no reference (article 0x04B)."""
        if self.facts is not None:
            self.facts.set_key(index, key)
        if key is None:
            self.keys.pop(index, None)
            self.place.pop(index, None)
        else:
            self.keys[index] = key
