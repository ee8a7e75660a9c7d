"""The radix index once more, as plainly as it can be said: every cached prefix of whole blocks, with its slot.

It owns the expected outcome of every operation and knows nothing of edges, splits, heaps, packed bytes or digests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Prefix = tuple[str, tuple[int, ...]]


@dataclass
class Live:
    extra: str
    tokens: list[int]
    table: list[int]
    protected: int


@dataclass
class Model:
    """`slots` and `used` have one entry for each cached prefix; a prefix is an extra key and its tokens."""

    size: int
    slots: dict[Prefix, int] = field(default_factory=dict)
    used: dict[Prefix, int] = field(default_factory=dict)
    live: dict[str, Live] = field(default_factory=dict)

    def blocks(self, extra: str, tokens: list[int]) -> list[Prefix]:
        """All prefixes of whole blocks, shortest first."""
        return [(extra, tuple(tokens[:n])) for n in range(self.size, len(tokens) + 1, self.size)]

    def match(self, extra: str, tokens: list[int]) -> list[int]:
        """Slots of the longest cached prefix."""
        found = []
        for prefix in self.blocks(extra, tokens):
            if prefix not in self.slots:
                break
            found.append(self.slots[prefix])
        return found

    def touch(self, extra: str, tokens: list[int], version: int) -> None:
        for prefix in self.blocks(extra, tokens):
            if prefix in self.slots:
                self.used[prefix] = version

    def store(self, extra: str, tokens: list[int], table: list[int], protected: int, version: int) -> list[int]:
        """Insert whole blocks with their slots; returns the duplicates behind `protected` tokens."""
        found = len(self.match(extra, tokens))
        for prefix, slot in list(zip(self.blocks(extra, tokens), table, strict=False))[found:]:
            self.slots[prefix] = slot
        self.touch(extra, tokens, version)
        return table[protected // self.size : found]

    # ------------------------------------------------------------------ who may go
    def locked(self) -> set[Prefix]:
        return {p for r in self.live.values() for p in self.blocks(r.extra, r.tokens[: r.protected])}

    def leaves(self) -> list[Prefix]:
        """Unlocked cached prefixes that no longer cached prefix continues."""
        inner = {(extra, tokens[: -self.size]) for extra, tokens in self.slots}
        return [p for p in self.slots if p not in inner and p not in self.locked()]

    def drop(self, slots: list[int], lru: bool) -> None:
        """An edge went: its slots must be the end of one unlocked leaf, and under LRU of the one used longest ago."""
        at = {slot: prefix for prefix, slot in self.slots.items()}
        end = at[slots[-1]]
        assert end in self.leaves()
        assert not lru or self.used[end] == min(self.used[p] for p in self.leaves())
        for slot in reversed(slots):
            prefix = at[slot]
            assert prefix in self.leaves(), "something hangs below it, or somebody reads it"
            del self.slots[prefix], self.used[prefix]

    def private(self) -> list[int]:
        return [s for r in self.live.values() for s in r.table[r.protected // self.size :]]
