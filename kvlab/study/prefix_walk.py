"""A prefix index that is asked step by step, and every step kept as plain data for the stage; it owns no rule.

Lookups change nothing and are in no machine's history, so whoever asks keeps them: that is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvlab.contract import Json, Rejected
from kvlab.execution.tokenizer import Tokenizer
from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.reasons import REASONS
from kvlab.reuse.manifests import plain
from kvlab.reuse.one_tenant import one_tenant
from kvlab.reuse.prefix_cache import PrefixCache
from kvlab.views import prefix
from kvlab.views.prefix import DONE, LOOKUP, REFUSED, STARTS, Moment
from kvlab.views.scene import Recording


class PrefixWalk:
    """One real index over one real allocator, all that was asked of it, and what came of it.

    `outcomes`: "" or the reason of a refusal, a step each. A refused step changes nothing and is kept, too. `tokenizer`
    gives the words on the chips.
    """

    def __init__(self, block_size: int = 16, num_blocks: int = 12, groups: int = 2, policy: str = "normative",
                 partial_tails: bool = False, hash_name: str = "sha256", tokenizer: Tokenizer | None = None) -> None:
        ends = [3 + n for n in range(groups)]  # layers: three in the first group, one in each other
        layout = tuple(CacheGroup(f"g{n}", ends[n - 1] if n else 0, ends[n], 1, 1, 2, block_size, num_blocks,
                                  1_000 * (n + 1)) for n in range(groups))
        self.cache: PrefixCache
        self.cache, self.asker = one_tenant(Allocator(CacheLayoutManifest(layout)), policy=policy,
                                            partial_tails=partial_tails, hash_name=hash_name)
        self.tokenizer, self.outcomes = tokenizer, []
        self.steps: list[Moment] = [self._moment(STARTS, "An empty index")]

    # ------------------------------------------------------------------ what may be asked
    def lookup(self, request: str, tokens: Sequence[int], requires_logits: bool = True) -> str:
        """What a prompt would find; nothing changes. "" or the reason of a refusal."""
        def find() -> dict[str, Any]:
            match = self.cache.lookup(self.asker, request, tokens, requires_logits=requires_logits)
            return {"match": match.to_dict()}

        return self._keep(LOOKUP, f"look {request}'s prompt up", "lookup", request, tokens, find)

    def start(self, request: str, tokens: Sequence[int], requires_logits: bool = True) -> str:
        """A request begins over what is found for it."""
        return self._apply({"op": "start", "asker": self.asker, "request": request, "tokens": list(tokens),
                            "requires_logits": requires_logits}, f"start {request}")

    def publish(self, request: str, tokens: Sequence[int]) -> str:
        """The full blocks of a live request may be found from now on."""
        return self._apply({"op": "publish", "asker": self.asker, "request": request, "tokens": list(tokens)},
                           f"publish {request}'s blocks")

    def release(self, request: str) -> str:
        return self._apply({"op": "release", "request": request}, f"end {request}")

    def evict(self, *bundles: Sequence[str]) -> str:
        """Some cached blocks lose their identity; a bundle names one handle in each group."""
        return self._apply({"op": "evict", "blocks": [list(bundle) for bundle in bundles]},
                           f"evict {', '.join('-'.join(bundle) for bundle in bundles)}")

    def take(self, request: str, tokens: int) -> str:
        """Somebody who needs blocks and publishes nothing."""
        return self._apply({"op": "allocate", "request": request, "tokens": tokens},
                           f"{request} takes blocks for {tokens} tokens")

    def refused(self, op: Json) -> str:
        """Try an operation that may well be forbidden; its reason, "" where it went through."""
        return self._apply(dict(op), f"{op.get('op')} {op.get('request', '')}".strip())

    # ------------------------------------------------------------------ how it is kept
    def _apply(self, op: Json, said: str) -> str:
        tokens = op.get("tokens")
        listed = tokens if isinstance(tokens, list) else self.steps[-1].tokens

        def do() -> dict[str, Any]:
            receipt = self.cache.apply(op)
            match = receipt.match.to_dict() if receipt.match else None
            return {"receipt": receipt.to_dict(), "match": match}

        return self._keep(DONE, said, op["op"], str(op.get("request") or ""), listed, do)

    def _keep(self, what: str, said: str, op: str, request: str, tokens: Sequence[int],
              do: Callable[[], Mapping[str, Any]]) -> str:
        came: Mapping[str, Any] = {}
        reason = detail = ""
        try:
            came = do()
        except Rejected as no:
            what, reason, detail = REFUSED, no.reason, no.detail
        made = self._moment(what, said, request, tokens, op)
        self.steps.append(replace(made, reason=reason, detail=detail, **came))
        self.outcomes.append(reason)
        return reason

    def _moment(self, what: str, said: str, request: str = "", tokens: Sequence[int] = (), op: str = "") -> Moment:
        try:
            keys = tuple(self.cache.ask({"ask": "keys", "tokens": list(tokens)}))
        except Rejected:
            tokens, keys = (), ()
        return Moment(what, said, self.cache.snapshot(), self.cache.digest, plain(self.asker.manifest), request,
                      tuple(tokens), keys, op)

    def record(self, title: str, question: str) -> Recording:
        """All that has happened so far, to be played by a stage."""
        ids = {token for step in self.steps for token in step.tokens}
        pieces = {token: self.tokenizer.decode([token]) for token in ids} if self.tokenizer else {}
        return prefix.recording(self.steps, title=title, question=question, pieces=pieces, reasons=REASONS)
