"""The loop around a memory, one round after another, and the log of what it really did; first come, first served.

It owns the order of a round (article 0x00) and no policy worth the name. It refuses to own memory: what it wants is an
intent, and only a receipt makes it more.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvlab.contract import Receipt, Rejected
from kvlab.memory.kv_store import MemoryStep
from kvlab.study.lesson import World

Rows = dict[str, list[int]]


class Rounds:
    """Chats that wait for a world's memory and then speak, a token a round.

    `log` names what was done, in the order in which it was done. `refused` has each waiting chat's last refusal:
    it keeps its place and owns nothing. `receipts` are what the memory handed back, as far as it has receipts.
    """

    def __init__(self, world: World, waiting: Mapping[str, str]) -> None:
        self.world, self.waiting = world, {chat: world.tokenizer.encode(text) for chat, text in waiting.items()}
        self.log: list[str] = []
        self.refused: dict[str, Rejected] = {}
        self.receipts: list[Receipt] = []

    def round(self) -> bool:
        """One round; False where the memory refused it, and then nothing has changed. Cost: one model pass.

        ValueError where nobody waits and nobody speaks.
        """
        frontiers = self.observe_frontiers()
        rows = self.choose_prefill_and_decode(frontiers)
        if not rows:
            raise ValueError("nobody waits, and nobody speaks")
        try:
            step = self.ask_foreign_feasibility(rows)
        except Rejected as no:
            self.refused |= dict.fromkeys(rows, no)
            return False
        try:
            logits = self.run_iteration(rows, frontiers, step)
        except BaseException:
            step.rollback()
            raise
        self.publish_progress(rows, step, logits)
        return True

    def observe_frontiers(self) -> Mapping[str, int]:
        """How many tokens of each chat have rows by now."""
        self.log.append("observe_frontiers")
        return {chat: self.world.memory.length(chat) for chat in (*self.world.logits, *self.waiting)}

    def choose_prefill_and_decode(self, frontiers: Mapping[str, int]) -> Rows:
        """The next waiting chat's prompt that was not refused yet, else a word of every chat that runs."""
        self.log.append("choose_prefill_and_decode")
        new = next((chat for chat in self.waiting if not frontiers[chat] and chat not in self.refused), None)
        if new is not None:
            return {new: self.waiting[new]}
        return {chat: [int(logits.argmax())] for chat, logits in self.world.logits.items()}

    def ask_foreign_feasibility(self, rows: Rows) -> MemoryStep:
        """Can the memory hold these rows? `Rejected` if not; if so they are reserved, and still nobody's."""
        self.log.append("ask_foreign_feasibility")
        return self.world.memory.open(rows)

    def run_iteration(self, rows: Rows, frontiers: Mapping[str, int], step: MemoryStep) -> dict[str, Tensor]:
        self.log.append("run_iteration")
        model, ends = self.world.engine.model, torch.tensor([len(tokens) for tokens in rows.values()]).cumsum(0)
        tokens = torch.tensor([token for part in rows.values() for token in part], device=self.world.engine.device)
        places = [torch.arange(frontiers[chat], frontiers[chat] + len(part)) for chat, part in rows.items()]
        logits = model.forward(tokens, torch.cat(places).to(tokens.device), step.attend, (ends - 1).to(tokens.device))
        return dict(zip(rows, logits, strict=True))

    def publish_progress(self, rows: Rows, step: MemoryStep, logits: Mapping[str, Tensor]) -> None:
        """Commit the rows; only now do the chats have them, and only now has anybody said anything."""
        self.log.append("publish_progress")
        receipt = step.commit()
        self.receipts += [receipt] if receipt is not None else []
        self.world.logits |= logits
        for chat, tokens in rows.items():
            if self.waiting.pop(chat, None) is None:
                self.world.said.setdefault(chat, []).extend(tokens)
