"""Arms side by side on long sessions: same prefix, same machine, taking turns.

Every measured turn is answered once by each arm from the same cached prefix (rewinding is a
length), in an order that rotates, so that drift of the machine hits all arms alike. What AR wrote
goes on as the session's text. Arms that only differ in their policy can be replayed on that text
for their accepted lengths.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..decode.rounds import Round
from ..decode.sampling import GREEDY, Sampling
from ..decode.session import Session, replay
from ..drafters.base import Drafter
from ..drafters.dflash import DFlash
from ..errors import SharpDraftError
from ..method.policies import Constant, FixedSlope
from ..method.scale import Policy
from ..model.kernels import widest
from ..workloads.tasks import Recording, Task
from .several import Several

EDGES = (512, 1024, 2048, 4096, 8192)
KNOWN_ARMS = "ar, frozen, sharpdraft, sharpdraft@N0, fixed@SCALE, window@KEYS"


@dataclass(frozen=True)
class Arm:
    """One way to decode: target only, drafter as released, or drafter with a policy."""

    name: str
    drafting: bool
    policy: Policy | None = None
    window: int | None = None
    # Which of several drafters.
    drafter: str | None = None

    def set(self, session: Session, drafter: Drafter[Any] | None, block: int | None = None) -> None:
        """Make a session whose drafter is `drafter` decode this way, with blocks of `block` tokens
        or the drafter's. Raises SharpDraftError if it cannot."""
        session.drafting, session.policy, session.drafter = self.drafting, self.policy, drafter
        if isinstance(drafter, Several):
            drafter.chosen = self.drafter
        if drafter is not None:
            session.size = block or drafter.block_size
        if drafter is not None and self.window:
            if not isinstance(drafter, DFlash):
                raise SharpDraftError(
                    f"arm '{self.name}': a window can be put on DFlash drafters only, one at a time"
                )
            session.drafter = drafter.windowed(self.window)


def arms_of(names: Sequence[str], policies: Mapping[str, FixedSlope]) -> tuple[Arm, ...]:
    """The arms called `names` for every drafter of `policies`, which says what each is best scaled
    by. With several, a drafter's arms are called `DRAFTER:ARM`. Raises SharpDraftError for a name
    that is no arm's."""
    if len(policies) == 1:
        return tuple(arm(name, policy) for name in names for policy in policies.values())
    found = [arm(name, next(iter(policies.values()))) for name in names if name == "ar"]
    for drafter, policy in policies.items():
        for chosen in (arm(name, policy) for name in names if name != "ar"):
            found.append(replace(chosen, name=f"{drafter}:{chosen.name}", drafter=drafter))
    return tuple(found)


def arm(name: str, recommended: FixedSlope) -> Arm:
    """An arm by name: `ar`, `frozen`, `sharpdraft` (the drafter's recommended policy),
    `sharpdraft@512` (another N0), `fixed@1.2` (one scale at every length), `window@512` (Frozen,
    seeing the last Keys only). Raises SharpDraftError for anything else."""
    if name == "ar":
        return Arm(name, drafting=False)
    if name == "frozen":
        return Arm(name, drafting=True)
    if name == "sharpdraft":
        return Arm(name, drafting=True, policy=recommended)
    found = re.fullmatch(r"(sharpdraft|fixed|window)@([0-9.]+)", name)
    if found is None:
        raise SharpDraftError(f"unknown arm '{name}': known are {KNOWN_ARMS}")
    try:
        if found[1] == "fixed":
            return Arm(name, drafting=True, policy=Constant(float(found[2])))
        if found[1] == "window":
            if (window := int(found[2])) < 1:
                raise ValueError(f"a window holds at least 1 Key, got {window}")
            return Arm(name, drafting=True, window=window)
        other = recommended.with_reference(int(found[2]))
        return Arm(name, drafting=True, policy=other)
    except ValueError as error:
        raise SharpDraftError(f"arm '{name}': {error}") from error


@dataclass(frozen=True)
class Plan:
    """What is run. Two runs of one plan write the same rows, so that a broken run can be gone on
    with."""

    target: str
    drafter: str
    block: int | None
    timed: tuple[Arm, ...]
    replayed: tuple[Arm, ...]
    turns_per_bucket: int = 1
    edges: tuple[int, ...] = EDGES
    masses_every: int = 0
    tasks: str = ""  # What tells one prompt file from another: a digest.
    # How every arm chooses tokens; each answer is drawn with a seed of its own, made from this one.
    sampling: Sampling = GREEDY

    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, default=str)


class RunLog:
    """Rows of a run as JSON lines behind a header with its plan; each is on disk before the next is
    measured."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        try:
            self._open(plan)
        except (OSError, UnicodeDecodeError) as error:
            raise SharpDraftError(
                f"cannot read and write {path} ({error}): give another --out"
            ) from error

    def _open(self, plan: Plan) -> None:
        path = self.path
        header = {"plan": json.loads(plan.key()), "machine": machine()}
        kept: list[str] = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    break  # a row cut short by a crash or a full disk; what follows a broken row is not trusted
                kept.append(line)
                self.rows.append(row)
            if self.rows and self.rows[0].get("plan") != header["plan"]:
                raise SharpDraftError(
                    f"{path} holds a run with other settings: give another --out, or move it away"
                )
            self.rows = self.rows[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text("\n".join(kept or [json.dumps(header)]) + "\n", encoding="utf-8")
        os.replace(partial, path)

    def add(self, row: dict[str, Any]) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise SharpDraftError(
                f"cannot write {self.path} ({error}): make room and run the same command again; it "
                "goes on from here"
            ) from error
        self.rows.append(row)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import platform

    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "kernels": widest() is not None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


def run_recording(
    session: Session,
    recording: Recording,
    plan: Plan,
    stop: Collection[int],
    done: Sequence[dict[str, Any]],
    on_row: Callable[[dict[str, Any]], None],
    on_progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Measure some turns of a recorded session: `turns_per_bucket` in each context bucket, spread
    evenly, the text between them read from the recording."""
    limit = min(len(recording.tokens), session.target.max_positions, plan.edges[-1])
    for number in measured_turns(recording, plan, limit):
        turn = recording.turns[number]
        if any(row["session"] == recording.name and row["turn"] == number for row in done):
            continue
        on_progress(f"{recording.name}: reading to {turn.start} tokens")
        session.drafting = True
        catch_up(session, recording.tokens[: turn.start])
        row = measure_turn(
            session,
            recording.tokens[turn.start : turn.answer],
            turn.end - turn.answer,
            plan,
            stop,
            number,
            on_progress,
        )
        on_row({"session": recording.name, "turn": number, **row})


def run_live(
    session: Session,
    task: Task,
    prompts: Iterator[list[int]],
    plan: Plan,
    stop: Collection[int],
    done: Sequence[dict[str, Any]],
    on_row: Callable[[dict[str, Any]], None],
    on_progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Measure every turn of a session until its turns or the context run out."""
    for number, prompt in enumerate(prompts):
        if number and session.tokens[-1] not in stop:
            prompt = [next(iter(stop)), *prompt] if stop else prompt
        if len(prompt) + 2 > session.room:
            break
        finished = next(
            (r for r in done if r["session"] == task.name and r["turn"] == number), None
        )
        if finished is not None:
            session.drafting = True
            catch_up(session, [*session.tokens, *prompt, *finished["tokens"]])
            continue
        answer = min(task.answer_tokens, session.room - len(prompt))
        row = measure_turn(session, prompt, answer, plan, stop, number, on_progress)
        on_row({"session": task.name, "turn": number, **row})


def measured_turns(recording: Recording, plan: Plan, limit: int) -> list[int]:
    """Turns to measure: spread evenly over each bucket, the last one at its upper end."""
    chosen: list[int] = []
    low = 0
    for edge in plan.edges:
        inside = [
            i
            for i, turn in enumerate(recording.turns)
            if low < turn.answer and turn.end <= min(edge, limit) and turn.end - turn.answer >= 32
        ]
        count = min(plan.turns_per_bucket, len(inside))
        chosen += [inside[len(inside) - 1 - (k * len(inside)) // count] for k in range(count)][::-1]
        low = edge
    return chosen


def measure_turn(
    session: Session,
    prompt: Sequence[int],
    answer_tokens: int,
    plan: Plan,
    stop: Collection[int],
    number: int,
    on_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Answer one prompt with every arm; leaves the session behind AR's answer (the first arm's
    without AR)."""
    start = len(session.tokens)
    drafter = session.drafter
    random = plan.sampling.temperature > 0
    session.sampling = (
        replace(plan.sampling, seed=1000 * (plan.sampling.seed or 0) + number)
        if random
        else plan.sampling
    )
    shift = number % len(plan.timed)
    arms: dict[str, dict[str, Any]] = {}
    answers: dict[str, list[int]] = {}
    for chosen in (*plan.timed[shift:], *plan.timed[:shift]):
        session.rewind(start)
        chosen.set(session, drafter, plan.block)
        if chosen.drafting and session.drafter is not None:
            # A prefix that an arm's own turns would have left read is not part of its turn.
            session.drafter.catch_up([session.drafts], [session.policy])
        on_progress(f"{chosen.name} at {start} tokens")
        began = time.perf_counter()
        rounds = list(session.generate(prompt, answer_tokens, stop))
        seconds = time.perf_counter() - began
        answers[chosen.name] = session.tokens[start + len(prompt) :]
        arms[chosen.name] = {"seconds": seconds, **_summary(rounds)}
    reference = plan.timed[0].name
    text = answers[reference]
    differences = {}
    for name, answer in answers.items():
        # Sampled answers differ, as they do from seed to seed.
        if answer != text and not random:
            at = next(i for i in range(min(len(answer), len(text))) if answer[i] != text[i])
            gap = _logit_gap(session, start, [*prompt, *text[:at]], text[at], answer[at])
            differences[name] = {"at": at, "gap": gap}
    session.rewind(start)
    _reading(session, drafter)
    # The last token stays unread, as after any answer: where the context is full, there is no room
    # for it.
    session.read([*prompt, *text[:-1]])
    session.tokens.append(text[-1])
    row: dict[str, Any] = {
        "context": start + len(prompt),
        "tokens": text,
        "arms": {chosen.name: arms[chosen.name] for chosen in plan.timed},
        "differences": differences,
        "replayed": {},
    }
    for chosen in plan.replayed:
        on_progress(f"replaying {chosen.name} at {start} tokens")
        chosen.set(session, drafter, plan.block)
        # What was just measured live is what a replay would find.
        measured = arms.get(chosen.name)
        if measured is None or chosen.name in differences:
            measured = _summary(list(replay(session, start + len(prompt), chosen.policy)))
        row["replayed"][chosen.name] = dict(measured)
        if plan.masses_every:
            row["replayed"][chosen.name]["mass"] = _masses(
                session, start + len(prompt), chosen.policy, plan.masses_every
            )
    _reading(session, drafter)
    return row


def _reading(session: Session, drafter: Drafter[Any] | None) -> None:
    """Let the session's drafter, every one of several, read along."""
    session.drafting, session.drafter = True, drafter
    if isinstance(drafter, Several):
        drafter.chosen = None


def _masses(
    session: Session, first: int, policy: Policy | None, every: int
) -> list[tuple[int, float]]:
    """Top-32 mass at every so many anchors, over layers, heads and proposal positions: (context,
    mass)."""
    found = []
    values: list[float] = []
    for at in range(first, len(session.tokens) - session.size, every):
        values.clear()
        next(
            iter(replay(session, at, policy, lambda layer, mass: values.append(float(mass.mean()))))
        )
        found.append((at, sum(values) / len(values)))
    return found


def _summary(rounds: Sequence[Round]) -> dict[str, Any]:
    drafted = [r for r in rounds if r.drafted]
    return {
        "tokens": sum(len(r.tokens) for r in rounds),
        "rounds": [(r.context, r.drafted, r.accepted) for r in drafted],
        "draft_seconds": sum(r.draft_seconds for r in rounds),
        "verify_seconds": sum(r.verify_seconds for r in rounds),
    }


def _logit_gap(session: Session, start: int, text: Sequence[int], first: int, second: int) -> float:
    """How far apart the target puts two tokens behind a text: what explains a difference between
    arms."""
    session.rewind(start)
    session.drafting = False
    logits = session.read(text)[0, -1]
    return float((logits[first] - logits[second]).abs())


def catch_up(session: Session, tokens: Sequence[int]) -> None:
    """Bring the session to a text, keeping what it has cached of it; its last token stays
    unread."""
    session.rewind(min(session.cache.length, len(tokens)))
    common = next(
        (i for i, (a, b) in enumerate(zip(session.tokens, tokens, strict=False)) if a != b),
        len(session.tokens),
    )
    session.rewind(common)
    if unread := list(tokens[common:-1]):
        session.read(unread)
    session.tokens.extend(tokens[len(session.tokens) :])
