"""Three savings that people call cache reuse, measured apart on one real run: bytes, prefill rows, rows read again.

It owns the comparison and no mechanism: who shares, copies or answers together is real machinery (article 0x00B).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import SoftmaxState, block_state, merge_state, normalize
from kvlab.execution.model import Model
from kvlab.execution.tokenizer import Tokenizer
from kvlab.memory import ledger
from kvlab.study.lesson import PagedWorld, copying_world
from kvlab.study.lesson_contracts import SIZE

SHARING, SKIPPING, BATCHING = "sharing_bytes", "skipping_prefill", "batching_shared_prefix_attention"


@dataclass(frozen=True, slots=True)
class Cost:
    """What two chats with one beginning took: bytes of K/V in rows, rows computed, rows that one decode step reads."""

    way: str
    stored_bytes: int
    computed_rows: int
    read_rows: int


def costs(model: Model, tokenizer: Tokenizer, story: str) -> tuple[Cost, ...]:
    """Two chats that begin with `story`, four ways. Each way saves one thing more than the one before it.

    ValueError if two ways of answering over the same rows do not agree.
    """
    n, row = len(tokenizer.encode(story)), model.kv_row_bytes()
    alone, copied = (copying_world(model, tokenizer, chats=2, max_length=n) for _ in range(2))
    shared = PagedWorld(model, tokenizer, num_blocks=8)
    for chat in "AB":
        alone.read(chat, story)
    for world in (copied, shared):
        world.read("A", story)
        world.branch("A", "B")
    held = ledger.from_snapshot(shared.allocator.snapshot())
    paged = sum(ledger.unique(h).materialized.bytes for h in held)
    k, v = (tensor[0] for tensor in shared.rows("A")[0])
    q = torch.rand(2, 2 * k.shape[1], k.shape[2], generator=torch.Generator().manual_seed(2)).to(k.device)
    (one, apart), (other, together) = _one_by_one(q, k, v), _at_once(q, k, v, n // SIZE * SIZE)
    if not torch.allclose(one, other, atol=1e-5):
        raise ValueError("the two schedules do not agree")
    kept, twice = (row * sum(world.memory.lengths.values()) for world in (alone, copied))
    return (Cost("each on its own", kept, alone.engine.rows_computed, apart),
            Cost("computed once, copied", twice, copied.engine.rows_computed, apart),
            Cost("computed once, shared", paged, shared.engine.rows_computed, apart),
            Cost("shared, and answered together", paged, shared.engine.rows_computed, together))


def _one_by_one(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, int]:
    """Each chat's query over all its rows; the answers `[2, heads, head_dim]` and how many rows were read."""
    return torch.cat([normalize(_state(chat[None], k, v)) for chat in q]), len(q) * len(k)


def _at_once(q: Tensor, k: Tensor, v: Tensor, shared: int) -> tuple[Tensor, int]:
    """Both queries meet the first `shared` rows together; then each has its own rest. Answers, and rows read."""
    both = _state(q, k[:shared], v[:shared])
    answers = []
    for i, chat in enumerate(q):
        mine = SoftmaxState(both.m[i : i + 1], both.l[i : i + 1], both.u[i : i + 1])
        answers.append(normalize(merge_state(mine, _state(chat[None], k[shared:], v[shared:]))))
    return torch.cat(answers), shared + len(q) * (len(k) - shared)


def _state(q: Tensor, k: Tensor, v: Tensor) -> SoftmaxState:
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return block_state(torch.einsum("nhd,thd->nht", q, keys) * q.shape[-1] ** -0.5, values)


def saved(rows: tuple[Cost, ...]) -> dict[str, int]:
    """What each step down the ways saved, by its name: bytes, rows not computed, rows not read."""
    own, copied, shared, together = rows
    return {SHARING: copied.stored_bytes - shared.stored_bytes, SKIPPING: own.computed_rows - copied.computed_rows,
            BATCHING: shared.read_rows - together.read_rows}
