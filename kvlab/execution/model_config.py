"""What a Llama-style model's files say about its shape, checked; it reads no weights and runs nothing.

A configuration that this decoder would compute wrongly is refused by name, never approximated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

RopePairing = Literal["half", "interleaved"]


class ModelFileError(Exception):
    """A model file is missing, malformed or of a kind that kvlab does not run: which file, and what was expected."""

    def __init__(self, path: Path | str, expected: str) -> None:
        self.path, self.expected = path, expected
        super().__init__(f"{path}: expected {expected}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-style decoder. Sizes count scalars, `max_position` counts tokens.

    `rope_pairing` says which lanes of a head rotate together: "half" pairs lane i with i + head_dim/2 (the
    Hugging Face layout), "interleaved" pairs 2i with 2i + 1 (RoFormer, and llama.cpp's Llama files).
    ValueError where the sizes contradict each other.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    rope_theta: float
    rope_pairing: RopePairing
    norm_eps: float
    max_position: int
    tied: bool

    def __post_init__(self) -> None:
        facts = asdict(self)
        if bad := [k for k, v in facts.items() if not isinstance(v, (str, bool)) and not v > 0]:
            raise ValueError(f"{', '.join(bad)} above 0")
        if self.heads % self.kv_heads:
            raise ValueError(f"query heads a multiple of KV heads, not {self.heads} and {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"an even head_dim, because RoPE rotates pairs of lanes, not {self.head_dim}")


class _Fields:
    """One file's key-value pairs, read with the type that is needed; every complaint names file and key."""

    def __init__(self, path: Path, pairs: Mapping[str, Any]) -> None:
        self.path, self.pairs = path, pairs

    def read(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.pairs.get(key)
        if value is None:
            if default is None:
                raise ModelFileError(self.path, f"the key {key}")
            return default
        kinds = (float, int) if kind is float else kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            raise ModelFileError(self.path, f"the key {key} as {kind.__name__}, not {value!r}")
        return kind(value)

    def forbid(self, key: str, allowed: tuple[Any, ...], what: str) -> None:
        value = self.pairs.get(key)
        if value is not None and value not in allowed:
            raise ModelFileError(self.path, f"{what}: {key} is {value!r}")


def _checked(path: Path, facts: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig(**facts)
    except ValueError as error:
        raise ModelFileError(path, str(error)) from None


def config_from_folder(path: Path, pairs: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a Hugging Face `config.json`, whose content is `pairs`; ModelFileError if unsupported."""
    f = _Fields(path, pairs)
    if "LlamaForCausalLM" not in (pairs.get("architectures") or ["LlamaForCausalLM"]):
        raise ModelFileError(path, f"the architecture LlamaForCausalLM, not {pairs['architectures']!r}")
    if pairs.get("model_type", "llama") != "llama":
        raise ModelFileError(path, f"the model_type llama, not {pairs['model_type']!r}")
    rope = pairs.get("rope_parameters") or pairs.get("rope_scaling") or {}
    if (scaling := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise ModelFileError(path, f"plain RoPE: the rope scaling {scaling!r} is not supported")
    f.forbid("hidden_act", ("silu",), "SwiGLU")
    f.forbid("attention_bias", (False,), "attention without biases")
    f.forbid("mlp_bias", (False,), "an MLP without biases")
    f.forbid("partial_rotary_factor", (1, 1.0), "RoPE over whole heads")
    f.forbid("quantization_config", (), "unquantised safetensors")
    hidden, heads = f.read("hidden_size", int), f.read("num_attention_heads", int)
    return _checked(path, {
        "layers": f.read("num_hidden_layers", int),
        "heads": heads,
        "kv_heads": f.read("num_key_value_heads", int, heads),
        "head_dim": f.read("head_dim", int, hidden // max(heads, 1)),
        "hidden": hidden,
        "intermediate": f.read("intermediate_size", int),
        "vocab": f.read("vocab_size", int),
        "rope_theta": f.read("rope_theta", float, float(rope.get("rope_theta", 10000.0))),
        "rope_pairing": "half",
        "norm_eps": f.read("rms_norm_eps", float),
        "max_position": f.read("max_position_embeddings", int),
        "tied": f.read("tie_word_embeddings", bool, False),
    })


def config_from_gguf(path: Path, pairs: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a GGUF header: metadata `pairs` and the tensors it lists; ModelFileError if unsupported.

    llama.cpp's converter permutes the q and k rows of Llama models, so that rotating pairs are interleaved.
    """
    f = _Fields(path, pairs)
    if (architecture := f.read("general.architecture", str)) != "llama":
        raise ModelFileError(path, f"the architecture llama, not {architecture!r}")
    f.forbid("split.count", (0, 1), "one whole GGUF file, not a part of a split one")
    f.forbid("llama.expert_count", (0,), "a dense model, not a mixture of experts")
    f.forbid("llama.rope.scaling.type", ("none",), "plain RoPE: this rope scaling is not supported")
    if "rope_freqs.weight" in tensors:
        raise ModelFileError(path, "plain RoPE: the rope scaling 'llama3' (rope_freqs.weight) is not supported")
    hidden, heads = f.read("llama.embedding_length", int), f.read("llama.attention.head_count", int)
    head_dim = f.read("llama.attention.key_length", int, hidden // max(heads, 1))
    f.forbid("llama.rope.dimension_count", (head_dim,), f"RoPE over whole heads of {head_dim}")
    tokens = f.read("tokenizer.ggml.tokens", list)
    if (vocab := f.read("llama.vocab_size", int, len(tokens))) != len(tokens):
        raise ModelFileError(path, f"one vocabulary size, not {vocab} (llama.vocab_size) and {len(tokens)} tokens")
    return _checked(path, {
        "layers": f.read("llama.block_count", int),
        "heads": heads,
        "kv_heads": f.read("llama.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden": hidden,
        "intermediate": f.read("llama.feed_forward_length", int),
        "vocab": vocab,
        "rope_theta": f.read("llama.rope.freq_base", float, 10000.0),
        "rope_pairing": "interleaved",
        "norm_eps": f.read("llama.attention.layer_norm_rms_epsilon", float),
        "max_position": f.read("llama.context_length", int),
        "tied": "output.weight" not in tensors,
    })
