"""The lookup of a prefix index, in the safe order of article 0x07F: authorise, compare, derive, validate, say.

It owns the order and the walk. It refuses to change anything: no table, no queue, no entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from kvlab.contract import Json, Rejected
from kvlab.memory.block_pool import index_of
from kvlab.memory.plan import identity
from kvlab.reuse.chain import bare, extra_bytes, extras_of, tail_key, walk
from kvlab.reuse.gate_state import Directory
from kvlab.reuse.keys import KeyInputs, extra_keys
from kvlab.reuse.manifests import CacheCompatibilityManifest, SideInput
from kvlab.reuse.prefix_entries import Found, Part, live_run
from kvlab.reuse.prefix_receipts import (
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
PARENT_OF, TOKENS_OF = itemgetter(0), itemgetter(2)
"""Of a record, by place: a name costs twice as much, and a long hit has hundreds."""


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
    words: tuple[tuple[int, ...], ...]
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


def derive(cache: PrefixCache, part: Part | None, ask: Question) -> tuple[list[bytes], list[Found]]:
    """Keys in ancestry order, and what stands under each in the first group, until one is missing (F6.04).

    A block after the first miss is not even hashed. O(hit tokens).
    """
    cache.telemetry["lookups"] += 1
    cache.telemetry["probes"] += 1
    if part is None:
        return [], []
    inputs, get = part.inputs(ask.asker.side_inputs), part.maps[0].get
    if bare(inputs):
        keys, found = cache.hashed.run(cache.hashed.root, ask.packed, cache.block_size * TOKEN_BYTES, get)
    else:
        keys, found = [], []
        for key, _, _ in walk(cache.hashed, ask.packed, cache.block_size, inputs):
            if (have := get(key)) is None:
                break
            keys.append(key)
            found.append(have)
    cache.telemetry["probes"] += len(keys)
    return keys, found


def resolve(cache: PrefixCache, part: Part | None, ask: Question, keys: list[bytes], found: list[Found]) -> Claim:
    """What of the run every cache group can serve now, and the lengths that follow. O(hit blocks x groups)."""
    size, pools = cache.block_size, cache.allocator.pools
    runs = [live_run(pools[0], found)]
    for pool, entries in zip(pools[1:], part.maps[1:] if part else (), strict=False):
        there = list(map(entries.get, keys[: len(runs[0])]))
        runs.append(live_run(pool, there[: there.index(None)] if None in there else there))
    ends = [len(run) * size for run in runs]
    indexed = common_frontier([lambda n, end=end: min(n, end) for end in ends], ask.prompt)
    full = indexed // size
    if part is not None and cache.witness:
        check_witness(part, ask.packed, keys[:full], cache.hashed.root, size)
    tail = find_tail(cache, part, ask, full, keys) if part is not None and cache.partial_tails else None
    indexed = full * size + (len(tail[0]) // TOKEN_BYTES if tail else 0)
    semantic = indexed
    if part is not None and cache.witness:
        semantic = max(indexed, part.semantic(ask.packed, ask.asker.side_inputs))
    unit = 1 if cache.partial_tails else cache.alignment
    own = lengths(ask.prompt, semantic, indexed, requires_logits=ask.requires_logits, unit=unit)
    taken, copy = own.runtime // size, own.runtime % size
    whole = [run[:full] + ([word] if tail else []) for run, word in zip(runs, tail[1] if tail else runs, strict=True)]
    words = tuple(tuple(run[: taken + (copy > 0)]) for run in whole) if own.runtime else ((),) * len(pools)
    return Claim(own, words, copy, bundles(own.recompute + copy, size))


def check_witness(part: Part, packed: bytes, keys: list[bytes], root: bytes, block_size: int) -> None:
    """`collision_witness_mismatch` where a key was found whose block was made of other tokens, or hung elsewhere."""
    parent, stride, records = root, block_size * TOKEN_BYTES, part.records
    rows = list(map(records.__getitem__, keys))
    if packed.startswith(b"".join(map(TOKENS_OF, rows))) and list(map(PARENT_OF, rows)) == [root, *keys][:-1]:
        return
    for block, (key, record) in enumerate(zip(keys, rows, strict=True)):
        if record.tokens != packed[block * stride : block * stride + stride] or record.parent != parent:
            raise Rejected("collision_witness_mismatch", f"block {block} has the key {key.hex()[:12]} of other tokens")
        parent = key


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
    handles = MatchedHandles(tuple(p.group for p in pools), tuple(p.first_block_id for p in pools), claim.words)
    return PrefixMatchReceipt.sealed(
        ask.request, ask.generation, cache.digest, directory.publication_generation, manifest.digest,
        ask.asker.namespace, directory.namespace.namespace_generation, cache.policy_id, own.semantic, own.runtime,
        own.recompute, handles, claim.new_bundles, claim.copy_rows,
        RECOMPUTE_TAIL if ask.requires_logits else NOT_REQUIRED)


def prove(cache: PrefixCache, part: Part | None, words: Sequence[Sequence[int]], copied: bool) -> None:
    """Do these blocks hold one unbroken prefix of this part, in every group, now? `Rejected` for the first that fails.

    Order for each bundle: every group, its lifetime and identity, its part, its place, its parent. The last bundle of
    a partial match may be somebody's tail, which has a lifetime but no identity.
    """
    counts = {len(row) for row in words}
    if len(counts) > 1:
        raise Rejected("missing_group_entry", f"{[len(row) for row in words]} blocks: a hit is one block in each group")
    parent, key_of, part_of = cache.hashed.root, cache.entries.key_of, cache.entries.part_of
    for block, bundle in enumerate(zip(*words, strict=True)):
        if copied and block == max(counts) - 1 and not all(
                part_of[g][index_of(word)] for g, word in enumerate(bundle)):
            prove_tail(cache, part, bundle)
            return
        keys = set()
        for g, (pool, word) in enumerate(zip(cache.allocator.pools, bundle, strict=True)):
            identity(pool, word)
            if part is None or part_of[g][index_of(word)] is not part:
                raise Rejected("incompatible_manifest", f"{pool.text(word)} was published under another manifest")
            keys.add(key_of[g][index_of(word)])
        if len(keys) > 1:
            raise Rejected("cross_group_bundle_mismatch", f"block {block} has other tokens in another group")
        parent = prove_place(part, block, keys.pop(), parent)


def prove_place(part: Part, block: int, key: bytes, parent: bytes) -> bytes:
    """Does this key stand at this place of the prefix, right under the block before? Without witnesses: believed."""
    record = part.records.get(key)
    if record is not None and record.block != block:
        raise Rejected("gap_skipped", f"place {block} of the hit is block {record.block} of its prefix")
    if record is not None and record.parent != parent:
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
