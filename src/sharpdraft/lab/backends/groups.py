"""Arms in a serving engine: the same sessions and tables as the lab's own, one engine or server an
arm, taking turns.

A row is a group of prompts at about one context length, answered at once by each arm. What the
first arm wrote is what the others must write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from ...errors import SharpDraftError
from ...workloads.tasks import Recording
from ..buckets import bucket_of
from ..novelty import Repetition, marks
from ..plan import Plan, Row, failed_row, fits, measured_turns, unfitting_row

_OF_SERVERS = ("counts", "counted", "retries")
"""What a server's figures have besides; see `Server.answer`."""


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
    """Tokens to answer, how long the answer may get, and the workload, "" where none was named."""

    name: str
    tokens: tuple[int, ...]
    answer_tokens: int
    workload: str = ""


@dataclass(frozen=True)
class Group:
    """Prompts at about one context length that are answered at once."""

    prompts: tuple[Prompt, ...]

    @property
    def name(self) -> str:
        """Those of its prompts."""
        return "+".join(prompt.name for prompt in self.prompts)

    @property
    def context(self) -> int:
        """Mean length of the prompts, in tokens."""
        return sum(len(prompt.tokens) for prompt in self.prompts) // len(self.prompts)

    @property
    def answer_tokens(self) -> int:
        """How long an answer may get, tokens."""
        return max(prompt.answer_tokens for prompt in self.prompts)


def recorded_prompts(recordings: Sequence[Recording], plan: Plan, limit: int) -> list[Prompt]:
    """The turns that the lab measures, each with all that stands before it."""
    return [
        Prompt(f"{r.name}-{number}", r.tokens[: turn.answer], turn.end - turn.answer)
        for r in recordings
        for number in measured_turns(r, plan, limit)
        for turn in (r.turns[number],)
    ]


def fitting(prompts: Sequence[Prompt], limit: int) -> tuple[list[Prompt], list[Row]]:
    """The prompts that leave room for an answer in a context of `limit` tokens, no answer being
    longer than its room, and rows of the others."""
    found, rows = [], []
    for prompt in prompts:
        context = len(prompt.tokens)
        if fits(context, limit):
            answer = min(prompt.answer_tokens, limit - context)
            found.append(replace(prompt, answer_tokens=answer))
        else:
            rows.append(unfitting_row(prompt.name, 0, context, limit))
    return found, rows


def groups_of(prompts: Sequence[Prompt], concurrency: int) -> list[Group]:
    """`concurrency` prompts of one workload and context bucket at a time, short ones first."""
    order = list(dict.fromkeys(prompt.workload for prompt in prompts))
    inside: dict[tuple[int, int], list[Prompt]] = {}
    for prompt in prompts:
        place = order.index(prompt.workload), bucket_of(len(prompt.tokens))
        inside.setdefault(place, []).append(prompt)
    return [
        Group(tuple(own[start : start + concurrency]))
        for _, own in sorted(inside.items())
        for start in range(0, len(own), concurrency)
    ]


def run_groups(
    groups: Sequence[Group],
    backends: Mapping[str, Backend],
    stop: Sequence[int],
    done: Sequence[Row],
    on_row: Callable[[Row], None],
    on_progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Answer every group that `done` has not with every arm, in an order that rotates. Where a
    group is not answered its prompts are asked one by one, and those that are not answered then are
    skipped."""
    known = {row["session"] for row in done}
    for number, group in enumerate(groups):
        waiting = [group]
        while waiting:
            part = waiting.pop(0)
            if part.name in known:
                continue
            alone = [Group((prompt,)) for prompt in part.prompts]
            if any(each.name in known for each in alone):
                waiting = alone
                continue
            try:
                answers = _answers(part, number, backends, stop, on_progress)
            except SharpDraftError as error:
                if len(part.prompts) > 1:
                    waiting = alone
                else:
                    on_row(failed_row(part.name, 0, part.context, error))
            else:
                on_row(_row(part, number, answers))


def _answers(
    group: Group,
    number: int,
    backends: Mapping[str, Backend],
    stop: Sequence[int],
    on_progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """What each arm answers. Raises SharpDraftError, which begins with the arm's name."""
    names = list(backends)
    shift = number % len(names)
    prompts = [prompt.tokens for prompt in group.prompts]
    answers = {}
    for name in (*names[shift:], *names[:shift]):
        on_progress(f"{name}: {len(prompts)} answers at {group.context} tokens")
        try:
            answers[name] = backends[name].answer(prompts, group.answer_tokens, stop)
        except SharpDraftError as error:
            raise SharpDraftError(f"{name}: {error}") from error
    return {name: answers[name] for name in names}


def _row(group: Group, number: int, answers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    texts = {name: _written(answer) for name, answer in answers.items()}
    first = next(iter(texts.values()))
    told = next(iter(answers.values()))
    workload = group.prompts[0].workload
    return {
        **({"workload": workload} if workload else {}),
        "session": group.name,
        "turn": number,
        "context": group.context,
        "requests": len(group.prompts),
        "tokens": told["tokens"],
        **{key: told[key] for key in ("reasoning",) if told.get(key)},
        **_repetition(group, told),
        "arms": {name: _figures(group, answer) for name, answer in answers.items()},
        "differences": {
            name: _difference(text, first) for name, text in texts.items() if text != first
        },
        "replayed": {},
    }


def _texts(group: Group, answer: Mapping[str, Any]) -> list[list[int]]:
    """Prompts with their answers; none where a server answers with texts."""
    if any(isinstance(answered, str) for answered in answer["tokens"]):
        return []
    pairs = zip(group.prompts, answer["tokens"], strict=True)
    return [[*prompt.tokens, *answered] for prompt, answered in pairs]


def _repetition(group: Group, answer: Mapping[str, Any]) -> dict[str, Any]:
    pairs = zip(_texts(group, answer), group.prompts, strict=False)
    parts = [asdict(Repetition.of(text, len(prompt.tokens))) for text, prompt in pairs]
    return {"repetition": asdict(Repetition.total(parts))} if parts else {}


def _figures(group: Group, answer: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "seconds": answer["seconds"],
        "first": answer["first"],
        "tokens": answer["decoded"],
        "rounds": [each for answered in answer.get("rounds", ()) for each in answered],
    }
    if texts := _texts(group, answer):
        found["new"] = "".join(map(marks, texts, answer.get("rounds", ())))
    return found | {key: answer[key] for key in _OF_SERVERS if answer.get(key)}


def _written(answer: Mapping[str, Any]) -> Sequence[Any]:
    """What arms have to agree on: a server's text behind what it thought before."""
    thoughts = answer.get("reasoning")
    if not thoughts:
        return list(answer["tokens"])
    return [a + b for a, b in zip(thoughts, answer["tokens"], strict=True)]


def _difference(texts: Sequence[Any], others: Sequence[Any]) -> dict[str, Any]:
    """The first answer of a group that differs, and where: a token of it, or a character of a
    server's text."""
    number = next(i for i, (a, b) in enumerate(zip(texts, others, strict=True)) if a != b)
    pairs = enumerate(zip(texts[number], others[number], strict=False))
    shorter = min(len(texts[number]), len(others[number]))
    return {"request": number, "at": next((i for i, (a, b) in pairs if a != b), shorter)}
