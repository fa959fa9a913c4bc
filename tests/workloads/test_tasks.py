"""Tasks as data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.hub.smollm2 import SMOLLM2
from sharpdraft.train.sessions import write_wave
from sharpdraft.workloads import tasks
from sharpdraft.workloads.tasks import (
    Recording,
    Task,
    Turn,
    built_in,
    digest,
    from_file,
    read_recording,
    recordings,
    turns_of,
)
from support.tiny import PROMPT, Tiny


def test_digests_of_earlier_runs_are_still_theirs(tmp_path: Path) -> None:
    """What stands in the rows of runs from before prompt files had other shapes."""
    path = tmp_path / "prompts.txt"
    path.write_text(
        '{"prompt": "one"}\n\nplain text\n{"turns": ["a", "b {x}"], "name": "two", "other": 1}\r\n'
    )
    assert digest(from_file(path, 50)) == "e826499b368c0043"
    assert digest(built_in()) == "18b1ac93907297ee"
    path.write_text('{"prompt": "one", "messages": []}\n{"turns": ["a"], "prompt": "b"}\n')
    with pytest.warns(SharpDraftNote, match="not used: messages, prompt"):
        assert digest(from_file(path, 192)) == "d744022780f67394"


def test_digests_tell_system_messages_apart() -> None:
    tasks = [[Task("a", ("b",), 9, system)] for system in (None, "", "be kind")]
    assert len({digest(each) for each in tasks}) == 3


def test_digests_tell_leads_apart() -> None:
    assert len({digest([Task("a", ("b c",), 9, lead=lead)]) for lead in (0, 1, 2)}) == 3


def test_a_recording_of_another_target_or_workload_is_refused(tmp_path: Path) -> None:
    names = ["zoo", built_in()[1].name, built_in()[0].name]
    tensors = {}
    for number, name in enumerate(names):
        tensors[f"{name}.tokens"] = torch.tensor([number, 60_000], dtype=torch.uint16)
        tensors[f"{name}.turns"] = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    path = tmp_path / "recorded.safetensors"

    def read(metadata: dict[str, str] | None) -> list[Recording]:
        save_file(tensors, str(path), metadata)
        return read_recording(path, "code")

    expected = [
        Recording(names[number], (number, 60_000), (Turn(0, 1, 2),)) for number in (2, 1, 0)
    ]
    assert read(None) == read({"target": SMOLLM2, "workload": "code"}) == expected
    for metadata, said in (
        ({"target": "mine/model", "workload": "code"}, "code as mine/model wrote it, not code of"),
        ({"target": SMOLLM2, "workload": "far"}, f"holds far as {SMOLLM2} wrote it, not code of"),
    ):
        with pytest.raises(SharpDraftError, match=f"{said}.*record it anew"):
            read(metadata)


def test_a_workload_that_was_not_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tasks, "recording", lambda workload: tmp_path / f"{workload}.safetensors")
    assert recordings("math") == []


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
