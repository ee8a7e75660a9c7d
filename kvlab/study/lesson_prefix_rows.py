"""The prefix lesson's chats on a real model: rows that others have computed are found, the rest is computed.

It owns no rule and no row: the index finds, the engine computes, and this module counts. Its naive answers go around
the engine on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.execution.model import Model
from kvlab.execution.tokenizer import Tokenizer
from kvlab.memory.allocator import Allocator
from kvlab.memory.kv_store import PagedMemory, PagedStore
from kvlab.reuse.one_tenant import one_tenant
from kvlab.serving.prefix_memory import PrefixMemory
from kvlab.study.lesson import QUEUE_SEED, World, layout_of


@dataclass(frozen=True, slots=True)
class Begun:
    """How a chat began: tokens of its prompt, how many were found, how many computed, logits after the last one."""

    tokens: int
    found: int
    computed: int
    logits: Tensor


class PrefixWorld(World):
    """A few chats on one model over paged memory with an index. Freed rows that nobody can find become NaN."""

    def __init__(self, model: Model, tokenizer: Tokenizer, *, num_blocks: int, block_size: int = 16) -> None:
        layout = layout_of(model, num_blocks=num_blocks, block_size=block_size)
        self.allocator = Allocator(layout, queue_seed=QUEUE_SEED)
        self.store = PagedStore(layout, model.dtype, model.device)
        self.allocator.observers.append(self.store.poison)
        self.cache, self.asker = one_tenant(self.allocator)
        self.prompts: dict[str, list[int]] = {}
        super().__init__(model, tokenizer, PrefixMemory(PagedMemory(self.allocator, self.store), self.cache,
                                                        self.asker))

    def begin(self, request: str, text: str) -> Begun:
        """A new chat over whatever is found for its text."""
        ids, before = self.tokenizer.encode(text), self.engine.rows_computed
        logits, found = self.engine.start(request, ids)
        self.logits[request], self.prompts[request] = logits, ids
        return Begun(len(ids), found, self.engine.rows_computed - before, logits)

    def end(self, request: str) -> None:
        """A chat ends. What it said can be found, too: all its full blocks are offered first."""
        self.memory.offer(request, [*self.prompts.pop(request), *self.said.get(request, [])])
        self.leave(request)

    # ------------------------------------------------------------------ naive answers
    def take_everything(self, request: str, text: str) -> int:
        """Begin a chat over all that is found, the last row included, as one that wants no logits; tokens taken."""
        ids = self.tokenizer.encode(text)
        match = self.cache.lookup(self.asker, request, ids, requires_logits=False)
        self.cache.admit(match.receipt)
        self.prompts[request] = ids
        return match.lengths.runtime

    def feed_again(self, request: str) -> None:
        """Run the model over a chat's last token once more, behind all its rows."""
        self.logits |= self.engine.extend({request: self.prompts[request][-1:]})


@torch.inference_mode()
def over_nothing(model: Model) -> str:
    """Run a model over no rows at all; the beginning of what it says to that, "" where it finds nothing to say."""
    none = torch.empty(0, dtype=torch.int64, device=model.device)
    try:
        model.forward(none, none, lambda layer, q, k, v: q)  # no query, so nobody asks what attention would say
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}".partition(" into ")[0]
    return ""


def alone(model: Model, tokenizer: Tokenizer, text: str, tokens: int) -> tuple[Tensor, str]:
    """What a chat gets when nobody was there before: logits after its prompt, and what it says."""
    world = PrefixWorld(model, tokenizer, num_blocks=2 + (len(tokenizer.encode(text)) + tokens) // 16)
    begun = world.begin("A", text)
    world.speak("A", tokens=tokens)
    return begun.logits, world.reply("A")


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference between two rows of logits."""
    return float((one - other).abs().max())


def talk(world: PrefixWorld, head: str, asks: Sequence[str], words: int) -> list[Begun]:
    """A chat of some turns: each prompt is all that was said before, and each ends before the next begins."""
    said, turns = head, []
    for turn, ask in enumerate(asks):
        said += ask
        turns.append(world.begin(f"turn {turn}", said))
        world.speak(f"turn {turn}", tokens=words)
        said += world.reply(f"turn {turn}")
        world.end(f"turn {turn}")
    return turns
