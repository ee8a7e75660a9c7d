"""Opens a model's files, GGUF or a safetensors folder, and hands out its tensors by one set of names.

It owns no tensor of a model and runs nothing; what it cannot read faithfully it refuses with `ModelFileError`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlab.contract import digest_of
from kvlab.execution.gguf_file import GgufFile
from kvlab.execution.model_config import ModelConfig, ModelFileError, config_from_folder, config_from_gguf

__all__ = ["FolderFiles", "GgufFiles", "ModelFileError", "ModelFiles", "open_model_files", "read_json"]

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


class ModelFiles(Protocol):
    """A model on disk. Tensor names are those of Hugging Face's Llama, whatever the format."""

    path: Path
    config: ModelConfig

    def fill(self, name: str, dest: Tensor) -> None:
        """Write the tensor, a vector `[n]` or a matrix `[out, in]`, into `dest`, in its dtype."""

    def digest(self) -> str:
        """SHA-256 over the configuration and the weight files' content. Cost: one pass over the files."""


def open_model_files(path: Path) -> GgufFiles | FolderFiles:
    """The files of the model at `path`: a .gguf file, or a folder with config.json and safetensors."""
    if path.is_dir():
        return FolderFiles(path)
    if path.suffix == ".gguf":
        return GgufFiles(path)
    raise ModelFileError(path, "a .gguf file, or a folder with config.json, *.safetensors and tokenizer.json")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelFileError where it is missing or no JSON object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        value = None
    if not isinstance(value, dict):
        raise ModelFileError(path, "a readable file that holds a JSON object")
    return value


def _digest(config: ModelConfig, files: list[Path]) -> str:
    hashes = []
    for path in files:
        with path.open("rb") as file:
            hashes.append([path.name, hashlib.file_digest(file, "sha256").hexdigest()])
    return digest_of({"config": asdict(config), "files": hashes})


class GgufFiles:
    """A model in one GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, GgufFile(path)
        self.config = config_from_gguf(path, self.file.metadata, self.file.tensors)

    def fill(self, name: str, dest: Tensor) -> None:
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            self.file.fill(f"blk.{layer}.{_GGUF_NAMES[part]}.weight", dest)
        else:
            self.file.fill(f"{_GGUF_NAMES[stem]}.weight", dest)

    def digest(self) -> str:
        return _digest(self.config, [self.path])


class FolderFiles:
    """A model in a Hugging Face folder: config.json, and model.safetensors whole or in shards with an index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = config_from_folder(path / "config.json", read_json(path / "config.json"))

    @cached_property
    def _shards(self) -> dict[Path, Any]:
        """The open safetensors files."""
        index = self.path / "model.safetensors.index.json"
        names = {"model.safetensors"}
        if index.exists():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, dict):
                raise ModelFileError(index, "the key weight_map, which says what shard holds which tensor")
            names = set(listed.values())
        return {self.path / name: self._open(self.path / name) for name in sorted(names)}

    @staticmethod
    def _open(path: Path) -> Any:
        if not path.is_file():
            raise ModelFileError(path, "a safetensors file (model.safetensors, or the shards that its index names)")
        try:
            return safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise ModelFileError(path, f"a complete safetensors file (cut off or damaged: {error})") from None

    @cached_property
    def _where(self) -> dict[str, Path]:
        return {name: path for path, shard in self._shards.items() for name in shard.keys()}  # noqa: SIM118

    def fill(self, name: str, dest: Tensor) -> None:
        path = self._where.get(name)
        if path is None:
            raise ModelFileError(self.path, f"the tensor {name} in {', '.join(p.name for p in self._shards)}")
        tensor = self._shards[path].get_tensor(name)
        wanted = tuple(dest.shape)
        if tuple(tensor.shape) != wanted:
            raise ModelFileError(path, f"the tensor {name} with shape {list(wanted)}, not {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ModelFileError(path, f"the tensor {name} in floating point, not in the quantised {tensor.dtype}")
        dest.copy_(tensor)

    def digest(self) -> str:
        return _digest(self.config, list(self._shards))
