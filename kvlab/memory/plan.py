"""Plans: what an allocator operation would change, worked out against the committed state and changing nothing.

Each planner validates its operation in a fixed order, so that a malformed one always gets the same reason.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvlab.contract import Operation, Rejected
from kvlab.memory.block_pool import BlockPool, index_of
from kvlab.memory.chain import CODES, given, head, many, moved
from kvlab.memory.layout import CacheGroup
from kvlab.memory.records import append_path
from kvlab.memory.requests import Request


@dataclass(slots=True)
class GroupChange:
    """One request's block table in one group: keep a prefix of it, drop the rest, add shared and fresh blocks."""

    keep: int
    dropped: Sequence[int] = ()
    shared: Sequence[int] = ()
    fresh_rows: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    copy_from: int | None = None
    copy_rows: int = 0
    in_place: int | None = None
    in_place_rows: int = 0


@dataclass(slots=True)
class RequestChange:
    """A request before and after: `before` is None for a new one, `ends` is set where it goes away.

    `new_rows` rows, the last ones of `context`, have to be written before publication.
    """

    request_id: str
    before: Request | None
    version: int
    context: int
    groups: list[GroupChange]
    path: str = ""
    ends: bool = False
    new_rows: int = 0


@dataclass(slots=True)
class Plan:
    """All that one transaction would do. `writes` says whether rows must be written before it may publish.

    `reads` are requests it leaves as they are but relies on, `found` the cached identities it relies on, as
    (group, handle, key): both must still be so when it publishes.
    """

    operation: str
    changes: list[RequestChange] = field(default_factory=list)
    reads: list[Request] = field(default_factory=list)
    found: list[tuple[int, int, str]] = field(default_factory=list)
    identities: list[tuple[int, int, str | None]] = field(default_factory=list)
    writes: bool = False
    reason: str = ""


class State(Protocol):
    """The part of the allocator that a planner reads."""

    groups: tuple[CacheGroup, ...]
    pools: tuple[BlockPool, ...]
    requests: dict[str, Request]


def length(op: Operation, name: str, least: int = 1) -> int:
    """A whole number of tokens from an operation, at least `least`."""
    value = op.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise Rejected("invalid_length", f"{name} is {value!r}, expected a whole number of at least {least}")
    return value


def named(op: Operation, name: str) -> Any:
    if name not in op:
        raise Rejected("unknown_operation", f"{op.get('op')} needs {name!r}")
    return op[name]


def live(state: State, request_id: Any) -> Request:
    """The live request of this id. A second release finds none: that is how a double release is refused."""
    request = state.requests.get(request_id) if isinstance(request_id, str) else None
    if request is None:
        raise Rejected("unknown_request", f"request {request_id!r}")
    return request


def absent(state: State, request_id: Any) -> str:
    if not isinstance(request_id, str) or not request_id:
        raise Rejected("unknown_operation", f"a request id is a word, not {request_id!r}")
    if request_id in state.requests:
        raise Rejected("request_exists", f"request {request_id!r}")
    return request_id


def expect(request: Request, op: Operation, state: State) -> None:
    """Compare what the caller believes of a request with what is committed; absent beliefs are not checked."""
    generation, version = op.get("expected_request_generation"), op.get("expected_table_version")
    if generation is not None and generation != request.generation:
        raise Rejected("stale_request_generation", f"expected {generation}, live is {request.generation}")
    if version is not None and version != request.version:
        raise Rejected("stale_table_version", f"expected {version}, live is {request.version}")
    order = {group.group_id: g for g, group in enumerate(state.groups)}
    for group_id, text in op.get("expected_tail", {}).items():
        if group_id not in order:
            raise Rejected("unknown_operation", f"no cache group {group_id!r}")
        g = order[group_id]
        if not request.tables[g] or state.pools[g].text(request.tables[g][-1]) != text:
            raise Rejected("stale_block_generation", f"{text} is not the tail of {request.request_id} in {group_id}")


def block_rows(start: int, end: int, block_size: int) -> list[int]:
    """Valid rows of each block that covers tokens `[start, end)`, `start` being a block edge."""
    return [min(block_size, end - at) for at in range(start, end, block_size)]


# ---------------------------------------------------------------- the planners
def plan_allocate(state: State, op: Operation) -> Plan:
    """A new request of `tokens` tokens: one bundle per `ceil(tokens / block_size)`."""
    request_id, tokens = absent(state, named(op, "request")), length(op, "tokens")
    groups = [GroupChange(0, fresh_rows=block_rows(0, tokens, g.block_size)) for g in state.groups]
    change = RequestChange(request_id, None, 1, tokens, groups, append_path(0, state.groups[0].block_size, 0),
                           new_rows=tokens)
    return Plan("allocate", [change], writes=True)


def plan_append(state: State, op: Operation) -> Plan:
    """`tokens` (default 1) more rows for one request, or for each of `requests` ({id: tokens}) in this order.

    Requests of one batch are planned one after another: once an earlier one has its copy of a shared tail,
    the last owner left may write in place.
    """
    if "requests" in op:
        batch = op["requests"]
        wanted = list(batch.items() if isinstance(batch, dict) else batch)
    else:
        wanted = [(named(op, "request"), op.get("tokens", 1))]
    plan, gone = Plan("append", writes=True), Counter()
    for request_id, tokens in wanted:
        request = live(state, request_id)
        if any(c.request_id == request_id for c in plan.changes):
            raise Rejected("duplicate_request", f"request {request_id!r}")
        count = length({"tokens": tokens}, "tokens")
        if "requests" not in op:
            expect(request, op, state)
        plan.changes.append(_append_one(state, request, count, gone))
    if not plan.changes:
        raise Rejected("unknown_operation", "append needs at least one request")
    return plan


def _append_one(state: State, request: Request, count: int, gone: Counter) -> RequestChange:
    start, end, groups, path = request.context, request.context + count, [], ""
    for g, (group, pool, table) in enumerate(zip(state.groups, state.pools, request.tables, strict=True)):
        size, offset, j = group.block_size, start % group.block_size, start // group.block_size
        edge = min(end, (j + 1) * size) if offset else start
        change = GroupChange(keep=len(table))
        owners = 0
        if offset:
            tail, index = table[j], index_of(table[j])
            if index in pool.written:
                raise Rejected("write_in_flight", pool.text(tail))
            # A cached identity adds no reference, but whoever finds the block by it reads these rows.
            owners = pool.refs(index) - gone[g, index] + pool.leases.get(index, 0) + (index in pool.keys)
            # Until publication those who copy still read this block: a row that one of them may see stays.
            owners += gone[g, index] > 0 and pool.valid_rows(index, offset) > offset
            if owners == 1:
                change.in_place, change.in_place_rows = tail, edge - j * size
            else:
                gone[g, index] += 1
                change.keep, change.dropped = j, (tail,)
                change.copy_from, change.copy_rows = tail, offset
                change.fresh_rows.append(edge - j * size)
        change.fresh_rows += block_rows(edge, end, size)
        groups.append(change)
        path = path or append_path(start, size, owners)
    return RequestChange(request.request_id, request, request.version + 1, end, groups, path, new_rows=count)


def plan_fork(state: State, op: Operation) -> Plan:
    """`child` starts with the parent's whole table: one more reference a block, no bytes moved."""
    parent = live(state, named(op, "request"))
    expect(parent, op, state)
    child = absent(state, named(op, "child"))
    for pool, table in zip(state.pools, parent.tables, strict=True):
        if pool.written and pool.written & set(map(index_of, table)):
            raise Rejected("write_in_flight", f"a block of {parent.request_id} in {pool.group}")
    groups = [GroupChange(0, shared=tuple(table)) for table in parent.tables]
    return Plan("fork", [RequestChange(child, None, 1, parent.context, groups)], reads=[parent])


def plan_truncate(state: State, op: Operation) -> Plan:
    """Keep the first `tokens` tokens, or `drop` a list of logical blocks, which must be the last ones."""
    request = live(state, named(op, "request"))
    expect(request, op, state)
    if "drop" in op:
        size, count = state.groups[0].block_size, len(request.tables[0])
        drop = sorted(set(op["drop"]))
        if drop != list(range(count - len(drop), count)):
            raise Rejected("interior_truncate", f"blocks {drop} of {count}")
        tokens = length({"tokens": min(request.context, (count - len(drop)) * size)}, "tokens")
    else:
        tokens = length(op, "tokens")
    if tokens > request.context:
        raise Rejected("truncate_beyond_context", f"{tokens} of {request.context} tokens")
    groups = []
    for group, table in zip(state.groups, request.tables, strict=True):
        keep = -(-tokens // group.block_size)
        groups.append(GroupChange(keep, dropped=table[keep:]))
    change = RequestChange(request.request_id, request, request.version + 1, tokens, groups)
    return Plan("truncate", [change], reason=str(op.get("reason", "")))


def plan_end(state: State, op: Operation) -> Plan:
    """Release or cancel: every reference of the request goes; only the receipt's reason differs.

    `tail_first`: the last block joins the free queue first, as vLLM v0.23.0 does; else in table order.
    """
    request = live(state, named(op, "request"))
    expect(request, op, state)
    order = -1 if op.get("tail_first") else 1
    groups = [GroupChange(0, dropped=tuple(table)[::order]) for table in request.tables]
    change = RequestChange(request.request_id, request, request.version, request.context, groups, ends=True)
    return Plan(op["op"], [change], reason=str(op.get("reason", op["op"])))


def plan_cache_full(state: State, op: Operation) -> Plan:
    """Give the logical blocks `blocks` of a request the cached identities `keys`: weak, no reference added."""
    request = live(state, named(op, "request"))
    expect(request, op, state)
    plan, blocks, keys = Plan("cache_full", reads=[request]), named(op, "blocks"), named(op, "keys")
    if len(blocks) != len(keys):
        raise Rejected("unknown_operation", f"{len(keys)} keys for {len(blocks)} blocks")
    for j, key in zip(blocks, keys, strict=True):
        for g, (group, table) in enumerate(zip(state.groups, request.tables, strict=True)):
            if not (0 <= j < len(table) and (j + 1) * group.block_size <= request.context):
                raise Rejected("cache_partial_block", f"block {j} of {request.request_id} in {group.group_id}")
            plan.identities.append((g, table[j], str(key)))
    return plan


def identity(pool: BlockPool, word: int) -> str:
    """The cached identity under a handle that is current and that no open transaction has reserved."""
    if not pool.current(word):
        raise Rejected("stale_block_generation", pool.text(word))
    if index_of(word) not in pool.keys or index_of(word) in pool.spoiled:
        raise Rejected("touch_without_identity", pool.text(word))
    if index_of(word) in pool.reserved:
        raise Rejected("block_reserved", pool.text(word))
    return pool.keys[index_of(word)]


def _bundles(state: State, wanted: Iterable[Sequence[str]]) -> list[tuple[int, int, str]]:
    """(group, handle, key) of each block of named bundles: one a group, of the same identity in every group."""
    found: list[tuple[int, int, str]] = []
    for bundle in wanted:
        if len(bundle) != len(state.pools):
            raise Rejected("cross_group_bundle_mismatch", f"a bundle of {len(bundle)} for {len(state.pools)} groups")
        words = [pool.word(text) for pool, text in zip(state.pools, bundle, strict=True)]
        rows = [(g, word, identity(state.pools[g], word)) for g, word in enumerate(words)]
        if len({key for _, _, key in rows}) > 1:
            raise Rejected("cross_group_bundle_mismatch", " and ".join(bundle))
        found += rows
    return found


def plan_touch(state: State, op: Operation) -> Plan:
    """A new request over cached bundles: they leave the free queue where they stood in it, one reference more.

    With `tokens` it gets fresh blocks for the rest of its length in the same transaction: all of it or nothing.
    """
    request_id = absent(state, named(op, "request"))
    found = _bundles(state, named(op, "blocks"))
    words = [[word for group, word, _ in found if group == g] for g in range(len(state.groups))]
    hit = length({"tokens": len(words[0]) * state.groups[0].block_size}, "tokens")
    if len(set(words[0])) < len(words[0]):
        raise Rejected("block_twice_in_table", f"request {request_id!r}")
    for group in state.groups:
        if -(-hit // group.block_size) != len(words[0]):
            raise Rejected("cross_group_bundle_mismatch", f"{group.group_id} has blocks of {group.block_size} tokens")
    tokens = length(op, "tokens", hit) if "tokens" in op else hit
    groups = [GroupChange(0, shared=w, fresh_rows=block_rows(hit, tokens, g.block_size))
              for w, g in zip(words, state.groups, strict=True)]
    change = RequestChange(request_id, None, 1, tokens, groups, new_rows=tokens - hit)
    return Plan("touch", [change], found=found, writes=tokens > hit)


def plan_evict(state: State, op: Operation) -> Plan:
    """Take the cached identity of bundles away. A live mapping of them stays as it is (article 0x05E)."""
    found = _bundles(state, named(op, "blocks"))
    return Plan("evict", identities=[(g, word, None) for g, word, _ in found], found=found)


PLANNERS: dict[str, Callable[[State, Operation], Plan]] = {
    "allocate": plan_allocate,
    "append": plan_append,
    "fork": plan_fork,
    "truncate": plan_truncate,
    "release": plan_end,
    "cancel": plan_end,
    "cache_full": plan_cache_full,
    "touch": plan_touch,
    "evict": plan_evict,
}


# ---------------------------------------------------------------- for the chained digest
def transition(epoch: int, plan: Plan) -> list[bytes | array]:
    """One committed transition as packed bytes: who, what, and every handle that a table gained, in order.

    Which handles a table lost follows from the records before: only their number is said.
    """
    changes = plan.changes
    if len(changes) == 1:
        who, version, context = changes[0].request_id.encode(), changes[0].version, changes[0].context
    else:
        who, version, context = many([(c.request_id, c.new_rows) for c in changes]), 0, len(changes)
    groups = range(len(changes[0].groups) if changes else 0)
    gained = [array("q", [w for c in changes for w in (*c.groups[g].shared, *c.groups[g].fresh)]) for g in groups]
    lost = [sum(len(c.groups[g].dropped) for c in changes) for g in groups]
    parts = [head(epoch, CODES[plan.operation], version, context, len(who)),
             *[moved(n, len(words)) for n, words in zip(lost, gained, strict=True)], who, *gained]
    parts += [given(g, word, key) for g, word, key in plan.identities]
    return parts
