"""One request of a trace as a replay consumes it, the block keys it stands for, and the order of sessions in waves.

It reads no file and holds no cache: what is hit is for `kvlab.study.ideal_hits` or a real index to say.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, zip_longest

from kvlab.reuse.token_keys import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """What a trace says of one request. What it does not say is None; nothing is made up.

    `at`: seconds after the first row. `session`: which chat, `turn`: which of its requests, from 1. There are three
    kinds of traces. Text: `prompt` and `output` are token ids, packed as little-endian 32-bit words, the form that the
    indexes take as it is. Block ids: `block_ids` has one id for each `id_tokens` tokens of the prompt, the last block
    may be partial, and the output is unknown. Lengths only: all of them are None.
    """

    prompt_tokens: int
    output_tokens: int
    at: float | None = None
    session: int | str | None = None
    turn: int | None = None
    prompt: bytes | None = None
    output: bytes | None = None
    block_ids: tuple[int, ...] | None = None
    id_tokens: int = 0

    @property
    def content_known(self) -> bool:
        return self.prompt is not None or self.block_ids is not None

    def block_keys(self, block_size: int, *, output: bool = False) -> list[Hashable]:
        """What is in each block, one key a block; equal keys behind equal prefixes are equal content. O(blocks).

        Token ids: the packed ids of each *full* block of the prompt, or of prompt and output with `output`. A partial
        tail is no block. Block ids: where `block_size` is a part of `id_tokens`, the sub-keys `(id, i)`; where it is a
        multiple, tuples of ids. Here a partial last block *is* one, with as many tokens as the prompt has left: its id
        says what it holds. Their output is unknown and adds no key. Lengths only: no keys.
        ValueError where `block_size` neither divides `id_tokens` nor is a multiple of it.
        """
        if block_size < 1:
            raise ValueError(f"a block holds at least 1 token, not {block_size}")
        if self.prompt is not None:
            packed, stride = self.prompt + (self.output or b"" if output else b""), block_size * TOKEN_BYTES
            return [packed[at : at + stride] for at in range(0, len(packed) - stride + 1, stride)]
        return self._sub_keys(self.block_ids, block_size) if self.block_ids is not None else []

    def _sub_keys(self, ids: tuple[int, ...], block_size: int) -> list[Hashable]:
        if block_size % self.id_tokens == 0:
            group = block_size // self.id_tokens
            return [ids[at : at + group] for at in range(0, len(ids), group)] if group > 1 else [(i, 0) for i in ids]
        if self.id_tokens % block_size:
            raise ValueError(f"the trace's ids stand for {self.id_tokens} tokens each: a block size divides that or is "
                             f"a multiple of it, and {block_size} is neither")
        parts = self.id_tokens // block_size
        blocks = -(-self.prompt_tokens // block_size)
        return [(ids[n // parts], n % parts) for n in range(blocks)]


def by_session(requests: Iterable[TracedRequest]) -> Iterator[list[TracedRequest]]:
    """Neighbouring requests of one session, session by session; a request without one stands alone.

    For traces that hold sessions one after another (ShareGPT form, message lists). O(one session) memory.
    """
    for session, group in groupby(requests, key=lambda request: request.session):
        if session is None:
            yield from ([request] for request in group)
        else:
            yield list(group)


def in_turn(sessions: Iterable[Sequence[TracedRequest]], wave: int = 50) -> Iterator[TracedRequest]:
    """Sessions in waves of `wave`: within a wave, one request of each session in turn until all are done.

    The order in which `wave` agents at once would ask a server that answers each before the next. O(one wave) memory.
    """
    if wave < 1:
        raise ValueError(f"a wave has at least 1 session, not {wave}")
    rest = iter(sessions)
    while batch := list(islice(rest, wave)):
        for round_ in zip_longest(*batch):
            yield from (request for request in round_ if request is not None)
