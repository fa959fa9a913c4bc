"""Arms in a serving engine: the same sessions and tables as the lab's own, one engine or server an
arm, taking turns.

A row is a group of prompts at about one context length, answered at once by each arm. What the
first arm wrote is what the others must write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...workloads.tasks import Recording, bucket_of
from ..plan import Plan, measured_turns


class Backend(Protocol):
    """What answers prompts: an engine in a child process, or a server."""

    def answer(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Answer prompts at once, greedily: tokens, decoded, first, seconds, and rounds or
        counts."""
        ...

    def close(self) -> None:
        """End it, or the connection to it."""
        ...


@dataclass(frozen=True)
class Prompt:
    """Tokens to answer, and how long the answer may get."""

    name: str
    tokens: tuple[int, ...]
    answer_tokens: int


@dataclass(frozen=True)
class Group:
    """Prompts at about one context length that are answered at once."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    answer_tokens: int

    @property
    def context(self) -> int:
        """Mean length of the prompts, in tokens."""
        return sum(len(prompt) for prompt in self.prompts) // len(self.prompts)


def recorded_prompts(recordings: Sequence[Recording], plan: Plan, limit: int) -> list[Prompt]:
    """The turns that the lab measures, each with all that stands before it."""
    return [
        Prompt(f"{r.name}-{number}", r.tokens[: turn.answer], turn.end - turn.answer)
        for r in recordings
        for number in measured_turns(r, plan, limit)
        for turn in (r.turns[number],)
    ]


def groups_of(prompts: Sequence[Prompt], edges: Sequence[int], concurrency: int) -> list[Group]:
    """`concurrency` prompts of one context bucket at a time; prompts beyond the last bucket are
    left out."""
    found = []
    for bucket in range(len(edges)):
        inside = [p for p in prompts if bucket_of(len(p.tokens), edges) == bucket]
        for start in range(0, len(inside), concurrency):
            part = inside[start : start + concurrency]
            name, tokens = "+".join(p.name for p in part), tuple(p.tokens for p in part)
            found.append(Group(name, tokens, max(p.answer_tokens for p in part)))
    return found


def run_groups(
    groups: Sequence[Group],
    backends: Mapping[str, Backend],
    stop: Sequence[int],
    done: Sequence[Mapping[str, Any]],
    on_row: Callable[[dict[str, Any]], None],
    on_progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Answer every group that `done` has not with every arm, in an order that rotates."""
    names = list(backends)
    known = {row["session"] for row in done}
    for number, group in enumerate(groups):
        if group.name in known:
            continue
        shift = number % len(names)
        answers = {}
        for name in (*names[shift:], *names[:shift]):
            on_progress(f"{name}: {len(group.prompts)} answers at {group.context} tokens")
            answers[name] = backends[name].answer(group.prompts, group.answer_tokens, stop)
        on_row(_row(group, number, {name: answers[name] for name in names}))


def _row(group: Group, number: int, answers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    texts = {name: answer["tokens"] for name, answer in answers.items()}
    first = next(iter(texts.values()))
    return {
        "session": group.name,
        "turn": number,
        "context": group.context,
        "requests": len(group.prompts),
        "tokens": first,
        "arms": {name: _figures(answer) for name, answer in answers.items()},
        "differences": {
            name: _difference(text, first) for name, text in texts.items() if text != first
        },
        "replayed": {},
    }


def _figures(answer: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "seconds": answer["seconds"],
        "first": answer["first"],
        "tokens": answer["decoded"],
        "rounds": [each for answered in answer.get("rounds", ()) for each in answered],
    }
    if answer.get("counts"):
        found["counts"] = answer["counts"]
    return found


def _difference(texts: Sequence[Any], others: Sequence[Any]) -> dict[str, Any]:
    """The first answer of a group that differs, and where: a token of it, or a character of a
    server's text."""
    number = next(i for i, (a, b) in enumerate(zip(texts, others, strict=True)) if a != b)
    pairs = enumerate(zip(texts[number], others[number], strict=False))
    shorter = min(len(texts[number]), len(others[number]))
    return {"request": number, "at": next((i for i, (a, b) in pairs if a != b), shorter)}
