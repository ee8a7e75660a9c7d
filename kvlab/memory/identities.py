"""The cached identities of one pool's blocks, and where those of them that are free wait: columns by block index.

It owns the packed form and refuses to know what a name means: whoever publishes a block names it, and an equal name
says equal rows (article 0x05E). A dictionary takes ten times as much for each block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, MutableMapping, Sequence

import numpy as np

NAME_BYTES = 16
UNNAMED, PACKED, ODD = range(3)
Name = str | bytes
"""A name as text, or the 16 bytes that print as eight hexadecimal digits, a stroke and twenty-four more."""
Names = Sequence[Name] | np.ndarray
"""Several of them; packed ones may come as an array of bytes, `uint8[n, 16]`."""


def text_of(name: Name) -> str:
    """How a name prints."""
    return name if isinstance(name, str) else f"{name[:4].hex()}/{name[4:].hex()}"


def texts_of(names: Names) -> list[str]:
    """How several names print."""
    return [text_of(name.tobytes() if isinstance(name, np.ndarray) else name) for name in names]


def packed_of(name: Name) -> bytes | None:
    """The 16 bytes of a name that has this form; None for any other text."""
    if isinstance(name, bytes):
        return name
    if len(name) != 2 * NAME_BYTES + 1 or name[8] != "/" or name != name.lower():
        return None
    try:
        packed = bytes.fromhex(name[:8] + name[9:])
    except ValueError:
        return None
    return packed if text_of(packed) == name else None  # fromhex passes over blanks


class Identities(MutableMapping[int, str]):
    """Block index -> name. 17 bytes a block for names that pack; any other name stands in a dictionary.

    Single blocks cost O(1), many at once a few array operations; iteration is O(pool).
    """

    __slots__ = ("_kind", "_kinds", "_named", "_names", "_odd")

    def __init__(self, num_blocks: int) -> None:
        self._kind = bytearray(num_blocks)
        self._kinds = np.frombuffer(self._kind, np.uint8)
        self._names = np.zeros((num_blocks, NAME_BYTES), np.uint8)
        self._odd: dict[int, str] = {}
        self._named = 0

    # ------------------------------------------------------------------ one block
    def __contains__(self, index: object) -> bool:
        return self._kind[index] != UNNAMED

    def __getitem__(self, index: int) -> str:
        kind = self._kind[index]
        if kind == UNNAMED:
            raise KeyError(index)
        return self._odd[index] if kind == ODD else text_of(self._names[index].tobytes())

    def __setitem__(self, index: int, name: Name) -> None:
        packed = packed_of(name)
        self._odd.pop(index, None)
        self._named += self._kind[index] == UNNAMED
        if packed is None:
            self._kind[index], self._odd[index] = ODD, name
        else:
            self._kind[index] = PACKED
            self._names[index] = np.frombuffer(packed, np.uint8)

    def __delitem__(self, index: int) -> None:
        if self._kind[index] == UNNAMED:
            raise KeyError(index)
        self._kind[index] = UNNAMED
        self._odd.pop(index, None)
        self._named -= 1

    def pop(self, index: int, default: str | None = None) -> str | None:
        """Take a block's name away: the name, or `default` where it had none."""
        if self._kind[index] == UNNAMED:
            return default
        name = self[index]
        del self[index]
        return name

    # ------------------------------------------------------------------ many at once
    def have(self, indices: np.ndarray) -> np.ndarray:
        """Which of these blocks carry a name: a boolean for each."""
        return self._kinds[indices] != UNNAMED

    def of(self, indices: np.ndarray) -> list[Name]:
        """The names of blocks that carry one, packed where they are."""
        flat = self._names[indices].tobytes()
        names: list[Name] = [flat[at : at + NAME_BYTES] for at in range(0, len(flat), NAME_BYTES)]
        if self._odd:
            names = [self._odd.get(i, name) for i, name in zip(indices.tolist(), names, strict=True)]
        return names

    def give(self, indices: np.ndarray, names: Names) -> None:
        """Name different blocks, all at once where the names are an array."""
        if self._odd or not isinstance(names, np.ndarray):
            for index, name in zip(indices.tolist(), names, strict=True):
                self[index] = name.tobytes() if isinstance(name, np.ndarray) else name
            return
        self._named += len(indices) - int(np.count_nonzero(self._kinds[indices]))
        self._kinds[indices] = PACKED
        self._names[indices] = names

    def end(self, indices: np.ndarray) -> list[Name]:
        """Take the names of blocks that carry one away; they, in order."""
        names = self.of(indices)
        self._kinds[indices] = UNNAMED
        self._named -= len(indices)
        if self._odd:
            for index in indices.tolist():
                self._odd.pop(index, None)
        return names

    # ------------------------------------------------------------------ all of them
    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._kinds).tolist())

    def __len__(self) -> int:
        return self._named


class Places(MutableMapping[int, int]):
    """Block index -> position in the free queue, for free blocks that carry an identity. 4 bytes a block.

    `column[index]` is the position, or -1; whoever writes it in bulk keeps `count`.
    """

    __slots__ = ("_column", "column", "count")

    def __init__(self, num_blocks: int) -> None:
        self._column = array("i", [-1]) * num_blocks
        self.column = np.frombuffer(self._column, np.int32)
        self.count = 0

    def __contains__(self, index: object) -> bool:
        return self._column[index] >= 0

    def __getitem__(self, index: int) -> int:
        position = self._column[index]
        if position < 0:
            raise KeyError(index)
        return position

    def __setitem__(self, index: int, position: int) -> None:
        self.count += self._column[index] < 0
        self._column[index] = position

    def __delitem__(self, index: int) -> None:
        if self._column[index] < 0:
            raise KeyError(index)
        self._column[index] = -1
        self.count -= 1

    def pop(self, index: int, default: int | None = None) -> int | None:
        """The block waits no longer: where it stood, or `default`."""
        position = self._column[index]
        if position < 0:
            return default
        self._column[index] = -1
        self.count -= 1
        return position

    def put(self, indices: np.ndarray, positions: np.ndarray) -> None:
        """Blocks that have just gone back to the queue wait there."""
        self.column[indices] = positions
        self.count += len(indices)

    def leave(self, indices: np.ndarray) -> None:
        """Blocks that wait do so no longer."""
        self.column[indices] = -1
        self.count -= len(indices)

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.column >= 0).tolist())

    def __len__(self) -> int:
        return self.count
