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
from kvlab.reuse.chain import tail_key, walk
from kvlab.reuse.manifests import CacheCompatibilityManifest, SideInput, read_record
from kvlab.reuse.prefix_entries import Part, Record, Tail
from kvlab.reuse.prefix_lookup import Asker, find, prove, tail_extras
from kvlab.reuse.prefix_receipts import IMMUTABLE_PARTIAL, VLLM, PrefixMatchReceipt, read_receipt
from kvlab.reuse.prefix_snapshot import name_of
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
    inputs, size = part.inputs(asker.side_inputs), cache.block_size * TOKEN_BYTES
    made = list(walk(cache.hashed, packed, cache.block_size, inputs))
    known = _known(cache, part, request, made)
    fresh = [(key, record) for block, (key, parent, extras) in enumerate(made) if block not in known and not _carries(
        cache, part, request, key, record := Record(parent, block, packed[block * size : (block + 1) * size], extras))]
    duplicates = tuple(key.hex() for key, _ in fresh if cache.entries.holds(part, key))
    parts = ()
    if fresh:
        parts = (cache.allocator.cache_full(op["request"], [record.block for _, record in fresh],
                                            [name_of(part, key) for key, _ in fresh]),)
    part = cache.entries.open(asker.manifest, asker.adapter_name)
    for key, record in fresh:
        for g, table in enumerate(request.tables):
            cache.entries.put(part, g, key, table[record.block])
        if cache.witness:
            part.records[key] = record
    _remember(cache, part, asker, request, packed, made[-1][0] if made else cache.hashed.root)
    cache.moved(asker.manifest.digest.encode(), *(key for key, _ in fresh))
    return {"request": op["request"], "published": tuple(key.hex() for key, _ in fresh), "duplicates": duplicates,
            "parts": parts}


def _known(cache: PrefixCache, part: Part, request: Request, made: list[tuple[bytes, bytes, bytes]]) -> set[int]:
    """Blocks that stand under their keys already, where no witness has to be compared for them. O(blocks)."""
    if cache.witness:
        return set()
    known, entries = set(range(len(made))), cache.entries
    for pool, table, key_of, part_of in zip(cache.allocator.pools, request.tables, entries.key_of, entries.part_of,
                                            strict=True):
        indices = (np.frombuffer(table, np.int64) & INDEX_MASK).tolist()
        known = {block for block in known if (i := indices[block]) in pool.keys and key_of[i] == made[block][0]
                 and part_of[i] is part}
    return known


def _carries(cache: PrefixCache, part: Part, request: Request, key: bytes, record: Record) -> bool:
    """Whether this block stands under this key already.

    `collision_witness_mismatch` where another prefix has the key, `in_place_relabel` where the block has another key.
    """
    if part.records.get(key, record) != record and cache.entries.holds(part, key):
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
    prove(cache, part, receipt.matched_group_handles.words, copied)


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
    tokens = op.get("tokens", receipt.prompt)
    if not isinstance(tokens, int) or tokens < receipt.prompt:
        raise Rejected("invalid_length", f"room for {tokens!r} tokens, the prompt has {receipt.prompt}")
    verify_match(cache, receipt)
    whole = receipt.runtime_hit_tokens // cache.block_size
    hit = [words[:whole] for words in receipt.matched_group_handles.words]
    done = (cache.allocator.touch(receipt.request_id, hit, tokens) if whole
            else cache.allocator.allocate(receipt.request_id, tokens))
    return {"request": receipt.request_id, "parts": (done,)}


def _start(cache: PrefixCache, op: Operation) -> Json:
    """Look a prompt up and start its request with what was found, where nothing has to happen in between."""
    match = find(cache, asker_of(op), op["request"], op["tokens"], op.get("requires_logits", True),
                 op.get("request_generation", 1))
    return _admit(cache, {"receipt": match.receipt}) | {"match": match}


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
