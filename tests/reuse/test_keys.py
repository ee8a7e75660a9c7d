"""The concrete key: chained over full blocks, with the extras of article 0x01A, and no more than a candidate."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.reuse.keys import KeyInputs, block_hashes, bytes_identity, embedding_rows, extra_keys, tensor_identity
from kvlab.reuse.manifests import SideInput

TOKENS = list(range(100, 148))


def differ(one, other):
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def test_a_hash_is_of_parent_tokens_and_extras():
    def sha(value):
        return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()

    first = sha([None, TOKENS[:16], [["salt", "s"]]])
    assert block_hashes(TOKENS, 16, KeyInputs(cache_salt="s"))[:2] == [first, sha([first, TOKENS[16:32], None])]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 8), st.integers(0, 39))
def test_an_edit_changes_its_block_and_every_later_one(tokens, size, at):
    before = block_hashes(tokens, size)
    assert len(before) == len(tokens) // size
    if at < len(tokens):
        edited = [*tokens[:at], tokens[at] + 10, *tokens[at + 1 :]]
        assert differ(before, block_hashes(edited, size)) == list(range(at // size, len(before)))


def test_extras_stand_where_they_count():
    picture = SideInput("multimodal", 14, 4, "x")
    rows = (SideInput("prompt_embedding", 20, 1, "r1"), SideInput("prompt_embedding", 21, 1, "r2"))
    inputs = KeyInputs("a", "s", (picture, *rows))
    assert extra_keys(inputs, 0, 16) == (("adapter", "a"), ("multimodal", "x", 14), ("salt", "s"))
    first, second = extra_keys(inputs, 16, 32)[:2]
    assert (first, second) == (("adapter", "a"), ("multimodal", "x", -2))
    assert extra_keys(inputs, 16, 32)[2][0] == "embeddings" and len(extra_keys(inputs, 32, 48)) == 1
    assert extra_keys(KeyInputs(), 0, 16) is None


def test_identities_are_injective_in_dtype_shape_and_kind():
    six = bytes(range(6))
    made = {bytes_identity(kind, dtype, shape, data) for kind, dtype, shape, data in [
        ("L", "uint8", (2, 3), six), ("L", "uint8", (3, 2), six), ("P", "uint8", (2, 3), six),
        ("L", "int8", (2, 3), six), ("L", "uint8", (2, 3), six[::-1]), ("L", "uint8", (6,), six)]}
    assert len(made) == 6
    values = torch.arange(6, dtype=torch.int16)
    assert tensor_identity("x", values) == bytes_identity("x", "int16", (6,), values.numpy().tobytes())
    assert tensor_identity("x", values.view(2, 3).t()) != tensor_identity("x", values.view(3, 2))
    same_bytes = torch.ones(4, dtype=torch.float16)
    assert tensor_identity("x", same_bytes) != tensor_identity("x", same_bytes.view(torch.bfloat16))
    assert tensor_identity("x", same_bytes.view(torch.bfloat16))


def test_embedding_rows_cover_their_tokens():
    rows = embedding_rows(3, torch.tensor([[1.0, 2.0], [1.0, 3.0]]))
    assert [(r.start, r.length) for r in rows] == [(3, 1), (4, 1)] and rows[0].identity != rows[1].identity
    with pytest.raises(KeyError):
        block_hashes(TOKENS, 16, hash_name="none")
