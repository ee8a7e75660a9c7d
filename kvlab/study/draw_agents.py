"""Draws the embedded trace of agent chats from a seeded model: our own numbers, no row of anybody's file.

It owns the model. The file `fixtures/agents.jsonl` is its output, in the form of the Mooncake traces.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

AGENTS = Path(__file__).resolve().parents[2] / "fixtures" / "agents.jsonl"
SEED, SESSIONS, WAVE, ID_TOKENS = 7, 72, 12, 512
APPLICATIONS = ((1_343, 5), (3_100, 3), (6_200, 1))
"""Tokens of the instructions that every chat of an application begins with, and how many chats come to it."""


def draw_agents() -> Iterator[str]:
    """The lines of the file: `SESSIONS` chats, `WAVE` at a time, one request of each in turn, each longer than before.

    A full block keeps its id for the rest of the chat, a partial last one is named anew each time.
    """
    draw, fresh, moment = random.Random(SEED), count(), 0
    heads = [[next(fresh) for _ in range(tokens // ID_TOKENS)] for tokens, _ in APPLICATIONS]
    for start in range(0, SESSIONS, WAVE):
        wave = []
        for _ in range(start, min(start + WAVE, SESSIONS)):
            app = draw.choices(range(len(heads)), [weight for _, weight in APPLICATIONS])[0]
            wave.append((list(heads[app]), APPLICATIONS[app][0], draw.randint(4, 11)))
        for turn in range(max(turns for _, _, turns in wave)):
            for n, (ids, length, turns) in enumerate(wave):
                if turn >= turns:
                    continue
                length += min(3_000, round(draw.lognormvariate(6.2, 0.8)))
                ids += [next(fresh) for _ in range(length // ID_TOKENS - len(ids))]
                output = min(900, 8 + round(draw.lognormvariate(4.6, 0.7)))
                partial = [next(fresh)] if length % ID_TOKENS else []
                yield json.dumps({"timestamp": moment, "input_length": length, "output_length": output,
                                  "hash_ids": ids + partial})
                wave[n] = (ids, length + output, turns)
                moment += round(draw.expovariate(1 / 400))
