"""What a prefix index answers without changing anything: matches, claims, keys, lengths, telemetry; it decides nothing.

Whatever reads entries names a principal, who must be authorised, as a lookup must.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvlab.contract import Json, Rejected
from kvlab.reuse.chain import block_key, block_keys, tail_key
from kvlab.reuse.keys import KeyInputs
from kvlab.reuse.manifests import SideInput, read_record
from kvlab.reuse.prefix_lookup import Claim, Question, derive, find, prove, resolve, say
from kvlab.reuse.prefix_operations import asker_of
from kvlab.reuse.prefix_receipts import IMMUTABLE_PARTIAL, PrefixLengths, bundles, common_frontier, lengths, logits_cap
from kvlab.reuse.token_keys import pack

if TYPE_CHECKING:
    from kvlab.reuse.prefix_cache import PrefixCache


def answer(cache: PrefixCache, question: Json) -> Any:
    """The answer as plain data. `unknown_operation` where there is no such question, or it lacks something."""
    ask = QUESTIONS.get(str(question.get("ask")))
    if ask is None:
        raise Rejected("unknown_operation", f"{question.get('ask')!r}")
    return ask(cache, question)


def _lookup(cache: PrefixCache, said: Json) -> Json:
    """{principal, namespace, manifest, request, tokens, requires_logits?} -> lengths, receipt, steps taken."""
    return find(cache, asker_of(said), said["request"], said["tokens"], said.get("requires_logits", True),
                said.get("request_generation", 1)).to_dict()


def _claim(cache: PrefixCache, said: Json) -> Json:
    """As `lookup`, with what another index claims to have found in `claim`: its receipt, if every word of it holds."""
    directory, part = cache.enter(asker_of(said), [])
    ask = Question(asker_of(said), said["request"], said.get("request_generation", 1), pack(said["tokens"]),
                   said.get("requires_logits", True))
    found = resolve(cache, part, ask, *derive(cache, part, ask))
    theirs, own = said["claim"], found.lengths
    cap = logits_cap(ask.prompt, ask.requires_logits)
    own = PrefixLengths(ask.prompt, theirs.get("semantic", own.semantic), theirs.get("indexed", own.indexed), cap,
                        theirs.get("runtime", own.runtime))
    rows = found.rows
    if "handles" in theirs:
        rows = tuple(array("q", [p.word(t) for t in theirs["handles"][p.group]]).tobytes()
                     for p in cache.allocator.pools)
    claim = Claim(own, rows, theirs.get("copy_rows", own.runtime % cache.block_size),
                  theirs.get("new_bundles", bundles(own.recompute + own.runtime % cache.block_size, cache.block_size)))
    receipt = say(cache, directory, ask, claim)
    prove(cache, part, receipt.matched_group_handles, claim.copy_rows > 0)
    return receipt.to_dict()


def _inputs(said: Json) -> KeyInputs:
    sides = tuple(read_record(SideInput, s) for s in said.get("side_inputs", ()))
    return KeyInputs(said.get("adapter_name"), said.get("cache_salt"), sides)


def _keys(cache: PrefixCache, said: Json) -> list[str]:
    """{tokens, adapter_name?, cache_salt?, side_inputs?} -> the key of every full block."""
    return [key.hex() for key in block_keys(said["tokens"], cache.block_size, _inputs(said), cache.hashed.name)]


def _key_difference(cache: PrefixCache, said: Json) -> Json:
    """{one, other}, each as for `keys` -> whether each block's key is the same, or changed."""
    pairs = zip(_keys(cache, said["one"]), _keys(cache, said["other"]), strict=False)
    return {f"h{i}": "same" if a == b else "changed" for i, (a, b) in enumerate(pairs)}


def _hash_block(cache: PrefixCache, said: Json) -> str:
    """{tokens, parent?} -> the key of exactly one block."""
    parent = bytes.fromhex(said["parent"]) if "parent" in said else cache.hashed.root
    return block_key(cache.hashed, parent, pack(said["tokens"]), cache.block_size).hex()


def _tail_keys(cache: PrefixCache, said: Json) -> Json:
    """{tokens, rows: [n]} -> the key of each frontier of one block, and whether two of them are equal."""
    keys = [tail_key(cache.hashed, cache.hashed.root, pack(said["tokens"][:n]), IMMUTABLE_PARTIAL).hex()
            for n in said["rows"]]
    return {"keys": keys, "keys_equal": len(set(keys)) < len(keys)}


def _lengths(cache: PrefixCache, said: Json) -> Json:
    """{S_prompt, S_sem, S_indexed, requires_logits?, alignment?} -> the four lengths, by the rule that lookups use."""
    own = lengths(said["S_prompt"], said["S_sem"], said["S_indexed"],
                  requires_logits=said.get("requires_logits", True), unit=said.get("alignment", cache.alignment))
    return own.to_dict() | {"new_block_bundles": bundles(own.recompute, cache.block_size)}


def _bundles(cache: PrefixCache, said: Json) -> Json:
    """{rows} -> fresh bundles, their capacity and the useful payload: different ledgers (formula F6.06)."""
    count, layout = bundles(said["rows"], cache.block_size), cache.allocator.layout
    return {"bundles": count, "capacity_bytes": count * layout.bundle_bytes,
            "useful_bytes": said["rows"] * layout.row_bytes}


def _frontier(cache: PrefixCache, said: Json) -> int:
    """{limit, groups: [[boundaries]]} -> the longest boundary that every group has, at most `limit` tokens."""
    finders = [lambda n, at=tuple(row): max((b for b in at if b <= n), default=0) for row in said["groups"]]
    return common_frontier(finders, said["limit"])


def _telemetry(cache: PrefixCache, said: Json) -> Json:
    """How often entries were really read since the index began or was loaded."""
    return dict(cache.telemetry)


QUESTIONS: dict[str, Callable[[PrefixCache, Json], Any]] = {
    "lookup": _lookup, "claim": _claim, "keys": _keys, "key_difference": _key_difference, "hash_block": _hash_block,
    "tail_keys": _tail_keys, "lengths": _lengths, "bundles": _bundles, "frontier": _frontier, "telemetry": _telemetry,
}
