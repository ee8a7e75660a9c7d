"""The first ceiling of a replay: what an infinite cache would hit. It evicts nothing and knows no pool and no policy.

Rule: a block is hit if an earlier request held the same block behind the same prefix, so a block counts only where
all blocks before it were hit. Everything that a request's keys name is cached when it ends, and no token is held back
for logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvlab.study.ceilings import PrefixNodes, walk
from kvlab.study.traced_request import TracedRequest


@dataclass(frozen=True, slots=True)
class IdealHits:
    """Tokens of prompts, and `unique_blocks`: different blocks (content behind prefix) that the cache ends up with.

    Requests whose content the trace does not tell count in `requests` and `prompt_tokens`; they hit nothing and add no
    block, since nobody can say which.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    unique_blocks: int

    @property
    def share(self) -> float:
        """Hit tokens of all prompt tokens, 0 for no prompt."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def ideal_hits(requests: Iterable[TracedRequest], block_size: int) -> IdealHits:
    """Play `requests` in their order against a cache without a limit. O(blocks) time, O(unique blocks) memory.

    The last partial block: of token ids it is no block, is never cached and never hit (as in vLLM). Of a trace of block
    ids it is one, because its id names its content; it counts with the tokens that it has.
    """
    seen, requests_seen, prompt_tokens, hit_tokens = PrefixNodes(), 0, 0, 0
    for request in requests:
        requests_seen += 1
        prompt_tokens += request.prompt_tokens
        hit_tokens += walk(seen, request, block_size).ideal
    return IdealHits(requests_seen, prompt_tokens, hit_tokens, len(seen))
