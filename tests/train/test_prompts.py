"""Prompts to train on."""

from __future__ import annotations

import json
import re
from importlib import resources
from itertools import islice

from sharpdraft.train.prompts import sessions


def test_held_out_values_never_occur_in_training() -> None:
    """Each turn is taken apart again with its template; a slot's value must be of the right half of
    the list."""
    data = json.loads(
        resources.files("sharpdraft.train").joinpath("prompts.json").read_text(encoding="utf-8")
    )
    held = {slot: set(values[::7]) for slot, values in data["slots"].items()}
    patterns = []
    for turn in {turn for session in data["sessions"] for turn in session}:
        parts = re.split(r"\{(\w+)\}", turn)
        slots = parts[1::2]
        texts = [re.escape(text) for text in parts[::2]]
        values = ["(" + "|".join(map(re.escape, data["slots"][slot])) + ")" for slot in slots] + [
            ""
        ]
        pattern = "".join(text + value for text, value in zip(texts, values, strict=True))
        patterns.append((re.compile(pattern), slots))
    seen: dict[bool, set[tuple[str, str]]] = {True: set(), False: set()}
    for held_out in (True, False):
        for seed in range(3):
            for session in islice(sessions(seed, held_out=held_out), 60):
                for turn in session:
                    found = [
                        (slots, match.groups())
                        for p, slots in patterns
                        if (match := p.fullmatch(turn))
                    ]
                    assert found, turn
                    for slots, values in found:
                        for slot, value in zip(slots, values, strict=True):
                            assert (value in held[slot]) == held_out, (slot, value)
                            seen[held_out].add((slot, value))
    assert len(seen[True]) > 20 and len(seen[False]) > 150


def test_sessions_repeat_with_their_seed_and_keep_their_name() -> None:
    first, again, other = (list(islice(sessions(seed), 20)) for seed in (4, 4, 5))
    assert first == again != other
    names = json.loads(resources.files("sharpdraft.train").joinpath("prompts.json").read_text())[
        "slots"
    ]["name"]
    for session in first:
        assert (
            len({name for turn in session for name in names if re.search(rf"\b{name}\b", turn)})
            <= 1
        )
