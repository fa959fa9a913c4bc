"""Arms in a serving engine: the same sessions and tables as the lab's own, one engine or server an
arm, taking turns.

A row is a group of sessions at about one context length, answered at once by each arm. What the
first arm wrote is what the others must write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..method.scale import policy_to_settings
from ..method.settings import FROZEN
from ..workloads.tasks import Recording, bucket_of
from .runs import Arm, Plan, measured_turns


class Backend(Protocol):
    """What answers prompts: an engine in a child process, or a server."""

    def answer(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[int] = ()
    ) -> dict[str, Any]: ...


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
        return sum(len(prompt) for prompt in self.prompts) // len(self.prompts)


def asked_for(arm: Arm) -> object:
    """What an engine is asked for, for an arm; None for AR, which has no drafter."""
    if not arm.drafting:
        return None
    return FROZEN if arm.policy is None else policy_to_settings(arm.policy)


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
            answer = max(p.answer_tokens for p in part)
            found.append(
                Group("+".join(p.name for p in part), tuple(p.tokens for p in part), answer)
            )
    return found


def run_groups(
    groups: Sequence[Group],
    backends: Mapping[str, Backend],
    stop: Sequence[int],
    done: Sequence[Mapping[str, Any]],
    on_row: Callable[[dict[str, Any]], None],
    on_progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Answer every group with every arm, in an order that rotates."""
    names = list(backends)
    for number, group in enumerate(groups):
        if any(row["session"] == group.name for row in done):
            continue
        shift = number % len(names)
        answers = {}
        for name in (*names[shift:], *names[:shift]):
            on_progress(f"{name}: {len(group.prompts)} answers at {group.context} tokens")
            answers[name] = backends[name].answer(group.prompts, group.answer_tokens, stop)
        on_row(_row(group, number, {name: answers[name] for name in names}))


def _row(group: Group, number: int, answers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    texts = {name: answer["tokens"] for name, answer in answers.items()}
    first = next(iter(texts))
    arms = {}
    for name, answer in answers.items():
        rounds = [each for answered in answer.get("rounds", ()) for each in answered]
        arms[name] = {
            "seconds": answer["seconds"],
            "first": answer["first"],
            "tokens": answer["decoded"],
            "rounds": rounds,
        }
        if answer.get("counts"):
            arms[name]["counts"] = answer["counts"]
    return {
        "session": group.name,
        "turn": number,
        "context": group.context,
        "requests": len(group.prompts),
        "tokens": texts[first],
        "arms": arms,
        "differences": {
            name: _difference(text, texts[first])
            for name, text in texts.items()
            if text != texts[first]
        },
        "replayed": {},
    }


def _difference(texts: Sequence[Any], others: Sequence[Any]) -> dict[str, Any]:
    """The first answer of a group that differs, and where: a token of it, or a character of a
    server's text."""
    number = next(i for i, (a, b) in enumerate(zip(texts, others, strict=True)) if a != b)
    pairs = enumerate(zip(texts[number], others[number], strict=False))
    shorter = min(len(texts[number]), len(others[number]))
    return {"request": number, "at": next((i for i, (a, b) in pairs if a != b), shorter)}
