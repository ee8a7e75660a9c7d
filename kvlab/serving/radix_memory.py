"""Paged rows behind a radix tree: a slot of the tree is a block of the store, and one request's rows serve the next.

It owns neither rows nor tree, only open steps. It decides nothing about who waits; what it evicts it asks for by name.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvlab.contract import Event, Receipt, Rejected
from kvlab.memory.kv_store import PagedStep, PagedStore
from kvlab.memory.transaction import StagedRequest
from kvlab.reuse.radix_cache import RadixCache
from kvlab.reuse.radix_requests import LiveRequest, live
from kvlab.reuse.token_keys import TOKEN_BYTES, TokenKey, pack


@dataclass(frozen=True, slots=True)
class NewRows:
    """One request of an open step: the packed tokens to come, and the reserved slots that they will need."""

    found: LiveRequest
    tokens: bytes
    fresh: array


class RadixTxn:
    """New rows in reserved slots, seen by nobody else until `publish` gives them to their requests.

    The slots come from the free queue and are the memory's (`reserve`); the requests own them from `publish` on.
    """

    def __init__(self, memory: RadixMemory, rows: Sequence[NewRows], begun: str | None) -> None:
        self.memory, self.rows, self.begun = memory, rows, begun
        self.written: set[str] = set()
        self.open = True
        memory.writing.update(row.found.request_id for row in rows)

    def view(self) -> list[StagedRequest]:
        """The staged tables as block indices of the store; every group has the same."""
        first, groups = self.memory.cache.pool.first_slot, len(self.memory.store.layout.groups)
        out = []
        for row in self.rows:
            start = len(row.found.tokens) // TOKEN_BYTES
            table = [slot - first for slot in (*row.found.table, *row.fresh)]
            out.append(StagedRequest(row.found.request_id, start, start + len(row.tokens) // TOKEN_BYTES,
                                     (table,) * groups))
        return out

    def wrote(self, group_id: str) -> None:
        """One group has all its new rows."""
        self.written.add(group_id)

    def publish(self) -> None:
        """The rows become their requests' own, private until they are offered. O(table).

        `Rejected` (`publish_before_append_write`, `half_bundle_publication`) where a group lacks rows: nothing changes
        and the step stays open. `transaction_closed` after its end.
        """
        if not self.open:
            raise Rejected("transaction_closed", "this step has ended")
        groups = len(self.memory.store.layout.groups)
        if not self.written:
            raise Rejected("publish_before_append_write", "no group has reported its new rows")
        if len(self.written) < groups:
            raise Rejected("half_bundle_publication", f"{len(self.written)} of {groups} groups")
        for row in self.rows:
            self.memory.cache.apply({"op": "extend", "request": row.found.request_id, "append": row.tokens,
                                     "slots": row.fresh})
        self._close()

    def rollback(self) -> None:
        """Reserved slots return to the queue, and a request that this step began is cancelled; see `RadixMemory`."""
        if not self.open:
            return
        self._close()
        fresh = [slot for row in self.rows for slot in row.fresh]
        if fresh:
            self.memory.cache.apply({"op": "give_back", "slots": fresh})
        if self.begun is not None:
            self.memory.cache.cancel(self.begun)

    def _close(self) -> None:
        self.open = False
        self.memory.writing.difference_update(row.found.request_id for row in self.rows)


class RadixMemory:
    """A store, the tree over its blocks, and the requests between them. It is the only producer of its tree.

    A refusal comes before the first change. A model pass that fails and is rolled back leaves no request, no lease and
    no private slot behind; three traces stay, because each was a step of its own: the tree's version and the order of
    its free queue have moved on, the match may have split an edge and counts as a use, and what was evicted to make
    room is gone. `evicted_tokens` counts these; `cache.observers` see each eviction by name.
    ValueError where the store's groups are not blocks of the cache's size, one for each slot at least.
    """

    def __init__(self, store: PagedStore, cache: RadixCache) -> None:
        size, slots = cache.tree.block_size, cache.pool.num_slots
        if any(g.block_size != size or g.num_blocks < slots for g in store.layout.groups):
            raise ValueError(f"every cache group needs {slots} blocks of {size} tokens, one for each slot")
        self.store, self.cache = store, cache
        self.writing: set[str] = set()
        self.evicted_tokens = 0

    # ------------------------------------------------------------------ new rows
    def open(self, rows: Mapping[str, Sequence[int]]) -> PagedStep:
        """Reserve room for new tokens of a batch; a new request, over nothing that is cached, in a step of its own.

        `Rejected` with nothing changed: `out_of_memory` where evicting every unlocked leaf would not suffice,
        `write_in_flight` for a request of another open step, `invalid_length`, `invalid_token`, `unknown_operation`.
        """
        new = [request for request in rows if request not in self.cache.requests]
        if new and len(rows) > 1:
            raise Rejected("unknown_operation", "start a new request in a step of its own")
        packed = {request: pack(tokens) for request, tokens in rows.items()}
        if not all(packed.values()):
            raise Rejected("invalid_length", "every request of a step needs at least one new token")
        if new:
            return self._begin(new[0], packed[new[0]], b"")
        needs = [(self._still(request), tokens) for request, tokens in packed.items()]
        return PagedStep(self.store, RadixTxn(self, self._reserve(needs), None))

    def start(self, request: str, tokens: Sequence[int]) -> tuple[PagedStep, int]:
        """A new request over the longest cached prefix of all its tokens but the last; also how many tokens that is.

        The last one is always computed, for the next token's logits. The prefix is leased before anything is evicted
        for the rest. `Rejected` with nothing changed: `empty_prompt`, `request_exists`, `out_of_memory`.
        """
        data = pack(tokens)
        if not data:
            raise Rejected("empty_prompt", f"{request} has no token to compute logits from")
        step = self._begin(request, data, data[:-TOKEN_BYTES])
        return step, step.context_lengths[0] - step.query_lengths[0]

    def _begin(self, request: str, data: bytes, question: bytes) -> PagedStep:
        """Lease what is cached of `question` and reserve slots for the rest of `data`."""
        cache, size = self.cache, self.cache.tree.block_size
        if request in cache.requests:
            raise Rejected("request_exists", f"request {request!r}")
        walk = cache.tree.walk(TokenKey(question, size))
        leased = sum(len(node.value) for node in walk.path if not node.lock_ref)
        if walk.partial is not None and not walk.partial.lock_ref:
            leased += walk.into // cache.tree.block_bytes
        self._room(-(-(len(data) - walk.consumed) // cache.tree.block_bytes), leased)
        cache.settle(cache.handoff(request, question), "admit")
        return PagedStep(self.store, RadixTxn(self, self._reserve([(cache.requests[request], data[walk.consumed:])]),
                                              request))

    def _still(self, request: str) -> LiveRequest:
        """A live request that no open step is writing for: its slots may not move under a writer."""
        if request in self.writing:
            raise Rejected("write_in_flight", f"a step of {request} is open")
        return live(self.cache, request)

    def _room(self, blocks: int, leased: int = 0) -> int:
        """How many of `blocks` are not free; `out_of_memory` if evicting all but `leased` blocks would not free them.

        No unlocked edge has a locked one below it, so every evictable block can go in the end.
        """
        free, evictable = self.cache.pool.free_count, self.cache.tree.evictable - leased
        if blocks > free + evictable:
            raise Rejected("out_of_memory", f"{blocks} slots wanted, {free} free and {evictable} evictable")
        return max(0, blocks - free)

    def _reserve(self, needs: Sequence[tuple[LiveRequest, bytes]]) -> list[NewRows]:
        """Slots for every request of a step, evicting what is missing and no more than whole edges make it."""
        cache, size = self.cache, self.cache.tree.block_bytes
        counts = [-(-(len(found.tokens) + len(tokens)) // size) - len(found.table) for found, tokens in needs]
        total = sum(counts)
        if missing := self._room(total):
            self.evicted_tokens += cache.evict(missing * cache.tree.block_size).evicted_tokens
        fresh = cache.apply({"op": "reserve", "count": total}).allocated if total else array("i")
        ends = [sum(counts[: n + 1]) for n in range(len(counts))]
        return [NewRows(found, tokens, fresh[end - count : end])
                for (found, tokens), count, end in zip(needs, counts, ends, strict=True)]

    # ------------------------------------------------------------------ what becomes of rows
    def offer(self, request: str, tokens: Sequence[int]) -> None:
        """Let others find the whole blocks of a live request; `covered_token_mismatch` unless its rows are `tokens`.

        Where somebody was faster, its own duplicates are freed and its table names the tree's slots from here on.
        """
        if self._still(request).tokens != pack(tokens):
            raise Rejected("covered_token_mismatch", f"these are not the tokens of {request}'s rows")
        self.cache.publish(request)

    def release(self, request: str) -> Receipt:
        """A request ends: its whole blocks stay and can be found, its duplicates and its last part block are freed."""
        self._still(request)
        return self.cache.finish(request)

    def cancel(self, request: str) -> Receipt:
        """A request ends and nothing that it has not offered can be found."""
        self._still(request)
        return self.cache.cancel(request)

    def length(self, request: str) -> int:
        found = self.cache.requests.get(request)
        return len(found.tokens) // TOKEN_BYTES if found else 0

    def poison(self, event: Event) -> None:
        """A cache observer: fill every slot that returns to the queue with NaN, so that no recycled row is read."""
        if event.kind == "committed" and event.receipt.released:
            blocks = [slot - self.cache.pool.first_slot for slot in event.receipt.released]
            for group in range(len(self.store.layout.groups)):
                self.store.blank(group, blocks)
