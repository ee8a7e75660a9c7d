"""Known models' K/V geometry as data, and what one token costs on yours; it reads a config and never a weight.

A geometry is all that a byte ledger needs of a model. Attention that does not keep K and V for each head is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.execution import catalog
from kvlab.execution.model_config import ModelFileError
from kvlab.memory.ledger import RowGeometry


@dataclass(frozen=True, slots=True)
class Geometry:
    """The K/V shape of a whole model: layers that cache, K/V heads over all ranks, lanes a head, context in tokens."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    context: int


KNOWN = {
    "llama-3-8b": Geometry("Llama-3-8B", 32, 8, 128, 8192),
    "qwen2.5-7b": Geometry("Qwen2.5-7B", 28, 4, 128, 32768),
    "smollm2": Geometry("SmolLM2-135M", 30, 3, 64, 8192),
}
"""From the models' own config.json files. Their names work wherever a model is asked for; so does "austen"."""


def rank_heads(geometry: Geometry, tp: int = 1) -> int:
    """K/V heads on each of `tp` ranks, split as vLLM does: an even share, or whole heads repeated.

    ValueError where neither goes without a rest.
    """
    if tp < 1 or max(tp, geometry.kv_heads) % min(tp, geometry.kv_heads):
        raise ValueError(f"{geometry.kv_heads} K/V heads of {geometry.name} cannot be split over {tp} ranks evenly")
    return max(1, geometry.kv_heads // tp)


def row_geometry(geometry: Geometry, tp: int = 1, k_bytes: int = 2, v_bytes: int | None = None) -> RowGeometry:
    """The row of one rank, `k_bytes` and `v_bytes` (default: as K) wide a scalar."""
    return RowGeometry("kv", geometry.layers, rank_heads(geometry, tp), geometry.head_dim, k_bytes, v_bytes or k_bytes)


def bytes_per_token(geometry: Geometry, tp: int = 1, dtype_bytes: int = 2) -> int:
    """K/V bytes of one token on one rank (formula F3.01, article 0x02A)."""
    return row_geometry(geometry, tp, dtype_bytes).row_bytes


def find(where: str) -> Geometry:
    """The geometry of a known name, of "austen", or of a `config.json` or a folder with one.

    ModelFileError names the file and what it lacks.
    """
    if where.lower() in KNOWN:
        return KNOWN[where.lower()]
    try:
        path = catalog.resolve(where)
    except ModelFileError:
        names = ", ".join([*KNOWN, "austen"])
        raise ModelFileError(Path(where), f"a config.json, a folder with one, or one of the names {names}") from None
    return from_config(path / "config.json" if path.is_dir() else path, "" if where != "austen" else "austen-llama")


def from_config(path: Path, name: str = "") -> Geometry:
    """The geometry in a Llama-style Hugging Face `config.json`; ModelFileError where it has none."""
    try:
        pairs = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFileError(path, f"a readable config.json ({error})") from None
    if not isinstance(pairs, dict):
        raise ModelFileError(path, "a config.json: one object of keys")
    pairs = pairs.get("text_config") or pairs
    if "kv_lora_rank" in pairs:
        raise ModelFileError(path, "K and V rows for each head; this model stores one latent row (kv_lora_rank)")
    heads = _whole(path, pairs, "num_attention_heads")
    dims = pairs.get("head_dim") or _whole(path, pairs, "hidden_size") // heads
    return Geometry(
        name=name or str(pairs.get("_name_or_path") or path.resolve().parent.name),
        layers=_whole(path, pairs, "num_hidden_layers"), kv_heads=_whole(path, pairs, "num_key_value_heads", heads),
        head_dim=_whole(path, {"head_dim": dims}, "head_dim"), context=_whole(path, pairs, "max_position_embeddings"))


def _whole(path: Path, pairs: dict[str, Any], key: str, default: int | None = None) -> int:
    value = pairs.get(key, default)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFileError(path, f"the key {key} as a positive whole number, not {value!r}")
    return value


def cost_line(where: str, tp: int = 1, dtype_bytes: int = 2) -> str:
    """What one token costs on a model, in one line of words.

    ModelFileError for a bad config, ValueError for a split that does not go.
    """
    model = find(where)
    one, whole = bytes_per_token(model, tp, dtype_bytes), bytes_per_token(model, 1, dtype_bytes)
    split = f"{model.layers} layers x {rank_heads(model, tp)} K/V heads x {model.head_dim} lanes"
    widths = f"(K {dtype_bytes} + V {dtype_bytes} bytes)"
    context = one * model.context / 2**20
    full = f"{context:,.3g} MiB" if context < 1024 else f"{context / 1024:.3g} GiB"
    line = (f"{model.name}, TP {tp}: one token costs {one:,} bytes ({one / 1024:g} KiB) on each rank = {split} x "
            f"{widths}; a full context of {model.context:,} tokens takes {full}.")
    if tp > model.kv_heads:
        copies = tp // model.kv_heads
        return line + (f" {tp} ranks share {model.kv_heads} K/V heads, so each head is stored {copies} times: "
                       f"all ranks together hold {one * tp:,} bytes for {whole:,} distinct ones.")
    return line + (f" All {tp} ranks together: {one * tp:,} bytes." if tp > 1 else "")
