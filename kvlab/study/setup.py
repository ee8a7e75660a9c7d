"""All inputs of a real run as one record, and the link that reopens a frame of it; it runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_NEW_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Setup:
    """The inputs of a run: together with the model's digest they decide every frame.

    `samples` answers are drawn from each prompt, by forks of it. `num_blocks` a group; None sizes the pool so
    that the worst case fits with a few blocks to spare. ValueError where a value is out of its range.
    """

    prompts: tuple[str, ...]
    model: str = "austen"
    block_size: int = 16
    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    samples: int = 1
    share: bool = True
    chat: bool = False
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        if not self.prompts or not all(p.strip() for p in self.prompts):
            raise ValueError("Every prompt needs some text.")
        if len(self.prompts) * self.samples > len(NAMES) or self.samples < 1:
            raise ValueError(f"At most {len(NAMES)} answers at once, and at least one a prompt.")
        if not 1 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise ValueError(f"Ask for 1 to {MAX_NEW_TOKENS} new tokens.")
        if self.block_size < 1 or (self.num_blocks is not None and self.num_blocks < 1):
            raise ValueError("A block holds at least one token, and a pool at least one block.")
        if not 0 <= self.temperature < float("inf") or self.top_k < 0 or self.seed < 0:
            raise ValueError("Temperature, top-k and seed are not negative.")


SHORT = {"m": "model", "b": "block_size", "n": "max_new_tokens", "t": "temperature", "k": "top_k", "s": "seed",
         "x": "samples", "share": "share", "chat": "chat", "pool": "num_blocks"}


@dataclass(frozen=True, slots=True)
class Link:
    """An address that reopens a frame: the inputs, the model they ran on, the recording they gave, the frame."""

    setup: Setup
    model_digest: str
    recording: str
    frame: int

    def query(self) -> dict[str, str | list[str]]:
        """The link as query parameters; values that are defaults are left out."""
        default = Setup(("x",))
        values = {short: getattr(self.setup, name) for short, name in SHORT.items()
                  if getattr(self.setup, name) != getattr(default, name)}
        plain = {k: str(int(v)) if isinstance(v, bool) else str(v) for k, v in values.items()}
        return {"p": list(self.setup.prompts), **plain, "d": self.model_digest[:12], "r": self.recording,
                "f": str(self.frame + 1)}

    @classmethod
    def from_query(cls, query: Mapping[str, Sequence[str]]) -> Link | None:
        """The inverse of `query`; None where it names no prompts. ValueError names the parameter that is wrong."""
        if not query.get("p"):
            return None
        values = {}
        for short, name in SHORT.items():
            if short in query:
                text = query[short][0]
                try:
                    values[name] = _KINDS[name](text)
                except ValueError:
                    raise ValueError(f"The link's {short}={text!r} is not a {name.replace('_', ' ')}.") from None
        frame = query.get("f", ["1"])[0]
        if not frame.isdigit():
            raise ValueError(f"The link's frame {frame!r} is not a number.")
        return cls(Setup(tuple(query["p"]), **values), query.get("d", [""])[0], query.get("r", [""])[0],
                   max(0, int(frame) - 1))

    def mismatches(self, model_digest: str, recording: str, frames: int) -> list[str]:
        """What no longer matches, in sentences; empty where the link shows what it showed when it was made."""
        out = []
        if self.model_digest and not model_digest.startswith(self.model_digest):
            here = model_digest[:12]
            out.append(f"The model's files are not the ones of the link ({self.model_digest}, here {here}).")
        if self.recording and self.recording != recording:
            out.append(f"The run gave other frames than the link's ({self.recording}, here {recording}).")
        if self.frame >= frames:
            out.append(f"The link points at frame {self.frame + 1}, this recording has {frames}.")
        return out


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


_KINDS = {"model": str, "block_size": int, "max_new_tokens": int, "temperature": float, "top_k": int, "seed": int,
          "samples": int, "share": _switch, "chat": _switch, "num_blocks": int}
