"""What one prompt finds in a prefix index, block by block, read from plain data; it draws nothing and decides nothing.

The states are `PrefixCache.snapshot()`; a block is a hit where the index has its key in every cache group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]
HIT, MISS, BEHIND = "=", "≠", "·"
"""Marks of a block: found in every group, the first one that is not, and whatever stands behind that one."""


@dataclass(frozen=True, slots=True)
class Column:
    """One full block of a prompt: its tokens, its key, the handles that answer for it by group, its mark.

    `handles` lack a group that has no live entry. `entry`: whether any group has one.
    """

    tokens: tuple[int, ...]
    key: str
    handles: Mapping[str, str]
    mark: str

    @property
    def entry(self) -> bool:
        return bool(self.handles)


@dataclass(frozen=True, slots=True)
class Walk:
    """A prompt over one part of an index: full blocks as columns, the tail's tokens, and the published twin.

    `same`: how many leading tokens some published sequence shares, None where the index keeps no witnesses.
    """

    columns: tuple[Column, ...]
    tail: tuple[int, ...]
    same: int | None

    @property
    def hits(self) -> int:
        return sum(c.mark == HIT for c in self.columns)

    @property
    def probes(self) -> int:
        """Blocks that a lookup looks at: the hits, and the first miss where there is one."""
        return min(self.hits + 1, len(self.columns))


def part_of(snapshot: Json, manifest: Json) -> Json | None:
    """The entries published under a manifest, None where there are none."""
    return next((p for p in snapshot["parts"] if p["manifest"] == manifest), None)


def walk(snapshot: Json, manifest: Json, tokens: Sequence[int], keys: Sequence[str]) -> Walk:
    """A prompt, with the keys of its full blocks, over a state. O(blocks + entries + published tokens)."""
    part, size = part_of(snapshot, manifest), snapshot["allocator"]["groups"][0]["block_size"]
    groups = [g["group_id"] for g in snapshot["allocator"]["groups"]]
    known = {e["key"]: e["handles"] for e in (part["entries"] if part else ())}
    columns, going = [], True
    for n, key in enumerate(keys):
        found = {g: known[key][g][0] for g in groups if key in known and known[key][g]}
        mark = HIT if going and len(found) == len(groups) else MISS if going else BEHIND
        going = mark == HIT
        columns.append(Column(tuple(tokens[n * size : (n + 1) * size]), key, found, mark))
    return Walk(tuple(columns), tuple(tokens[len(keys) * size :]), _same(part, tokens) if part else 0)


def _same(part: Json, tokens: Sequence[int]) -> int | None:
    if not part["sequences"]:
        return None
    return max(_common(s["tokens"], tokens) for s in part["sequences"])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def holders(snapshot: Json, group: int, handle: str) -> list[str]:
    """The requests whose tables name a block."""
    name = snapshot["allocator"]["groups"][group]["group_id"]
    return [r for r, row in snapshot["allocator"]["requests"].items() if handle in row["tables"][name]]


def valid_rows(snapshot: Json, group: int, handle: str) -> int:
    """How many rows of a block are valid, in its present life."""
    space = snapshot["allocator"]["groups"][group]
    column = snapshot["allocator"]["blocks"][space["group_id"]]
    return column["valid_rows"][int(handle.split("@")[0]) - space["first_block_id"]]


def keys_by_handle(snapshot: Json) -> dict[str, str]:
    """Which key each live entry's block stands under, over all parts."""
    return {handle: entry["key"] for part in snapshot["parts"] for entry in part["entries"]
            for found in entry["handles"].values() for handle in found}


def counts(snapshot: Json) -> dict[str, int]:
    """Blocks of the first group: in use, free with an identity, free without one."""
    first = snapshot["allocator"]["groups"][0]
    column = snapshot["allocator"]["blocks"][first["group_id"]]
    free = [i for i, refs in enumerate(column["ref_cnt"]) if not refs]
    cached = sum(str(i + first["first_block_id"]) in column["keys"] for i in free)
    return {"in use": first["num_blocks"] - len(free), "cached and free": cached, "empty": len(free) - cached}
