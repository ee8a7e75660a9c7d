"""Small prefix indexes for tests: two tenants, two cache groups of unequal size, and a plain model of what is found."""

from __future__ import annotations

from dataclasses import replace

from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import CacheLayoutManifest
from kvlab.reuse.identity import IdentityGate
from kvlab.reuse.prefix_cache import PrefixCache
from kvlab.reuse.prefix_lookup import Asker
from tests.reuse.worlds import gate, geometry, manifest

TOKENS = list(range(100, 150))


def layout(block_size: int = 16, pools: tuple[int, ...] = (8, 8)) -> CacheLayoutManifest:
    groups = geometry().groups[: len(pools)]
    sized = [replace(g, block_size=block_size, num_blocks=n) for g, n in zip(groups, pools, strict=True)]
    return CacheLayoutManifest(tuple(sized))


def authorised() -> IdentityGate:
    """Ann in prod/a and Bob in prod/b; Amy belongs to prod/a and has no grant."""
    made = gate()
    made.authorize("ann", "prod/a")
    made.authorize("bob", "prod/b")
    return made


def asker(tenant: str = "a", *, adapter_name: str | None = None, side_inputs: tuple = (), **changes) -> Asker:
    said = {"covered_token_ids": (), "input_side_data_identity": (), "cache_salt": None,
            "cache_isolation_namespace": f"prod/{tenant}"} | changes
    who = {"a": "ann", "b": "bob"}[tenant]
    return Asker(who, f"prod/{tenant}", manifest(**said), adapter_name, side_inputs)


def index(block_size: int = 16, pools: tuple[int, ...] = (8, 8), audit: str = "state", **design) -> PrefixCache:
    return PrefixCache(Allocator(layout(block_size, pools), audit=audit), authorised(), **design)


def published(tokens=TOKENS, request="A", **design) -> tuple[PrefixCache, Asker]:
    """An index in which one request of prod/a has started and published `tokens`."""
    cache, ann = index(**design), asker()
    cache.start(ann, request, tokens)
    cache.publish(ann, request, tokens)
    return cache, ann


def end(cache: PrefixCache, request: str) -> None:
    cache.apply({"op": "release", "request": request})


class PlainList:
    """Every publication ever made, as (namespace, generation, tokens so far, group, handle): nothing leaves it."""

    def __init__(self) -> None:
        self.rows: set[tuple[str, int, tuple[int, ...], str, str]] = set()
        self.spoiled: set[tuple[str, str]] = set()

    def publish(self, namespace: str, generation: int, tokens: list[int], tables: dict[str, list[str]],
                block_size: int) -> None:
        for group, table in tables.items():
            for j in range(len(tokens) // block_size):
                self.rows.add((namespace, generation, tuple(tokens[: (j + 1) * block_size]), group, table[j]))

    def spoil(self, allocator: Allocator) -> None:
        """What an open transaction has reserved may have been written into, in the lifetime that it has now."""
        for pool in allocator.pools:
            self.spoiled |= {(pool.group, f"{pool.first_block_id + i}@{pool.generations()[i]}") for i in pool.reserved}

    def blocks(self, namespace: str, generation: int, tokens: list[int], state: dict, block_size: int) -> int:
        """How many blocks from the first on are there in every group: by looking at every row, block after block."""
        count = 0
        for j in range(len(tokens) // block_size):
            wanted = tuple(tokens[: (j + 1) * block_size])
            for group in state["blocks"]:
                held = [h for n, g, t, k, h in self.rows if (n, g, t, k) == (namespace, generation, wanted, group)]
                if not any(alive(state, group, h) and (group, h) not in self.spoiled for h in held):
                    return count
            count += 1
        return count


def alive(state: dict, group: str, handle: str) -> bool:
    """Whether an allocator snapshot says that a handle's block is in that lifetime and carries an identity."""
    block, generation = handle.split("@")
    columns = state["blocks"][group]
    first = next(g["first_block_id"] for g in state["groups"] if g["group_id"] == group)
    return columns["generation"][int(block) - first] == int(generation) and block in columns["keys"]
