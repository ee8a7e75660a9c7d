"""A Llama-style decoder in plain torch: weights and arithmetic; it never knows where K/V rows live.

Memory is the caller's: every layer hands its new rows to an `Attend` callback and takes back what the queries
saw. So one decoder serves a paged pool, a contiguous cache, reserved virtual memory, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor

from kvlab.execution.catalog import resolve
from kvlab.execution.model_config import ModelConfig, ModelFileError
from kvlab.execution.tokenizer import Tokenizer, load_tokenizer
from kvlab.execution.weights import open_model_files

__all__ = ["Attend", "LayerWeights", "Model", "ModelConfig", "ModelFileError", "Weights", "assemble", "causal_attend",
           "load_model", "project", "rms_norm", "rope_tables", "rotate"]

Fill = Callable[[str, Tensor], None]
"""`fill(name, dest)`: write a weight, a vector `[n]` or a matrix `[out, in]`, into `dest`."""


class Attend(Protocol):
    """The seam to memory: keep the batch's new rows, answer its queries.

    q `[n, heads, head_dim]`, k and v `[n, kv_heads, head_dim]`: the n new tokens of the whole ragged, packed
    batch, after RoPE. Returns `[n, heads, head_dim]`.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices lie as `[out, in]`, contiguous, and what reads the same input is fused by rows.

    With `[in, out]` a CPU takes a tenth less time for one token and a third less for four, but it adds up a
    token's products one after another: over 30 layers, on one thread, that made decoded logits several times less
    exact than those of one pass, and more than 1e-4 apart from them.
    Norm weights are kept times sqrt(hidden), as `rms_norm` wants them.
    """

    attention_norm: Tensor
    qkv: Tensor
    attention_out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights: `embed` and `head`, both `[vocab, hidden]` and one tensor where they are tied, layers, last norm."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def assemble(config: ModelConfig, fill: Fill, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Weights:
    """Read and fuse all weights. Names are those of Hugging Face's Llama. Cost: one pass over the weights."""
    c, (q, kv) = config, (config.heads * config.head_dim, config.kv_heads * config.head_dim)

    def read(inputs: int, **outputs: int) -> Tensor:
        fused = torch.empty(sum(outputs.values()), inputs, dtype=dtype)
        for name, part in zip(outputs, fused.split(list(outputs.values())), strict=True):
            fill(f"{name}.weight", part)
        return fused.to(device)

    def norm(name: str) -> Tensor:
        fill(f"{name}.weight", out := torch.empty(c.hidden, dtype=dtype))
        return (out * math.sqrt(c.hidden)).to(device)

    def layer(at: int) -> LayerWeights:
        base = f"model.layers.{at}"
        heads, mlp = f"{base}.self_attn", f"{base}.mlp"
        return LayerWeights(
            attention_norm=norm(f"{base}.input_layernorm"),
            qkv=read(c.hidden, **{f"{heads}.q_proj": q, f"{heads}.k_proj": kv, f"{heads}.v_proj": kv}),
            attention_out=read(q, **{f"{heads}.o_proj": c.hidden}),
            mlp_norm=norm(f"{base}.post_attention_layernorm"),
            gate_up=read(c.hidden, **{f"{mlp}.gate_proj": c.intermediate, f"{mlp}.up_proj": c.intermediate}),
            down=read(c.intermediate, **{f"{mlp}.down_proj": c.hidden}),
        )

    embed = read(c.hidden, **{"model.embed_tokens": c.vocab})
    head = embed if c.tied else read(c.hidden, lm_head=c.vocab)
    return Weights(embed, tuple(map(layer, range(c.layers))), norm("model.norm"), head)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """`x` `[n, in]` times a weight `[out, in]`, -> `[n, out]`.

    On a CPU, eight to some sixty rows multiply up to twice as fast as columns, with the rounding error of a pass.
    """
    if 8 <= x.shape[0] < 64 and x.device.type == "cpu":
        return torch.mm(weight, x.t()).t().contiguous()
    return F.linear(x, weight)


def rms_norm(x: Tensor, weight: Tensor, floor: Tensor) -> Tensor:
    """Root-mean-square norm of `x` `[n, hidden]` (Zhang and Sennrich 2019), x / sqrt(mean(x^2) + eps) * w.

    Written as x / hypot(|x|, floor) * weight with floor = sqrt(hidden * eps) and weight = w * sqrt(hidden): four
    kernels where F.rms_norm runs nine on a CPU, 4 % of a decode step. Computed at least in float32.
    """
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=floor.dtype)
    return (x / torch.hypot(length, floor) * weight).to(x.dtype)


def rope_tables(config: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and signed sines `[max_position, 1, head_dim]`, laid out for `rotate` (RoFormer, section 3.2.2).

    The angles are computed in float64: at position 8,000 a float32 angle is already off by 5e-4.
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(config.max_position, dtype=torch.float64),
                         config.rope_theta ** (-pairs / config.head_dim))
    cos, sin = angles.cos(), angles.sin()
    if config.rope_pairing == "half":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    else:
        cos, sin = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    return cos.unsqueeze(1).to(device, dtype), sin.unsqueeze(1).to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """Rotate every pair of lanes of `x` `[n, heads, head_dim]` by its angle: each lane times its cosine, plus its
    partner times the signed sine."""
    n, heads, lanes = x.shape
    if pairing == "half":
        partner = x.roll(lanes // 2, -1)
    else:
        partner = x.view(n, heads, lanes // 2, 2).flip(-1).view(n, heads, lanes)
    return torch.addcmul(x * cos, partner, sin)


class Model:
    """A decoder with its weights. Stateless: the same call gives the same logits, and K/V rows go to `attend`.

    `digest` names configuration and weights; `dtype` and `device` are those of weights and activations.
    """

    def __init__(self, config: ModelConfig, weights: Weights, digest: str = "") -> None:
        self.config, self.weights, self.digest = config, weights, digest
        self.dtype, self.device = weights.head.dtype, str(weights.head.device)
        self._cos, self._sin = rope_tables(config, self.dtype, self.device)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._floor = torch.tensor(math.sqrt(config.hidden * config.norm_eps), dtype=wide, device=self.device)

    def kv_row_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of one token's K and V rows over all layers, stored as `dtype` (default: the model's own)."""
        width = torch.empty(0, dtype=dtype or self.dtype).element_size()
        return 2 * self.config.layers * self.config.kv_heads * self.config.head_dim * width

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Logits `[len(rows) or n, vocab]` after the n packed tokens.

        `tokens` and `positions` are int64 `[n]`: the new tokens of a ragged batch, one sequence after another,
        and each one's position in its own sequence. `rows` picks the packed rows whose logits are wanted; only
        they pass through the LM head. IndexError for a token or position out of range.
        Cost: 2 multiply-adds a weight and token, and each weight read once a call.
        """
        c, w, floor, n = self.config, self.weights, self._floor, tokens.shape[0]
        rotated = c.heads + c.kv_heads
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        x = w.embed.index_select(0, tokens)
        for at, layer in enumerate(w.layers):
            qkv = project(rms_norm(x, layer.attention_norm, floor), layer.qkv).view(n, -1, c.head_dim)
            qk = rotate(qkv[:, :rotated], cos, sin, c.rope_pairing)
            seen = attend(at, qk[:, : c.heads], qk[:, c.heads :], qkv[:, rotated:])
            x = x + project(seen.reshape(n, -1), layer.attention_out)
            gate, up = project(rms_norm(x, layer.mlp_norm, floor), layer.gate_up).chunk(2, -1)
            x = x + project(F.silu(gate) * up, layer.down)
        if rows is not None:
            x = x.index_select(0, rows)
        return project(rms_norm(x, w.norm, floor), w.head)


def causal_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An `Attend` without memory: the batch is one whole sequence and every token sees itself and all before it.

    The oracle that every kind of reuse is measured against. Cost: O(n^2) scores a head.
    """
    seen = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
                                          is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return seen[0].transpose(0, 1)


def load_model(where: str | Path, dtype: torch.dtype = torch.float32,
               device: str = "cpu") -> tuple[Model, Tokenizer]:
    """The model at `where` and its tokenizer: "austen", "smollm2", a .gguf file, or a safetensors folder.

    Nothing is cached on disk and nothing is downloaded. ModelFileError names the file and what was expected.
    """
    files = open_model_files(resolve(where))
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(files.digest)
        tokenizer = load_tokenizer(files)
        weights = assemble(files.config, files.fill, dtype, device)
        return Model(files.config, weights, digest.result()), tokenizer
