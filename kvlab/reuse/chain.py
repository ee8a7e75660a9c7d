"""The parent-hash chain in bytes: one key for a whole prefix of full blocks, and one for an immutable partial tail.

It owns the encoding that is hashed (article 0x07B, 0x07D; formulas F6.04, F6.05). It refuses to store keys or to say
whether one may be used. `kvlab.reuse.keys` has the same projection over canonical JSON, for single objects; an index
hashes every block of every prompt, so here the tokens are packed bytes.

    block   parent key | block_size tokens, 4 bytes each, little-endian | extra keys, canonical JSON of tagged fields
    tail    "tail" | rows, 4 bytes | policy, length-prefixed | parent key | rows tokens | extra keys

The parent key and the tokens have fixed lengths and each extra key is tagged, so no two inputs share an encoding.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvlab.contract import SHA256, Rejected, canonical
from kvlab.reuse.keys import Extra, KeyInputs, extra_keys
from kvlab.reuse.token_keys import TOKEN_BYTES, pack

FORM = b"kvlab/prefix-chain/1"
BARE = KeyInputs()


def _sha256(data: bytes) -> bytes:
    return SHA256(data).digest()


def _crc32(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


def _run(make: Callable[[bytes], bytes], parent: bytes, packed: bytes, at: int, end: int, stride: int) -> list[bytes]:
    """The keys of the bare blocks in packed[at:end], each from its parent's."""
    keys = []
    for start in range(at, end, stride):
        parent = make(parent + packed[start : start + stride])
        keys.append(parent)
    return keys


def _run_sha256(parent: bytes, packed: bytes, at: int, end: int, stride: int) -> list[bytes]:
    """`_run` spelled out: the call of a wrapper a block costs a quarter of the hash."""
    keys, sha256 = [], SHA256
    for start in range(at, end, stride):
        parent = sha256(parent + packed[start : start + stride]).digest()
        keys.append(parent)
    return keys


@dataclass(frozen=True, slots=True)
class ChainHash:
    """A hash by name. `gives_up` says what it costs to use it; `needs_witness` refuses it without token witnesses.

    `run(parent, packed, at, end, stride)`: the keys of the bare blocks in packed[at:end], bytes of whole blocks.
    """

    name: str
    make: Callable[[bytes], bytes]
    run: Callable[[bytes, bytes, int, int, int], list[bytes]]
    root: bytes
    gives_up: str = ""
    needs_witness: bool = False


HASHES = {
    "sha256": ChainHash("sha256", _sha256, _run_sha256, _sha256(FORM)),
    "crc32": ChainHash(
        "crc32", _crc32, partial(_run, _crc32), _crc32(FORM),
        "Everything but speed: 32 bits collide by chance from about 77,000 blocks on, and anybody can compute another "
        "prompt with the same key. Only behind token witnesses, and only where all who publish trust each other.",
        needs_witness=True),
}


def extra_bytes(extras: tuple[Extra, ...] | None) -> bytes:
    """Extra keys as canonical JSON of tagged fields; nothing where a block has none."""
    return canonical(extras) if extras else b""


def block_key(hashed: ChainHash, parent: bytes, tokens: bytes, block_size: int, extras: bytes = b"") -> bytes:
    """h_i = H(h_{i-1}, X_i, E_i). `partial_block_hashed_as_full` where it is not exactly one block of tokens."""
    if len(tokens) != block_size * TOKEN_BYTES:
        rows = len(tokens) // TOKEN_BYTES
        raise Rejected("partial_block_hashed_as_full", f"{rows} tokens, a block has {block_size}")
    return hashed.make(parent + tokens + extras)


def tail_key(hashed: ChainHash, parent: bytes, tokens: bytes, policy: str, extras: bytes = b"") -> bytes:
    """h_tail = H(h_parent, X[0:v], v, policy, E): two frontiers of one block never share a key."""
    rows, named = len(tokens) // TOKEN_BYTES, policy.encode()
    head = b"tail" + rows.to_bytes(4, "little") + len(named).to_bytes(4, "little") + named
    return hashed.make(head + parent + tokens + extras)


def bare(inputs: KeyInputs) -> bool:
    """Whether a request brings nothing beside its tokens, so that no block has an extra key."""
    return inputs.adapter_name is None and inputs.cache_salt is None and not inputs.side_inputs


def extras_of(inputs: KeyInputs, block: int, block_size: int) -> bytes:
    """The extra keys of one block, encoded. O(side inputs)."""
    return extra_bytes(extra_keys(inputs, block * block_size, (block + 1) * block_size))


def walk(hashed: ChainHash, packed: bytes, block_size: int, inputs: KeyInputs) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(key, parent, extras) of each full block in ancestry order, each hashed when it is asked for."""
    parent, stride, plain = hashed.root, block_size * TOKEN_BYTES, bare(inputs)
    for block, at in enumerate(range(0, len(packed) - stride + 1, stride)):
        extras = b"" if plain else extras_of(inputs, block, block_size)
        key = hashed.make(parent + packed[at : at + stride] + extras)
        yield key, parent, extras
        parent = key


def block_keys(tokens: Sequence[int] | bytes, block_size: int, inputs: KeyInputs = BARE,
               hash_name: str = "sha256") -> list[bytes]:
    """The key of every full block, each from its parent's. O(tokens); a partial tail has none."""
    return [key for key, _, _ in walk(HASHES[hash_name], pack(tokens), block_size, inputs)]
