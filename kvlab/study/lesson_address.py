"""What lesson 4 adds: an attention that gathers rows with another translator's strides, and a panel to follow a scalar.

It owns no translation and no tensor: rows are written rightly, and only read as somebody else would. Needs the extra
`lab`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import ipywidgets as widgets
from torch import Tensor

from kernels.reference import paged_attention
from kvlab.memory.address import AddressTrace, follow
from kvlab.memory.address_records import AddressSnapshot
from kvlab.memory.kv_store import PagedMemory, PagedStep
from kvlab.reasons import REASONS
from kvlab.study.lesson import PagedWorld
from kvlab.views import address
from kvlab.views.scene import Recording
from kvlab.views.stage import widget

Gather = Callable[[Tensor, int], Tensor]
"""`gather(tensor, n)`: what a kernel takes for layer n of a `[layers, blocks, tokens, heads, lanes]` cache tensor."""


def slot_id_as_offset(tensor: Tensor, layer: int) -> Tensor:
    """The slot id used as if it were the row's place in memory: right in the group's first layer, and only there."""
    return tensor[0]


def heads_before_tokens(tensor: Tensor, layer: int) -> Tensor:
    """Blocks that hold token rows of all heads, read as if each held all tokens of a head, one head after another."""
    blocks, tokens, heads, lanes = tensor[layer].shape
    strides = (tokens * heads * lanes, lanes, tokens * lanes, 1)
    return tensor[layer].as_strided((blocks, tokens, heads, lanes), strides)


class MisreadingStep(PagedStep):
    """A step that writes rows where they belong, and reads them where another translator would look."""

    gathers: Mapping[int, Gather] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        store = self.store
        g, keys, values = store.layers[layer]
        store.write_rows(layer, *self.slots[g], k, v)
        if gather := self.gathers.get(g):
            at = layer - store.layout.groups[g].layer_start
            keys, values = gather(store.k[g], at), gather(store.v[g], at)
        out = paged_attention(q, keys, values, self.tables[g], self.context_lengths, self.query_lengths,
                              q.shape[-1] ** -0.5)
        if layer in store.last_layer:
            self.txn.wrote(store.last_layer[layer])
        return out


class MisreadingMemory(PagedMemory):
    """Paged memory whose attention gathers some groups' rows by `gathers` {group index: gather}."""

    def __init__(self, world: PagedWorld, gathers: Mapping[int, Gather]) -> None:
        super().__init__(world.allocator, world.store)
        self.gathers = gathers

    def open(self, rows: Mapping[str, Sequence[int]]) -> MisreadingStep:
        step = MisreadingStep(self.store, super().open(rows).txn)
        step.gathers = self.gathers
        return step


def misread(world: PagedWorld, gathers: Mapping[int, Gather]) -> PagedWorld:
    """Make a world read some groups wrongly from now on; returns it."""
    world.memory = world.engine.memory = MisreadingMemory(world, gathers)
    return world


def followed(snapshot: AddressSnapshot, trace: AddressTrace, note: str = "") -> Recording:
    """A trace as a recording, with a sentence for a refusal."""
    question = f"Where is {trace.kind} of token {trace.token}?"
    return address.recording(snapshot.to_dict(), trace.to_dict(), question=question, reasons=REASONS, note=note)


class Follower(widgets.VBox):
    """Choose request, token, layer, tensor, head and lane, and step through the translation on the stage."""

    def __init__(self, snapshot: AddressSnapshot, request: str, token: int, layer: int, head: int = 0,
                 lane: int = 0) -> None:
        self.snapshot = snapshot
        narrow = {"layout": {"width": "9.5em"}, "style": {"description_width": "3.5em"}}
        whole = {"token": token, "layer": layer, "head": head, "lane": lane}
        self.fields: dict[str, widgets.Widget] = {
            "request": widgets.Dropdown(options=list(snapshot.requests), value=request, description="request",
                                        **narrow),
            "kind": widgets.Dropdown(options=["K", "V"], description="tensor", **narrow),
            **{name: widgets.IntText(value, description=name, **narrow) for name, value in whole.items()},
        }
        self.stage = widget(self._recording(), frame=0)
        for field in self.fields.values():
            field.observe(lambda _: self.show(), names="value")
        super().__init__([widgets.HBox(list(self.fields.values()), layout={"flex_flow": "row wrap"}), self.stage])

    def trace(self) -> AddressTrace:
        """The translation of what is chosen now, as far as it goes."""
        chosen = {name: field.value for name, field in self.fields.items()}
        return follow(self.snapshot, **chosen)

    def _recording(self) -> Recording:
        return followed(self.snapshot, self.trace())

    def show(self) -> Recording:
        """Put the chosen translation on the stage, at its last frame."""
        made = self._recording()
        self.stage.recording = made.to_dict()
        self.stage.frame = len(made.frames) - 1
        return made

    def __repr__(self) -> str:
        return f"Follower({len(self.snapshot.requests)} requests, {self.snapshot.model_layers} layers)"
