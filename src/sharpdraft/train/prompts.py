"""Training sessions as data: templates whose slots are filled at random, with slot values held
out."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from importlib import resources

_SLOT = re.compile(r"\{(\w+)\}")
# Every seventh value of every slot is never seen in training: a held-out session is new in its
# words, not only in their combination.
_HOLD_OUT_EVERY = 7


def sessions(seed: int, *, held_out: bool = False) -> Iterator[list[str]]:
    """Endless user turns of multi-turn sessions; held-out ones share no slot value with the
    others."""
    data = json.loads(
        resources.files(__package__).joinpath("prompts.json").read_text(encoding="utf-8")
    )
    values = {
        slot: [v for i, v in enumerate(all_values) if (i % _HOLD_OUT_EVERY == 0) == held_out]
        for slot, all_values in data["slots"].items()
    }
    rng = random.Random(f"{seed}-{held_out}")
    while True:
        # A name and the things it owns stay the same through a session; other slots are drawn anew.
        fixed = {slot: [rng.choice(values[slot])] for slot in ("name", "item")}
        yield [_filled(turn, {**values, **fixed}, rng) for turn in rng.choice(data["sessions"])]


def _filled(turn: str, values: dict[str, list[str]], rng: random.Random) -> str:
    return _SLOT.sub(lambda slot: rng.choice(values[slot[1]]), turn)
