"""The radix lesson's chats on a real model: rows in slots, and two ways to say whose slots they are.

It owns rows and words. Who may have a slot a book says: the real radix cache, or a careless index that frees too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.reference import paged_attention
from kvlab.execution.model import Model
from kvlab.execution.tokenizer import Tokenizer
from kvlab.memory.kv_store import PagedStore
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.reuse.radix_cache import RadixCache


class Book(Protocol):
    """Who has which slots. Slots are numbered from 0 and hold the rows of one token."""

    def begin(self, chat: str, tokens: Sequence[int]) -> int:
        """A new chat; returns how many of its first tokens have rows already."""
        ...

    def grow(self, chat: str, tokens: Sequence[int]) -> None: ...

    def table(self, chat: str) -> Sequence[int]: ...

    def publish(self, chat: str) -> None: ...


class RadixBook:
    """The real cache: match, lease, private rows, publication."""

    def __init__(self, slots: int) -> None:
        self.cache = RadixCache(slots)

    def begin(self, chat: str, tokens: Sequence[int]) -> int:
        handed = self.cache.handoff(chat, tokens)
        self.cache.settle(handed, "admit")
        return handed.matched_tokens

    def grow(self, chat: str, tokens: Sequence[int]) -> None:
        self.cache.extend(chat, tokens)

    def table(self, chat: str) -> Sequence[int]:
        return self.cache.table(chat)

    def publish(self, chat: str) -> None:
        self.cache.publish(chat)


class CarelessBook:
    """A dict of prefixes with a stack of free slots. When a chat publishes, it frees everything that was found there
    before: also what this chat had only borrowed. That is the bug; nothing else in it is wrong."""

    def __init__(self, slots: int) -> None:
        self.free = list(reversed(range(slots)))
        self.stored: list[tuple[list[int], list[int]]] = []
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}

    def _match(self, tokens: Sequence[int]) -> list[int]:
        best: list[int] = []
        for known, slots in self.stored:
            pairs = enumerate(zip(known, tokens, strict=False))
            same = next((i for i, (a, b) in pairs if a != b), min(len(known), len(tokens)))
            best = slots[:same] if same > len(best) else best
        return best

    def begin(self, chat: str, tokens: Sequence[int]) -> int:
        self.tables[chat] = list(self._match(tokens))
        self.tokens[chat] = list(tokens[: len(self.tables[chat])])
        return len(self.tables[chat])

    def grow(self, chat: str, tokens: Sequence[int]) -> None:
        self.tokens[chat] += tokens
        self.tables[chat] += [self.free.pop() for _ in tokens]

    def table(self, chat: str) -> Sequence[int]:
        return self.tables[chat]

    def publish(self, chat: str) -> None:
        prefix = self._match(self.tokens[chat])
        self.free += self.tables[chat][: len(prefix)]
        self.tables[chat][: len(prefix)] = prefix
        self.stored.append((list(self.tokens[chat]), list(self.tables[chat])))


class SlotWorld:
    """A few chats on one model over slots of one token. Greedy, so a run repeats word for word."""

    def __init__(self, model: Model, tokenizer: Tokenizer, book: Book, slots: int) -> None:
        c, width = model.config, torch.empty(0, dtype=model.dtype).element_size()
        group = CacheGroup("g0", 0, c.layers, c.kv_heads, c.head_dim, width, 1, slots, 0)
        self.model, self.tokenizer, self.book = model, tokenizer, book
        self.store = PagedStore(CacheLayoutManifest((group,)), model.dtype, model.device)
        self.length: dict[str, int] = {}
        self.logits: dict[str, Tensor] = {}
        self.said: dict[str, list[int]] = {}
        self.computed = 0

    def read(self, chat: str, text: str) -> int:
        """A chat begins, or goes on, with this text; returns how many of its tokens had rows already."""
        ids, found = self.tokenizer.encode(text), 0
        if chat not in self.length:
            found = self.book.begin(chat, ids[:-1])
            self.length[chat] = found
        self._compute(chat, ids[found:])
        return found

    def publish(self, chat: str) -> None:
        self.book.publish(chat)

    def speak(self, chat: str, tokens: int) -> str:
        """The chat's likeliest next tokens, and all that it has said so far."""
        for _ in range(tokens):
            chosen = int(self.logits[chat].argmax())
            self.said.setdefault(chat, []).append(chosen)
            self._compute(chat, [chosen])
        return self.tokenizer.decode(self.said[chat])

    @torch.inference_mode()
    def _compute(self, chat: str, ids: Sequence[int]) -> None:
        self.book.grow(chat, ids)
        start, end = self.length[chat], self.length[chat] + len(ids)
        slots = torch.tensor(list(self.book.table(chat)), device=self.store.device)
        offsets = torch.zeros(len(ids), dtype=torch.int64, device=self.store.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            _, keys, values = self.store.layers[layer]
            self.store.write_rows(layer, slots[start:end], offsets, k, v)
            return paged_attention(q, keys, values, slots[None], [end], [len(ids)], q.shape[-1] ** -0.5)

        positions = torch.arange(start, end, device=self.store.device)
        last = torch.tensor([len(ids) - 1], device=self.store.device)
        logits = self.model.forward(torch.tensor(list(ids), device=self.store.device), positions, attend, last)
        self.logits[chat], self.length[chat] = logits[0], end
        self.computed += len(ids)


def alone(model: Model, tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """What a chat says when nobody else is there."""
    slots = len(tokenizer.encode(text)) + tokens
    world = SlotWorld(model, tokenizer, RadixBook(slots), slots)
    world.read("A", text)
    return world.speak("A", tokens)
