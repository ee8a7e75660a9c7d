"""The ownership contract once more, as plainly as it can be said: dicts and lists, references counted from the tables.

It owns the expected outcome of every operation and knows nothing of packed arrays, transactions or digests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

Handle = tuple[int, int]


@dataclass
class Live:
    version: int
    context: int
    tables: list[list[Handle]]


def handles(bundles: list[list[str]]) -> list[list[Handle]]:
    return [[tuple(int(n) for n in text.split("@")) for text in bundle] for bundle in bundles]


class Model:
    """`apply(op)` changes the state and returns None, or leaves it alone and returns the reason of the refusal."""

    def __init__(self, sizes: list[int], queues: list[list[int]]) -> None:
        self.sizes, self.groups, self.epoch = sizes, range(len(sizes)), 0
        self.free = [list(q) for q in queues]
        self.generation = [dict.fromkeys(sorted(q), 0) for q in queues]
        self.rows = [dict.fromkeys(sorted(q), 0) for q in queues]
        self.keys: list[dict[int, str]] = [{} for _ in queues]
        self.requests: dict[str, Live] = {}

    def apply(self, op: dict) -> str | None:
        if op.get("expected_epoch", self.epoch) != self.epoch:
            return "stale_allocator_epoch"
        reason = getattr(self, op["op"])(**{k: v for k, v in op.items() if k not in ("op", "expected_epoch")})
        self.epoch += reason is None
        return reason

    # ------------------------------------------------------------------ blocks
    def refs(self, g: int) -> Counter:
        return Counter(block for live in self.requests.values() for block, _ in live.tables[g])

    def fresh(self, g: int, rows: int) -> Handle:
        block = self.free[g].pop(0)
        self.generation[g][block] += 1
        self.rows[g][block] = rows
        self.keys[g].pop(block, None)
        return block, self.generation[g][block]

    def drop(self, g: int, block: int) -> None:
        if not self.refs(g)[block]:
            self.free[g].append(block)
            if block not in self.keys[g]:
                self.rows[g][block] = 0

    def cut(self, live: Live, g: int, keep: int) -> None:
        while len(live.tables[g]) > keep:
            self.drop(g, live.tables[g].pop(keep)[0])

    def grow(self, live: Live, g: int, end: int) -> None:
        while len(live.tables[g]) * self.sizes[g] < end:
            rows = min(self.sizes[g], end - len(live.tables[g]) * self.sizes[g])
            live.tables[g].append(self.fresh(g, rows))

    # ------------------------------------------------------------------ operations
    def allocate(self, request: str, tokens: int) -> str | None:
        if request in self.requests:
            return "request_exists"
        if tokens < 1:
            return "invalid_length"
        if any(-(-tokens // size) > len(free) for size, free in zip(self.sizes, self.free, strict=True)):
            return "out_of_memory"
        live = self.requests[request] = Live(1, tokens, [[] for _ in self.groups])
        for g in self.groups:
            self.grow(live, g, tokens)

    def append(self, requests: list) -> str | None:
        for n, (name, tokens) in enumerate(requests):
            if name not in self.requests:
                return "unknown_request"
            if name in dict(requests[:n]):
                return "duplicate_request"
            if tokens < 1:
                return "invalid_length"
        if not requests:
            return "unknown_operation"
        if any(self.wanted(g, requests) > len(self.free[g]) for g in self.groups):
            return "out_of_memory"
        left: set[tuple[int, int]] = set()
        for name, tokens in requests:
            live = self.requests[name]
            for g in self.groups:
                self.append_one(live, g, live.context + tokens, left)
            live.version, live.context = live.version + 1, live.context + tokens

    def wanted(self, g: int, requests: list) -> int:
        count, refs, left = 0, self.refs(g), set()
        for name, tokens in requests:
            live, size = self.requests[name], self.sizes[g]
            count += -(-(live.context + tokens) // size) - len(live.tables[g])
            if live.context % size and self.must_copy(g, live, refs, left):
                count += 1
                refs[live.tables[g][-1][0]] -= 1
                left.add((g, live.tables[g][-1][0]))
        return count

    def must_copy(self, g: int, live: Live, refs: Counter, left: set[tuple[int, int]]) -> bool:
        """Somebody else holds the tail, may find it, or left it in this very batch and still sees the row."""
        tail = live.tables[g][-1][0]
        seen = (g, tail) in left and self.rows[g][tail] > live.context % self.sizes[g]
        return refs[tail] > 1 or tail in self.keys[g] or seen

    def append_one(self, live: Live, g: int, end: int, left: set[tuple[int, int]]) -> None:
        table, size = live.tables[g], self.sizes[g]
        if live.context % size:
            rows = min(size, end - (len(table) - 1) * size)
            if self.must_copy(g, live, self.refs(g), left):
                old, _ = table.pop()
                left.add((g, old))
                table.append(self.fresh(g, rows))
                self.drop(g, old)
            else:
                self.rows[g][table[-1][0]] = rows
        self.grow(live, g, end)

    def fork(self, request: str, child: str) -> str | None:
        if request not in self.requests:
            return "unknown_request"
        if child in self.requests:
            return "request_exists"
        parent = self.requests[request]
        self.requests[child] = Live(1, parent.context, [list(t) for t in parent.tables])

    def truncate(self, request: str, tokens: int) -> str | None:
        live = self.requests.get(request)
        if live is None:
            return "unknown_request"
        if tokens < 1:
            return "invalid_length"
        if tokens > live.context:
            return "truncate_beyond_context"
        for g in self.groups:
            self.cut(live, g, -(-tokens // self.sizes[g]))
        live.version, live.context = live.version + 1, tokens

    def release(self, request: str) -> str | None:
        if request not in self.requests:
            return "unknown_request"
        for g in self.groups:
            self.cut(self.requests[request], g, 0)
        del self.requests[request]

    cancel = release

    def cache_full(self, request: str, blocks: list[int], keys: list[str]) -> str | None:
        live = self.requests.get(request)
        if live is None:
            return "unknown_request"
        if any((j + 1) * size > live.context for j in blocks for size in self.sizes):
            return "cache_partial_block"
        for j, key in zip(blocks, keys, strict=True):
            for g in self.groups:
                self.keys[g][live.tables[g][j][0]] = key

    def unfit(self, bundles: list[list[Handle]]) -> str | None:
        for bundle in bundles:
            for g, (block, generation) in enumerate(bundle):
                if self.generation[g][block] != generation:
                    return "stale_block_generation"
                if block not in self.keys[g]:
                    return "touch_without_identity"
            if len({self.keys[g][block] for g, (block, _) in enumerate(bundle)}) > 1:
                return "cross_group_bundle_mismatch"
        return None

    def touch(self, request: str, blocks: list[list[str]], tokens: int = 0) -> str | None:
        if request in self.requests:
            return "request_exists"
        bundles, hit = handles(blocks), len(blocks) * self.sizes[0]
        if reason := self.unfit(bundles):
            return reason
        if not bundles:
            return "invalid_length"
        if len({bundle[0] for bundle in bundles}) < len(bundles):
            return "block_twice_in_table"
        if any(-(-hit // size) != len(bundles) for size in self.sizes):
            return "cross_group_bundle_mismatch"
        if tokens and tokens < hit:
            return "invalid_length"
        tokens = tokens or hit
        left = [[b for b in self.free[g] if b not in {bundle[g][0] for bundle in bundles}] for g in self.groups]
        if any(-(-tokens // size) - len(bundles) > len(free) for size, free in zip(self.sizes, left, strict=True)):
            return "out_of_memory"
        self.free = left
        live = self.requests[request] = Live(1, tokens, [[b[g] for b in bundles] for g in self.groups])
        for g in self.groups:
            self.grow(live, g, tokens)

    def evict(self, blocks: list[list[str]]) -> str | None:
        bundles = handles(blocks)
        if reason := self.unfit(bundles):
            return reason
        for bundle in bundles:
            for g, (block, _) in enumerate(bundle):
                self.keys[g].pop(block, None)
                if block in self.free[g]:
                    self.rows[g][block] = 0

    # ------------------------------------------------------------------ the state as the real one prints it
    def picture(self) -> dict:
        columns = [{"generation": list(self.generation[g].values()), "valid_rows": list(self.rows[g].values()),
                    "ref_cnt": [self.refs(g)[block] for block in self.rows[g]],
                    "keys": {str(block): key for block, key in sorted(self.keys[g].items())}} for g in self.groups]
        return {
            "epoch": self.epoch, "blocks": {f"g{g}": columns[g] for g in self.groups},
            "free": {f"g{g}": self.free[g] for g in self.groups},
            "requests": {name: {"version": live.version, "context": live.context,
                                "tables": {f"g{g}": [f"{b}@{n}" for b, n in live.tables[g]] for g in self.groups}}
                         for name, live in sorted(self.requests.items())},
        }
