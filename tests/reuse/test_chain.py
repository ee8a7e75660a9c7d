"""The chain's encoding: one input, one form; and what each part of it is for."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import contract
from kvlab.contract import Rejected
from kvlab.reuse.chain import HASHES, ChainHash, block_key, block_keys, extras_of, tail_key
from kvlab.reuse.keys import KeyInputs
from kvlab.reuse.manifests import SideInput
from kvlab.reuse.token_keys import pack, unpack

SHA256 = HASHES["sha256"]
SHOWN = ChainHash("shown", lambda data: data, lambda *_: [], b"r" * 32)
"""A hash that shows what it is given."""
WORDS = st.one_of(st.none(), st.sampled_from(["X", "x", "[", "]", '"', "salt"]))
INPUTS = st.tuples(st.lists(st.integers(0, 3), min_size=2, max_size=2), WORDS, WORDS, st.integers(0, 1))


@settings(max_examples=150, deadline=None)
@given(one=INPUTS, other=INPUTS)
def test_two_inputs_never_share_an_encoding(one, other):
    def shown(tokens, adapter, salt, block):
        return block_key(SHOWN, bytes(32), pack(tokens), 2, extras_of(KeyInputs(adapter, salt), block, 2))

    same = (one[0], one[1], None if one[3] else one[2]) == (other[0], other[1], None if other[3] else other[2])
    assert (shown(*one) == shown(*other)) == same  # the salt counts in block 0 only


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_tokens_are_four_little_endian_bytes_each(tokens):
    assert pack(tokens) == b"".join(t.to_bytes(4, "little") for t in tokens)
    assert unpack(pack(tokens)) == tokens and pack(pack(tokens)) == pack(tokens)


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["x"], [None]])
def test_what_is_no_token_is_refused(bad):
    with pytest.raises(Rejected, match="invalid_token"):
        pack(bad)


def test_a_key_by_hand():
    tokens, root = [7, 8, 9, 10], hashlib.sha256(b"kvlab/prefix-chain/1").digest()
    first = hashlib.sha256(root + pack([7, 8]) + b'[["adapter","a"],["salt","s"]]').digest()
    second = hashlib.sha256(first + pack([9, 10]) + b'[["adapter","a"],["multimodal","p",-1]]').digest()
    inputs = KeyInputs("a", "s", (SideInput("multimodal", 1, 2, "p"),))
    assert block_keys(tokens, 2, inputs)[1] != second  # the picture reaches into block 0 too
    first = hashlib.sha256(root + pack([7, 8]) + b'[["adapter","a"],["multimodal","p",1],["salt","s"]]').digest()
    second = hashlib.sha256(first + pack([9, 10]) + b'[["adapter","a"],["multimodal","p",-1]]').digest()
    assert block_keys([*tokens, 11], 2, inputs) == [first, second]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_only_a_whole_block_has_a_blocks_key(rows):
    with pytest.raises(Rejected, match="partial_block_hashed_as_full"):
        block_key(SHA256, SHA256.root, pack([1] * rows), 2)


def test_a_tails_key_is_no_blocks_key():
    assert tail_key(SHA256, SHA256.root, pack([1, 2]), "p") != block_key(SHA256, SHA256.root, pack([1, 2]), 2)


def test_the_built_in_sha256_is_sha256_and_openssl_serves_where_it_is_missing(monkeypatch):
    assert contract.SHA256(b"abc").hexdigest() == hashlib.sha256(b"abc").hexdigest()

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(contract.importlib, "import_module", missing)
    assert contract._plain_sha256() is hashlib.sha256
