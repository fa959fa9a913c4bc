"""Live runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch

from sharpdraft.decode.sampling import Sampling
from sharpdraft.decode.session import Session
from sharpdraft.lab.measure import measure_turn, run_live
from sharpdraft.lab.novelty import Repetition
from sharpdraft.lab.plan import measured
from sharpdraft.workloads.tasks import Task
from support.drafters import make_drafter
from support.lab import plan_of, without_times
from support.tiny import BLOCK, VOCAB, Tiny, continuation

LIVE = plan_of(
    "ar",
    "frozen",
    "sharpdraft",
    "window@40",
    replayed=("frozen", "sharpdraft", "fixed@1.3"),
    masses_every=4,
)
TASK = Task("t", ("",) * 5, answer_tokens=16)
PROMPTS = [
    [5, 9, 40],
    [33, 2],
    [18],
    [61, 61, 7, 30],
    [44],
]  # More than arms: each comes first once, AR twice.


def live(
    tiny: Tiny, done: list[dict[str, Any]], **options: Any
) -> tuple[Session, list[dict[str, Any]]]:
    """Run all turns that are not done yet."""
    session = Session(tiny.target, make_drafter(tiny.target), **options)
    rows = list(done)
    # The template's own end of turn is not the first of the tokens that end one.
    ends = (VOCAB - 2, VOCAB - 1)
    run_live(session, TASK, iter(PROMPTS), LIVE, ends, rows, rows.append, end_of_turn=VOCAB - 1)
    return session, rows


@pytest.fixture(scope="module")
def whole(llama: Tiny) -> tuple[Session, list[dict[str, Any]]]:
    return live(llama, [])


def test_live_run_is_the_targets_conversation(
    llama: Tiny, whole: tuple[Session, list[dict[str, Any]]]
) -> None:
    session, rows = whole
    said: list[int] = []
    assert [row["turn"] for row in rows] == [0, 1, 2, 3, 4]
    for row, prompt in zip(rows, PROMPTS, strict=True):
        said += [VOCAB - 1] * bool(said) + prompt  # The end of turn that a cut answer lacks.
        answer = continuation(llama.model, said, 16)
        assert VOCAB - 1 not in answer
        assert (row["session"], row["context"], row["tokens"]) == ("t", len(said), answer)
        assert row["differences"] == {}
        assert list(row["arms"]) == ["ar", "frozen", "sharpdraft", "window@40"]
        for name, figures in row["arms"].items():
            assert figures["tokens"] == 16 and figures["seconds"] > 0
            written = [accepted + 1 for _, _, accepted in figures["rounds"]]
            assert (written == []) if name == "ar" else (0 < sum(written) <= 15)
        assert row["replayed"].keys() == {"frozen", "sharpdraft", "fixed@1.3"}
        for name in ("frozen", "sharpdraft"):
            assert row["replayed"][name]["rounds"] == row["arms"][name]["rounds"]
        contexts = [at for at, _ in row["replayed"]["frozen"]["mass"]]
        assert contexts == list(range(len(said), len(said) + 16 - BLOCK, 4))
        said += answer
    assert session.tokens == said
    last = {name: dict(figures["mass"]) for name, figures in rows[-1]["replayed"].items()}
    # Beyond the reference mass is concentrated; before it nothing is touched.
    assert all(last["sharpdraft"][at] > last["frozen"][at] for at in last["frozen"])
    first = rows[0]["replayed"]
    early = [
        (a, b)
        for (at, a), (_, b) in zip(
            first["frozen"]["mass"], first["sharpdraft"]["mass"], strict=True
        )
        if at < 20
    ]
    assert early and all(a == b for a, b in early)


def test_arms_take_turns_in_coming_first(llama: Tiny) -> None:
    session = Session(llama.target, make_drafter(llama.target))
    said: list[str] = []
    plan = plan_of("ar", "frozen", "fixed@1.2")
    run_live(
        *(session, TASK, iter(PROMPTS[:4]), plan, (), [], lambda row: None, said.append),
        end_of_turn=None,
    )
    names = [text.split()[0] for text in said]
    ar, frozen, fixed = "ar", "frozen", "fixed@1.2"
    assert names == [ar, frozen, fixed, frozen, fixed, ar, fixed, ar, frozen, ar, frozen, fixed]


def test_live_run_goes_on(llama: Tiny, whole: tuple[Session, list[dict[str, Any]]]) -> None:
    whole_session, whole_rows = whole
    for kept in (1, 4):
        session, rows = live(llama, whole_rows[:kept])
        assert without_times(rows) == without_times(whole_rows)
        assert session.tokens == whole_session.tokens


def test_live_run_ends_with_the_context(
    llama: Tiny, whole: tuple[Session, list[dict[str, Any]]]
) -> None:
    for capacity in (12, 29, 31, 40):  # Within answers and prompts, and at their ends.
        session, rows = live(llama, [], capacity=capacity)
        assert len(session.tokens) <= capacity
        assert [row["turn"] for row in rows] == [0, 1, 2, 3, 4], "no turn is left out unsaid"
        full, *behind = (row for row in rows if "skipped" in row)
        assert full["skipped"]["kind"] == (
            f"no room for an answer in the target's context of {capacity} tokens"
        )
        assert full["context"] + 2 > capacity
        assert {row["skipped"]["kind"] for row in behind} <= {"behind a turn that was skipped"}
        for row, same in zip(measured(rows), whole[1], strict=False):
            assert row["tokens"] == same["tokens"][: len(row["tokens"])]
        _, resumed = live(llama, measured(rows), capacity=capacity)
        assert without_times(resumed) == without_times(rows)


def test_stop_token_inside_an_answer(llama: Tiny) -> None:
    """A turn that ends with a stop token needs none put behind it."""
    stop = continuation(llama.model, PROMPTS[0], 10)[-1]
    session = Session(llama.target, make_drafter(llama.target))
    rows: list[dict[str, Any]] = []
    end = VOCAB - 1
    run_live(session, TASK, iter(PROMPTS[:2]), LIVE, (stop, end), [], rows.append, end_of_turn=end)
    first, second = rows
    assert first["tokens"][-1] == stop and first["tokens"].index(stop) == len(first["tokens"]) - 1
    assert second["context"] == first["context"] + len(first["tokens"]) + len(PROMPTS[1])


def test_arm_that_differs_is_shown_with_its_gap(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verification gone wrong, planted: the row says where, and how far apart the target's two
    logits are."""
    session = Session(llama.target, make_drafter(llama.target))
    right = Session.generate

    def wrong(self: Session, *args: Any) -> Iterator[Any]:
        yield from right(self, *args)
        if self.settings.acts:
            self.tokens[-3] = (self.tokens[-3] + 1) % VOCAB

    monkeypatch.setattr(Session, "generate", wrong)
    rows: list[dict[str, Any]] = []
    plan = plan_of("ar", "frozen", "sharpdraft")
    run_live(session, TASK, iter(PROMPTS[:1]), plan, (), [], rows.append, end_of_turn=None)
    (row,) = rows
    answer = continuation(llama.model, PROMPTS[0], 16)
    assert row["tokens"] == answer
    ids = torch.tensor([PROMPTS[0] + answer[:13]])
    with torch.no_grad():
        logits = llama.model(ids).logits[0, -1]
    gap = float(logits[answer[13]] - logits[(answer[13] + 1) % VOCAB])
    assert row["differences"] == {"sharpdraft": {"at": 13, "gap": pytest.approx(gap, rel=1e-3)}}
    assert session.tokens == PROMPTS[0] + answer


def by_hand(text: list[int], contexts: list[int]) -> str:
    grams = [text[i - 3 : i + 1] for i in range(3, len(text))]
    return "".join("0" if grams[at - 3] in grams[: at - 3] else "1" for at in contexts)


def test_sessions_of_one_turn_begin_with_another_arm_each(llama: Tiny) -> None:
    session = Session(llama.target, make_drafter(llama.target))
    rows: list[dict[str, Any]] = []
    firsts = []
    for name in ("a", "b", "c"):
        said: list[str] = []
        session.rewind(0)
        run_live(
            *(session, Task(name, ("",), 4), iter([[5, 9]]), plan_of("ar", "frozen"), (), rows),
            *(rows.append, said.append),
            end_of_turn=None,
        )
        firsts.append(said[0].split()[0])
    assert firsts == ["ar", "frozen", "ar"]


def test_rows_say_what_is_new_in_the_whole_text(
    whole: tuple[Session, list[dict[str, Any]]],
) -> None:
    session, rows = whole
    marked = ""
    for row in rows:
        end = row["context"] + len(row["tokens"])
        text = session.tokens[:end]
        for arm in (*row["arms"].values(), *row["replayed"].values()):
            assert arm["new"] == by_hand(text, [context for context, _, _ in arm["rounds"]])
            marked += arm["new"]
        assert row["repetition"] == asdict(Repetition.of(text, row["context"]))
        assert row["repetition"]["positions"] == len(row["tokens"]) - 1
    assert {"0", "1"} == set(marked)


def test_sampled_arms_are_marked_by_their_own_answers(llama: Tiny) -> None:
    plan = plan_of("ar", "frozen", sampling=Sampling(2.0, seed=1))
    answers: list[list[int]] = []

    class Watched(Session):
        def generate(self, *args: Any, **options: Any) -> Any:
            yield from super().generate(*args, **options)
            answers.append(list(self.tokens))

    session = Watched(llama.target, make_drafter(llama.target))
    session.extend([9, 9, 9, 9, 9])
    row = measure_turn(session, [5, 9, 40], 24, plan, (), 0)
    ar, frozen = answers
    assert ar != frozen
    contexts = [context for context, _, _ in row["arms"]["frozen"]["rounds"]]
    assert row["arms"]["frozen"]["new"] == by_hand(frozen, contexts)
    assert row["arms"]["ar"]["new"] == ""


def test_a_lead_is_read_before_a_turn_is_timed(llama: Tiny) -> None:
    asked: list[int] = []

    class Watched(Session):
        def generate(self, prompt: Any, *args: Any, **options: Any) -> Any:
            asked.append(len(prompt))
            yield from super().generate(prompt, *args, **options)

    page = llama.text[:30]
    task = Task("t", ("", ""), answer_tokens=8)
    prompts = [[*page, 5, 9], [33, 2]]

    def rows_of(session: Session, lead: int, done: list[Any]) -> list[dict[str, Any]]:
        rows = list(done)
        run_live(
            *(session, task, iter(prompts), LIVE, (), rows, rows.append),
            end_of_turn=None,
            lead=lead,
        )
        return rows

    plain = rows_of(Session(llama.target, make_drafter(llama.target)), 0, [])
    session = Watched(llama.target, make_drafter(llama.target))
    # What it has read of the page, and of anything else, is no matter.
    session.extend([*page[:12], 61, 7, 7])
    led = rows_of(session, 30, [])
    assert without_times(led) == without_times(plain)
    assert asked == [2] * 8 and led[0]["context"] == 32
    for done in (led[:1], led[:2]):
        again = rows_of(session, 30, done)
        assert without_times(again) == without_times(plain)
    # A page that does not fit is skipped, with the turns behind it.
    small = Session(llama.target, make_drafter(llama.target), capacity=30)
    assert all("skipped" in row for row in rows_of(small, 30, []))
