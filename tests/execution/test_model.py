"""The decoder against an independent numpy oracle, alone, packed, and over both RoPE pairings."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.numpy import load_file

from kvlab.execution.model import Model, assemble, causal_attend, load_model
from kvlab.execution.model_config import ModelConfig
from tests.execution import tiny
from tests.support import FIXTURES, require

AUSTEN = FIXTURES / "austen-llama"
SENTENCE = "She was then in the full bloom of her beauty, and he could not but admire her."


@cache
def austen(dtype: torch.dtype = torch.float32):
    return load_model("austen", dtype)


def logits_of(model: Model, tokens: list[int], attend=causal_attend) -> torch.Tensor:
    return model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attend)


def relative_error(found: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(found.double().numpy() - expected).max() / np.abs(expected).max())


def tiny_model(tensors: dict[str, np.ndarray], pairing: str = "half") -> Model:
    s = tiny.SIZES
    config = ModelConfig(s["layers"], s["heads"], s["kv_heads"], s["head_dim"], s["hidden"], s["intermediate"],
                         s["vocab"], s["theta"], pairing, s["eps"], 64, "lm_head.weight" not in tensors)
    weights = assemble(config, lambda name, dest: dest.copy_(torch.from_numpy(tensors[name])), torch.float64)
    return Model(config, weights)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.float16, 2e-2),
                                              (torch.bfloat16, 1e-1)])
def test_austen_agrees_with_the_oracle(dtype, bound):
    model, tokenizer = austen(dtype)
    tokens = tokenizer.encode(SENTENCE)
    expected = tiny.oracle(load_file(AUSTEN / "model.safetensors"), json.loads((AUSTEN / "config.json").read_text()),
                           tokens)
    found = logits_of(model, tokens)
    assert found.dtype == dtype and relative_error(found, expected) < bound


@pytest.mark.parametrize("tied", [True, False])
def test_grouped_heads_and_tied_or_untied_head_agree_with_the_oracle(tied):
    tensors, tokens = tiny.random_tensors(3, tied), [5, 9, 200, 7, 7, 31, 100]
    expected = tiny.oracle(tensors, tiny.config_json(tied), tokens)
    assert relative_error(logits_of(tiny_model(tensors), tokens), expected) < 1e-9


def test_both_rope_pairings_are_one_model_under_the_known_permutation():
    tensors, tokens = tiny.random_tensors(4), [1, 2, 3, 50, 60, 70, 250]
    half = logits_of(tiny_model(tensors), tokens)
    pairs = logits_of(tiny_model(tiny.interleaved(tensors), "interleaved"), tokens)
    unpermuted = logits_of(tiny_model(tensors, "interleaved"), tokens)
    assert relative_error(pairs, half.numpy()) < 1e-12
    assert relative_error(unpermuted, half.numpy()) > 1e-3


def test_a_packed_ragged_batch_equals_single_runs():
    model, tokenizer = austen()
    prompts = [tokenizer.encode(t) for t in ("It is a truth", "Emma", "He bowed; she said nothing, and walked on.")]
    lengths = [len(p) for p in prompts]

    def ragged(layer, q, k, v):
        parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
        return torch.cat([causal_attend(layer, *part) for part in parts])

    positions = torch.cat([torch.arange(n) for n in lengths])
    packed = model.forward(torch.tensor([t for p in prompts for t in p]), positions, ragged)
    for found, prompt in zip(packed.split(lengths), prompts, strict=True):
        np.testing.assert_allclose(found, logits_of(model, prompt), rtol=1e-4, atol=1e-4)


class OneSequence:
    """A contiguous cache of one sequence: keep all rows, answer the newest queries."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer, q, k, v):
        if layer in self.rows:
            k, v = (torch.cat(pair) for pair in zip(self.rows[layer], (k, v), strict=True))
        self.rows[layer] = k, v
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        return F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask,
                                              enable_gqa=True).transpose(0, 1)


def test_rows_that_were_kept_give_the_logits_of_the_whole_sequence():
    model, tokenizer = austen(torch.float64)
    tokens, cache_ = tokenizer.encode(SENTENCE), OneSequence()
    cuts = [0, 5, 6, 7, 12, len(tokens)]
    parts = [model.forward(torch.tensor(tokens[a:b]), torch.arange(a, b), cache_)
             for a, b in pairwise(cuts)]
    np.testing.assert_allclose(torch.cat(parts), logits_of(model, tokens), rtol=1e-10, atol=1e-10)


def test_rows_picks_whose_logits_are_computed():
    model, tokens = austen()[0], [4, 8, 15, 16, 23, 42]
    picked = model.forward(torch.tensor(tokens), torch.arange(6), causal_attend, torch.tensor([5, 2]))
    np.testing.assert_allclose(picked, logits_of(model, tokens)[[5, 2]], rtol=1e-5, atol=1e-5)


def test_a_token_or_position_out_of_range_is_an_index_error():
    model = austen()[0]
    for token, position in ((1024, 0), (-1, 0), (0, 512), (0, -1)):
        with pytest.raises(IndexError):
            model.forward(torch.tensor([token]), torch.tensor([position]), causal_attend)


def test_row_bytes_count_both_k_and_v_of_every_layer():
    model = austen()[0]
    assert model.kv_row_bytes(torch.float16) == 1024
    assert model.kv_row_bytes() == 2048


def test_the_digest_names_content_and_not_the_dtype(tmp_path):
    one, same = (tiny.write_folder(tmp_path / name, tiny.random_tensors(1)) for name in ("one", "same"))
    other = tiny.write_folder(tmp_path / "other", tiny.random_tensors(2))
    eps = tiny.write_folder(tmp_path / "eps", tiny.random_tensors(1))
    (eps / "config.json").write_text(json.dumps(tiny.config_json() | {"rms_norm_eps": 1e-6}))
    digest = load_model(one)[0].digest
    assert load_model(same, torch.float64)[0].digest == digest and len(digest) == 64
    assert len({digest, load_model(other)[0].digest, load_model(eps)[0].digest}) == 3


def perplexity(model: Model, tokens: list[int]) -> float:
    return float(F.cross_entropy(logits_of(model, tokens)[:-1], torch.tensor(tokens[1:])).exp())


def test_austen_knows_its_english():
    model, tokenizer = austen()
    tokens = tokenizer.encode(SENTENCE)
    assert perplexity(model, tokens) < 60 < 1024 / 10
    assert perplexity(model, sorted(tokens)) > 5 * perplexity(model, tokens)


def test_the_seam_gets_shapes_and_layers_in_order():
    model, calls = austen()[0], []

    def attend(layer, q, k, v):
        calls.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return q

    model.forward(torch.tensor([1, 2, 3]), torch.tensor([0, 0, 9]), attend)
    assert calls == [(layer, (3, 4, 32), (3, 2, 32), (3, 2, 32)) for layer in range(4)]


def test_a_gpu_gives_the_logits_of_the_cpu():
    device = require("cuda")
    model, tokenizer = load_model("austen", torch.float64, device)
    tokens = tokenizer.encode(SENTENCE)
    found = model.forward(torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device), causal_attend)
    assert found.device.type == device and model.device.startswith(device)
    assert relative_error(found.cpu(), logits_of(austen(torch.float64)[0], tokens).numpy()) < 1e-9


def test_smollm2_answers():
    require("smollm2")
    model, tokenizer = load_model("smollm2")
    assert model.kv_row_bytes(torch.float16) == 23040
    tokens = tokenizer.encode(tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}]))
    rows, fed, answer = OneSequence(), 0, []
    while len(answer) < 12 and not set(answer) & set(tokenizer.eos_ids):
        new = (tokens + answer)[fed:]
        positions = torch.arange(fed, fed := fed + len(new))
        logits = model.forward(torch.tensor(new), positions, rows, torch.tensor([len(new) - 1]))
        answer.append(int(logits.argmax()))
    assert "Paris" in tokenizer.decode(answer)
    policy = tokenizer.encode("The agent must first obtain the user id and the reservation id from the user.")
    assert perplexity(model, policy) < 100
