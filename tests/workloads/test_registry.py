"""Workloads from outside: what they yield, which part is held out, what is said where a source is
missing."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.workloads import documents, sources
from sharpdraft.workloads.registry import WORKLOADS, available, tasks_of, workloads_of
from sharpdraft.workloads.sources import LIBRARY, MANUAL, Document, Source, is_held_out
from sharpdraft.workloads.tasks import Task, built_in
from sharpdraft.workloads.templates import data_of, fill, part
from sharpdraft.workloads.workload import Reader, Workload

pytestmark = pytest.mark.filterwarnings("ignore::sharpdraft.errors.SharpDraftNote")


class Words:
    """A tokenizer of words, spaces and signs."""

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [re.findall(r"\w+|\s+|[^\w\s]", text) for text in texts]}


def reader(**options: Any) -> Reader:
    return Reader(**{"tokenizer": Words(), "limit": 4096, **options})


def length(text: str) -> int:
    return len(Words()([text])["input_ids"][0])


@pytest.mark.parametrize("name", WORKLOADS)
def test_sessions_are_the_same_every_time(name: str) -> None:
    workload = WORKLOADS[name]
    tasks = tasks_of(workload, reader())
    assert tasks == tasks_of(workload, reader())
    names = [task.name for task in tasks]
    assert len(set(names)) == len(names) and all(each.startswith(f"{name}/") for each in names)
    for task in tasks:
        assert task.turns and all(turn.strip() for turn in task.turns)
        assert task.answer_tokens >= 32
        assert 0 <= task.lead < len(task.turns[0])
    few = tasks_of(workload, reader(sessions=3))
    assert few == tasks[: len(few)]
    assert len({each.name.partition("@")[0] for each in few}) == 3
    assert all((workload.about, workload.source, workload.licence))


@pytest.mark.parametrize("name", ["documents", "code", "math", "far"])
def test_what_is_held_out_is_no_part_of_the_rest(name: str) -> None:
    held, others = (
        tasks_of(WORKLOADS[name], reader(held_out=part, sessions=30)) for part in (True, False)
    )

    def lines(tasks: list[Task]) -> set[str]:
        """Long lines of leads, which are what is read; and whole turns of what is asked."""
        leads = {line for task in tasks for line in task.turns[0][: task.lead].split("\n")}
        asked = {turn for task in tasks for turn in task.turns[task.lead > 0 :]}
        return {line for line in leads | asked if len(line) > 60}

    if name in ("math", "far"):
        assert not lines(held) & lines(others)
    else:
        assert not {t.name.partition("@")[0] for t in held} & {
            t.name.partition("@")[0] for t in others
        }
    assert held and others


def test_the_parts_of_a_source_are_disjoint_and_whole() -> None:
    for source in (LIBRARY, MANUAL):
        held, others = ({d.name for d in source.documents(part)} for part in (True, False))
        everything = {d.name for d in source.find() if d.size >= 6000}
        assert not held & others and held | others == everything
        assert all(map(is_held_out, held)) and not any(map(is_held_out, others))
    # Chapters of the manual that are part of another chapter would be in both parts.
    texts = {d.name: set(d.read().splitlines()) for d in MANUAL.find() if d.size >= 6000}
    for name, own in texts.items():
        assert all(len(own & o) < len(own) / 2 for other, o in texts.items() if other != name)
    for name in ("word_problems.json", "far_keys.json"):
        for values in data_of(name)["slots"].values():
            assert len(part(values, True)) >= 3 and len(part(values, False)) >= 3


def test_built_in_sessions_are_held_out_as_a_whole() -> None:
    for name in ("greedy", "sampled"):
        tasks = tasks_of(WORKLOADS[name], reader())
        assert [replace(t, name=t.name.partition("/")[2]) for t in tasks] == built_in()
        with pytest.raises(SharpDraftError, match="all held out"):
            tasks_of(WORKLOADS[name], reader(held_out=False))
    assert WORKLOADS["greedy"].temperature == 0 and WORKLOADS["sampled"].temperature == 1


def test_documents_are_cut_below_the_end_of_every_bucket() -> None:
    found: dict[str, list[int]] = {}
    for task in tasks_of(WORKLOADS["documents"], reader(limit=3000)):
        name, _, cut = task.name.partition("@")
        tokens = length(task.turns[0][: task.lead])
        # Lines are not cut, and some are long.
        assert 0.8 * int(cut) < tokens <= int(cut) + 1
        # What is asked stands behind the text, and there is room for it and its answer.
        asked = task.turns[0][task.lead :]
        assert asked.endswith((".", "?"))
        assert tokens + length(asked) + task.answer_tokens + 30 < 3000
        found.setdefault(name, []).append(int(cut))
    assert [384, 896, 1920, 2776] in found.values()
    for cuts in found.values():
        assert cuts == [384, 896, 1920, 2776][: len(cuts)]


def test_texts_of_one_document_begin_alike() -> None:
    """So that a bench goes on from what it has read."""
    tasks = tasks_of(WORKLOADS["documents"], reader(sessions=1))
    assert len(tasks) > 2
    leads = [task.turns[0][: task.lead].rstrip() for task in tasks]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(leads))


def source(name: str, *texts: tuple[str, str]) -> Source:
    def find() -> Iterator[Document]:
        for each, text in texts:
            yield Document(each, len(text), lambda text=text: text)

    return Source(name, f"the {name}", "free", f"apt-get install {name}", find)


def held_out_name(start: str) -> str:
    return next(f"{start}{i}" for i in range(99) if is_held_out(f"{start}{i}"))


def made(workload: Workload) -> list[Task]:
    return tasks_of(workload, reader())


def test_a_missing_source_and_a_short_document(monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = held_out_name("long"), held_out_name("short")
    there = source("books", (long, "one two\n" * 4000), (short, "one two\n" * 900))
    monkeypatch.setattr(documents, "_SOURCES", (source("papers"), there))
    with pytest.warns(SharpDraftNote) as notes:
        tasks = tasks_of(WORKLOADS["documents"], reader())
    assert [str(each.message) for each in notes] == [
        "documents: the papers: not installed here; apt-get install papers; the others are read",
        f"documents: 1 are shorter than 3,872 tokens and are cut at what they reach: books-{short} "
        "(3,600 tokens)",
    ]
    assert [task.name.partition("@")[2] for task in tasks] == [
        *("384", "896", "1920", "3872"),
        *("384", "896", "1920"),
    ]
    monkeypatch.setattr(documents, "_SOURCES", (source("papers"),))
    with pytest.raises(SharpDraftError, match="the papers: not installed here; apt-get install"):
        tasks_of(WORKLOADS["documents"], reader())
    with pytest.warns(SharpDraftNote, match="papers; the other workloads are measured"):
        (found,) = available(workloads_of(["documents", "math"]), made)
    assert found == made(WORKLOADS["math"])
    with pytest.raises(SharpDraftError, match="the papers: not installed here"):
        available(workloads_of(["documents"]), made)


def test_a_document_of_one_long_line_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are not cut, so that nothing of it fits."""
    line = source("books", (held_out_name("line"), "one two " * 3000))
    monkeypatch.setattr(documents, "_SOURCES", (line,))
    with (
        pytest.warns(SharpDraftNote, match="1 are shorter than 3,872 tokens"),
        pytest.raises(SharpDraftError, match="none of its texts fits"),
    ):
        tasks_of(WORKLOADS["documents"], reader())


def test_a_package_that_is_run_from_its_source_has_no_readmes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def requires(name: str) -> list[str]:
        raise sources.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sources.metadata, "requires", requires)
    with pytest.raises(SharpDraftError, match=r"READMEs of the packages.*not installed here"):
        sources.READMES.documents(True)


def test_a_library_without_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SharpDraftError, match="library: not installed here; install Python with"):
        tasks_of(WORKLOADS["code"], reader())


def test_a_context_that_is_too_short_for_any_document() -> None:
    with pytest.raises(SharpDraftError, match="fits into a context of 200 tokens"):
        tasks_of(WORKLOADS["documents"], reader(limit=200))


def test_code_asks_for_functions_that_are_shown() -> None:
    for task in tasks_of(WORKLOADS["code"], reader()):
        shown = task.turns[0][: task.lead]
        for turn in (task.turns[0][task.lead :], *task.turns[1:]):
            name = re.findall(r"`(\w+)`", turn)[0]
            assert len(re.findall(rf"def {name}\(", shown)) == 1, (task.name, name)


def test_far_asks_for_what_stands_at_the_start() -> None:
    names = data_of("far_keys.json")["slots"]["name"]
    asked = 0
    for task in tasks_of(WORKLOADS["far"], reader()):
        register = task.turns[0][: task.lead]
        assert register.count("\n") >= 12
        for turn in (task.turns[0][task.lead :], *task.turns[1:]):
            assert "{" not in turn
            for name in names:
                if name in turn:
                    asked += 1
                    assert name in register
    assert asked > 40


def test_templates_are_filled() -> None:
    known: dict[str, str] = {}
    slots = {"town": ["A", "B"]}
    text = fill("{town} {town} {town2} {n:7-7} {n}", slots, random.Random(0), known)
    assert text.split() == [known["town"], known["town"], known["town2"], "7", "7"]
    assert {known["town"], known["town2"]} == {"A", "B"}


def test_names() -> None:
    assert [each.name for each in workloads_of(["math", "far"])] == ["math", "far"]
    with pytest.raises(SharpDraftError, match="workload 'maths': known are greedy, sampled"):
        workloads_of(["maths"])
    with pytest.raises(SharpDraftError, match="workload 'far' is named twice"):
        workloads_of(["far", "far"])
    with pytest.raises(SharpDraftError, match="no workload is named"):
        workloads_of([])
