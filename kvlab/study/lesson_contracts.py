"""What lesson 1 adds: five chats over one paged memory, around which one contract at a time can be switched off.

It breaks nothing inside a machine: what is switched off is asked and overruled, or not asked at all. It holds no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor

from kernels.reference import SoftmaxState, attention_oracle, block_state, merge_state, normalize, paged_attention
from kvlab.contract import Rejected
from kvlab.execution.model import Model
from kvlab.execution.tokenizer import Tokenizer
from kvlab.memory.address import resolve
from kvlab.memory.address_bytes import address_snapshot
from kvlab.memory.address_snapshot import validate
from kvlab.memory.block_pool import index_of
from kvlab.memory.kv_store import PagedMemory, PagedStep
from kvlab.memory.transaction import StagedRequest
from kvlab.reuse.compatibility import examine
from kvlab.reuse.keys import block_hashes
from kvlab.reuse.manifests import CacheCompatibilityManifest
from kvlab.serving.engine import Engine
from kvlab.study.lesson import PagedWorld, World
from kvlab.study.lesson_address import slot_id_as_offset
from kvlab.study.lesson_identity import Records

SIZE = 16
"""Tokens a block."""

CONTRACTS = {
    "address": "Where do the bytes live?",
    "ownership": "Who may read, write and free them?",
    "identity": "Do they mean the same computation?",
    "index": "How is the longest match found?",
    "execution_reuse": "Can shared work be done once?",
}
"""The five contracts (article 0x00B) and the question that each of them answers."""

Combine = Callable[[SoftmaxState, SoftmaxState], Tensor]
"""What makes one attention row `[1, heads, head_dim]` of the states that two sets of keys left behind."""


# ---------------------------------------------------------------- two parts, one row
def merged(shared: SoftmaxState, own: SoftmaxState) -> Tensor:
    """Exactly what one pass over both sets of keys gives (article 0x0BA)."""
    return normalize(merge_state(shared, own))


def averaged(shared: SoftmaxState, own: SoftmaxState) -> Tensor:
    """The mean of two finished rows: as if both sets of keys deserved the same weight."""
    return (normalize(shared) + normalize(own)) / 2


def in_two_parts(q: Tensor, k: Tensor, v: Tensor, shared: int, combine: Combine) -> Tensor:
    """One query q `[1, heads, head_dim]` over k, v `[context, kv_heads, head_dim]`: the first `shared` rows apart."""
    wide, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    keys, values = (x.repeat_interleave(wide, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,thd->nht", q, keys) * scale
    parts = [block_state(scores[..., at], values[at]) for at in (slice(shared), slice(shared, None))]
    return combine(*parts)


class ContractStep(PagedStep):
    """A step that reads as its world's translator does, and answers a shared prefix as its world's schedule does."""

    world: Chats

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        g = self.store.layers[layer][0]
        self.store.write_rows(layer, *self.slots[g], k, v)
        keys, values = self.world.gathered(layer)
        out, first = [], 0
        for i, (n, context) in enumerate(zip(self.query_lengths, self.context_lengths, strict=True)):
            rows = q[first : first + n]
            out.append(self.world.answer(rows, g, keys, values, self.tables[g][i], context))
            first += n
        if layer in self.store.last_layer:
            self.txn.wrote(self.store.last_layer[layer])
        return torch.cat(out)


class ContractMemory(PagedMemory):
    """Paged memory whose steps ask a world how to read and how to answer."""

    world: Chats

    def open(self, rows: Mapping[str, Sequence[int]]) -> ContractStep:
        step = ContractStep(self.store, super().open(rows).txn)
        step.world = self.world
        return step


# ---------------------------------------------------------------- five chats
@dataclass(frozen=True, slots=True)
class Published:
    """A full block that others may find: a handle a group, the manifest its rows were made under, its place."""

    bundle: tuple[str, ...]
    manifest: CacheCompatibilityManifest
    place: int


class Chats(PagedWorld):
    """Chats over one paged memory with an index of full blocks; `voices` are the models of chats under an adapter.

    `off` names the contract that is switched off, "" none. `taken` says which published block each chat was given,
    `overruled` what a contract said that nobody listened to.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, voices: Mapping[str, Model] | None = None, *,
                 off: str = "", num_blocks: int = 32, combine: Combine | None = None) -> None:
        super().__init__(model, tokenizer, num_blocks=num_blocks)
        if off not in ("", *CONTRACTS):
            raise ValueError(f"the contracts are {', '.join(CONTRACTS)}, not {off!r}")
        self.off, self.combine = off, averaged if off == "execution_reuse" else combine
        self.memory = self.engine.memory = ContractMemory(self.allocator, self.store)
        self.memory.world = self
        self.voices = {chat: Engine(voice, self.memory, eos=tokenizer.eos_ids, device=voice.device)
                       for chat, voice in (voices or {}).items()}
        self.records = Records(model, self)
        self.ids: dict[str, list[int]] = {}
        self.published: dict[str, Published] = {}
        self.taken: list[tuple[str, int, Published]] = []
        self.overruled: dict[str, str] = {}

    # ------------------------------------------------------------------ what a chat does
    def ask(self, chat: str, text: str) -> int:
        """A new chat: take what the index finds, compute the rest, publish its full blocks. Returns rows computed."""
        ids = self.ids[chat] = self.tokenizer.encode(text)
        engine = self.voices.get(chat, self.engine)
        found = self.match(chat, ids)
        reach, gap = max(found, default=-1) + 1, min(found, default=0)
        before = engine.rows_computed
        if gap:
            found |= self._before(chat, ids, gap, engine)
        if found:
            self.allocator.apply({"op": "touch", "request": chat, "blocks": [found[j].bundle for j in range(reach)]})
        self.logits |= engine.extend({chat: ids[reach * SIZE :]})
        self._publish(chat)
        return engine.rows_computed - before

    def _before(self, chat: str, ids: list[int], gap: int, engine: Engine) -> dict[int, Published]:
        """The blocks before one that the index offered out of place: computed, named, and let go to be found again."""
        engine.extend({chat: ids[: gap * SIZE]})
        self.allocator.apply({"op": "cache_full", "request": chat, "blocks": list(range(gap)),
                              "keys": self.keys(ids)[:gap]})
        made = {j: Published(self.bundle(chat, j), self.manifest(chat, (j + 1) * SIZE), j) for j in range(gap)}
        self.allocator.release(chat)
        return made

    def go_on(self, chat: str, text: str) -> None:
        """More text of a chat that exists."""
        self.ids[chat] = self.ids[chat] + self.tokenizer.encode(text)
        self.logits |= self.voices.get(chat, self.engine).extend({chat: self.tokenizer.encode(text)})

    def branch_at(self, parent: str, child: str, at: int, text: str) -> None:
        """`child` goes on from the parent's first `at` tokens with a line of its own."""
        self.memory.fork(parent, child)
        self.allocator.truncate(child, at)
        self.ids[child] = self.ids[parent][:at]
        if self.off == "ownership":
            self._write_in_place(child, self.tokenizer.encode(text))
        self.go_on(child, text)

    def speak(self, *requests: str, tokens: int = 1) -> None:
        """Each chat says its likeliest next token: those of the base model in one batch, each adapter on its own."""
        plain = [chat for chat in requests if chat not in self.voices]
        for batch in ([plain] if plain else []) + [[chat] for chat in requests if chat in self.voices]:
            engine = self.voices.get(batch[0], self.engine)
            for _ in range(tokens):
                chosen = {chat: [int(self.logits[chat].argmax())] for chat in batch}
                for chat, ids in chosen.items():
                    self.said.setdefault(chat, []).extend(ids)
                self.logits |= engine.extend(chosen)

    # ------------------------------------------------------------------ address: where a kernel looks
    def gathered(self, layer: int) -> tuple[Tensor, Tensor]:
        """The K and V that attention reads for a layer, `[blocks, tokens, kv_heads, head_dim]`."""
        g, keys, values = self.store.layers[layer]
        if self.off == "address":
            return slot_id_as_offset(self.store.k[g], layer), slot_id_as_offset(self.store.v[g], layer)
        return keys, values

    # ------------------------------------------------------------------ execution: how it is computed
    def answer(self, q: Tensor, g: int, keys: Tensor, values: Tensor, table: Tensor, context: int) -> Tensor:
        """One chat's queries over its rows; where a schedule is set, a decode step answers its shared blocks apart."""
        shared = self.shared_rows(g, table, context) if self.combine and len(q) == 1 else 0
        if not shared:
            return paged_attention(q, keys, values, table[None], [context], [len(q)], q.shape[-1] ** -0.5)
        return in_two_parts(q, *rows_of(keys, values, table, context), shared, self.combine)

    def shared_rows(self, g: int, table: Tensor, context: int) -> int:
        """Rows of the full blocks at the head of a group's table that other tables name too."""
        pool, full = self.allocator.pools[g], table[: context // SIZE].tolist()
        alone = (j for j, index in enumerate(full) if pool.refs(index) < 2)
        return SIZE * next(alone, len(full))

    # ------------------------------------------------------------------ index: what was computed before
    def keys(self, ids: list[int]) -> list[str]:
        """A key for every full block: from its parent's key on, unless the index is off; then from its own tokens."""
        if self.off == "index":
            return [block_hashes(ids[at : at + SIZE], SIZE)[0] for at in range(0, len(ids) - SIZE + 1, SIZE)]
        return block_hashes(ids, SIZE)

    def match(self, chat: str, ids: list[int]) -> dict[int, Published]:
        """The published blocks that this chat may take, by place: a prefix, unless the index is off.

        At least one token is left to compute, for there is nothing to take a logit from otherwise.
        """
        found: dict[int, Published] = {}
        for j, key in enumerate(self.keys(ids[:-1])):
            candidate = self.published.get(key)
            if candidate is not None and self._may_read(chat, candidate):
                found[j] = candidate
                self.taken.append((chat, j, candidate))
            elif self.off != "index":
                break
        return found

    def _publish(self, chat: str) -> None:
        """Name a chat's own full blocks, so that others find them."""
        new = {j: key for j, key in enumerate(self.keys(self.ids[chat])) if key not in self.published}
        if new:
            self.allocator.apply({"op": "cache_full", "request": chat, "blocks": [*new], "keys": [*new.values()]})
        for j, key in new.items():
            self.published[key] = Published(self.bundle(chat, j), self.manifest(chat, (j + 1) * SIZE), j)

    def bundle(self, chat: str, j: int) -> tuple[str, ...]:
        """The handles of a chat's logical block j, one a group."""
        live = self.allocator.requests[chat]
        return tuple(pool.text(table[j]) for pool, table in zip(self.allocator.pools, live.tables, strict=True))

    # ------------------------------------------------------------------ identity: may it be reused
    def manifest(self, chat: str, tokens: int) -> CacheCompatibilityManifest:
        """Under which facts a chat's first `tokens` rows are computed."""
        voice = self.voices[chat].model.digest if chat in self.voices else "none"
        return self.records.manifest(self.ids[chat][:tokens], chat, adapter_identity=voice)

    def _may_read(self, chat: str, candidate: Published) -> bool:
        reason = self.compatible(chat, candidate)
        if reason and self.off == "identity":
            self.overruled["identity"] = reason
            return True
        return not reason

    def compatible(self, chat: str, candidate: Published) -> str:
        """What the manifest says of a candidate for a chat: the reason of the first difference, "" if there is none.

        It is asked about the tokens that the index claims to have found: the whole prefix, or one block of it.
        """
        producer, end = candidate.manifest, (candidate.place + 1) * SIZE
        consumer, start = self.manifest(chat, end), end - SIZE if self.off == "index" else 0
        ours, theirs = (replace(m, covered_token_ids=m.covered_token_ids[start:]) for m in (producer, consumer))
        layout = self.records.layout
        return examine(ours, theirs, {layout.digest: layout}).reason

    # ------------------------------------------------------------------ ownership: who may write
    def _write_in_place(self, chat: str, tokens: list[int]) -> None:
        """Write a chat's next rows wherever its table points. The contract is asked, and overruled."""
        live = self.allocator.requests[chat]
        handles = self.bundle(chat, len(live.tables[0]) - 1)
        try:
            self.allocator.admit_writer(chat, dict(zip((g.group_id for g in self.layout.groups), handles, strict=True)))
        except Rejected as no:
            self.overruled["ownership"] = no.reason
        tables = tuple([index_of(word) for word in table] for table in live.tables)
        staged = StagedRequest(chat, live.context, live.context + len(tokens), tables)
        nobody = SimpleNamespace(view=lambda: [staged], wrote=lambda group: None)
        positions = torch.arange(staged.start, staged.context, device=self.store.device)
        self.engine.model.forward(torch.tensor(tokens, device=self.store.device), positions,
                                  PagedStep(self.store, nobody).attend)


def rows_of(keys: Tensor, values: Tensor, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """K and V `[context, kv_heads, head_dim]` of one table, in the order of its tokens."""
    blocks = table[: -(-context // SIZE)]
    return keys[blocks].flatten(0, 1)[:context], values[blocks].flatten(0, 1)[:context]


# ---------------------------------------------------------------- the naive layout
def rectangle_facts(addresses: Sequence[int], row_bytes: int, reserved: int, most: int) -> dict[str, bool]:
    """Which promises of a rectangle hold for one request (article 0x00A).

    `addresses`: the byte of each token's row in one layer, in order; a row has `row_bytes` bytes there. `reserved`: the
    tokens that there is room for, `most` those that the request may come to.
    """
    steps = {after - before for before, after in pairwise(addresses)}
    return {"one_contiguous_tensor_per_request": steps == {row_bytes}, "capacity_for_max_length": reserved >= most,
            "position_maps_to_fixed_stride_from_one_base": len(steps) == 1}


def row_addresses(world: World, chat: str) -> list[int]:
    """Where the K row of each of a chat's tokens begins, in layer 0, in rectangular or in paged memory."""
    if isinstance(world, PagedWorld):
        snapshot = address_snapshot(world.store, world.allocator.snapshot())
        tokens = range(world.allocator.requests[chat].context)
        return [resolve(snapshot, chat, token, 0, "K", 0, 0).byte_address for token in tokens]
    keys = world.memory.k[0, world.memory.slot[chat]]
    return [keys[token].data_ptr() for token in range(world.memory.length(chat))]


# ---------------------------------------------------------------- what each contract can notice
def noticed(world: Chats) -> dict[str, str]:
    """What each contract's own checks say of a world after the fact; "" where all of them pass.

    Nothing is assumed: addresses are resolved, counts recounted, manifests compared, keys recomputed, and attention is
    measured against the oracle. Cost: one translation a block, layer and tensor, one oracle row a chat and layer.
    """
    return {"address": _read_elsewhere(world), "ownership": _counted_again(world), "identity": _compared_again(world),
            "index": _hashed_again(world), "execution_reuse": _answered_again(world)}


def _read_elsewhere(world: Chats) -> str:
    """Does attention read each row where the translator says it is?"""
    snapshot = address_snapshot(world.store, world.allocator.snapshot())
    validate(snapshot)
    for layer, (g, *_) in enumerate(world.store.layers):
        for kind, rows in zip("KV", world.gathered(layer), strict=True):
            for chat, live in world.allocator.requests.items():
                for token in {*range(0, live.context, SIZE), live.context - 1}:
                    block, offset = index_of(live.tables[g][token // SIZE]), token % SIZE
                    if rows[block, offset].data_ptr() != resolve(snapshot, chat, token, layer, kind, 0, 0).byte_address:
                        return f"layer {layer} is read at another address"
    return ""


def _counted_again(world: Chats) -> str:
    try:
        world.allocator.check()
    except Rejected as no:
        return no.reason
    return world.overruled.get("ownership", "")


def _compared_again(world: Chats) -> str:
    return next((reason for chat, _, block in world.taken if (reason := world.compatible(chat, block))), "")


def _hashed_again(world: Chats) -> str:
    """Is the prefix of every block that was given away the prefix of the chat that got it?"""
    for chat, j, block in world.taken:
        ours, theirs = (block_hashes(list(ids)[: (j + 1) * SIZE], SIZE)[-1]
                        for ids in (block.manifest.covered_token_ids, world.ids[chat]))
        if ours != theirs:
            return f"block {j} has another prefix"
    return ""


def _answered_again(world: Chats) -> str:
    """Is a query over the rows of each chat answered as by one exact pass over the same rows?"""
    model, draw = world.engine.model, torch.Generator().manual_seed(1)
    q = torch.rand(1, model.config.heads, model.config.head_dim, generator=draw).to(world.store.device) * 4 - 2
    for layer, (g, *_) in enumerate(world.store.layers):
        keys, values = world.gathered(layer)
        for live in world.allocator.requests.values():
            table = torch.tensor([index_of(word) for word in live.tables[g]], device=world.store.device)
            context = live.context
            exact = attention_oracle(q, keys, values, table, context, context - 1, q.shape[-1] ** -0.5)
            if (world.answer(q, g, keys, values, table, context) - exact).abs().max() > 1e-4:
                return "not what one exact pass gives"
    return ""
