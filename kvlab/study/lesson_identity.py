"""Parts of the identity lesson: a world where adapters share one cache, and the records of a real model.

It holds no answer: texts come from the model, rows from kvlab's own paged memory, verdicts from the gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvlab.execution.model import Model, causal_attend
from kvlab.execution.tokenizer import Tokenizer
from kvlab.memory.allocator import Allocator
from kvlab.memory.block_pool import index_of
from kvlab.memory.kv_store import PagedMemory, PagedStore
from kvlab.memory.layout import quarter_split
from kvlab.reuse.identity import IdentityGate
from kvlab.reuse.manifests import (
    CacheCompatibilityManifest,
    CacheIsolationNamespace,
    LayoutIdentity,
    LogicalCacheABI,
    PositionContract,
    plain,
)
from kvlab.serving.engine import Engine

QUEUE_SEED = 5
DTYPES = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}


class SharedCache:
    """One paged K/V memory that several models write into and read from: chats under adapters, side by side.

    `voices` are models of one shape by name, such as a base model under several adapters. Greedy, so a run
    repeats word for word. `found` says whose rows a chat was given.
    """

    def __init__(self, voices: Mapping[str, Model], tokenizer: Tokenizer, *, num_blocks: int = 16,
                 block_size: int = 16) -> None:
        self.voices, self.tokenizer, self.block_size = dict(voices), tokenizer, block_size
        first = next(iter(voices.values()))
        c, width = first.config, torch.empty(0, dtype=first.dtype).element_size()
        self.layout = quarter_split(c.layers, c.kv_heads, c.head_dim, width, block_size=block_size,
                                    num_blocks=num_blocks)
        self.allocator = Allocator(self.layout, queue_seed=QUEUE_SEED)
        self.store = PagedStore(self.layout, first.dtype, first.device)
        self.memory = PagedMemory(self.allocator, self.store)
        self.engines = {name: Engine(model, self.memory, eos=tokenizer.eos_ids, device=model.device)
                        for name, model in voices.items()}
        self.prompts: dict[str, list[int]] = {}
        self.found: dict[str, str] = {}

    def answer(self, chat: str, voice: str, prompt: str, tokens: int, *, reuse: str | None = None) -> str:
        """What a voice says to a prompt. With `reuse` it takes the full blocks that this earlier chat begins with.

        At least one token is computed, for there is nothing to take a logit from otherwise.
        """
        ids, engine = self.tokenizer.encode(prompt), self.engines[voice]
        start = self._take(chat, ids, reuse) if reuse else 0
        logits = engine.extend({chat: ids[start:]})[chat]
        self.prompts[chat], said = ids, []
        for _ in range(tokens):
            said.append(int(logits.argmax()))
            logits = engine.extend({chat: said[-1:]})[chat]
        return self.tokenizer.decode(said)

    def _take(self, chat: str, ids: list[int], reuse: str) -> int:
        alike = next((i for i, (a, b) in enumerate(zip(ids, self.prompts[reuse], strict=False)) if a != b),
                     min(len(ids), len(self.prompts[reuse])))
        whole = min(alike, len(ids) - 1) // self.block_size * self.block_size
        if not whole:
            return 0
        self.memory.fork(reuse, chat)
        self.allocator.truncate(chat, whole)
        self.found[chat] = reuse
        return whole

    def plant(self, chat: str, other: Tensor) -> None:
        """Put other rows where a chat's first tokens have theirs, behind the contract's back.

        `other`: `[2, layers, n, kv_heads, head_dim]`, K and V, as `rows` gives them.
        """
        live, size = self.allocator.requests[chat], self.block_size
        at = range(other.shape[2])
        offsets = torch.tensor([t % size for t in at], device=self.store.device)
        for layer in range(other.shape[1]):
            table = live.tables[self.store.layers[layer][0]]
            blocks = torch.tensor([index_of(table[t // size]) for t in at], device=self.store.device)
            self.store.write_rows(layer, blocks, offsets, *other[:, layer])


# ---------------------------------------------------------------- rows without a memory
@torch.inference_mode()
def rows(model: Model, tokens: list[int], first: int = 0) -> Tensor:
    """K and V rows `[2, layers, n, kv_heads, head_dim]` of a sequence whose first token stands at `first`."""
    kept: list[Tensor] = []

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append(torch.stack([k, v]))
        return causal_attend(layer, q, k, v)

    ids = torch.tensor(tokens, device=model.device)
    model.forward(ids, torch.arange(first, first + len(tokens), device=model.device), keep)
    return torch.stack(kept, 1)


# ---------------------------------------------------------------- the records of a real model
class Records:
    """The identity records of one real model over one memory layout, and the gate of one tenant that admits them.

    `manifest` names what a chat computes, `other` a layout of the same memory that differs in one field.
    """

    def __init__(self, model: Model, cache: SharedCache, *, tenant: str = "anna", cluster: str = "home") -> None:
        c = model.config
        self.abi = LogicalCacheABI(1, "llama", c.layers, c.kv_heads, c.head_dim, "after RoPE")
        self.positions = PositionContract("rope", float(c.rope_theta), c.rope_pairing, 0)
        self.layout = LayoutIdentity.paged(
            cache.layout, DTYPES[model.dtype], abi=self.abi, positions=self.positions, manifest_id="rank 0",
            model_generation=model.digest, tp_world_size=2)
        self.space = CacheIsolationNamespace(cluster, tenant, 1, "a salt nobody guesses", 1, "full_blocks")

    def manifest(self, tokens: list[int], request: str, **changes: Any) -> CacheCompatibilityManifest:
        """The manifest of some covered tokens, computed by the base model; `changes` replace fields."""
        made = {"cache_abi_sha256": self.abi.digest, "cache_layout_sha256": self.layout.digest,
                "model_generation": self.layout.model_generation, "adapter_identity": "none",
                "weight_transform_identity": "none", "position_contract_sha256": self.positions.digest,
                "covered_token_ids": tuple(tokens), "input_side_data_identity": (),
                "cache_isolation_namespace": self.space.name, "namespace_generation": 1,
                "cache_salt": self.space.cache_salt, "publication_generation": 1, "tokenizer_revision": "1",
                "chat_template_revision": "1", "request_id": request, "sampling_and_stopping_policy": "greedy"}
        return CacheCompatibilityManifest(**made | changes)

    def other(self, manifest_id: str, **changes: Any) -> LayoutIdentity:
        """The same layout with some fields changed; `storage_dtype` and `axis_order` change in every group."""
        inside = {k: changes.pop(k) for k in ("storage_dtype", "axis_order") if k in changes}
        groups = tuple(replace(g, **inside) for g in self.layout.cache_groups)
        return replace(self.layout, manifest_id=manifest_id, cache_groups=groups, **changes)

    def gate(self, *layouts: LayoutIdentity, members: tuple[str, ...] = ("anna",)) -> IdentityGate:
        """A gate with this tenant's namespace, which admits the base layout and some others."""
        gate = IdentityGate()
        gate.apply({"op": "create", "namespace": plain(self.space), "members": list(members),
                    "abis": [plain(self.abi)], "layouts": [plain(x) for x in (self.layout, *layouts)]})
        return gate
