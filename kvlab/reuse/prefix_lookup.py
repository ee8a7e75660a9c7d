"""The lookup of a prefix index, in the safe order of article 0x07F: authorise, compare, derive, validate, say.

It owns the order and the walk. It refuses to change anything: no table, no queue, no entry.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvlab.contract import Json, Rejected
from kvlab.memory.block_pool import INDEX_MASK, index_of
from kvlab.memory.plan import identity
from kvlab.reuse.chain import ChainHash, bare, extra_bytes, extras_of, tail_key, walk
from kvlab.reuse.gate_state import Directory
from kvlab.reuse.key_table import LAST_PART, KeyTable
from kvlab.reuse.keys import KeyInputs, extra_keys
from kvlab.reuse.manifests import CacheCompatibilityManifest, SideInput
from kvlab.reuse.prefix_entries import Part
from kvlab.reuse.prefix_receipts import (
    HANDLE_BYTES,
    IMMUTABLE_PARTIAL,
    NOT_REQUIRED,
    RECOMPUTE_TAIL,
    VLLM,
    MatchedHandles,
    PrefixLengths,
    PrefixMatchReceipt,
    bundles,
    check_lengths,
    common_frontier,
    lengths,
    logits_cap,
)
from kvlab.reuse.token_keys import TOKEN_BYTES, pack

if TYPE_CHECKING:
    from kvlab.reuse.prefix_cache import PrefixCache

Manifest = CacheCompatibilityManifest
FIRST_CHUNK, LARGEST_CHUNK = 8, 128
"""How many keys a lookup makes before it compares them, at first and at most: blocks that it may hash for nothing."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks or publishes, under which manifest. The manifest covers no tokens: those are the chain's business.

    ValueError where it does cover some.
    """

    principal: str
    namespace: str
    manifest: Manifest
    adapter_name: str | None = None
    side_inputs: tuple[SideInput, ...] = ()

    def __post_init__(self) -> None:
        if self.manifest.covered_token_ids or self.manifest.input_side_data_identity:
            raise ValueError("the manifest of an index covers no tokens and no side inputs; the chain's keys do")


@dataclass(frozen=True, slots=True)
class Question:
    """One lookup: who asks, for which request, the packed prompt, whether its last row must give logits."""

    asker: Asker
    request: str
    generation: int
    packed: bytes
    requires_logits: bool

    @property
    def prompt(self) -> int:
        return len(self.packed) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What a lookup gives back: the lengths, the frozen receipt, and the steps that were taken, in their order."""

    lengths: PrefixLengths
    receipt: PrefixMatchReceipt
    log: tuple[str, ...]

    def to_dict(self) -> Json:
        return {"lengths": self.lengths.to_dict() | {"new_block_bundles": self.receipt.new_block_bundles},
                "receipt": self.receipt.to_dict(), "log": list(self.log)}


@dataclass(frozen=True, slots=True)
class Claim:
    """What somebody says that a lookup found: the lengths, the blocks a group, rows to copy, bundles to take."""

    lengths: PrefixLengths
    rows: tuple[bytes, ...]
    copy_rows: int
    new_bundles: int


def find(cache: PrefixCache, asker: Asker, request: str, tokens: Sequence[int] | bytes, requires_logits: bool,
         generation: int) -> PrefixMatch:
    """The longest prefix that may be read and is found. `Rejected` before anything is read where it may not be."""
    log: list[str] = []
    directory, part = cache.enter(asker, log)
    ask = Question(asker, request, generation, pack(tokens), requires_logits or cache.policy == VLLM)
    logits_cap(ask.prompt, ask.requires_logits)
    keys, found = derive(cache, part, ask)
    log.append("derive_and_lookup_key")
    claim = resolve(cache, part, ask, keys, found)
    log.append("validate_entry_generation_and_all_group_handles")
    receipt = say(cache, directory, ask, claim)
    log.append("publish_PrefixMatchReceipt")
    seen, hit = cache.telemetry, claim.lengths.runtime
    seen["hits" if hit else "misses"] += 1
    seen["hit_tokens"] += hit
    return PrefixMatch(claim.lengths, receipt, tuple(log))


def derive(cache: PrefixCache, part: Part | None, ask: Question) -> tuple[list[bytes], array]:
    """Keys in ancestry order, and the oldest block (a handle) under each in the first group, up to a miss (F6.04).

    O(hit tokens); behind the first miss at most one chunk of blocks is hashed for nothing.
    """
    cache.telemetry["lookups"] += 1
    cache.telemetry["probes"] += 1
    if part is None:
        return [], array("q")
    inputs, table, size = part.inputs(ask.asker.side_inputs), cache.entries.tables[0], cache.block_size
    if bare(inputs):
        keys, found = descend(cache.hashed, table, part.number, ask.packed, size * TOKEN_BYTES)
        cache.recent = ask.packed, keys
    else:
        keys, found = [], array("q")
        for key, _, _ in walk(cache.hashed, ask.packed, size, inputs):
            if (row := table.find(part.number, key)) < 0:
                break
            keys.append(key)
            found.append(table.words[row])
    cache.telemetry["probes"] += len(keys)
    return keys, found


def descend(hashed: ChainHash, table: KeyTable, part: int, packed: bytes, stride: int) -> tuple[list[bytes], array]:
    """`derive` for bare blocks: one key through the table, then as far as its run goes, a chunk of keys at a time."""
    keys: list[bytes] = []
    found = array("q")
    parent, at, end = hashed.root, 0, len(packed) // stride * stride
    while at < end:
        parent = hashed.make(parent + packed[at : at + stride])
        if (row := table.find(part, parent)) < 0:
            break
        keys.append(parent)
        found.append(table.words[row])
        at, chunk, right = at + stride, FIRST_CHUNK, True
        while right and (count := table.ahead(part, row, min(chunk, (end - at) // stride))):
            made = hashed.run(parent, packed, at, at + count * stride, stride)
            good = table.agree(row + 1, made)
            keys += made[:good]
            found += table.handles(row + 1, good)
            at, row, parent = at + good * stride, row + good, keys[-1]
            chunk, right = min(4 * chunk, LARGEST_CHUNK), good == count
    return keys, found


def resolve(cache: PrefixCache, part: Part | None, ask: Question, keys: list[bytes], found: array) -> Claim:
    """What of the run every cache group can serve now, and the lengths that follow. O(hit blocks x groups)."""
    size, pools, tables = cache.block_size, cache.allocator.pools, cache.entries.tables
    runs = [tables[0].run(found)]
    for table in tables[1:]:
        runs.append(table.run(table.oldest(part.number, keys[: len(runs[0]) // HANDLE_BYTES]) if part else found))
    ends = [len(run) // HANDLE_BYTES * size for run in runs]
    indexed = common_frontier([lambda n, end=end: min(n, end) for end in ends], ask.prompt)
    full = indexed // size
    if part is not None and cache.witness:
        indices = np.frombuffer(runs[0], np.int64)[:full] & INDEX_MASK
        check_witness(tables[0], ask.packed, indices, keys[:full], cache.hashed.root, size)
    tail = find_tail(cache, part, ask, full, keys) if part is not None and cache.partial_tails else None
    indexed = full * size + (len(tail[0]) // TOKEN_BYTES if tail else 0)
    semantic = indexed
    if part is not None and cache.witness:
        semantic = max(indexed, part.semantic(ask.packed, ask.asker.side_inputs))
    unit = 1 if cache.partial_tails else cache.alignment
    own = lengths(ask.prompt, semantic, indexed, requires_logits=ask.requires_logits, unit=unit)
    taken, copy = own.runtime // size, own.runtime % size
    if tail:
        runs = [run[: full * HANDLE_BYTES] + array("q", [word]).tobytes()
                for run, word in zip(runs, tail[1], strict=True)]
    end = (taken + (copy > 0)) * HANDLE_BYTES
    rows = tuple([run[:end] for run in runs]) if own.runtime else (b"",) * len(pools)
    return Claim(own, rows, copy, bundles(own.recompute + copy, size))


def check_witness(table: KeyTable, packed: bytes, indices: np.ndarray, keys: list[bytes], root: bytes,
                  block_size: int) -> None:
    """`collision_witness_mismatch` where a key was found whose block was made of other tokens, or hung elsewhere."""
    if not keys:
        return
    same = table.witnesses.match(indices, packed[: len(keys) * block_size * TOKEN_BYTES], root, keys)
    if not same.all():
        block = int(same.argmin())
        raise Rejected("collision_witness_mismatch",
                       f"block {block} has the key {keys[block].hex()[:12]} of other tokens")


def find_tail(cache: PrefixCache, part: Part, ask: Question, full: int,
              keys: list[bytes]) -> tuple[bytes, tuple[int, ...]] | None:
    """The longest live tail right after `full` blocks: its tokens and a handle a group. At most block_size - 1 keys."""
    size = cache.block_size
    parent = keys[full - 1] if full else cache.hashed.root
    rest = ask.packed[full * size * TOKEN_BYTES :][: (size - 1) * TOKEN_BYTES]
    if not part.tails:
        return None
    for end in range(len(rest), 0, -TOKEN_BYTES):
        extras = tail_extras(part.inputs(ask.asker.side_inputs), full, size, end // TOKEN_BYTES)
        tail = part.tails.get(tail_key(cache.hashed, parent, rest[:end], IMMUTABLE_PARTIAL, extras))
        if tail is not None and tail.record.tokens == rest[:end] and cache.entries.tail_lives(
                tail, cache.allocator.requests, size):
            return rest[:end], tail.words
    return None


def tail_extras(inputs: KeyInputs, block: int, block_size: int, rows: int) -> bytes:
    """The extra keys of the first `rows` rows of a block, encoded."""
    start = block * block_size
    return extra_bytes(extra_keys(inputs, start, start + rows)) if rows < block_size else extras_of(
        inputs, block, block_size)


def say(cache: PrefixCache, directory: Directory, ask: Question, claim: Claim) -> PrefixMatchReceipt:
    """The sealed receipt of a claim that holds; `Rejected` for the first thing that it may not say."""
    own, manifest = claim.lengths, ask.asker.manifest
    unit = 1 if cache.partial_tails else cache.alignment
    check_lengths(own, unit=unit, block_size=cache.block_size, copy_rows=claim.copy_rows,
                  new_bundles=claim.new_bundles)
    pools = cache.allocator.pools
    handles = MatchedHandles(tuple(p.group for p in pools), tuple(p.first_block_id for p in pools), claim.rows)
    return PrefixMatchReceipt.sealed(
        ask.request, ask.generation, cache.digest, directory.publication_generation, manifest.digest,
        ask.asker.namespace, directory.namespace.namespace_generation, cache.policy_id, own.semantic, own.runtime,
        own.recompute, handles, claim.new_bundles, claim.copy_rows,
        RECOMPUTE_TAIL if ask.requires_logits else NOT_REQUIRED)


def prove(cache: PrefixCache, part: Part | None, handles: MatchedHandles, copied: bool) -> None:
    """Do these blocks hold one unbroken prefix of this part, in every group, now? `Rejected` for the first that fails.

    Order for each bundle: every group, its lifetime and identity, its part, its place, its parent. The last bundle of
    a partial match may be somebody's tail, which has a lifetime but no identity.
    """
    counts = [len(row) // HANDLE_BYTES for row in handles.rows]
    if len({*counts}) > 1:
        raise Rejected("missing_group_entry", f"{counts} blocks: a hit is one block in each group")
    if not copied and proved(cache, part, handles.rows):
        return
    parent, tables, words = cache.hashed.root, cache.entries.tables, handles.words
    for block, bundle in enumerate(zip(*words, strict=True)):
        if copied and block == counts[0] - 1 and not all(
                table.part(index_of(word)) for table, word in zip(tables, bundle, strict=True)):
            prove_tail(cache, part, bundle)
            return
        keys, place = set(), None
        for pool, table, word in zip(cache.allocator.pools, tables, bundle, strict=True):
            identity(pool, word)
            if part is None or table.part(index_of(word)) != part.number or table.word(index_of(word)) != word:
                raise Rejected("incompatible_manifest", f"{pool.text(word)} was published under another manifest")
            keys.add(table.key(index_of(word)))
            place = place or (table, index_of(word))
        if len(keys) > 1:
            raise Rejected("cross_group_bundle_mismatch", f"block {block} has other tokens in another group")
        parent = prove_place(*place, block, keys.pop(), parent)


def proved(cache: PrefixCache, part: Part | None, rows: Sequence[bytes]) -> bool:
    """`prove` for whole blocks all at once: True where everything holds, False where somebody has to look closer."""
    if not rows[0]:
        return True
    if part is None:
        return False
    root, first = cache.hashed.root, b""
    for pool, table, row in zip(cache.allocator.pools, cache.entries.tables, rows, strict=True):
        handles = np.frombuffer(row, np.int64)
        indices = handles & INDEX_MASK
        if pool.reserved or pool.spoiled or int(indices.max()) >= pool.num_blocks:
            return False
        spots = table.spots.take(indices)
        held = (table.words.take(spots) == handles) & (table.parts.take(spots) & LAST_PART == part.number)
        if not (held & table.live(indices)).all():
            return False
        keys = table.keys.take(spots, 0).tobytes()
        if first not in (b"", keys):
            return False
        first = keys
        if (noted := table.witnesses) is not None and (
                noted.parents[indices].tobytes() != root + keys[: -len(root)]
                or noted.numbers[indices].tolist() != list(range(len(indices)))):
            return False
    return True


def prove_place(table: KeyTable, index: int, block: int, key: bytes, parent: bytes) -> bytes:
    """Does this key stand at this place of the prefix, right under the block before? Without witnesses: believed."""
    if table.witnesses is None:
        return key
    record = table.witnesses.record(index)
    if record.block != block:
        raise Rejected("gap_skipped", f"place {block} of the hit is block {record.block} of its prefix")
    if record.parent != parent:
        raise Rejected("parent_hash_mismatch", f"block {block} hangs under {record.parent.hex()[:12]}, the block "
                       f"before it is {parent.hex()[:12]}")
    return key


def prove_tail(cache: PrefixCache, part: Part | None, bundle: Sequence[int]) -> None:
    """Is this bundle a live request's published tail? `stale_block_generation` where it no longer is."""
    live = part is not None and any(
        tail.words == tuple(bundle) and cache.entries.tail_lives(tail, cache.allocator.requests, cache.block_size)
        for tail in part.tails.values())
    if not live:
        texts = [pool.text(word) for pool, word in zip(cache.allocator.pools, bundle, strict=True)]
        raise Rejected("stale_block_generation", f"{' and '.join(texts)} is nobody's tail any more")
