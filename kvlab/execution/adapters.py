"""Adapters as seeded low-rank deltas on a model's projections; it trains nothing and shares every weight it can.

An adapter is named by what it adds, never by a name: `Adapter.identity` is a digest of its factors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlab.contract import canonical, digest_of
from kvlab.execution.model import Model

TARGETS = ("q", "k", "v")


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Low-rank deltas (LoRA, Hu et al. 2021): a projection W `[out, in]` becomes W + scale * up @ down.

    `factors[layer][target]` is (up `[out, rank]`, down `[rank, in]`) in float32; a target is one of q, k, v.
    """

    seed: int
    rank: int
    scale: float
    factors: tuple[dict[str, tuple[Tensor, Tensor]], ...]

    @property
    def identity(self) -> str:
        """SHA-256 of the scale and of every factor with its place, dtype and shape. O(bytes of the factors)."""
        out = hashlib.sha256(canonical(["low-rank", self.scale, len(self.factors)]))
        for layer, targets in enumerate(self.factors):
            for target, pair in sorted(targets.items()):
                for part in pair:
                    out.update(canonical([layer, target, str(part.dtype), list(part.shape)]))
                    out.update(part.contiguous().numpy().tobytes())
        return out.hexdigest()


def seeded_adapter(model: Model, *, seed: int, rank: int = 4, scale: float = 1.0,
                   targets: tuple[str, ...] = TARGETS) -> Adapter:
    """An adapter for `model` from a seed: the same seed gives the same bytes on every machine and device.

    Factors are uniform draws (a normal draw's last bits depend on the CPU), sized so that `scale` 1 adds a delta as
    large as the projection itself. ValueError for a rank below 1 or an unknown target.
    """
    if rank < 1 or not targets or set(targets) - set(TARGETS):
        raise ValueError(f"an adapter needs a rank from 1 and targets among {', '.join(TARGETS)}")
    draw, hidden = torch.Generator().manual_seed(seed), model.config.hidden

    def uniform(rows: int, columns: int) -> Tensor:
        return torch.rand(rows, columns, generator=draw) * 2 - 1

    def pair(weight: Tensor) -> tuple[Tensor, Tensor]:
        size = 3 * float(weight.double().norm()) / (weight.numel() * rank) ** 0.5  # 3: two draws of variance 1/3
        return uniform(weight.shape[0], rank) * float(f"{size:.2e}"), uniform(rank, hidden)

    layers = [_parts(model, layer.qkv) for layer in model.weights.layers]
    return Adapter(seed, rank, scale, tuple({t: pair(parts[t]) for t in targets} for parts in layers))


def with_adapter(model: Model, adapter: Adapter) -> Model:
    """A model that computes with the adapter merged in; embeddings, MLPs, norms and output projections are shared.

    Its digest names the base model and the adapter. Cost: one new q/k/v matrix a layer.
    ValueError where the adapter was made for another shape.
    """
    c, layers = model.config, []
    if len(adapter.factors) != c.layers:
        raise ValueError(f"the adapter has {len(adapter.factors)} layers, the model {c.layers}")
    for layer, targets in zip(model.weights.layers, adapter.factors, strict=True):
        merged = layer.qkv.clone()
        for target, part in _parts(model, merged).items():
            if target in targets:
                up, down = targets[target]
                if (up.shape[0], down.shape[1]) != part.shape:
                    raise ValueError(f"the adapter's {target} is for a projection of another shape")
                part += (adapter.scale * (up @ down)).to(part)
        layers.append(replace(layer, qkv=merged))
    return Model(c, replace(model.weights, layers=tuple(layers)), digest_of([model.digest, adapter.identity]))


def _parts(model: Model, qkv: Tensor) -> dict[str, Tensor]:
    """Views of the q, k and v rows of a fused projection `[out, in]`."""
    c = model.config
    widths = (c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim)
    return dict(zip(TARGETS, qkv.split(widths), strict=True))
