"""Reading a prefix index from plain data, every key recomputed from what it was made of; it holds no state.

The same validator runs on every load and every check. Order: form, generations, then each entry (length, extras, key,
block) and each tail.
"""

from __future__ import annotations

import json

import numpy as np

from kvlab.contract import Json, Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.block_pool import index_of
from kvlab.memory.plan import identity
from kvlab.reuse.chain import ChainHash, block_key, tail_key
from kvlab.reuse.gate_state import State
from kvlab.reuse.key_table import Record, rows_of
from kvlab.reuse.manifests import CacheCompatibilityManifest, SideInput, read_record
from kvlab.reuse.prefix_entries import Entries, Part, Tail, live, name_of
from kvlab.reuse.prefix_receipts import IMMUTABLE_PARTIAL
from kvlab.reuse.token_keys import TOKEN_BYTES, pack


def read_entries(rows: list[Json], allocator: Allocator, gate: State, hashed: ChainHash, block_size: int,
                 witness: bool) -> Entries:
    """The entries that a snapshot describes, over blocks as they are now; `Rejected` for the first that is wrong."""
    entries = Entries(allocator.pools, len(hashed.root), block_size if witness else None)
    for row in rows:
        manifest = read_record(CacheCompatibilityManifest, row["manifest"])
        _check_generation(manifest, row["publication_generation"], gate)
        part = entries.open(manifest, row["adapter_name"])
        for entry in row["entries"]:
            _read_entry(entries, part, entry, hashed, block_size)
        for tail in row["tails"]:
            _read_tail(entries, part, tail, allocator, hashed, block_size)
        part.sequences = [(pack(s["tokens"]), tuple(read_record(SideInput, i) for i in s["side_inputs"]))
                          for s in row["sequences"]]
    return entries


def _check_generation(manifest: CacheCompatibilityManifest, published: int, gate: State) -> None:
    directory = gate.get(("directory", manifest.cache_isolation_namespace))
    if directory is None:
        raise Rejected("namespace_mismatch", f"entries of {manifest.cache_isolation_namespace}, which is not here")
    space, now = directory.namespace, directory.publication_generation
    if published != now or manifest.publication_generation != now:
        raise Rejected("stale_entry_generation", f"published in generation {published}, {space.name} is at {now}")
    if manifest.namespace_generation != space.namespace_generation:
        raise Rejected("stale_namespace_generation", f"entries of generation {manifest.namespace_generation}, "
                       f"{space.name} is at {space.namespace_generation}")


def _read_record(part: Part, row: Json, block_size: int) -> Record | None:
    if row["tokens"] is None:
        return None
    record = Record(bytes.fromhex(row["parent"]), row["block"], pack(row["tokens"]), row["extras"].encode())
    fields = json.loads(record.extras) if record.extras else []
    salt = [value for tag, value, *_ in fields if tag == "salt"]
    wanted = [part.manifest.cache_salt] if record.block == 0 and part.manifest.cache_salt is not None else []
    if salt != wanted:
        raise Rejected("salt_dropped", f"block {record.block} was hashed with salt {salt}, not {wanted}")
    for tag, _, *offset in fields:
        if tag == "multimodal" and not offset[0] < block_size:
            raise Rejected("extra_key_offset_drift", f"an item of block {record.block} begins at {offset[0]}: that is "
                           "seen from the prompt, not from the block")
    return record


def _read_entry(entries: Entries, part: Part, row: Json, hashed: ChainHash, block_size: int) -> None:
    key, record = bytes.fromhex(row["key"]), _read_record(part, row, block_size)
    if record is not None:
        _check_key(key, record, hashed, block_size)
    elif entries.tables[0].witnesses is not None:
        raise ValueError(f"{row['key'][:12]} has no witness")
    name = name_of(part, key)
    for pool, table in zip(entries.pools, entries.tables, strict=True):
        for text in row["handles"][pool.group]:
            word = pool.word(text)
            if not live(pool, word):
                identity(pool, word)
            if pool.keys.get(index_of(word)) != name:
                raise ValueError(f"{text} carries another identity than {row['key'][:12]}")
            if table.part(index_of(word)):
                raise ValueError(f"{text} stands under two keys")
            table.put(part.number, np.array([word]), rows_of([key]), [record])


def _check_key(key: bytes, record: Record, hashed: ChainHash, block_size: int) -> None:
    if (record.parent == hashed.root) != (record.block == 0):
        raise Rejected("parent_hash_mismatch", f"block {record.block} hangs under {record.parent.hex()[:12]}")
    if block_key(hashed, record.parent, record.tokens, block_size, record.extras) == key:
        return
    if record.block and key in (block_key(hashed, p, record.tokens, block_size, record.extras)
                                for p in (b"", hashed.root)):
        raise Rejected("local_block_only_key", f"block {record.block} was hashed as if nothing stood before it")
    raise Rejected("parent_hash_mismatch", f"{key.hex()[:12]} is not the key of block {record.block} under "
                   f"{record.parent.hex()[:12]}")


def _read_tail(entries: Entries, part: Part, row: Json, allocator: Allocator, hashed: ChainHash,
               block_size: int) -> None:
    key, record = bytes.fromhex(row["key"]), _read_record(part, row, block_size)
    rows = len(record.tokens) // TOKEN_BYTES
    if not 0 < rows < block_size:
        raise ValueError(f"a tail of {rows} rows in blocks of {block_size}")
    if key != tail_key(hashed, record.parent, record.tokens, IMMUTABLE_PARTIAL, record.extras):
        raise Rejected("tail_key_without_valid_rows", f"{key.hex()[:12]} is not the key of these {rows} rows")
    words = tuple(pool.word(row["handles"][pool.group]) for pool in entries.pools)
    tail = part.tails[key] = Tail(record, row["request"], row["request_generation"], words)
    if not entries.tail_lives(tail, allocator.requests, block_size):
        raise Rejected("unknown_request", f"{tail.request} no longer holds the tail {key.hex()[:12]}")
