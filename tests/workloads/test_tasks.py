"""Tasks as data."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpdraft.errors import SharpDraftError
from sharpdraft.lab.table import label
from sharpdraft.train.sessions import write_wave
from sharpdraft.workloads.tasks import Task, Turn, bucket_of, built_in, from_file, turns_of
from support.tiny import PROMPT, Tiny


def tasks_from(folder: Path, text: str | bytes) -> list[Task]:
    path = folder / "prompts.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return from_file(path, 50)


def test_prompts_as_text(tmp_path: Path) -> None:
    assert tasks_from(tmp_path, "Say hello.\n\n  \nWhat is β?\r\n") == [
        Task("line-1", ("Say hello.",), 50),
        Task("line-4", ("What is β?",), 50),
    ]


def test_prompts_as_json_lines(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one"},
        {"turns": ["a", "b {x}"], "name": "two"},
        {"name": 3, "prompt": "c", "other": None},
    ]
    assert tasks_from(tmp_path, "\n".join(map(json.dumps, rows))) == [
        Task("line-1", ("one",), 50),
        Task("two", ("a", "b {x}"), 50),
        Task("3", ("c",), 50),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        (" \n\t\n", "holds no prompt"),
        ('fine\n{"prompt": "x"', "line 2: not JSON"),
        ('{"prompt": ""}', 'line 1: needs "prompt"'),
        ('{"prompt": 7}', 'line 1: needs "prompt"'),
        ('fine\n\n{"other": "x"}', 'line 3: needs "prompt"'),
        ('{"turns": []}', 'line 1: needs "prompt" (text) or "turns"'),
        ('{"turns": "abc"}', "line 1: needs"),
        ('{"turns": ["a", " "]}', "line 1: needs"),
        ('{"turns": null, "prompt": "a"}', "line 1: needs"),
        (
            '{"name": "a", "prompt": "b"}\n{"name": "a", "prompt": "c"}',
            "every name must be given once",
        ),
        (b"\xff\xfe", "cannot read the prompt file"),
    ],
)
def test_prompt_files_that_are_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(SharpDraftError) as caught:
        tasks_from(tmp_path, text)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(tmp_path / "prompts.txt") in str(caught.value)


def test_prompt_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(SharpDraftError, match="cannot read the prompt file"):
            from_file(path, 5)


def test_built_in_sessions() -> None:
    tasks = built_in()
    assert len(tasks) >= 10 and len({task.name for task in tasks}) == len(tasks)
    assert all(len(task.turns) >= 30 and all(turn.strip() for turn in task.turns) for task in tasks)
    assert len({turn for task in tasks for turn in task.turns}) == sum(
        len(task.turns) for task in tasks
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_turns_of(spans: list[tuple[int, int]], tail: int) -> None:
    mask: list[bool] = []
    expected = []
    for prompt, answer in spans:
        start = len(mask)
        mask += [False] * prompt + [True] * answer
        expected.append(Turn(start, start + prompt, len(mask)))
    assert turns_of(torch.tensor(mask + [False] * tail)) == expected


def test_turns_of_a_wave_are_its_prompts_and_answers(llama: Tiny) -> None:
    turns = [[[20, 31, 14], [50, 9]], [[7], [8, 8, 40]]]
    end = Counter(llama.text[PROMPT:]).most_common(1)[0][0]
    wave = write_wave(llama.target, turns, 120, end)
    for session, tokens, written in zip(
        turns, wave["tokens"].tolist(), wave["written"], strict=True
    ):
        found = turns_of(written)
        assert len(found) > 2
        for number, turn in enumerate(found):
            prompt = tokens[turn.start : turn.answer]
            expected = session[number % 2]
            # An answer that was cut off is followed by the end of turn it lacks.
            assert prompt in (expected, [end, *expected])


def test_turns_of_nothing() -> None:
    assert turns_of(torch.zeros(5, dtype=torch.bool)) == []


def test_buckets() -> None:
    assert [bucket_of(n, (512, 1024)) for n in (1, 512, 513, 1024, 1025)] == [0, 0, 1, 1, None]
    assert [label(i, (100, 512, 1024, 4096)) for i in range(4)] == [
        "0-100",
        "100-512",
        "512-1K",
        "1K-4K",
    ]
