"""What changes a prefix index: publication, admission, the end of a request, a new generation; each validated first.

It owns no state. A block's identity is published by one allocator transaction, and the entry follows it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvlab.contract import Json, Operation, Rejected
from kvlab.memory.block_pool import INDEX_MASK, index_of
from kvlab.memory.plan import live
from kvlab.memory.requests import Request
from kvlab.reuse.chain import bare, tail_key, walk
from kvlab.reuse.key_table import Record, rows_of
from kvlab.reuse.keys import KeyInputs
from kvlab.reuse.manifests import CacheCompatibilityManifest, SideInput, read_record
from kvlab.reuse.prefix_entries import Part, Tail, name_of, names_of
from kvlab.reuse.prefix_lookup import Asker, find, prove, tail_extras
from kvlab.reuse.prefix_receipts import IMMUTABLE_PARTIAL, VLLM, PrefixMatchReceipt, read_receipt
from kvlab.reuse.token_keys import TOKEN_BYTES, pack

if TYPE_CHECKING:
    from kvlab.reuse.prefix_cache import PrefixCache


def asker_of(said: Operation) -> Asker:
    """Who asks, as it is or from plain fields. ValueError for anything else."""
    if "asker" in said:
        return said["asker"]
    manifest = said["manifest"]
    if not isinstance(manifest, CacheCompatibilityManifest):
        manifest = read_record(CacheCompatibilityManifest, manifest)
    return Asker(said["principal"], said["namespace"], manifest, said.get("adapter_name"),
                 tuple(read_record(SideInput, s) for s in said.get("side_inputs", ())))


# ---------------------------------------------------------------- publication
def _publish(cache: PrefixCache, op: Operation) -> Json:
    """Keys for the full blocks of a live request, from rows that are committed: an open transaction's do not count.

    A block that carries its key already, because it was itself a hit, is left alone. One that was computed beside an
    equal block gets an entry of its own: tables are append-only, so the copies are not merged (vLLM v0.23.0 neither).
    """
    asker = asker_of(op)
    cache.enter(asker, [])
    packed, request = pack(op["tokens"]), live(cache.allocator, op["request"])
    if len(packed) > request.context * TOKEN_BYTES:
        raise Rejected("valid_rows_below_view",
                       f"{len(packed) // TOKEN_BYTES} tokens, {request.context} rows are committed")
    part = cache.entries.parts.get(asker.manifest.digest) or Part(asker.manifest, asker.adapter_name, 0)
    keys, extras = keys_of(cache, part.inputs(asker.side_inputs), packed)
    tables = [np.array(table, np.int64)[: len(keys)] for table in request.tables]
    rows = rows_of(keys) if keys else np.empty((0, len(cache.hashed.root)), np.uint8)
    fresh, duplicates = _fresh(cache, part, request, packed, (keys, extras, rows),
                               [words & INDEX_MASK for words in tables])
    parts = ()
    if fresh:
        parts = (cache.allocator.cache_full(op["request"], fresh, names_of(part, rows[fresh])),)
    part = cache.entries.open(asker.manifest, asker.adapter_name)
    if fresh:
        records = [_record(cache, packed, keys, extras, b) for b in fresh] if cache.witness else None
        for table, words in zip(cache.entries.tables, tables, strict=True):
            table.put(part.number, words[fresh], rows[fresh], records)
    _remember(cache, part, asker, request, packed, keys[-1] if keys else cache.hashed.root)
    cache.moved(asker.manifest.digest.encode(), rows[fresh].tobytes())
    return {"request": op["request"], "published": tuple([keys[b].hex() for b in fresh]), "duplicates": duplicates,
            "parts": parts}


def keys_of(cache: PrefixCache, inputs: KeyInputs, packed: bytes) -> tuple[list[bytes], list[bytes]]:
    """The key and the extra keys of each full block; what the last lookup has hashed is not hashed again. O(blocks)."""
    stride, hashed = cache.block_size * TOKEN_BYTES, cache.hashed
    if not bare(inputs):
        made = list(walk(hashed, packed, cache.block_size, inputs))
        return [key for key, _, _ in made], [extras for _, _, extras in made]
    before, keys = cache.recent
    blocks = len(packed) // stride
    keys = keys[:blocks]
    if not packed.startswith(before[: len(keys) * stride]):
        keys = []
    keys += hashed.run(keys[-1] if keys else hashed.root, packed, len(keys) * stride, blocks * stride, stride)
    return keys, [b""] * blocks


def _record(cache: PrefixCache, packed: bytes, keys: list[bytes], extras: list[bytes], block: int) -> Record:
    size = cache.block_size * TOKEN_BYTES
    parent = keys[block - 1] if block else cache.hashed.root
    return Record(parent, block, packed[block * size : (block + 1) * size], extras[block])


def _fresh(cache: PrefixCache, part: Part, request: Request, packed: bytes,
           made: tuple[list[bytes], list[bytes], np.ndarray],
           columns: list[np.ndarray]) -> tuple[list[int], tuple[str, ...]]:
    """The blocks that do not stand under their keys yet, and the keys among theirs that another block has already.

    `collision_witness_mismatch` where another prefix has a key, `in_place_relabel` where a block has another key.
    """
    keys, extras, rows = made
    if not keys:
        return [], ()
    tables, known = cache.entries.tables, np.ones(len(keys), bool)
    for table, column in zip(tables, columns, strict=True):
        known &= table.stands(part.number, column, rows)
    if cache.witness:
        whole = packed[: len(keys) * cache.block_size * TOKEN_BYTES]
        known &= tables[0].witnesses.match(columns[0], whole, cache.hashed.root, keys)
    rest = np.flatnonzero(~known)
    doubt = np.zeros(len(rest), bool)
    for table, pool, column in zip(tables, cache.allocator.pools, columns, strict=True):
        doubt |= table.stood(part.number, rows[rest]) | pool.keys.have(column[rest])
    if not doubt.any():
        return rest.tolist(), ()
    fresh, twice = [], []
    for block, closer in zip(rest.tolist(), doubt.tolist(), strict=True):
        key = keys[block]
        if closer and _carries(cache, part, request, key, _record(cache, packed, keys, extras, block)):
            continue
        fresh.append(block)
        if closer and cache.entries.holds(part, key):
            twice.append(key.hex())
    return fresh, tuple(twice)


def _carries(cache: PrefixCache, part: Part, request: Request, key: bytes, record: Record) -> bool:
    """Whether this block stands under this key already, in every group."""
    if cache.entries.record(part, key) not in (None, record):
        raise Rejected("collision_witness_mismatch",
                       f"block {record.block} has the key {key.hex()[:12]} of other tokens")
    name = name_of(part, key)
    worn = {pool.keys.get(index_of(table[record.block]))
            for pool, table in zip(cache.allocator.pools, request.tables, strict=True)}
    if worn - {None, name}:
        raise Rejected("in_place_relabel", f"block {record.block} of {request.request_id} stands under another key")
    return worn == {name}


def _remember(cache: PrefixCache, part: Part, asker: Asker, request: Request, packed: bytes, parent: bytes) -> None:
    """The sequence for semantic lengths, and its tail where tails may be found."""
    if cache.witness and packed:
        part.remember(packed, asker.side_inputs)
    if not cache.partial_tails:
        return
    size = cache.block_size
    drop_tails(cache)
    block, rows = divmod(len(packed) // TOKEN_BYTES, size)
    if rows:
        record = Record(parent, block, packed[block * size * TOKEN_BYTES :],
                        tail_extras(part.inputs(asker.side_inputs), block, size, rows))
        key = tail_key(cache.hashed, parent, record.tokens, IMMUTABLE_PARTIAL, record.extras)
        words = tuple(table[block] for table in request.tables)
        part.tails[key] = Tail(record, request.request_id, request.generation, words)


def drop_tails(cache: PrefixCache) -> None:
    """Forget the tails whose requests have ended or have been cut off before them. O(tails)."""
    for part in cache.entries.parts.values():
        part.tails = {key: tail for key, tail in part.tails.items()
                      if cache.entries.tail_lives(tail, cache.allocator.requests, cache.block_size)}


# ---------------------------------------------------------------- admission
def verify_match(cache: PrefixCache, receipt: PrefixMatchReceipt) -> None:
    """`Rejected` where the receipt of a match no longer holds.

    Order: seal, namespace generation, publication generation, then every bundle (see `prove`).
    """
    receipt.verify()
    directory = cache.gate.state.get(("directory", receipt.namespace_id))
    if directory is None or directory.namespace.namespace_generation != receipt.namespace_generation:
        raise Rejected("stale_namespace_generation", f"{receipt.namespace_id} has moved on since the lookup")
    if directory.publication_generation != receipt.index_publication_generation:
        raise Rejected("stale_entry_generation", f"found in generation {receipt.index_publication_generation}, "
                       f"{receipt.namespace_id} is at {directory.publication_generation}")
    part = cache.entries.parts.get(receipt.compatibility_manifest_sha256)
    copied = receipt.copy_valid_partial_rows > 0
    prove(cache, part, receipt.matched_group_handles, copied)


def admission(cache: PrefixCache, receipt: PrefixMatchReceipt) -> Json:
    """The allocator operation that starts a matched request. `Rejected` where the receipt no longer holds."""
    verify_match(cache, receipt)
    blocks = receipt.matched_group_handles.bundles(receipt.runtime_hit_tokens // cache.block_size)
    op = {"op": "touch", "blocks": blocks} if blocks else {"op": "allocate"}
    return op | {"request": receipt.request_id, "tokens": receipt.prompt}


def _admit(cache: PrefixCache, op: Operation) -> Json:
    receipt = op["receipt"]
    if not isinstance(receipt, PrefixMatchReceipt):
        receipt = read_receipt(receipt, cache.allocator.pools)
    verify_match(cache, receipt)
    return _take_in(cache, receipt, op.get("tokens", receipt.prompt))


def _take_in(cache: PrefixCache, receipt: PrefixMatchReceipt, tokens: int) -> Json:
    """Start the request of a match that holds."""
    if not isinstance(tokens, int) or tokens < receipt.prompt:
        raise Rejected("invalid_length", f"room for {tokens!r} tokens, the prompt has {receipt.prompt}")
    whole = receipt.runtime_hit_tokens // cache.block_size
    hit = [np.frombuffer(row, np.int64)[:whole] for row in receipt.matched_group_handles.rows]
    done = (cache.allocator.touch(receipt.request_id, hit, tokens) if whole
            else cache.allocator.allocate(receipt.request_id, tokens))
    return {"request": receipt.request_id, "parts": (done,)}


def _start(cache: PrefixCache, op: Operation) -> Json:
    """Look a prompt up and start its request with what was found, where nothing has to happen in between."""
    match = find(cache, asker_of(op), op["request"], op["tokens"], op.get("requires_logits", True),
                 op.get("request_generation", 1))
    return _take_in(cache, match.receipt, op.get("room", match.receipt.prompt)) | {"match": match}


# ---------------------------------------------------------------- the allocator's and the gate's own
def _own(cache: PrefixCache, op: Operation) -> Json:
    """An operation of the allocator. A tail that is cut off by it is no entry any more."""
    done = cache.allocator.apply(op)
    if op["op"] == "truncate":
        drop_tails(cache)
        cache.moved()
    return {"request": op.get("request"), "parts": (done,)}


def _end(cache: PrefixCache, op: Operation) -> Json:
    """Release or cancel. As vLLM v0.23.0: blocks are given back tail first.

    The normative order is one transaction in table order: then the beginning of a prefix is recycled first, and what
    is left of it can no longer be found.
    """
    tail_first = cache.policy == VLLM
    if op.keys() == {"op", "request"} and op["op"] == "release":
        done = cache.allocator.release(op["request"], tail_first)
    else:
        done = cache.allocator.apply({**op, "tail_first": tail_first})
    return {"request": op["request"], "parts": (done,)}


def _gate(cache: PrefixCache, op: Operation) -> Json:
    """An operation of the gate, such as authorize or reset_prefix_cache. Entries of an ended generation go with it."""
    if op["do"].get("op") in ("publish", "lookup", "release"):
        raise Rejected("unknown_operation", "the index publishes and finds; the gate beside it says who may")
    done = cache.gate.apply(op["do"])
    gone = cache.entries.close(lambda part: _current(cache, part))
    if gone:
        cache.moved(array("q", [gone]))
    return {"forgotten": gone, "parts": (done,)}


def _current(cache: PrefixCache, part: Part) -> bool:
    manifest = part.manifest
    directory = cache.gate.state.get(("directory", manifest.cache_isolation_namespace))
    return (manifest.namespace_generation, manifest.publication_generation) == (
        directory.namespace.namespace_generation, directory.publication_generation)


OPERATIONS: dict[str, Callable[[PrefixCache, Operation], Json]] = {
    "publish": _publish, "admit": _admit, "start": _start, "gate": _gate, "release": _end, "cancel": _end,
    "allocate": _own, "append": _own, "fork": _own, "truncate": _own, "evict": _own,
}
