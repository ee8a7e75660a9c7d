"""Runs a model over any K/V memory: prefill, fork, batched decode, sampling. First come, first served.

It owns no memory and no index, and decides nothing about scheduling: what does not fit is refused.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvlab.contract import Json
from kvlab.memory.kv_store import Attend, Memory, MemoryStep, RowMemory


class LanguageModel(Protocol):
    """What the engine needs of a model; `kvlab.execution.model.Model` is one."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor: ...


@runtime_checkable
class IndexedMemory(RowMemory, Protocol):
    """A memory in which a new request can begin with rows that others have computed (prefix chain or radix tree)."""

    def start(self, request: str, tokens: Sequence[int]) -> tuple[MemoryStep, int]: ...

    def offer(self, request: str, tokens: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: greedy at temperature 0, else seeded draws from the `top_k` likeliest (0: all)."""

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.temperature < 0 or self.top_k < 0:
            raise ValueError("max_new_tokens must be at least 1, temperature and top_k not negative")


def sample(logits: Tensor, sampling: Sampling, draw: random.Random) -> int:
    """One token id from logits `[vocab]`. In float64 and by inverse CDF, so that a seed means the same everywhere."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.double() / sampling.temperature
    if sampling.top_k:
        scaled, ids = scaled.topk(min(sampling.top_k, scaled.numel()))
    else:
        scaled, ids = scaled.sort(descending=True)
    edge = scaled.softmax(-1).cumsum(-1)
    return int(ids[min(int(torch.searchsorted(edge, draw.random())), ids.numel() - 1)])


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many leading tokens all the prompts share."""
    shortest, length = min(len(p) for p in prompts), 0
    while length < shortest and len({p[length] for p in prompts}) == 1:
        length += 1
    return length


@dataclass(slots=True)
class InFlight:
    """One request in flight: its tokens so far, the new ones, and the logits its next token comes from."""

    request: str
    tokens: list[int]
    prompt_tokens: int
    draw: random.Random
    logits: Tensor | None = None
    done: bool = False

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]


@dataclass(frozen=True, slots=True)
class Run:
    """What a run produced: new tokens per request, rows computed, rows computed again, notes per epoch.

    `notes[epoch]` says what the transaction of that epoch meant for the requests: the tokens whose rows it
    wrote, how many rows were computed for it, and how many of those again. A view puts words on frames with it.
    """

    outputs: dict[str, list[int]]
    rows_computed: int
    rows_recomputed: int
    notes: dict[int, Json] = field(default_factory=dict)


class Engine:
    """A model over a memory. `eos` ends a request; `progress(done, total)` is called after every model pass."""

    def __init__(self, model: LanguageModel, memory: Memory | IndexedMemory, *, eos: Sequence[int] = (),
                 device: str = "cpu", progress: Callable[[int, int], None] | None = None) -> None:
        self.model, self.memory, self.eos, self.device, self.progress = model, memory, frozenset(eos), device, progress
        self.rows_computed = 0
        self.rows_recomputed = 0
        self.notes: dict[int, Json] = {}

    # ------------------------------------------------------------------ single steps
    @torch.inference_mode()
    def extend(self, rows: Mapping[str, Sequence[int]], *, all_logits: bool = False,
               again: int = 0) -> dict[str, Tensor]:
        """Run the model over new tokens of some requests in one batch and keep their K/V rows.

        Returns each request's logits `[vocab]` after its last token, or `[n, vocab]` for all its new tokens.
        `again` says how many of them somebody else's live rows hold already. On any failure the memory is as
        before. Cost: one model pass over the new tokens.
        """
        starts = [self.memory.length(request) for request in rows]
        step = self.memory.open(rows)
        return self._write(step, rows, starts, all_logits, again)

    @torch.inference_mode()
    def start(self, request: str, tokens: Sequence[int], *, known: int = 0) -> tuple[Tensor, int]:
        """Begin a request over whatever prefix its memory finds for it, and compute the rest.

        Needs an `IndexedMemory` (`kvlab.serving.prefix_memory`, `kvlab.serving.radix_memory`). Returns the logits
        `[vocab]` after the last token and how many tokens were not computed. What is now complete can be found by the
        next one. `known`: how many leading tokens live requests hold; those among them that no hit saved count as
        computed again.
        """
        step, hit = self.memory.start(request, tokens)
        logits = self._write(step, {request: tokens[hit:]}, [hit], again=max(0, known - hit))[request]
        self.memory.offer(request, tokens)
        return logits, hit

    def _write(self, step: MemoryStep, rows: Mapping[str, Sequence[int]], starts: Sequence[int],
               all_logits: bool = False, again: int = 0) -> dict[str, Tensor]:
        """One model pass through an open step: its rows written, then published, or all of it undone."""
        counts = [len(tokens) for tokens in rows.values()]
        tokens = torch.tensor([t for part in rows.values() for t in part], device=self.device)
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        ends = torch.tensor(counts).cumsum(0)
        try:
            wanted = None if all_logits else (ends - 1).to(self.device)
            logits = self.model.forward(tokens, positions.to(self.device), step.attend, wanted)
            receipt = step.commit()
        except BaseException:
            step.rollback()
            raise
        self.rows_computed += len(tokens)
        self.rows_recomputed += again
        if receipt is not None:
            self.notes[receipt.allocator_epoch_after] = {
                "computed": len(tokens), "recomputed": again, "tokens": {r: list(t) for r, t in rows.items()}}
        parts = logits.split(counts) if all_logits else logits
        return dict(zip(rows, parts, strict=True))

    # ------------------------------------------------------------------ whole runs
    def run(self, prompts: Mapping[str, Sequence[int]], sampling: Sampling, *, share: bool = True,
            on_token: Callable[[str, int], None] | None = None) -> Run:
        """Answer several prompts at once, each until its end token or `sampling.max_new_tokens`.

        With `share`, what all prompts begin with is computed once and forked: later ones that diverge inside
        a block copy its valid rows on their first write. A memory with an index is asked for each prompt instead: it
        finds what earlier runs left, too. Without `share`, every prompt is computed from nothing and the rows that
        were there already count as recomputed. A finished request is released at once.
        """
        if not prompts or any(not p for p in prompts.values()):
            raise ValueError("every prompt needs at least one token")
        live = [InFlight(r, list(p), len(p), random.Random(f"{sampling.seed}/{i}"))
                for i, (r, p) in enumerate(prompts.items())]
        total = sampling.max_new_tokens + len(live)
        if share and isinstance(self.memory, IndexedMemory):
            self._begin(live)
        else:
            self._prefill(live, share)
        for n in range(sampling.max_new_tokens):
            self._decode(live, sampling, last=n == sampling.max_new_tokens - 1, on_token=on_token)
            if self.progress:
                self.progress(len(live) + n + 1, total)
            if all(s.done for s in live):
                break
        return Run({s.request: s.new_tokens for s in live}, self.rows_computed, self.rows_recomputed, self.notes)

    def _begin(self, live: list[InFlight]) -> None:
        """Every prompt over what the memory's index finds, and found by the next one in its turn."""
        for n, s in enumerate(live):
            known = max((common_prefix([s.tokens, o.tokens]) for o in live[:n]), default=0)
            s.logits, _ = self.start(s.request, s.tokens, known=known)
            if self.progress:
                self.progress(n + 1, len(live) * 2)

    def _prefill(self, live: list[InFlight], share: bool) -> None:
        shared = common_prefix([s.tokens for s in live]) if share and len(live) > 1 else 0
        first = live[0]
        if shared:
            logits = self.extend({first.request: first.tokens[:shared]})[first.request]
            for other in live[1:]:
                self.memory.fork(first.request, other.request)
            for s in live:
                s.logits = logits
        for n, s in enumerate(reversed(live)):
            if len(s.tokens) > shared:
                earlier = [o.tokens for o in live if o is not s and self.memory.length(o.request)]
                again = max((common_prefix([s.tokens, o]) for o in earlier), default=0) if not shared else 0
                s.logits = self.extend({s.request: s.tokens[shared:]}, again=again)[s.request]
            if self.progress:
                self.progress(n + 1, len(live) * 2)

    def _decode(self, live: list[InFlight], sampling: Sampling, last: bool,
                on_token: Callable[[str, int], None] | None) -> None:
        step: dict[str, list[int]] = {}
        for s in live:
            if s.done:
                continue
            token = sample(s.logits, sampling, s.draw)
            s.done = token in self.eos or last
            if token not in self.eos:
                s.tokens.append(token)
                if on_token:
                    on_token(s.request, token)
            if s.done:
                self.memory.release(s.request)
            else:
                step[s.request] = [token]
        if step:
            for request, logits in self.extend(step).items():
                next(s for s in live if s.request == request).logits = logits


def blocks_needed(prompts: Sequence[int], new_tokens: int, block_size: int) -> int:
    """Blocks a group needs in the worst case, nothing shared: for sizing a pool before a run."""
    return sum(math.ceil((p + new_tokens) / block_size) for p in prompts)
