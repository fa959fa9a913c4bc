"""Word problems, solved step by step, one a turn."""

from __future__ import annotations

import random
from collections.abc import Iterator

from .tasks import Task
from .templates import data_of, fill, part
from .workload import Reader, Workload

_SESSIONS = 8
_TURNS = 40
_ANSWER = 160


def _tasks(reader: Reader) -> Iterator[Task]:
    data = data_of("word_problems.json")
    problems = part(data["problems"], reader.held_out)
    slots = {name: part(values, reader.held_out) for name, values in data["slots"].items()}
    for number in range(reader.sessions or _SESSIONS):
        rng = random.Random(f"math-{number}-{reader.held_out}")
        turns: list[str] = []
        while len(turns) < _TURNS:
            # All problems once before one comes again, with other names and numbers.
            for problem in rng.sample(problems, len(problems)):
                asked = rng.choice(data["requests"])
                turns.append(f"{fill(problem, slots, rng, {})} {asked}")
        yield Task(f"{number}", tuple(turns[:_TURNS]), _ANSWER)


MATH = Workload(
    "math",
    "word problems over many turns, each worked out step by step",
    "templates of this package, workloads/word_problems.json",
    "Apache-2.0",
    _tasks,
)
