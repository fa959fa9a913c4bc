"""Sessions from templates: data in a JSON file, whose slots are filled at random, by a seed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from .sources import is_held_out

_SLOT = re.compile(r"\{(\w+)(?::(\d+)-(\d+))?\}")


def data_of(name: str) -> dict[str, Any]:
    """A file of templates in this directory."""
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return dict(json.loads(text))


def part(values: list[str], held_out: bool) -> list[str]:
    """The values that are held out from training, half of them, or the others."""
    return [value for value in values if is_held_out(value) == held_out]


def fill(
    template: str, slots: Mapping[str, list[str]], rng: random.Random, known: dict[str, str]
) -> str:
    """A template filled: {town} with a value of that slot, {town2} with another one, {n:2-9} with a
    number from 2 to 9. known: what slots stand for already, which is added to."""

    def value(slot: re.Match[str]) -> str:
        name, low, high = slot.groups()
        if name not in known:
            if low is not None:
                known[name] = str(rng.randint(int(low), int(high)))
            else:
                taken = set(known.values())
                own = slots[name.rstrip("0123456789")]
                known[name] = rng.choice([each for each in own if each not in taken] or own)
        return known[name]

    return _SLOT.sub(value, template)
