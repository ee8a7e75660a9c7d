"""One cache group's blocks in packed arrays: generations, reference counts, valid rows and the free queue.

It owns where a free block stands in line and how many references a block has. It refuses to know requests:
who holds a block, and whether a change is allowed, is the allocator's business.

    free queue (a doubly linked list through two arrays; entry n is the list's fixed end):
        n <-> 3 <-> 7 <-> 0 <-> n        next[n] is the head, prev[n] the tail
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvlab.contract import FactSum, Rejected, fact_hash

GENERATION_SHIFT = 32
INDEX_MASK = (1 << GENERATION_SHIFT) - 1
UNLINKED = -1


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

    20 bytes a block (generation 4, ref_cnt 4, valid rows 4, two links 8), and one dictionary entry for a
    block that carries a cached identity or stands reserved.
    """

    __slots__ = ("facts", "first_block_id", "free_count", "generation", "group", "keys", "leases", "next",
                 "num_blocks", "prev", "ref_cnt", "reserved", "spoiled", "valid_rows")

    def __init__(self, group: str, num_blocks: int, first_block_id: int, facts: FactSum | None) -> None:
        zeros = bytes(4 * num_blocks)
        self.group, self.num_blocks, self.first_block_id, self.facts = group, num_blocks, first_block_id, facts
        self.generation = array("I", zeros)
        self.ref_cnt = array("i", zeros)
        self.valid_rows = array("i", zeros)
        self.next = array("i", range(1, num_blocks + 1))
        self.next.append(0)
        self.prev = array("i", range(-1, num_blocks))
        self.prev[0] = num_blocks
        self.free_count = num_blocks
        self.keys: dict[int, str] = {}
        self.reserved: set[int] = set()
        self.leases: dict[int, int] = {}
        self.spoiled: set[int] = set()

    def queue_up(self, order: Sequence[int]) -> None:
        """Make the free queue exactly `order`, next one first; all other blocks count as held. O(pool)."""
        end = self.num_blocks
        self.next = array("i", [UNLINKED] * end + [end])
        self.prev = array("i", [UNLINKED] * end + [end])
        self.free_count = 0
        facts, self.facts = self.facts, None
        for index in order:
            self.put(index)
        self.facts = facts

    # ------------------------------------------------------------------ names
    def text(self, word: int) -> str:
        """The printed handle, for example `1002@9`."""
        return f"{self.first_block_id + index_of(word)}@{generation_of(word)}"

    def word(self, text: str) -> int:
        """The inverse of `text`; `malformed_snapshot` where it is no handle of this pool."""
        number, _, generation = str(text).partition("@")
        if not (number.isdigit() and generation.isdigit() and int(generation) <= INDEX_MASK):
            raise Rejected("malformed_snapshot", f"{text!r} is not a handle")
        index = int(number) - self.first_block_id
        if not 0 <= index < self.num_blocks:
            raise Rejected("malformed_snapshot", f"group {self.group} has no block {number}")
        return pack(index, int(generation))

    def handle(self, word: int) -> PhysicalBlockHandle:
        return PhysicalBlockHandle(self.group, self.group, self.first_block_id + index_of(word), generation_of(word))

    def current(self, word: int) -> bool:
        """Whether the handle names the block's present lifetime."""
        return self.generation[word & INDEX_MASK] == word >> GENERATION_SHIFT

    # ------------------------------------------------------------------ the free queue
    def queue(self) -> Iterator[int]:
        """Free block indices, next one first. O(free blocks): for snapshots and checks only."""
        i = self.next[self.num_blocks]
        while i != self.num_blocks:
            yield i
            i = self.next[i]

    def reserve(self, count: int) -> list[int]:
        """The next `count` free blocks that nobody has reserved or leased, marked; an empty list if too few.

        They keep their places in the queue until `take`, so that `unreserve` has nothing to restore.
        """
        if self.available() < count:
            return []
        found, i, marked, leased, links = [], self.next[self.num_blocks], self.reserved, self.leases, self.next
        while len(found) < count:
            if i not in marked and i not in leased:
                found.append(i)
            i = links[i]
        marked.update(found)
        return found

    def available(self) -> int:
        """How many free blocks no open transaction has reserved or leased. O(open leases)."""
        return self.free_count - len(self.reserved) - sum(map(self.is_free, self.leases))

    def unreserve(self, indices: Sequence[int]) -> None:
        self.reserved.difference_update(indices)

    def spoil(self, indices: Sequence[int]) -> None:
        """Rows of these free blocks may have been overwritten by a transaction that then broke off.

        What is committed stays as it was, but nobody may find a block by an identity that its rows no longer have.
        """
        self.spoiled.update(i for i in indices if i in self.keys)

    def take(self, index: int) -> None:
        """Take one block out of the queue, wherever it stands. O(1)."""
        before, after = self.prev[index], self.next[index]
        self._touch_links(before, index)
        self.next[before], self.prev[after] = after, before
        self.next[index] = self.prev[index] = UNLINKED
        self.free_count -= 1
        self.reserved.discard(index)

    def put(self, index: int) -> None:
        """Append one block at the end of the queue. O(1)."""
        end = self.num_blocks
        tail = self.prev[end]
        self._touch_links(tail, index)
        self.next[tail], self.prev[index] = index, tail
        self.next[index], self.prev[end] = end, index
        self.free_count += 1

    def is_free(self, index: int) -> bool:
        return self.next[index] != UNLINKED

    # ------------------------------------------------------------------ lifetimes and references
    def begin(self, index: int, rows: int) -> str | None:
        """Start a new lifetime of a reserved block: out of the queue, generation + 1, one reference.

        Returns the cached identity that the block loses by it, if any.
        """
        self.take(index)
        self.touch(index)
        self.generation[index] += 1
        self.ref_cnt[index] = 1
        self.valid_rows[index] = rows
        self.spoiled.discard(index)
        return self.keys.pop(index, None)

    def add_ref(self, index: int) -> None:
        """One more table names the block. A block that nobody held leaves the queue and is live again."""
        if self.is_free(index):
            self.take(index)
        self.touch(index)
        self.ref_cnt[index] += 1

    def drop_ref(self, index: int) -> bool:
        """One table less names the block; True if it went back to the free queue."""
        self.touch(index)
        self.ref_cnt[index] -= 1
        if self.ref_cnt[index]:
            return False
        if index not in self.keys:
            self.valid_rows[index] = 0
        self.put(index)
        return True

    def lease(self, index: int) -> None:
        """Keep a block from being given away while its rows are read or written, whoever lets go of it.

        One that loses its last reference meanwhile takes its place in the free queue, marked. So the end of a
        lease, like that of a reservation, changes nothing that is committed.
        """
        self.leases[index] = self.leases.get(index, 0) + 1

    def unlease(self, index: int) -> None:
        left = self.leases.pop(index) - 1
        if left:
            self.leases[index] = left

    def set_rows(self, index: int, rows: int) -> None:
        """The block now holds `rows` valid rows."""
        self.touch(index)
        self.valid_rows[index] = rows

    def set_key(self, index: int, key: str | None) -> None:
        """Give the block a cached identity, or take it away. It adds no reference (article 0x04B)."""
        self.touch(index)
        if key is not None:
            self.keys[index] = key
        elif self.keys.pop(index, None) is not None and self.is_free(index):
            self.valid_rows[index] = 0

    # ------------------------------------------------------------------ facts
    def touch(self, index: int) -> None:
        if self.facts is not None:
            self.facts.touch(("block", self, index))

    def _touch_links(self, before: int, index: int) -> None:
        if self.facts is not None:
            self.facts.touch(("link", self, before))
            self.facts.touch(("link", self, index))

    def fact(self, kind: str, index: int) -> int:
        """The hash of a block's own fact, or of its place in the queue: (block, next block)."""
        if kind == "link":
            after = self.next[index]
            return 0 if after == UNLINKED else fact_hash("link", self.group, index, after)
        return fact_hash("block", self.group, index, self.generation[index], self.ref_cnt[index],
                         self.valid_rows[index], self.keys.get(index))

    def facts_total(self) -> int:
        """Sum of all facts, from nothing. O(pool): at load and in checks only."""
        return sum(self.fact("block", i) for i in range(self.num_blocks)) + sum(
            self.fact("link", i) for i in range(self.num_blocks + 1)
        )
