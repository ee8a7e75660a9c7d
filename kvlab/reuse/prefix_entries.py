"""The entries of a prefix index: which blocks carry which key, in which manifest's part; live as long as the block is.

It owns the maps from key to block handle. It refuses to decide who may look (the gate) and which blocks live (the
allocator): an entry whose block has been given to somebody else is no entry any more, whether or not it still
stands here. A block's next publication unmaps its last one, so there are never more entries than blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kvlab.contract import Json
from kvlab.memory.block_pool import GENERATION_SHIFT, INDEX_MASK, BlockPool
from kvlab.reuse.keys import KeyInputs
from kvlab.reuse.manifests import CacheCompatibilityManifest, SideInput, plain
from kvlab.reuse.token_keys import TOKEN_BYTES, unpack

Manifest = CacheCompatibilityManifest
Found = int | list[int]
"""A block handle, or several where one prefix was computed more than once; the oldest first."""


class Record(NamedTuple):
    """What a key was made of (the witness): its parent's key, which block of the prefix, tokens and extras as bytes."""

    parent: bytes
    block: int
    tokens: bytes
    extras: bytes


class Tail(NamedTuple):
    """The first rows of a block that is not full, as one live request wrote them: a handle a group."""

    record: Record
    request: str
    generation: int
    words: tuple[int, ...]

    @property
    def rows(self) -> int:
        return len(self.record.tokens) // TOKEN_BYTES


class Part:
    """All entries published under one manifest: one map a cache group, so that nothing crosses by a lookup.

    `records` and `sequences` are kept with witnesses only: what each key was made of, and the whole token sequences
    that were published, by which the semantic length is told apart from the indexed one.
    """

    __slots__ = ("adapter_name", "manifest", "maps", "records", "sequences", "tails")

    def __init__(self, manifest: Manifest, adapter_name: str | None, groups: int) -> None:
        self.manifest, self.adapter_name = manifest, adapter_name
        self.maps: tuple[dict[bytes, Found], ...] = tuple({} for _ in range(groups))
        self.records: dict[bytes, Record] = {}
        self.tails: dict[bytes, Tail] = {}
        self.sequences: list[tuple[bytes, tuple[SideInput, ...]]] = []

    @property
    def binding(self) -> tuple[str, str | None, str | None]:
        """A namespace, an adapter's name and a salt stand for one manifest at a time."""
        return self.manifest.cache_isolation_namespace, self.adapter_name, self.manifest.cache_salt

    def inputs(self, sides: tuple[SideInput, ...] = ()) -> KeyInputs:
        return KeyInputs(self.adapter_name, self.manifest.cache_salt, sides)

    def semantic(self, packed: bytes, sides: tuple[SideInput, ...]) -> int:
        """The longest prefix that some published sequence computed, in tokens. O(sequences x tokens)."""
        best = 0
        for other, others in self.sequences:
            n = common(packed, other)
            best = max(best, min([n, *(s.start for s in {*sides} ^ {*others})]))
        return best

    def remember(self, packed: bytes, sides: tuple[SideInput, ...]) -> None:
        """Keep a published sequence; one that it continues is told by it from now on."""
        if any(s == sides and other.startswith(packed) for other, s in self.sequences):
            return
        self.sequences = [(o, s) for o, s in self.sequences if not (s == sides and packed.startswith(o))]
        self.sequences.append((packed, sides))


def common(one: bytes, other: bytes) -> int:
    """How many tokens two packed sequences begin with alike. O(tokens)."""
    n = min(len(one), len(other)) // TOKEN_BYTES
    a, b = (np.frombuffer(data, np.uint32, n) for data in (one, other))
    different = np.flatnonzero(a != b)
    return int(different[0]) if len(different) else n


def live(pool: BlockPool, word: int) -> bool:
    """Whether a handle still names a block that carries an identity, as it is committed: O(1)."""
    return word & INDEX_MASK in pool.keys and pool.current(word)


def at_hand(pool: BlockPool, word: int) -> bool:
    """Whether a live block may be had now: not reserved by an open transaction, nor spoiled by one that broke off."""
    index = word & INDEX_MASK
    return live(pool, word) and index not in pool.reserved and index not in pool.spoiled


def live_run(pool: BlockPool, found: list[Found]) -> list[int]:
    """The handles of a run of entries up to the first that is not at hand; the oldest of several that is. O(run).

    Lifetimes are compared for the whole run at once: a
    block at a time costs as much as its hash.
    """
    if not found:
        return []
    try:
        words = np.frombuffer(array("q", found), np.int64)
    except TypeError:  # some block was computed more than once
        found = [f if type(f) is int else next((w for w in f if at_hand(pool, w)), f[0]) for f in found]
        words = np.array(found, np.int64)
    places = words & INDEX_MASK
    good = pool.generations()[places] == words >> GENERATION_SHIFT
    end = len(found) if good.all() else int(good.argmin())
    indices, keys, gone = places.tolist(), pool.keys, pool.reserved.keys() | pool.spoiled
    if not all(map(keys.__contains__, indices)) or not gone.isdisjoint(indices):
        end = next((at for at in range(end) if indices[at] not in keys or indices[at] in gone), end)
    return found[:end]


class Entries:
    """The parts of one index by manifest digest, and what each block was last published under, per group.

    `key_of` and `part_of` are columns by block index: 16 bytes a block, where a dictionary takes ten times as much.
    """

    def __init__(self, pools: tuple[BlockPool, ...]) -> None:
        self.pools = pools
        self.parts: dict[str, Part] = {}
        self.bindings: dict[tuple[str, str | None, str | None], str] = {}
        self.key_of: tuple[list[bytes | None], ...] = tuple([None] * pool.num_blocks for pool in pools)
        self.part_of: tuple[list[Part | None], ...] = tuple([None] * pool.num_blocks for pool in pools)

    def open(self, manifest: Manifest, adapter_name: str | None) -> Part:
        """The part of a manifest, made where it has none."""
        part = self.parts.get(manifest.digest)
        if part is None:
            part = self.parts[manifest.digest] = Part(manifest, adapter_name, len(self.pools))
            self.bindings[part.binding] = manifest.digest
        return part

    def close(self, keep: Callable[[Part], bool]) -> int:
        """Forget the parts that are not to be kept; their blocks stay as they are. How many live keys went. O(pool)."""
        gone = {id(p): p for p in self.parts.values() if not keep(p)}
        self.parts = {d: p for d, p in self.parts.items() if id(p) not in gone}
        self.bindings = {p.binding: d for d, p in self.parts.items()}
        for parts, keys in zip(self.part_of, self.key_of, strict=True):
            for index, part in enumerate(parts):
                if id(part) in gone:
                    parts[index] = keys[index] = None
        return sum(self.holds(part, key) for part in gone.values() for key in part.maps[0])

    def holds(self, part: Part, key: bytes) -> bool:
        """Whether some live block stands under a key already. O(groups x blocks under it)."""
        for pool, entries in zip(self.pools, part.maps, strict=False):
            have = entries.get(key, ())
            if any(live(pool, word) for word in ([have] if type(have) is int else have)):
                return True
        return False

    def put(self, part: Part, g: int, key: bytes, word: int) -> None:
        """One more block under a key; what the block was published as before is unmapped in the same step."""
        index = word & INDEX_MASK
        before = self.part_of[g][index]
        if before is not None:
            self._unmap(before, self.key_of[g][index], g, index)
        self.part_of[g][index], self.key_of[g][index] = part, key
        entries = part.maps[g]
        have = entries.get(key)
        if have is None:
            entries[key] = word
        else:
            entries[key] = [have, word] if type(have) is int else [*have, word]

    def _unmap(self, part: Part, key: bytes, g: int, index: int) -> None:
        entries = part.maps[g]
        have = entries[key]
        left = [w for w in ([have] if type(have) is int else have) if w & INDEX_MASK != index]
        if left:
            entries[key] = left if len(left) > 1 else left[0]
            return
        del entries[key]
        if not any(key in other for other in part.maps):
            part.records.pop(key, None)

    def tail_lives(self, tail: Tail, requests: dict[str, Any], block_size: int) -> bool:
        """Whether the request that wrote a tail still has it, whole. Rows of a released block are nobody's."""
        request = requests.get(tail.request)
        if request is None or request.generation != tail.generation:
            return False
        block = tail.record.block
        return request.context >= block * block_size + tail.rows and all(
            block < len(table) and table[block] == word
            for table, word in zip(request.tables, tail.words, strict=True))

    # ------------------------------------------------------------------ plain data
    def rows(self, part: Part) -> Iterator[Json]:
        """The live entries of a part in the order of blocks and keys: what is committed of it. O(entries)."""
        keys = dict.fromkeys(key for entries in part.maps for key in entries)
        at = {key: (part.records[key].block if key in part.records else 0, key) for key in keys}
        for key in sorted(keys, key=at.__getitem__):
            handles: Json = {}
            for pool, entries in zip(self.pools, part.maps, strict=True):
                have = entries.get(key, ())
                words = [have] if type(have) is int else have
                handles[pool.group] = [pool.text(w) for w in words if live(pool, w)]
            if any(handles.values()):
                yield {"key": key.hex(), **record_row(part.records.get(key)), "handles": handles}

    def snapshot(self, requests: dict[str, Any], block_size: int) -> list[Json]:
        """Every part with its live entries and tails, in a stable order. O(entries)."""
        return [{
            "manifest": plain(part.manifest), "adapter_name": part.adapter_name,
            "publication_generation": part.manifest.publication_generation, "entries": list(self.rows(part)),
            "tails": [{"key": key.hex(), **record_row(tail.record), "request": tail.request,
                       "request_generation": tail.generation,
                       "handles": {p.group: p.text(w) for p, w in zip(self.pools, tail.words, strict=True)}}
                      for key, tail in sorted(part.tails.items()) if self.tail_lives(tail, requests, block_size)],
            "sequences": [{"tokens": unpack(packed), "side_inputs": [plain(s) for s in sides]}
                          for packed, sides in sorted(part.sequences, key=lambda row: (row[0], str(row[1])))],
        } for _, part in sorted(self.parts.items())]


def record_row(record: Record | None) -> Json:
    """A witness in plain data; empty fields where none is kept."""
    if record is None:
        return {"block": None, "parent": None, "tokens": None, "extras": None}
    return {"block": record.block, "parent": record.parent.hex(), "tokens": unpack(record.tokens),
            "extras": record.extras.decode()}
