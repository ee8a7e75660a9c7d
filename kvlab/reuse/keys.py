"""The concrete prefix key: which candidate an index should look at; it narrows the search and proves nothing.

    block_hash = hash(parent_block_hash, full_block_token_ids, extra_keys or None)      lookup key = block_hash + group

This is the projection observed in vLLM v0.23.0 (article 0x01A). Model generation, ABI, layout, rank, quantiser,
position contract and namespace generation are not in it: `kvlab.reuse.compatibility` compares those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.contract import canonical, digest_of
from kvlab.reuse.manifests import SideInput

if TYPE_CHECKING:
    from torch import Tensor

Extra = tuple[str, ...] | tuple[str, str, int]
BlockHash = Callable[[str | None, tuple[int, ...], tuple[Extra, ...] | None], str]


@dataclass(frozen=True, slots=True)
class ConcretePrefixKey:
    """What an index looks up: one hash for a whole prefix of full blocks, and the cache group it is stored in."""

    block_hash: str
    cache_group_id: str

    def __str__(self) -> str:
        return f"{self.block_hash}|{self.cache_group_id}"


@dataclass(frozen=True, slots=True)
class KeyInputs:
    """What the extra keys of a prefix are made from: all that a request brings beside its tokens."""

    adapter_name: str | None = None
    cache_salt: str | None = None
    side_inputs: tuple[SideInput, ...] = ()


# ---------------------------------------------------------------- extra keys of the block [start, end)
def lora_name(inputs: KeyInputs, start: int, end: int) -> list[Extra]:
    """The adapter's name, in every block. A name can be bound to other weights; the manifest holds the digest."""
    return [("adapter", inputs.adapter_name)] if inputs.adapter_name is not None else []


def multimodal_identifier_with_block_relative_offset(inputs: KeyInputs, start: int, end: int) -> list[Extra]:
    """Each item that reaches into the block, with where it begins as seen from the block (negative: before it)."""
    return [("multimodal", s.identity, s.start - start) for s in inputs.side_inputs
            if s.kind == "multimodal" and s.start < end and s.start + s.length > start]


def cache_salt_first_block_only(inputs: KeyInputs, start: int, end: int) -> list[Extra]:
    """The salt enters block 0; every later block inherits it through its parent."""
    return [("salt", inputs.cache_salt)] if inputs.cache_salt is not None and start == 0 else []


def sha256_of_covered_prompt_embeddings(inputs: KeyInputs, start: int, end: int) -> list[Extra]:
    """One digest over the embedding rows that stand in the block, each with its place in it."""
    rows = [[s.start - start, s.identity] for s in inputs.side_inputs
            if s.kind == "prompt_embedding" and start <= s.start < end]
    return [("embeddings", digest_of(rows))] if rows else []


EXTRA_GENERATORS = (lora_name, multimodal_identifier_with_block_relative_offset, cache_salt_first_block_only,
                    sha256_of_covered_prompt_embeddings)


def extra_keys(inputs: KeyInputs, start: int, end: int) -> tuple[Extra, ...] | None:
    """What distinguishes the block beside its tokens, or None. O(side inputs)."""
    return tuple(extra for make in EXTRA_GENERATORS for extra in make(inputs, start, end)) or None


# ---------------------------------------------------------------- hashes
def hash_block(parent_block_hash: str | None, full_block_token_ids: tuple[int, ...],
               extra_keys: tuple[Extra, ...] | None) -> str:
    """SHA-256 of the three as canonical JSON: an injective encoding, so nobody can compute another prompt for it."""
    return digest_of([parent_block_hash, full_block_token_ids, extra_keys])


def sum_mod_7(parent_block_hash: str | None, full_block_token_ids: tuple[int, ...],
              extra_keys: tuple[Extra, ...] | None) -> str:
    """A hash that collides all the time, for lessons: behind a manifest it costs comparisons, never an answer."""
    return str(sum(full_block_token_ids) % 7)


HASHES: dict[str, BlockHash] = {"sha256": hash_block, "sum_mod_7": sum_mod_7}


def block_hashes(tokens: Sequence[int], block_size: int, inputs: KeyInputs = KeyInputs(),
                 hash_name: str = "sha256") -> list[str]:
    """The hash of every full block of `tokens`, each from its parent's. O(tokens); a partial tail has none."""
    make, parent, out = HASHES[hash_name], None, []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        end = start + block_size
        parent = make(parent, tuple(tokens[start:end]), extra_keys(inputs, start, end))
        out.append(parent)
    return out


# ---------------------------------------------------------------- identities of side inputs
def bytes_identity(kind: str, dtype: str, shape: Sequence[int], data: bytes) -> str:
    """SHA-256 of kind, dtype, shape and then bytes, the header length-prefixed: no two values share an encoding.

    Raw bytes alone are ambiguous: six bytes are a 2 x 3 picture and a 3 x 2 one.
    """
    header = canonical([kind, dtype, list(shape), len(data)])
    return hashlib.sha256(len(header).to_bytes(8, "big") + header + data).hexdigest()


def tensor_identity(kind: str, value: Tensor) -> str:
    """The identity of a tensor's very content, dtype and shape included. O(bytes)."""
    from torch import uint8  # here, because keys of plain tokens need no tensors

    raw = value.detach().cpu().contiguous().reshape(-1).view(uint8).numpy().tobytes()
    return bytes_identity(kind, str(value.dtype).removeprefix("torch."), tuple(value.shape), raw)


def embedding_rows(start: int, rows: Tensor) -> tuple[SideInput, ...]:
    """Prompt embeddings `[n, hidden]` for the tokens from `start` on, as one side input a row."""
    return tuple(SideInput("prompt_embedding", start + i, 1, tensor_identity("prompt_embedding", row))
                 for i, row in enumerate(rows))
