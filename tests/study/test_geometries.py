"""What a token costs: known models, a config of one's own, tensor parallelism with and without heads to split."""

from __future__ import annotations

import json

import pytest

from kvlab.execution.model import load_model
from kvlab.execution.model_config import ModelFileError
from kvlab.study.geometries import KNOWN, bytes_per_token, cost_line, find, from_config, rank_heads
from tests.support import require

CONFIG = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
          "max_position_embeddings": 8192}


@pytest.mark.parametrize(("name", "tp", "cost"), [
    ("llama-3-8b", 1, 131_072), ("llama-3-8b", 2, 65_536), ("llama-3-8b", 8, 16_384), ("llama-3-8b", 16, 16_384),
    ("qwen2.5-7b", 1, 57_344), ("qwen2.5-7b", 2, 28_672), ("smollm2", 1, 23_040), ("smollm2", 3, 7_680),
    ("austen", 1, 1_024), ("austen", 2, 512)])
def test_one_token(name, tp, cost):
    assert bytes_per_token(find(name), tp) == cost
    assert f"{cost:,} bytes" in cost_line(name, tp)


def test_the_embedded_model_really_caches_that_much():
    c = load_model("austen")[0].config
    assert bytes_per_token(find("austen")) == c.layers * c.kv_heads * c.head_dim * 2 * 2


def test_smollm2_as_its_file_says():
    require("smollm2")
    from kvlab.execution.catalog import resolve
    from kvlab.execution.gguf_file import GgufFile
    from kvlab.execution.model_config import config_from_gguf

    file = GgufFile(resolve("smollm2"))
    c = config_from_gguf(file.path, file.metadata, file.tensors)
    g = KNOWN["smollm2"]
    assert (g.layers, g.kv_heads, g.head_dim, g.context) == (c.layers, c.kv_heads, c.head_dim, c.max_position)


def test_more_ranks_than_heads_repeat_the_heads_and_the_line_says_so():
    assert rank_heads(KNOWN["qwen2.5-7b"], 8) == 1
    line = cost_line("qwen2.5-7b", 8)
    assert "each head is stored 2 times" in line and "114,688 bytes for 57,344 distinct" in line
    assert "stored" not in cost_line("qwen2.5-7b", 4)


@pytest.mark.parametrize(("name", "tp"), [("smollm2", 2), ("qwen2.5-7b", 3), ("qwen2.5-7b", 6), ("llama-3-8b", 0)])
def test_a_split_that_does_not_go_is_said(name, tp):
    with pytest.raises(ValueError, match="cannot be split"):
        cost_line(name, tp)


def test_narrower_scalars_cost_less():
    assert 2 * bytes_per_token(KNOWN["llama-3-8b"], 2, 1) == bytes_per_token(KNOWN["llama-3-8b"], 2, 2)


def test_a_config_of_your_own(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert from_config(path, "mine") == find(str(tmp_path)).__class__("mine", 32, 8, 128, 8192)
    assert bytes_per_token(find(str(tmp_path)), 2) == 65_536
    path.write_text(json.dumps({"text_config": CONFIG | {"num_key_value_heads": None, "head_dim": 64}}))
    assert bytes_per_token(find(str(path))) == 32 * 32 * 64 * 4


@pytest.mark.parametrize(("text", "says"), [
    ("{", "readable config.json"), ("[1]", "one object"), ("{}", "num_attention_heads"),
    (json.dumps(CONFIG | {"num_hidden_layers": "32"}), "num_hidden_layers"),
    (json.dumps(CONFIG | {"num_key_value_heads": [1, 2]}), "num_key_value_heads"),
    (json.dumps(CONFIG | {"hidden_size": 8}), "head_dim"), (json.dumps(CONFIG | {"kv_lora_rank": 512}), "latent")])
def test_a_bad_config_is_named(tmp_path, text, says):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelFileError, match=says) as error:
        find(str(path))
    assert str(path) in str(error.value)


def test_no_such_model():
    with pytest.raises(ModelFileError, match="nowhere"):
        cost_line("nowhere/at/all")
