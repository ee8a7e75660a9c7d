"""Which blocks of one cache group stand under which key: a hash table over a log of keys, all in columns.

It owns the packed form: no key, no handle and no witness has an object of its own. It refuses to decide which blocks
live and who may look. A block stands under one key of one part at a time; several blocks may stand under one key.

    slots   open addressing, two for each block: the row of the oldest block under a key, or -1
    rows    a log: key | handle as it was published | part. What one publication adds stands in one piece, so a lookup
            that has found one block compares the keys behind it with the rows behind it, many at a time
    spots   the row of each block, or -1
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvlab.memory.block_pool import GENERATION_SHIFT, INDEX_MASK, BlockPool, index_of
from kvlab.reuse.token_keys import TOKEN_BYTES

NONE = -1
FIRST = 1 << 15
"""Marks a row that nobody may come to from the row before: a run begins here, or another block is the older one under
its key."""
LAST_PART = FIRST - 1


class Record(NamedTuple):
    """What a key was made of (the witness): its parent's key, which block of the prefix, tokens and extras as bytes."""

    parent: bytes
    block: int
    tokens: bytes
    extras: bytes


def rows_of(values: list[bytes]) -> np.ndarray:
    """Equally long values as rows of bytes."""
    return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), -1)


class Witnesses:
    """Columns of what each block's key was made of: 4 bytes a token, and a parent's key and a number a block."""

    __slots__ = ("extras", "numbers", "parents", "tokens")

    def __init__(self, num_blocks: int, width: int, block_size: int) -> None:
        self.tokens = np.zeros((num_blocks, block_size * TOKEN_BYTES), np.uint8)
        self.parents = np.zeros((num_blocks, width), np.uint8)
        self.numbers = np.zeros(num_blocks, np.int32)
        self.extras: dict[int, bytes] = {}

    def put(self, indices: np.ndarray, records: list[Record]) -> None:
        """Keep what the keys of these blocks were made of."""
        self.tokens[indices] = rows_of([r.tokens for r in records])
        self.parents[indices] = rows_of([r.parent for r in records])
        self.numbers[indices] = [r.block for r in records]
        for index, record in zip(indices.tolist(), records, strict=True):
            self.extras.pop(index, None)
            if record.extras:
                self.extras[index] = record.extras

    def match(self, indices: np.ndarray, packed: bytes, root: bytes, keys: list[bytes]) -> np.ndarray:
        """Which of these blocks were made of these tokens, one block after another, under each key's parent."""
        tokens, parents = self.tokens.take(indices, 0), self.parents.take(indices, 0)
        above = b"".join([root, *keys[:-1]])
        if tokens.tobytes() == packed and parents.tobytes() == above:
            return np.ones(len(indices), bool)
        same = (tokens == np.frombuffer(packed, np.uint8).reshape(len(indices), -1)).all(1)
        return same & (parents == np.frombuffer(above, np.uint8).reshape(len(indices), -1)).all(1)

    def record(self, index: int) -> Record:
        return Record(self.parents[index].tobytes(), int(self.numbers[index]), self.tokens[index].tobytes(),
                      self.extras.get(index, b""))


class KeyTable:
    """Key -> blocks, for the blocks of one pool and keys of `width` bytes.

    1.0625 * (`width` + 10) + 12 bytes a block (57 with SHA-256). A probe costs O(1) expected: half of the slots are
    always free. `twins` has the younger blocks under a key that an older one has, by the older block.
    """

    __slots__ = ("_keys", "_parts", "_spots", "_words", "end", "keys", "parts", "pool", "room", "slots", "spots",
                 "twins", "width", "witnesses", "words")

    def __init__(self, pool: BlockPool, width: int, witness_rows: int | None) -> None:
        blocks = pool.num_blocks
        self.pool, self.width, self.end, self.room = pool, width, 0, blocks + blocks // 16 + 8
        self.slots = array("i", [NONE]) * (2 * blocks + 1)
        self._keys, self._words = bytearray(width * self.room), array("q", bytes(8 * self.room))
        self._parts, self._spots = array("H", bytes(2 * self.room)), array("i", [NONE]) * blocks
        self.keys = np.frombuffer(self._keys, np.uint8).reshape(self.room, width)
        self.words = np.frombuffer(self._words, np.int64)
        self.parts = np.frombuffer(self._parts, np.uint16)
        self.spots = np.frombuffer(self._spots, np.int32)
        self.twins: dict[int, list[int]] = {}
        self.witnesses = None if witness_rows is None else Witnesses(blocks, width, witness_rows)

    # ------------------------------------------------------------------ one block, one key
    def key(self, index: int) -> bytes:
        row = self._spots[index]
        return bytes(self._keys[row * self.width : row * self.width + self.width])

    def word(self, index: int) -> int:
        """The handle of a block as it was published."""
        return self._words[self._spots[index]]

    def part(self, index: int) -> int:
        """The part in which a block was published, 0 for none."""
        row = self._spots[index]
        return self._parts[row] & LAST_PART if row >= 0 else 0

    def lives(self, index: int) -> bool:
        """Whether a published block still is what it was: same lifetime, identity kept."""
        return index in self.pool.keys and self.pool.current(self.word(index))

    def at_hand(self, index: int) -> bool:
        """Whether a block may be had now."""
        return self.lives(index) and index not in self.pool.reserved and index not in self.pool.spoiled

    def find(self, part: int, key: bytes) -> int:
        """The row of the oldest block that was published under a key of a part, or -1."""
        slots, keys, parts, width = self.slots, self._keys, self._parts, self.width
        at = int.from_bytes(key[:8], "little") % len(slots)
        while (row := slots[at]) >= 0:
            if parts[row] & LAST_PART == part and keys[row * width : row * width + width] == key:
                break
            at = at + 1 if at + 1 < len(slots) else 0
        return row

    def under(self, part: int, key: bytes) -> list[int]:
        """All blocks under a key, the oldest first."""
        row = self.find(part, key)
        if row < 0:
            return []
        oldest = index_of(self._words[row])
        return [oldest, *self.twins.get(oldest, ())]

    # ------------------------------------------------------------------ change
    def put(self, part: int, words: np.ndarray, keys: np.ndarray, records: list[Record] | None) -> None:
        """Blocks (handles, in the order of a prompt) are published under these keys, one each.

        What they stood under before is forgotten. O(blocks), amortised over the clearing of the log.
        """
        indices = words & INDEX_MASK
        listed, spots, slots, count = indices.tolist(), self._spots, self.slots, len(words)
        self.forget([index for index in listed if spots[index] >= 0])
        if self.end + count > self.room:
            self._clear_log()
        begin, self.end = self.end, self.end + count
        self._keys[begin * self.width : self.end * self.width] = keys.tobytes()
        self.words[begin : self.end] = words
        self._parts[begin : self.end] = array("H", [part]) * count
        self._parts[begin] |= FIRST
        self.spots[indices] = np.arange(begin, self.end)
        for row, at in enumerate(self._probes(part, keys), begin):  # each is put before the next is probed
            if slots[at] < 0:
                slots[at] = row
            else:
                self.twins.setdefault(index_of(self._words[slots[at]]), []).append(listed[row - begin])
                self._parts[row] |= FIRST
        if self.witnesses is not None:
            self.witnesses.put(indices, records)

    def forget(self, indices: list[int]) -> None:
        """These blocks stand under no key any more; a younger one under the same key takes a slot. O(blocks)."""
        if not indices:
            return
        slots, size, parts, spots = self.slots, len(self.slots), self._parts, self._spots
        for index, at in zip(indices, self._homes(self.keys.take(self.spots[indices], 0)), strict=True):
            row = spots[index]
            while (here := slots[at]) >= 0 and here != row:
                at = at + 1 if at + 1 < size else 0
            if here < 0:
                self._forget_twin(index)
            elif younger := self.twins.pop(index, None) if self.twins else None:
                slots[at] = spots[younger[0]]
                if younger[1:]:
                    self.twins[younger[0]] = younger[1:]
            elif slots[at + 1 if at + 1 < size else 0] < 0:
                slots[at] = NONE
            else:
                self._close(at)
            parts[row], spots[index] = 0, NONE
            if self.witnesses is not None:
                self.witnesses.extras.pop(index, None)

    def _forget_twin(self, index: int) -> None:
        oldest = index_of(self._words[self.find(self.part(index), self.key(index))])
        self.twins[oldest].remove(index)
        if not self.twins[oldest]:
            del self.twins[oldest]

    def _close(self, hole: int) -> None:
        """Free a slot; rows behind it that were pushed over it move back, so that no probe ends too early."""
        slots, keys, width, size, head = self.slots, self._keys, self.width, len(self.slots), min(self.width, 8)
        at = hole
        while True:
            at = at + 1 if at + 1 < size else 0
            row = slots[at]
            if row < 0:
                break
            home = int.from_bytes(keys[row * width : row * width + head], "little") % size
            if (at - home) % size >= (at - hole) % size:
                slots[hole] = row
                hole = at
        slots[hole] = NONE

    def _clear_log(self) -> None:
        """Close the gaps in the log. O(pool), once for a sixteenth of the pool's blocks at the most."""
        kept = np.flatnonzero(self.parts[: self.end])
        moved = np.full(self.end, NONE, np.int32)
        moved[kept] = np.arange(len(kept))
        begins = np.concatenate(([True], np.diff(kept) > 1)) if len(kept) else np.zeros(0, bool)
        for column in (self.keys, self.words, self.parts):
            column[: len(kept)] = column[kept]
        self.parts[: len(kept)][begins] |= FIRST
        self.parts[len(kept) : self.end] = 0
        self.spots[self.words[: len(kept)] & INDEX_MASK] = np.arange(len(kept))
        slots = np.frombuffer(self.slots, np.int32)
        taken = slots >= 0
        slots[taken] = moved[slots[taken]]
        self.end = len(kept)

    # ------------------------------------------------------------------ many keys
    def _homes(self, keys: np.ndarray) -> list[int]:
        """The slot at which the search for each key begins."""
        return (keys[:, :8].copy().view(f"<u{min(self.width, 8)}")[:, 0] % len(self.slots)).tolist()

    def _probes(self, part: int, wanted: np.ndarray) -> Iterator[int]:
        """The slot of each key: where it stands, or the free one where it would."""
        slots, keys, parts, width, size = self.slots, self._keys, self._parts, self.width, len(self.slots)
        flat = wanted.tobytes()
        for n, at in enumerate(self._homes(wanted)):
            while (row := slots[at]) >= 0:
                if parts[row] & LAST_PART == part and keys[row * width : row * width + width] == flat[
                        n * width : n * width + width]:
                    break
                at = at + 1 if at + 1 < size else 0
            yield at

    def ahead(self, part: int, row: int, limit: int) -> int:
        """How many rows, at most `limit`, stand in one piece behind a row: blocks that may follow it in a prompt."""
        behind = self._parts[row + 1 : row + 1 + limit]
        if behind == array("H", [part]) * limit:
            return limit
        return next((n for n, said in enumerate(behind) if said != part), len(behind))

    def agree(self, row: int, keys: list[bytes]) -> int:
        """How many of these keys, from the first on, are those of the rows from `row` on."""
        width = self.width
        if self._keys[row * width : (row + len(keys)) * width] == b"".join(keys):
            return len(keys)
        return next(n for n, key in enumerate(keys, row) if self._keys[n * width : n * width + width] != key) - row

    def handles(self, row: int, count: int) -> array:
        """The handles of so many rows."""
        return self._words[row : row + count]

    def oldest(self, part: int, keys: list[bytes]) -> array:
        """The handle of the oldest block under each key, until one is missing."""
        found = array("q")
        for key in keys:
            if (row := self.find(part, key)) < 0:
                break
            found.append(self._words[row])
        return found

    def stood(self, part: int, keys: np.ndarray) -> np.ndarray:
        """Under which of these keys some block may live; it does where only one was published under the key."""
        slots = self.slots
        found = np.array([slots[at] for at in self._probes(part, keys)], np.int64)
        there = found >= 0
        if there.any():
            indices = self.words[found] & INDEX_MASK
            there &= self.live(indices)
            if self.twins:
                there |= (found >= 0) & np.array([i in self.twins for i in indices.tolist()], bool)
        return there

    # ------------------------------------------------------------------ many blocks
    def live(self, indices: np.ndarray) -> np.ndarray:
        """Which of these blocks were published and still are what they were: same lifetime, identity kept."""
        spots = self.spots.take(indices)
        born = self.words.take(spots) >> GENERATION_SHIFT
        return (self.pool.generations().take(indices) == born) & (spots >= 0) & self.pool.keys.have(indices)

    def stands(self, part: int, indices: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Which of these blocks stand, live, under exactly these keys of this part."""
        spots = self.spots.take(indices)
        same = self.live(indices) & (self.parts.take(spots) & LAST_PART == part)
        if same.any():
            same &= (self.keys.take(spots, 0) == keys).all(1)
        return same

    def of_part(self, part: int) -> np.ndarray:
        """All blocks that were published in a part. O(pool): for snapshots and for the end of a generation."""
        return self.words[: self.end][self.parts[: self.end] & LAST_PART == part] & INDEX_MASK

    def run(self, found: array) -> bytes:
        """The handles of a run of published blocks up to the first that is not at hand; the oldest of several that is.

        At hand: live, and neither reserved by an open transaction nor spoiled by one that broke off. O(run).
        """
        words, pool = np.frombuffer(found, np.int64), self.pool
        indices = words & INDEX_MASK
        good = (pool.generations().take(indices) == words >> GENERATION_SHIFT) & pool.keys.have(indices)
        if pool.reserved or pool.spoiled:
            gone = pool.reserved.keys() | pool.spoiled
            good &= np.array([i not in gone for i in indices.tolist()], bool)
        if good.all():
            return found.tobytes()
        words = words.copy()
        for at in np.flatnonzero(~good).tolist():
            other = next((i for i in self.twins.get(int(indices[at]), ()) if self.at_hand(i)), None)
            if other is None:
                return words[:at].tobytes()
            words[at] = self.word(other)
        return words.tobytes()
