"""A small real run whose every K and V scalar can be read at its address, in any layout of its cache tensors.

It owns the run's tensors and the words behind the tokens. It refuses to translate (`kvlab.memory.address`) or to draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvlab.contract import Json
from kvlab.execution.model import Model, load_model
from kvlab.execution.tokenizer import Tokenizer
from kvlab.memory.address import resolve
from kvlab.memory.address_bytes import address_snapshot, lay_out, read_scalar
from kvlab.memory.address_sources import flattened, relaid
from kvlab.memory.allocator import Allocator
from kvlab.memory.kv_store import PagedMemory, PagedStore
from kvlab.memory.layout import AXES, quarter_split
from kvlab.serving.engine import Engine

STORY = ("The two young ladies were walking in the garden before dinner, "
         "when they saw a gentleman coming up the road; and it was Mr. Darcy. He")
BEN_SEES, NUM_BLOCKS, QUEUE_SEED = 25, 8, 5
ANNA, BEN = "A", "B"


@dataclass(frozen=True, slots=True)
class Reading:
    """What this process's memory holds at a scalar's address (another one in every run), and what the tensor shows."""

    address: int
    read: float
    shown: float


class AddressRun:
    """Anna's chat A read a story; Ben's chat B branched from it and went back to 25 tokens, so both share blocks."""

    def __init__(self, model: Model, tokenizer: Tokenizer, story: str = STORY) -> None:
        c, width = model.config, torch.empty(0, dtype=model.dtype).element_size()
        layout = quarter_split(c.layers, c.kv_heads, c.head_dim, width, block_size=16, num_blocks=NUM_BLOCKS)
        allocator = Allocator(layout, queue_seed=QUEUE_SEED)
        self.store = PagedStore(layout, model.dtype)
        memory, ids = PagedMemory(allocator, self.store), tokenizer.encode(story)
        Engine(model, memory, eos=tokenizer.eos_ids).extend({ANNA: ids})
        memory.fork(ANNA, BEN)
        allocator.truncate(BEN, BEN_SEES)
        self.snapshot = address_snapshot(self.store, allocator.snapshot())
        self.words = [tokenizer.decode([i]) for i in ids]

    def read(self, coordinate: Mapping[str, str | int], axes: Sequence[str] = AXES, inner_lanes: int = 1) -> Reading:
        """Lay the coordinate's group out by `axes`, for real, and read the scalar at its address in there.

        `coordinate` holds request, token, layer, kind, head, lane. Raises `Rejected` as `resolve` does, and ValueError
        where `inner_lanes` does not divide a head. O(scalars of the group).
        """
        at = resolve(self.snapshot, **coordinate)
        g = [group.id for group in self.snapshot.groups].index(at.group_id)
        keys, values = self.store.k[g], self.store.v[g]
        laid, tensors = lay_out(relaid(self.snapshot.groups[g], axes, inner_lanes), keys, values)
        groups = (*self.snapshot.groups[:g], laid, *self.snapshot.groups[g + 1 :])
        there = resolve(replace(self.snapshot, groups=groups), **coordinate)
        read = read_scalar(there, self.store.dtype)
        rows = keys if at.kind == "K" else values
        shown = rows[at.layer_local, at.physical_slot, at.token_offset, at.head, at.lane]
        del tensors  # not before the scalar was read
        return Reading(there.byte_address, float(read), float(shown))


def opening() -> Json:
    """What the app shows before its model runs, committed as `fixtures/address_run.json`; a test makes it again."""
    model, tokenizer = load_model("austen")
    run = AddressRun(model, tokenizer)
    return {"snapshot": flattened(run.snapshot, 0, AXES).to_dict(), "words": run.words, "model_digest": model.digest}
