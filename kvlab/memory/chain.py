"""The chained digest: each committed transition as packed bytes, hashed onto the digest before it.

It owns the form of a record and no state: which transition that is, the allocator says.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct

import numpy as np

from kvlab.memory.identities import NAME_BYTES, Name, packed_of

OPERATIONS = ("allocate", "append", "fork", "truncate", "release", "cancel", "cache_full", "touch", "evict")
CODES = {operation: code for code, operation in enumerate(OPERATIONS)}
head = Struct("<5q").pack
"""Which commit, the operation's code, the request's new version and length, and how long the name is that follows."""
moved = Struct("<2q").pack
"""How many handles the tables of a group lost, and how many they gained."""
head_of_one = Struct("<7q").pack
"""`head` and `moved` in one, where there is one cache group."""
head_of_name = Struct("<3q").pack
"""Which group, which handle, how many bytes of text follow; or that 16 packed bytes do, or that the name is gone."""
GONE, PACKED = -2, -1


def chained(record: Sequence[bytes | array | np.ndarray]) -> bytes:
    """The digest after a transition, 256 bits of BLAKE2b over the digest before and the transition's record.

    SHA-256 of a 256-block record takes twice as long where the processor has no instruction for it.
    """
    return blake2b(b"".join(record)).digest()[:32]


def many(rows: Sequence[tuple[str, int]]) -> bytes:
    """A batch by the hash of its (request, new rows) pairs, in order."""
    return blake2b(b"\0".join(b"%b %d" % (request.encode(), n) for request, n in rows), digest_size=32).digest()


def given(group: int, word: int, name: Name | None) -> bytes:
    """A block that gains an identity, or loses it: group, handle, form of the name, name."""
    if name is None:
        return head_of_name(group, word, GONE)
    if packed := packed_of(name):
        return head_of_name(group, word, PACKED) + packed
    text = name.encode()
    return head_of_name(group, word, len(text)) + text


def given_packed(group: int, words: np.ndarray, names: np.ndarray) -> np.ndarray:
    """The same for many blocks of one group whose names are packed: a row of bytes for each."""
    rows = np.empty((len(words), 24 + NAME_BYTES), np.uint8)
    rows[:, :24] = np.frombuffer(head_of_name(group, 0, PACKED), np.uint8)
    rows[:, 8:16] = words.view(np.uint8).reshape(-1, 8)
    rows[:, 24:] = names
    return rows
