"""Tiny random Llama models on disk, and a decoder in plain numpy that shares no code with the package."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

# 6 heads of 8 lanes are 48, not the hidden size, and three query heads share a KV head: nothing is equal by chance.
SIZES = {"layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 8, "hidden": 32, "intermediate": 96, "vocab": 272,
         "theta": 500.0, "eps": 1e-5}

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "Ġ a", "1 2"]


def vocabulary() -> list[str]:
    """Specials, the 256 byte letters of GPT-2, what the merges make, and fillers."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIALS, *bytes_, *(m.replace(" ", "") for m in MERGES)]
    return [*words, *(f"<filler{i}>" for i in range(SIZES["vocab"] - len(words)))]


def random_tensors(seed: int = 0, tied: bool = True) -> dict[str, np.ndarray]:
    """Random float32 weights under Hugging Face's names, matrices `[out, in]`."""
    rng, s = np.random.default_rng(seed), SIZES
    q, kv, hidden, inner = s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"], s["hidden"], s["intermediate"]
    shapes = {"model.embed_tokens": (s["vocab"], hidden), "model.norm": (hidden,)}
    if not tied:
        shapes["lm_head"] = (s["vocab"], hidden)
    for i in range(s["layers"]):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.input_layernorm": (hidden,), f"{at}.post_attention_layernorm": (hidden,)}
        shapes |= {f"{at}.self_attn.{n}_proj": (rows, hidden) for n, rows in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"{at}.self_attn.o_proj": (hidden, q), f"{at}.mlp.down_proj": (hidden, inner)}
        shapes |= {f"{at}.mlp.{n}_proj": (inner, hidden) for n in ("gate", "up")}
    return {f"{name}.weight": (rng.normal(0, 0.4, shape) + (len(shape) == 1)).astype(np.float32)
            for name, shape in shapes.items()}


def config_json(tied: bool = True) -> dict:
    s = SIZES
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": s["vocab"],
            "hidden_size": s["hidden"], "num_hidden_layers": s["layers"], "num_attention_heads": s["heads"],
            "num_key_value_heads": s["kv_heads"], "head_dim": s["head_dim"], "intermediate_size": s["intermediate"],
            "max_position_embeddings": 64, "rope_theta": s["theta"], "rms_norm_eps": s["eps"],
            "tie_word_embeddings": tied, "hidden_act": "silu"}


def write_folder(folder: Path, tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """A Hugging Face folder; with several shards, the tensors go round them and an index lists them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json("lm_head.weight" not in tensors)))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        home = {tensor: names[i % shards] for i, tensor in enumerate(sorted(tensors))}
        for name in names:
            save_file({t: v for t, v in tensors.items() if home[t] == name}, folder / name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    ids = {token: i for i, token in enumerate(vocabulary())}
    inner = tokenizers.Tokenizer(models.BPE(ids, [tuple(m.split()) for m in MERGES]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(SPECIALS)
    inner.save(str(folder / "tokenizer.json"))
    return folder


GGUF_PARTS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
              "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
              "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
              "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_PARTS[part]}.weight"
    return f"{GGUF_PARTS[stem]}.weight"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k matrix from half rotation to interleaved pairs, as llama.cpp's converter permutes them."""
    out, dim = np.empty_like(rows), rows.shape[0] // heads
    for head in range(heads):
        for lane in range(dim // 2):
            out[head * dim + 2 * lane] = rows[head * dim + lane]
            out[head * dim + 2 * lane + 1] = rows[head * dim + dim // 2 + lane]
    return out


def interleaved(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    heads = {"q_proj.weight": SIZES["heads"], "k_proj.weight": SIZES["kv_heads"]}
    return {name: interleave(t, heads[end]) if (end := name.rsplit(".", 2)[-2] + ".weight") in heads else t
            for name, t in tensors.items()}


def write_gguf(path: Path, tensors: dict[str, np.ndarray], kind: str = "F32", pre: str = "smollm", **more) -> Path:
    """The same model as a GGUF file, matrices as `kind` where they can be.

    `more` overrides metadata; None leaves a key out.
    """
    s, writer = SIZES, gguf.GGUFWriter(path, more.pop("architecture", "llama"))
    pairs = {"llama.block_count": s["layers"], "llama.embedding_length": s["hidden"], "llama.context_length": 64,
             "llama.feed_forward_length": s["intermediate"], "llama.attention.head_count": s["heads"],
             "llama.attention.head_count_kv": s["kv_heads"], "llama.attention.key_length": s["head_dim"],
             "llama.rope.dimension_count": s["head_dim"], "llama.rope.freq_base": s["theta"],
             "llama.attention.layer_norm_rms_epsilon": s["eps"], "tokenizer.ggml.model": "gpt2",
             "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": vocabulary(), "tokenizer.ggml.merges": MERGES,
             "tokenizer.ggml.token_type": [3] * 3 + [1] * (s["vocab"] - 3), "tokenizer.ggml.eos_token_id": 2} | more
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in pairs.items():
        if value is not None:
            add[type(value)](key, value)
    for name, tensor in interleaved(tensors).items():
        blocks = tensor.ndim == 2 and tensor.shape[1] % 32 == 0  # what quantisation needs; the rest stays as it is
        quant = gguf.GGMLQuantizationType[kind if blocks else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(tensor, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def oracle(tensors: dict[str, np.ndarray], config: dict, tokens: list[int]) -> np.ndarray:
    """Logits `[n, vocab]` of one sequence, from config.json's words alone: float64, one head at a time."""
    w = {name: t.astype(np.float64) for name, t in tensors.items()}
    heads, kv_heads, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def rope(x: np.ndarray) -> np.ndarray:
        out, half = np.empty_like(x), dim // 2
        for position in range(len(x)):
            for lane in range(half):
                angle = position / config["rope_theta"] ** (2 * lane / dim)
                turned = (x[position, lane] + 1j * x[position, lane + half]) * np.exp(1j * angle)
                out[position, lane], out[position, lane + half] = turned.real, turned.imag
        return out

    x = w["model.embed_tokens.weight"][tokens]
    mask = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (y @ w[f"{at}.self_attn.{n}_proj.weight"].T for n in "qkv")
        seen = np.empty_like(q)
        for head in range(heads):
            lanes = slice(head * dim, head * dim + dim)
            kv = slice((at_kv := head * kv_heads // heads) * dim, at_kv * dim + dim)
            scores = np.where(mask, rope(q[:, lanes]) @ rope(k[:, kv]).T / np.sqrt(dim), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            seen[:, lanes] = weights / weights.sum(-1, keepdims=True) @ v[:, kv]
        x = x + seen @ w[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (y @ w[f"{at}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm") @ w[head].T
