"""Two plain models of a replay: block LRU as the public figures have it, and every rule of a prefix chain."""

from __future__ import annotations

from collections import OrderedDict, deque

from kvlab.study.traced_request import TracedRequest


def plain_lru(requests: list[TracedRequest], block_size: int, pools: list[int]) -> list[float]:
    """Hit share of prompt blocks for each pool: one block after another, no ancestors, nothing pinned or held back."""
    out = []
    for pool in pools:
        kept: OrderedDict = OrderedDict()
        hit = asked = 0
        for request in requests:
            keys, in_prompt = request.block_keys(block_size, output=True), len(request.block_keys(block_size))
            path = 0
            for at, key in enumerate(keys):
                path = hash((path, key))
                found = path in kept
                hit += found and at < in_prompt
                asked += at < in_prompt
                if found:
                    kept.move_to_end(path)
                else:
                    kept[path] = None
                    if len(kept) > pool:
                        kept.popitem(last=False)
        out.append(hit / asked)
    return out


class ChainModel:
    """A prefix chain over a queue of blocks, with the rules that part it from plain LRU, one line each:

    full blocks only; a row held back for logits; no hit behind a lost ancestor; a running request's blocks, its output
    and its partial tail included, are nobody's; blocks come back in table order (or tail first), not by last use.
    """

    def __init__(self, block_size: int, pool: int, tail_first: bool = False) -> None:
        self.size, self.tail_first = block_size, tail_first
        self.queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(pool))
        self.content: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.refs: dict[int, int] = {}
        self.flight: deque[list[int]] = deque()
        self.evicted = 0

    def serve(self, request: TracedRequest, in_flight: int = 1) -> int | None:
        while len(self.flight) >= in_flight:
            self.end()
        while (hit := self.begin(request)) is None:
            if not self.flight:
                return None
            self.end()
        return hit

    def paths(self, request: TracedRequest) -> list[int]:
        keys = request.block_keys(self.size, output=True)
        keys = keys if request.prompt is not None else keys[: request.prompt_tokens // self.size]
        out, path = [], 0
        for key in keys:
            path = hash((path, key))
            out.append(path)
        return out

    def begin(self, request: TracedRequest) -> int | None:
        paths, table = self.paths(request), []
        for path in paths[: (request.prompt_tokens - 1) // self.size]:
            if not self.blocks.get(path):
                break
            table.append(self.blocks[path][0])
        hit, whole = len(table), -(-(request.prompt_tokens + request.output_tokens) // self.size)
        free = sum(block in self.queue for block in table)
        if whole - hit > len(self.queue) - free:
            return None
        for block in table:
            self.queue.pop(block, None)
        for _ in range(whole - hit):
            block, _ = self.queue.popitem(last=False)
            if (path := self.content.pop(block, None)) is not None:
                self.blocks[path].remove(block)
                self.evicted += 1
            table.append(block)
        for block, path in zip(table[hit:], paths[hit:], strict=False):
            self.content[block] = path
            self.blocks.setdefault(path, []).append(block)
        for block in table:
            self.refs[block] = self.refs.get(block, 0) + 1
        self.flight.append(table)
        return hit * self.size

    def end(self) -> None:
        table = self.flight.popleft()
        for block in reversed(table) if self.tail_first else table:
            self.refs[block] -= 1
            if not self.refs[block]:
                self.queue[block] = None
