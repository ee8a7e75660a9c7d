"""The entries of a prefix index: which blocks carry which key, in which manifest's part; live as long as the block is.

It owns the parts, one for each manifest, over the key tables of the cache groups. It refuses to decide who may look
(the gate) and which blocks live (the allocator): an entry whose block has been given to somebody else is no entry any
more, whether or not it still stands here. A block's next publication unmaps its last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kvlab.contract import Json
from kvlab.memory.block_pool import BlockPool, index_of
from kvlab.memory.identities import NAME_BYTES, Name, text_of
from kvlab.reuse.key_table import LAST_PART, KeyTable, Record, rows_of
from kvlab.reuse.keys import KeyInputs
from kvlab.reuse.manifests import CacheCompatibilityManifest, SideInput, plain
from kvlab.reuse.token_keys import TOKEN_BYTES, unpack

Manifest = CacheCompatibilityManifest


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
    """All that is published under one manifest: `number` says in a table which keys are its own.

    `sequences` are kept with witnesses only: the whole token sequences that were published, by which the semantic
    length is told apart from the indexed one.
    """

    __slots__ = ("adapter_name", "manifest", "number", "sequences", "tails")

    def __init__(self, manifest: Manifest, adapter_name: str | None, number: int) -> None:
        self.manifest, self.adapter_name, self.number = manifest, adapter_name, number
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


def names_of(part: Part, rows: np.ndarray) -> np.ndarray | list[Name]:
    """The identities that blocks carry in the allocator: one part's key never reads as another's.

    A name, shortened: what may be found is decided by the whole key.
    """
    whose = part.manifest.digest[:8]
    if rows.shape[1] < NAME_BYTES - 4:
        return [f"{whose}/{row.tobytes().hex()}" for row in rows]
    names = np.empty((len(rows), NAME_BYTES), np.uint8)
    names[:, :4] = np.frombuffer(bytes.fromhex(whose), np.uint8)
    names[:, 4:] = rows[:, : NAME_BYTES - 4]
    return names


def name_of(part: Part, key: bytes) -> str:
    """The same for one key, as it prints."""
    name = names_of(part, rows_of([key]))[0]
    return text_of(name if isinstance(name, str) else name.tobytes())


def common(one: bytes, other: bytes) -> int:
    """How many tokens two packed sequences begin with alike. O(tokens)."""
    n = min(len(one), len(other)) // TOKEN_BYTES
    if one[: n * TOKEN_BYTES] == other[: n * TOKEN_BYTES]:
        return n
    a, b = (np.frombuffer(data, np.uint32, n) for data in (one, other))
    different = np.flatnonzero(a != b)
    return int(different[0])


def live(pool: BlockPool, word: int) -> bool:
    """Whether a handle still names a block that carries an identity, as it is committed: O(1)."""
    return index_of(word) in pool.keys and pool.current(word)


class Entries:
    """The parts of one index by manifest digest, and a table of keys for each cache group.

    `width`: bytes of a key. `witness_rows`: tokens of a block where what each key was made of is kept, else None.
    """

    def __init__(self, pools: tuple[BlockPool, ...], width: int, witness_rows: int | None) -> None:
        self.pools = pools
        self.tables = tuple(KeyTable(pool, width, witness_rows) for pool in pools)
        self.parts: dict[str, Part] = {}
        self.bindings: dict[tuple[str, str | None, str | None], str] = {}

    def open(self, manifest: Manifest, adapter_name: str | None) -> Part:
        """The part of a manifest, made where it has none."""
        part = self.parts.get(manifest.digest)
        if part is None:
            taken = {p.number for p in self.parts.values()}
            number = next(n for n in range(1, LAST_PART + 1) if n not in taken)
            part = self.parts[manifest.digest] = Part(manifest, adapter_name, number)
            self.bindings[part.binding] = manifest.digest
        return part

    def close(self, keep: Callable[[Part], bool]) -> int:
        """Forget the parts that are not to be kept; their blocks stay as they are. How many live keys went. O(pool)."""
        gone = [p for p in self.parts.values() if not keep(p)]
        self.parts = {d: p for d, p in self.parts.items() if p not in gone}
        self.bindings = {p.binding: d for d, p in self.parts.items()}
        live = sum(len(self.keys(part)) for part in gone)
        for part in gone:
            for table in self.tables:
                table.forget(table.of_part(part.number).tolist())
        return live

    def keys(self, part: Part) -> set[bytes]:
        """The keys of a part under which some block lives. O(pool)."""
        return {table.key(i) for table in self.tables for i in table.of_part(part.number).tolist() if table.lives(i)}

    def holds(self, part: Part, key: bytes) -> bool:
        """Whether some live block stands under a key already. O(groups x blocks under it)."""
        return any(table.lives(i) for table in self.tables for i in table.under(part.number, key))

    def record(self, part: Part, key: bytes) -> Record | None:
        """What a key was made of, by the oldest live block under it; None without one, and without witnesses."""
        for table in self.tables:
            for index in table.under(part.number, key) if table.witnesses is not None else ():
                if table.lives(index):
                    return table.witnesses.record(index)
        return None

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
        """The live entries of a part in the order of blocks and keys: what is committed of it. O(pool)."""
        rows = {key: self.record(part, key) for key in self.keys(part)}
        for key in sorted(rows, key=lambda key: (rows[key].block if rows[key] else 0, key)):
            handles = {pool.group: [pool.text(table.word(i)) for i in table.under(part.number, key) if table.lives(i)]
                       for pool, table in zip(self.pools, self.tables, strict=True)}
            yield {"key": key.hex(), **record_row(rows[key]), "handles": handles}

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
