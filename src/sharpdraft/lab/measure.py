"""Arms side by side on long sessions: same prefix, same machine, taking turns.

Every measured turn is answered once by each arm from the same cached prefix (rewinding is a
length), in an order that rotates, so that drift of the machine hits all arms alike. What the first
arm wrote goes on as the session's text. Other arms can be replayed on that text for their accepted
lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, replace
from math import isfinite, nan
from typing import Any

from torch import Tensor

from ..decode.expected import ExpectedRound, expected
from ..decode.replay import replay
from ..decode.rounds import Round
from ..decode.session import Session
from ..errors import SharpDraftError
from ..workloads.tasks import Recording, Task
from .arms import AR
from .novelty import Repetition, marks
from .plan import Plan, Row, failed_row, fits, measured_turns, row_of, skipped_row, unfitting_row

Say = Callable[[str], None]
"""Told what is being done."""
_FAILURES = (SharpDraftError, MemoryError, RuntimeError)
"""What one turn may end with, as where there is no memory for its context, while others can be
measured."""


def run_recording(
    session: Session,
    recording: Recording,
    plan: Plan,
    stop: Collection[int],
    done: Sequence[Row],
    on_row: Callable[[Row], None],
    on_progress: Say = lambda text: None,
) -> None:
    """Measure the turns of a recorded session that the plan asks for and `done` has not; the text
    between them is read from the recording. A turn that fails is skipped. Raises SharpDraftError
    for an arm that the session cannot do."""
    _check(session, plan)
    name = recording.name
    for number in measured_turns(recording, plan, session.target.max_positions):
        if row_of(done, name, number) is not None:
            continue
        turn = recording.turns[number]
        prompt, answer = recording.tokens[turn.start : turn.answer], turn.end - turn.answer
        try:
            on_progress(f"{name}: reading to {turn.start} tokens")
            session.read_along()
            bring_to(session, recording.tokens[: turn.start])
            row = measure_turn(session, prompt, answer, plan, stop, number, on_progress)
        except _FAILURES as error:
            row = failed_row(name, number, turn.answer, error)
        on_row({"session": name, "turn": number, **row})


def run_live(
    session: Session,
    task: Task,
    prompts: Iterator[list[int]],
    plan: Plan,
    stop: Collection[int],
    done: Sequence[Row],
    on_row: Callable[[Row], None],
    on_progress: Say = lambda text: None,
    *,
    end_of_turn: int | None,
    lead: int = 0,
) -> None:
    """Measure every turn of a session. One that does not fit into the context, or fails, is
    skipped, and so are those behind it: without it they would be another conversation's.

    done: the rows so far. end_of_turn: the token that the chat template puts behind an answer, put
    there where an answer was cut; None for a single turn. lead: tokens of the first prompt that are
    read before it is measured, whatever the session has read so far; with 0 it has to be empty.
    Raises SharpDraftError for an arm that the session cannot do.
    """
    _check(session, plan)
    lost = False
    # Sessions of one turn, too, begin with another arm each.
    first = len({row["session"] for row in done} - {task.name})
    for number, prompt in enumerate(prompts):
        turn = first + number
        start = len(session.tokens) if number or not lead else 0
        if number and start and session.tokens[-1] not in stop and end_of_turn is not None:
            prompt = [end_of_turn, *prompt]
        context = start + len(prompt)
        if lost:
            on_row(skipped_row(task.name, number, context, "behind a turn that was skipped"))
        elif not fits(context, session.capacity):
            lost = True
            on_row(unfitting_row(task.name, number, context, session.capacity))
        elif (finished := row_of(done, task.name, number)) is not None:
            session.read_along()
            bring_to(session, [*session.tokens[:start], *prompt, *finished["tokens"]])
        else:
            try:
                if lead and not number:
                    on_progress(f"{task.name}: reading {lead} tokens")
                    session.read_along()
                    bring_to(session, prompt[:lead])
                    prompt = prompt[lead:]
                answer = min(task.answer_tokens, session.room - len(prompt))
                row = measure_turn(session, prompt, answer, plan, stop, turn, on_progress)
            except _FAILURES as error:
                lost, row = True, failed_row(task.name, number, context, error)
                session.rewind(start)
            on_row({"session": task.name, "turn": number, **row})


def measure_turn(
    session: Session,
    prompt: Sequence[int],
    answer_tokens: int,
    plan: Plan,
    stop: Collection[int],
    number: int,
    on_progress: Say = lambda text: None,
) -> dict[str, Any]:
    """Answer one prompt with every arm; leaves the session behind what the first one wrote.

    number: of the turn, by which the arms' order rotates and sampled answers get their seed.
    """
    start = len(session.tokens)
    sampled = plan.sampling.temperature > 0
    seed = 1000 * (plan.sampling.seed or 0) + number
    session.sampling = replace(plan.sampling, seed=seed) if sampled else plan.sampling
    shift = number % len(plan.timed)
    arms: dict[str, dict[str, Any]] = {}
    answers: dict[str, list[int]] = {}
    for arm in (*plan.timed[shift:], *plan.timed[:shift]):
        session.rewind(start)
        session.use(arm)
        # A prefix that an arm's own turns would have left read is not part of its turn.
        session.catch_up()
        on_progress(f"{arm.name} at {start} tokens")
        began = time.perf_counter()
        rounds = list(session.generate(prompt, answer_tokens, stop))
        seconds = time.perf_counter() - began
        answers[arm.name] = session.tokens[start + len(prompt) :]
        arms[arm.name] = {"seconds": seconds, **_summary(rounds, session.tokens)}
    text = answers[plan.timed[0].name]
    # Sampled answers differ, as they do from seed to seed.
    differences = {} if sampled else _differences(session, start, prompt, text, answers)
    session.rewind(start)
    session.read_along()
    session.extend([*prompt, *text])
    return {
        "context": start + len(prompt),
        "tokens": text,
        "repetition": asdict(Repetition.of(session.tokens, start + len(prompt))),
        "arms": {arm.name: arms[arm.name] for arm in plan.timed},
        "differences": differences,
        "replayed": _replayed(session, start + len(prompt), plan, arms, differences, on_progress),
    }


def bring_to(session: Session, tokens: Sequence[int]) -> None:
    """Bring a session to a text, keeping what it has cached of it; the last token stays unread, as
    behind an answer."""
    session.rewind(min(session.cache.length, len(tokens)))
    pairs = enumerate(zip(session.tokens, tokens, strict=False))
    common = next((i for i, (a, b) in pairs if a != b), len(session.tokens))
    session.rewind(common)
    session.extend(tokens[common:])


def _check(session: Session, plan: Plan) -> None:
    """What a session cannot do is refused before anything is measured."""
    for arm in plan.arms:
        session.use(arm)


def _differences(
    session: Session,
    start: int,
    prompt: Sequence[int],
    text: Sequence[int],
    answers: dict[str, list[int]],
) -> dict[str, dict[str, Any]]:
    """Where an answer is not the first arm's, and how far apart the target puts the two tokens,
    which is what explains it."""
    found = {}
    for name, answer in answers.items():
        if answer != text:
            at = next(i for i in range(min(len(answer), len(text))) if answer[i] != text[i])
            session.rewind(start)
            session.use(AR)
            logits = session.read([*prompt, *text[:at]])[0, -1]
            gap = float((logits[text[at]] - logits[answer[at]]).abs())
            found[name] = {"at": at, "gap": gap}
    return found


def _replayed(
    session: Session,
    first: int,
    plan: Plan,
    arms: dict[str, dict[str, Any]],
    differences: dict[str, Any],
    on_progress: Say,
) -> dict[str, dict[str, Any]]:
    """What the plan's replayed arms would have had from the anchor at `first` on."""
    found = {}
    for arm in plan.replayed:
        on_progress(f"replaying {arm.name} at {first} tokens")
        session.use(arm)
        measured = arms.get(arm.name)
        if plan.sampling.temperature:
            measured = _expected(list(expected(session, first)), session.tokens)
        # What was just measured live is what a replay would find.
        elif measured is None or arm.name in differences:
            measured = _summary(list(replay(session, first)), session.tokens)
        found[arm.name] = dict(measured)
        if plan.masses_every:
            found[arm.name]["mass"] = _masses(session, first, plan.masses_every)
    session.read_along()
    return found


def _masses(session: Session, first: int, every: int) -> list[tuple[int, float]]:
    """Top-32 mass of the arm in use at every so many anchors, over layers, heads and proposal
    positions: (context, mass)."""
    found = []
    values: list[float] = []

    def probe(layer: int, mass: Tensor) -> None:
        values.append(float(mass.mean()))

    for at in range(first, len(session.tokens) - session.num_drafts - 1, every):
        values.clear()
        next(replay(session, at, probe))
        mass = sum(values) / len(values) if values else nan  # Nothing was drafted there.
        if isfinite(mass):
            found.append((at, mass))
    return found


def _summary(rounds: Sequence[Round], text: Sequence[int]) -> dict[str, Any]:
    """What is kept of rounds. text: all of the session's, these rounds' own at its end."""
    drafted = [(r.context, r.drafted, r.accepted) for r in rounds if r.asked]
    return {
        "tokens": sum(len(r.tokens) for r in rounds),
        "rounds": drafted,
        "new": marks(text, drafted),
        "draft_seconds": sum(r.draft_seconds for r in rounds),
        "verify_seconds": sum(r.verify_seconds for r in rounds),
    }


def _expected(rounds: Sequence[ExpectedRound], text: Sequence[int]) -> dict[str, Any]:
    """As `_summary`, of rounds in expectation, each with its weight behind it."""
    asked = [
        (r.context, r.drafted, round(r.accepted, 6), round(r.weight, 6)) for r in rounds if r.asked
    ]
    tokens = sum(r.weight * (r.accepted + 1) for r in rounds)
    return {"tokens": round(tokens), "rounds": asked, "new": marks(text, asked)}
