"""Model files: every format gives the same model, and every bad file is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from kvlab.execution.gguf_file import GgufFile
from kvlab.execution.model import causal_attend, load_model
from kvlab.execution.model_config import ModelFileError
from tests.execution import tiny

TOKENS = torch.tensor([9, 4, 77, 130, 255])


def logits_at(where: Path, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return load_model(where, dtype)[0].forward(TOKENS, torch.arange(5), causal_attend)


@pytest.mark.parametrize("tied", [True, False])
def test_whole_sharded_and_gguf_files_are_one_model(tmp_path, tied):
    tensors = tiny.random_tensors(0, tied)
    expected = tiny.oracle(tensors, tiny.config_json(tied), TOKENS.tolist())
    for where in (tiny.write_folder(tmp_path / "whole", tensors), tiny.write_folder(tmp_path / "cut", tensors, 3),
                  tiny.write_gguf(tmp_path / "m.gguf", tensors)):
        # the GGUF header keeps rms_norm_eps in fp32, hence not 1e-12
        np.testing.assert_allclose(logits_at(where).numpy(), expected, rtol=0, atol=1e-7 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0"])
def test_quantised_weights_are_exactly_those_of_the_gguf_package(tmp_path, kind, dtype):
    tensors, quant = tiny.random_tensors(5), gguf.GGMLQuantizationType[kind]
    file = GgufFile(tiny.write_gguf(tmp_path / "m.gguf", tensors, kind))
    matrix = tensors["model.layers.1.mlp.down_proj.weight"]
    expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(matrix, quant), quant)).to(dtype)
    rows, columns = matrix.shape
    for wide in (torch.zeros(2 * rows, columns, dtype=dtype), torch.zeros(rows, 2 * columns, dtype=dtype)):
        dest = wide[:rows, :columns]
        file.fill("blk.1.ffn_down.weight", dest)
        assert torch.equal(dest, expected) and wide.count_nonzero() == dest.count_nonzero()


def test_the_header_reader_agrees_with_the_gguf_package(tmp_path):
    path = tiny.write_gguf(tmp_path / "m.gguf", tiny.random_tensors(), **{"general.languages": ["en", "né"]})
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    known = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == known
    assert {n: (t.begin, list(t.shape)) for n, t in ours.tensors.items()} == {
        t.name: (t.data_offset, t.shape.tolist()[::-1]) for t in theirs.tensors}


# ---------------------------------------------------------------- files that are refused
def change_config(**changes):
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return apply


def change_tensors(edit):
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
    return apply


def cut(name: str, keep: float):
    def apply(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])
    return apply


def write(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def remove(name: str):
    return lambda folder: (folder / name).unlink()


Q = "model.layers.0.self_attn.q_proj.weight"
BAD_FOLDERS = {
    "no config": (remove("config.json"), "config.json", "JSON object"),
    "config is no JSON": (write("config.json", "{"), "config.json", "JSON object"),
    "config is a list": (write("config.json", "[]"), "config.json", "JSON object"),
    "missing key": (change_config(intermediate_size=None), "config.json", "the key intermediate_size"),
    "wrong type": (change_config(hidden_size="32"), "config.json", "hidden_size as int"),
    "boolean size": (change_config(hidden_size=True), "config.json", "hidden_size as int"),
    "zero heads": (change_config(num_attention_heads=0), "config.json", "heads"),
    "uneven groups": (change_config(num_key_value_heads=4), "config.json", "multiple of KV heads"),
    "odd head": (change_config(head_dim=7), "config.json", "even head_dim"),
    "architecture": (change_config(architectures=["GPT2LMHeadModel"]), "config.json", "LlamaForCausalLM"),
    "model type": (change_config(architectures=None, model_type="qwen2"), "config.json", "qwen2"),
    "rope scaling": (change_config(rope_scaling={"type": "linear", "factor": 2.0}), "config.json", "'linear'"),
    "newer rope scaling": (change_config(rope_parameters={"rope_type": "yarn"}), "config.json", "'yarn'"),
    "activation": (change_config(hidden_act="gelu"), "config.json", "SwiGLU"),
    "biases": (change_config(attention_bias=True), "config.json", "without biases"),
    "quantised": (change_config(quantization_config={"bits": 4}), "config.json", "unquantised"),
    "no weights": (remove("model.safetensors"), "model.safetensors", "a safetensors file"),
    "cut weights": (cut("model.safetensors", 0.6), "model.safetensors", "cut off"),
    "missing tensor": (change_tensors(lambda t: t.pop(Q)), "folder", Q),
    "wrong shape": (change_tensors(lambda t: t.update({Q: t[Q][:-1]})), "model.safetensors", "[48, 32], not [47, 32]"),
    "integer tensor": (change_tensors(lambda t: t.update({Q: t[Q].astype(np.int8)})), "model.safetensors", "int8"),
    "vocabulary in weights": (change_config(vocab_size=300), "model.safetensors", "[300, 32], not [272, 32]"),
    "vocabulary in tokenizer": (change_config(vocab_size=200), "tokenizer.json", "at most 200 tokens"),
    "no tokenizer": (remove("tokenizer.json"), "tokenizer.json", "a tokenizer"),
    "bad tokenizer": (write("tokenizer.json", "{}"), "tokenizer.json", "readable"),
    "bad index": (write("model.safetensors.index.json", "{}"), "model.safetensors.index.json", "weight_map"),
    "missing shard": (write("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'),
                      "b.safetensors", "a safetensors file"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_bad_folder_is_named(tmp_path, case):
    damage, file, words = BAD_FOLDERS[case]
    folder = tiny.write_folder(tmp_path / "folder", tiny.random_tensors())
    load_model(folder)
    damage(folder)
    with pytest.raises(ModelFileError) as caught:
        load_model(folder)
    assert Path(caught.value.path).name == file
    assert str(caught.value).startswith(f"{caught.value.path}: expected ") and words in caught.value.expected


BAD_METADATA = {
    "architecture": ({"architecture": "qwen2"}, "the architecture llama, not 'qwen2'"),
    "missing key": ({"llama.block_count": None}, "the key llama.block_count"),
    "per-layer heads": ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv as int"),
    "rope scaling": ({"llama.rope.scaling.type": "yarn"}, "rope scaling"),
    "partial rope": ({"llama.rope.dimension_count": 4}, "whole heads"),
    "experts": ({"llama.expert_count": 8}, "mixture of experts"),
    "split file": ({"split.count": 2}, "a split one"),
    "vocabulary": ({"llama.vocab_size": 271}, "271 (llama.vocab_size) and 272 tokens"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "the key tokenizer.ggml.tokens"),
    "no merges": ({"tokenizer.ggml.merges": None}, "the key tokenizer.ggml.merges"),
    "foreign merges": ({"tokenizer.ggml.merges": ["x yz"]}, "merges of listed tokens"),
    "sentencepiece": ({"tokenizer.ggml.model": "llama"}, "byte-level BPE"),
    "pre-tokeniser": ({"tokenizer.ggml.pre": "llama-bpe"}, "not 'llama-bpe'"),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_bad_gguf_metadata_is_named(tmp_path, case):
    changes, words = BAD_METADATA[case]
    path = tiny.write_gguf(tmp_path / "m.gguf", tiny.random_tensors(), **changes)
    with pytest.raises(ModelFileError) as caught:
        load_model(path)
    assert caught.value.path == path and words in caught.value.expected


def gguf_without(name: str, tmp_path: Path) -> Path:
    return tiny.write_gguf(tmp_path / "m.gguf", {n: t for n, t in tiny.random_tensors().items() if n != name})


def test_a_gguf_file_without_a_tensor_or_with_another_shape_is_named(tmp_path):
    with pytest.raises(ModelFileError, match=r"m\.gguf: expected the tensor blk\.0\.attn_q\.weight"):
        load_model(gguf_without(Q, tmp_path))
    path = tiny.write_gguf(tmp_path / "n.gguf", tiny.random_tensors(), **{"llama.feed_forward_length": 64})
    with pytest.raises(ModelFileError, match=r"shape \[64, 32\], not \[96, 32\]"):
        load_model(path)


def test_llama3_rope_factors_are_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(ModelFileError, match="rope scaling 'llama3'"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [3, 4, 12, 30, 200, 3000, 6000, -1])
def test_a_cut_gguf_file_is_named_wherever_the_cut_is(tmp_path, keep):
    path = tiny.write_gguf(tmp_path / "m.gguf", tiny.random_tensors())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"m\.gguf: expected"):
        load_model(path)


@pytest.mark.parametrize(("at", "data", "words"), [
    (0, b"GGML", "four letters GGUF"), (4, struct.pack("<I", 9), "version 2 or 3"),
    (16, struct.pack("<Q", 1 << 60), "cut off or damaged"),
])
def test_a_damaged_gguf_header_is_named(tmp_path, at, data, words):
    path = tiny.write_gguf(tmp_path / "m.gguf", tiny.random_tensors())
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=words):
        load_model(path)


def test_an_unknown_quantisation_is_named(tmp_path):
    path = tiny.write_gguf(tmp_path / "m.gguf", tiny.random_tensors())
    name = b"blk.0.attn_q.weight"
    content = bytearray(path.read_bytes())
    at = content.index(name) + len(name) + 4 + 2 * 8
    content[at : at + 4] = struct.pack("<I", 4000)
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_q\.weight has the unsupported ggml type 4000"):
        load_model(path)


def test_what_is_no_model_at_all_is_named(tmp_path):
    with pytest.raises(ModelFileError, match="one of the names austen"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelFileError, match=r"notes\.txt: expected a \.gguf file, or a folder"):
        load_model(tmp_path / "notes.txt")
