"""A register at the start of a session, which later turns quote, edit and look up, with other
questions between them that push it away."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from .tasks import Task
from .templates import data_of, fill, part
from .workload import Reader, Workload

_SESSIONS = 8
_TURNS = 40
_ENTRIES = 16
_ANSWER = 128


def _tasks(reader: Reader) -> Iterator[Task]:
    data = data_of("far_keys.json")
    slots = {name: part(values, reader.held_out) for name, values in data["slots"].items()}
    slots |= data["shared"]
    titles = part([each["title"] for each in data["registers"]], reader.held_out)
    registers = [each for each in data["registers"] if each["title"] in titles]
    for number in range(reader.sessions or _SESSIONS):
        rng = random.Random(f"far-{number}-{reader.held_out}")
        yield _task(number, registers[number % len(registers)], data, slots, rng)


def _task(
    number: int,
    register: Mapping[str, Any],
    data: Mapping[str, Any],
    slots: Mapping[str, list[str]],
    rng: random.Random,
) -> Task:
    entries: list[dict[str, str]] = []
    lines = []
    for name in rng.sample(slots["name"], min(_ENTRIES, len(slots["name"]))):
        entry = {"name": name}
        lines.append(fill(register["entry"], slots, rng, entry))
        entries.append(entry)
    lead = f"{register['title']}\n" + "\n".join(lines) + "\n\n"
    turns = []
    for turn in range(_TURNS):
        # A question on the register, then one that has nothing to do with it.
        near = turn % 2 == 1
        known = dict(rng.choice(entries))
        asked = rng.choice(data["others"] if near else register["questions"])
        turns.append(fill(asked, slots, rng, {} if near else known))
    return Task(f"{number}", (lead + turns[0], *turns[1:]), _ANSWER, lead=len(lead))


FAR = Workload(
    "far",
    "a register at the start, which later turns quote, edit and look up, with others in between",
    "templates of this package, workloads/far_keys.json",
    "Apache-2.0",
    _tasks,
)
