"""Engines over a radix tree, a prefix chain or nothing at all, and what a greedy run says: for tests of reuse.

It owns no expectation: the honest side of every comparison is a run of its own memory that reuses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvlab.memory.allocator import Allocator
from kvlab.memory.kv_store import PagedMemory, PagedStore
from kvlab.memory.layout import quarter_split
from kvlab.reuse.one_tenant import one_tenant
from kvlab.reuse.radix_cache import RadixCache
from kvlab.serving.engine import Engine
from kvlab.serving.prefix_memory import PrefixMemory
from kvlab.serving.radix_memory import RadixMemory

CLOSE = 1e-4
TEXT = ("It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of "
        "a wife. However little known the feelings or views of such a man may be on his first entering a "
        "neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is considered as "
        "the rightful property of some one or other of their daughters. My dear Mr. Bennet, said his lady to him one "
        "day, have you heard that Netherfield Park is let at last? Mr. Bennet replied that he had not. But it is, "
        "returned she; for Mrs. Long has just been here, and she told me all about it.")
LENGTHS = [(0, 48), (24, 48), (48, 49), (48, 48), (47, 48), (33, 64), (64, 64), (16, 17)]
"""(how many tokens the second prompt shares with the first, of 64; its length): cold, half, full, off by one."""


def layout_of(model, block_size: int, blocks: int):
    c = model.config
    return quarter_split(c.layers, c.kv_heads, c.head_dim, 4, block_size=block_size, num_blocks=blocks)


def radix(model, block_size: int = 16, tokens: int = 384, first_slot: int = 40) -> Engine:
    """An engine over a radix tree; every slot that returns to the queue is filled with NaN."""
    slots = tokens // block_size
    store = PagedStore(layout_of(model, block_size, slots), model.dtype, model.device)
    memory = RadixMemory(store, RadixCache(slots, block_size=block_size, first_slot=first_slot))
    memory.cache.observers.append(memory.poison)
    return Engine(model, memory, device=model.device)


def chain(model, block_size: int = 16, tokens: int = 384) -> Engine:
    """An engine over a prefix chain; freed blocks that nobody may find are filled with NaN."""
    layout = layout_of(model, block_size, tokens // block_size)
    allocator, store = Allocator(layout, queue_seed=3), PagedStore(layout, model.dtype, model.device)
    allocator.observers.append(store.poison)
    return Engine(model, PrefixMemory(PagedMemory(allocator, store), *one_tenant(allocator)), device=model.device)


def plain(model, tokens: int = 384) -> Engine:
    """An engine that reuses nothing."""
    layout = layout_of(model, 16, tokens // 16)
    memory = PagedMemory(Allocator(layout, queue_seed=8), PagedStore(layout, model.dtype, model.device))
    return Engine(model, memory, device=model.device)


def alone(model, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after the last token, from nothing."""
    return plain(model).extend({"alone": tokens})["alone"]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() < CLOSE) and bool((a.argmax(-1) == b.argmax(-1)).all())


def pair(ids: Sequence[int], same: int, length: int) -> tuple[list[int], list[int]]:
    """A first prompt of 64 tokens, and a second that shares its first `same` tokens and is `length` long."""
    other = [(token + 1) % 256 for token in ids[same:length]]
    return list(ids[:64]), [*ids[:same], *other]


def talk(engine: Engine, now: Mapping[str, torch.Tensor], words: int) -> dict[str, tuple[list[int], torch.Tensor]]:
    """Decode greedily in one batch: each request's tokens and logits `[words + 1, vocab]`."""
    said: dict[str, list[int]] = {name: [] for name in now}
    seen = {name: [logits] for name, logits in now.items()}
    for _ in range(words):
        step = {name: [int(logits.argmax())] for name, logits in now.items()}
        now = engine.extend(step)
        for name, logits in now.items():
            said[name] += step[name]
            seen[name].append(logits)
    return {name: (said[name], torch.stack(seen[name])) for name in said}


def same_talk(ours: Mapping, theirs: Mapping) -> bool:
    """The same words, and logits within the tolerance at every one of them."""
    return all(ours[name][0] == theirs[name][0] and close(ours[name][1], theirs[name][1]) for name in theirs)


def honest(model, prompts: Mapping[str, Sequence[int]], words: int) -> dict[str, tuple[list[int], torch.Tensor]]:
    """What each prompt gets with an engine to itself."""
    out = {}
    for name, prompt in prompts.items():
        engine = plain(model)
        out |= talk(engine, engine.extend({name: prompt}), words)
    return out
