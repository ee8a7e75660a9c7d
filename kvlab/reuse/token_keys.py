"""Token ids as packed bytes that can be compared at an offset; it owns no tree and no meaning of a token.

A list is packed only as far as a comparison needs it, in chunks that double, so that a miss costs a block and not a
prompt (contract Loop 7, F7.04).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvlab.contract import Rejected, canonical

TOKEN_BYTES = 4
FIRST_CHUNK = 64
Tokens = Sequence[int] | bytes | array | np.ndarray
"""A list or tuple of ids, packed 32-bit ids (bytes or an array of them), or a numpy array."""


def pack(tokens: Iterable[int] | bytes) -> bytes:
    """Ids as little-endian unsigned 32-bit words; bytes are packed already. O(tokens).

    `invalid_token` for anything that is no whole number from 0 to 2**32 - 1.
    """
    if isinstance(tokens, bytes):
        return tokens
    try:
        words = array("I", tokens)
    except (TypeError, OverflowError) as error:
        raise Rejected("invalid_token", f"{error}") from error
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def unpack(data: bytes) -> list[int]:
    """The ids of packed bytes. O(tokens)."""
    words = array("I", data)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tolist()


def tag(extra_key: Any) -> bytes:
    """What stands before the first block of a sub-tree's selector: nothing for None, else the key's canonical JSON.

    A block has a fixed length, so tag + block names both; a field's name is part of its key, so an adapter called "X"
    is not a salt called "X".
    """
    return b"" if extra_key is None else canonical(extra_key)


def first_difference(a: bytes, at: int, b: bytes, start: int, length: int) -> int:
    """Bytes (whole tokens) in which a[at:] and b[start:] agree, at most `length`. O(length), vectorised."""
    count = length // TOKEN_BYTES
    differs = np.frombuffer(a, np.uint32, count, at) != np.frombuffer(b, np.uint32, count, start)
    where = int(differs.argmax()) if count else 0
    return where * TOKEN_BYTES if count and differs[where] else count * TOKEN_BYTES


class TokenKey:
    """The tokens of one query, packed as far as somebody has looked. `limit` bytes of it are whole blocks."""

    __slots__ = ("data", "limit", "source", "tokens")

    def __init__(self, tokens: Tokens, block_size: int) -> None:
        self.source: Sequence[int] | None = None
        if isinstance(tokens, bytes):
            self.data = tokens
        elif isinstance(tokens, list | tuple):
            self.data, self.source = b"", tokens
        elif isinstance(tokens, array | np.ndarray):
            row = np.asarray(tokens)
            packed = row.dtype.itemsize == TOKEN_BYTES and row.dtype.kind in "iu" and row.ndim == 1
            packed = packed and (row.dtype.kind == "u" or not row.size or int(row.min()) >= 0)
            self.data = row.astype("<u4", copy=False).tobytes() if packed else pack(row.tolist())
        else:
            raise Rejected("invalid_token", f"a sequence of token ids, not {type(tokens).__name__}")
        self.tokens = len(self.data) // TOKEN_BYTES if self.source is None else len(self.source)
        if self.source is None and len(self.data) % TOKEN_BYTES:
            raise Rejected("invalid_token", f"{len(self.data)} bytes are no whole number of tokens")
        self.limit = self.tokens // block_size * block_size * TOKEN_BYTES

    def upto(self, end: int) -> bytes:
        """Packed bytes that reach to `end` at least, or to the end of the tokens."""
        data = self.data
        while len(data) < end and self.source is not None:
            done = len(data) // TOKEN_BYTES
            chunk = self.source[done : done + max(FIRST_CHUNK, done)]
            self.data = data = data + pack(chunk)
            if len(data) >= self.tokens * TOKEN_BYTES:
                self.source = None
        return data

    def whole(self) -> bytes:
        """Everything, packed; the bytes after `limit` are an unfinished block."""
        return self.upto(self.tokens * TOKEN_BYTES)

    def agree(self, at: int, edge: bytes) -> int:
        """Bytes of `edge` that stand in this key from byte `at` on; inside `limit`. O(agreement), one pass."""
        length = min(len(edge), self.limit - at)
        data, seen = self.data, 0
        if len(data) >= at + length:
            if length == len(edge) and data.startswith(edge, at):
                return length
            return first_difference(data, at, edge, 0, length)
        while seen < length:
            ready = min(length, len(data) - at)
            if ready > seen:
                if data[at + seen : at + ready] != edge[seen:ready]:
                    return seen + first_difference(data, at + seen, edge, seen, ready - seen)
                seen = ready
            if seen < length:
                data = self.upto(len(data) + 1)
        return length
