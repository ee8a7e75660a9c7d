"""A real run as a story: prompts over one paged memory, its history, and the recording that a reader scrubs.

It owns the set-up of a run and the words that the model said; it draws nothing and allocates nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch

from kvlab.contract import History, Json
from kvlab.execution.model import Model, load_model
from kvlab.execution.tokenizer import Tokenizer
from kvlab.memory.allocator import Allocator
from kvlab.memory.kv_store import PagedMemory, PagedStore
from kvlab.memory.layout import CacheLayoutManifest, quarter_split
from kvlab.reasons import REASONS
from kvlab.serving.engine import Engine, Run, Sampling, blocks_needed
from kvlab.study.setup import NAMES, Setup
from kvlab.views import pool
from kvlab.views.scene import Recording

SPARE_BLOCKS = 3
BOARD = ("blocks in use", "blocks shared", "rows recomputed", "K/V copied", "K/V live", "K/V if rectangular")


@dataclass(frozen=True, slots=True)
class Played:
    """A finished run: the recording to look at, the history behind it, and what every request said."""

    setup: Setup
    recording: Recording
    history: History
    run: Run
    layout: CacheLayoutManifest
    texts: dict[str, str] = field(default_factory=dict)


def encode(setup: Setup, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Token ids of every request, named A, B, ... in order; ValueError for a prompt without a token."""
    prompts = {}
    for text in setup.prompts:
        ids = tokenizer.encode(tokenizer.chat([{"role": "user", "content": text}]) if setup.chat else text)
        if not ids:
            raise ValueError("every prompt needs at least one token")
        for _ in range(setup.samples):
            prompts[NAMES[len(prompts)]] = ids
    return prompts


def check_lengths(setup: Setup, prompts: dict[str, list[int]], limit: int) -> None:
    """ValueError where a prompt and its new tokens pass the `limit` tokens that the model's positions reach."""
    for request, ids in prompts.items():
        if len(ids) + setup.max_new_tokens > limit:
            raise ValueError(f"Prompt {request} has {len(ids)} tokens. With {setup.max_new_tokens} new ones that is "
                             f"more than the {limit} tokens this model can hold. Shorten it, or ask for fewer.")


def layout_for(setup: Setup, model: Model, lengths: Sequence[int]) -> CacheLayoutManifest:
    """The two cache groups of a run: three quarters of the model's layers and one quarter."""
    blocks = setup.num_blocks or blocks_needed(lengths, setup.max_new_tokens, setup.block_size) + SPARE_BLOCKS
    width = torch.empty(0, dtype=model.dtype).element_size()
    c = model.config
    return quarter_split(c.layers, c.kv_heads, c.head_dim, width, block_size=setup.block_size, num_blocks=blocks)


def play(setup: Setup, model: Model, tokenizer: Tokenizer,
         progress: Callable[[int, int], None] | None = None) -> Played:
    """Run the model for real and record every transaction of its memory.

    Raises `Rejected` (for example `out_of_memory`) where the pool is too small for the prompts, ValueError where
    they are too long for the model.
    """
    prompts = encode(setup, tokenizer)
    check_lengths(setup, prompts, model.config.max_position)
    layout = layout_for(setup, model, [len(p) for p in prompts.values()])
    allocator = Allocator(layout, queue_seed=setup.seed)
    store = PagedStore(layout, model.dtype, model.device)
    allocator.observers.append(store.poison)
    history = History(allocator)
    engine = Engine(model, PagedMemory(allocator, store), eos=tokenizer.eos_ids, device=model.device, progress=progress)
    sampling = Sampling(setup.max_new_tokens, setup.temperature, setup.top_k, setup.seed)
    run = engine.run(prompts, sampling, share=setup.share)
    history.detach()
    texts = {r: tokenizer.decode(ids) for r, ids in run.outputs.items()}
    notes = _notes(run, prompts, tokenizer, setup.max_new_tokens)
    recording = pool.recording(history.to_dict(), title=_title(setup, len(prompts)),
                               question="Who may write here?", notes=notes, board=BOARD, reasons=REASONS)
    return Played(setup, recording, history, run, layout, texts)


def _title(setup: Setup, requests: int) -> str:
    shape = f"{len(setup.prompts)} prompts" if len(setup.prompts) > 1 else "One prompt"
    return f"{shape}, {requests} answers, one memory" if requests != len(setup.prompts) else f"{shape}, one memory"


def _notes(run: Run, prompts: dict[str, list[int]], tokenizer: Tokenizer, max_new_tokens: int) -> Json:
    """What each committed epoch meant in words, and the rows that a rectangle for each request would take."""
    notes: Json = {"reserved_rows": sum(len(p) + max_new_tokens for p in prompts.values())}
    for epoch, facts in run.notes.items():
        note = {k: facts[k] for k in ("computed", "recomputed")}
        for request, ids in facts["tokens"].items():
            note.setdefault("pieces", {})[request] = tokenizer.decode(ids)
        notes[epoch] = note
    return notes


OPENING = Setup(
    prompts=("It is a truth universally acknowledged, that a single man in want of a wife",
             "It is a truth universally acknowledged, that a single man in possession of a good fortune"),
    max_new_tokens=24, temperature=0.7,
)
"""What the app opens on: the prompts part inside a block, so that the fork ends in a copy-on-write."""


def opening() -> Json:
    """Make the run that the app opens on, with the embedded model: committed as `fixtures/two_prompts.json`.

    A test makes it again and finds it equal; `frame` is the one where the copy is in flight.
    """
    model, tokenizer = load_model(OPENING.model)
    played = play(OPENING, model, tokenizer)
    copying = next(i for i, f in enumerate(played.recording.frames) if f.title.startswith("Lease"))
    return {"setup": asdict(OPENING) | {"prompts": list(OPENING.prompts)}, "model_digest": model.digest,
            "frame": copying, "texts": played.texts, "recording": played.recording.to_dict()}
