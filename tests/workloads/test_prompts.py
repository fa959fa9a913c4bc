"""Prompt files: of every format and shape the same prompts, and one line for what is none."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.workloads.prompts import Conversation, conversation_of
from sharpdraft.workloads.tasks import Task, from_file

# Ends of lines to Python, and to nobody who writes JSON lines or a text file.
ODD = "a\u2028b\u2029c\x0bd\x0ce\x85f\x1cg\x1dh\x1ei"


@pytest.fixture(autouse=True)
def no_notes() -> Any:
    """What is noted without being looked for fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SharpDraftNote)
        yield


def tasks_from(folder: Path, text: str | bytes, name: str = "prompts.txt") -> list[Task]:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return from_file(path, 50)


def table(rows: list[dict[str, Any]], **options: Any) -> str:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), **options)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def lines(rows: list[Any], **options: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def rows_of(texts: list[str]) -> list[dict[str, Any]]:
    return [{"prompt": text} for text in texts]


WRITERS: dict[str, Callable[[list[str]], str | bytes]] = {
    "a.jsonl": lambda texts: lines(rows_of(texts)),
    "b.jsonl": lambda texts: lines(rows_of(texts)).replace("\n", "\r\n\r\n"),
    "c.jsonl": lambda texts: lines(texts),
    "d.jsonl": lambda texts: json.dumps(rows_of(texts), indent=1),
    "e.jsonl": lambda texts: b"\xef\xbb\xbf" + lines(rows_of(texts)).encode(),
    "f.jsonl": lambda texts: lines(rows_of(texts)).encode("utf-16"),
    "g.jsonl": lambda texts: b"\xfe\xff" + lines(rows_of(texts)).encode("utf-16-be"),
    "h.jsonl.gz": lambda texts: gzip.compress(lines(rows_of(texts)).encode()),
    "i.NDJSON": lambda texts: lines(rows_of(texts)),
    "j.json": lambda texts: json.dumps(rows_of(texts)),
    "k.json": lambda texts: json.dumps(texts, indent=2),
    "l.json": lambda texts: json.dumps({"data": rows_of(texts)}, indent=2),
    "m.json": lambda texts: lines(rows_of(texts)),
    "n.csv": lambda texts: table(rows_of(texts)),
    "o.csv.gz": lambda texts: gzip.compress(table(rows_of(texts)).encode("utf-8-sig")),
    "p.tsv": lambda texts: table(rows_of(texts), delimiter="\t"),
    "q.txt": lambda texts: lines(rows_of(texts)),
    "r": lambda texts: lines(rows_of(texts)),
}
CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
TEXTS = st.lists(st.text(CHARACTERS, min_size=1, max_size=9).filter(str.strip), min_size=1)


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=40, deadline=None)
@given(texts=TEXTS)
@example(texts=[ODD, '"', "[INST] a", "{", "a\r\nb", "a\rb\n", "β, \ufeff"])
def test_what_is_written_is_what_is_read(name: str, texts: list[str]) -> None:
    with TemporaryDirectory() as folder:
        found = tasks_from(Path(folder), WRITERS[name](texts), name)
    assert [task.turns for task in found] == [(text,) for text in texts]
    assert len({task.name for task in found}) == len(texts)


@pytest.mark.parametrize("name", ["a.txt", "b.md", "c.TEXT", "d", "e.txt.gz"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@settings(max_examples=40, deadline=None)
@given(texts=TEXTS)
@example(texts=[ODD, '"a" she said', "[INST] b", "  c ", '["d"]'])
def test_a_text_file_is_a_prompt_a_line(name: str, encoding: str, texts: list[str]) -> None:
    texts = [text.replace("\n", " ").replace("\r", " ") for text in texts]
    texts = [text for text in texts if text.strip() and text.lstrip()[0] not in "{\ufeff"]
    raw = "\n\n".join(["", *texts, "  "]).encode(encoding)
    if not texts:
        return
    with TemporaryDirectory() as folder:
        found = tasks_from(Path(folder), gzip.compress(raw) if name.endswith("gz") else raw, name)
    assert [task.turns for task in found] == [(text,) for text in texts]
    assert [task.name for task in found] == [f"line-{3 + 2 * i}" for i in range(len(texts))]


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
        {"turns": None, "prompt": "d", "system": "be kind"},
    ]
    assert tasks_from(tmp_path, "\n".join(map(json.dumps, rows))) == [
        Task("line-1", ("one",), 50),
        Task("two", ("a", "b {x}"), 50),
        Task("3", ("c",), 50),
        Task("line-4", ("d",), 50, "be kind"),
    ]


def test_one_object_over_several_lines(tmp_path: Path) -> None:
    text = "\n" + json.dumps({"turns": ["a", "b"]}, indent=2)
    for name in ("p.json", "p.jsonl", "p.txt"):
        assert tasks_from(tmp_path, text, name) == [Task("line-2", ("a", "b"), 50)]


def said(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


def from_value(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": value} for role, value in pairs]


TALK = said(("system", "s"), ("user", "a"), ("assistant", "x"), ("user", "b"))
PARTS = [{"type": "text", "text": "a"}, {"type": "input_text", "text": " b"}]
ANSWERS = frozenset({"recorded answers"})


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("a", Conversation(("a",))),
        (["a", "b"], Conversation(("a", "b"))),
        (TALK, Conversation(("a", "b"), "s", ANSWERS)),
        ({"prompt": "a"}, Conversation(("a",))),
        ({"prompt": TALK}, Conversation(("a", "b"), "s", ANSWERS)),
        ({"prompt": PARTS}, Conversation(("a b",))),
        ({"turns": ["a", "b"]}, Conversation(("a", "b"))),
        ({"turns": TALK}, Conversation(("a", "b"), "s", ANSWERS)),
        ({"messages": TALK}, Conversation(("a", "b"), "s", ANSWERS)),
        ({"messages": said(("developer", "s"), ("user", PARTS))}, Conversation(("a b",), "s")),
        (
            {"messages": said(("user", "a"), ("user", "b"), ("assistant", None))},
            Conversation(("a", "b"), None, ANSWERS),
        ),
        (
            {"conversations": from_value(("system", "s"), ("human", "a"), ("gpt", "x"))},
            Conversation(("a",), "s", ANSWERS),
        ),
        ({"conversation": TALK[:2]}, Conversation(("a",), "s")),
        ({"problem": "a", "solution": "x"}, Conversation(("a",), None, frozenset({"solution"}))),
        ({"instruction": "a", "input": ""}, Conversation(("a",))),
        ({"instruction": "a", "input": "b"}, Conversation(("a\n\nb",))),
        ({"text": "a"}, Conversation(("a",))),
        ({"content": "a"}, Conversation(("a",))),
        ({"role": "user", "content": PARTS}, Conversation(("a b",))),
        ({"data": ["a", "x", "b", "y"]}, Conversation(("a", "b"), None, ANSWERS)),
        ({"data": TALK}, Conversation(("a", "b"), "s", ANSWERS)),
        ({"prompt": "a", "system": "s"}, Conversation(("a",), "s")),
        (
            {"messages": TALK, "system": "t"},
            Conversation(("a", "b"), "s", ANSWERS | {"system"}),
        ),
        ({"prompt": "a", "text": "b"}, Conversation(("a",), None, frozenset({"text"}))),
        ({"messages": json.dumps(TALK)}, Conversation(("a", "b"), "s", ANSWERS)),
        (
            {"custom_id": "1", "body": {"model": "m", "temperature": 1, "messages": TALK[:2]}},
            Conversation(("a",), "s", frozenset({"custom_id", "model", "temperature"})),
        ),
        (
            {"request": {"body": {"messages": TALK[1:2]}}, "response": {"messages": 1}},
            Conversation(("a",), None, frozenset({"response"})),
        ),
        ({"request": "a"}, Conversation(("a",))),
    ],
)
def test_what_a_row_asks(row: Any, found: Conversation) -> None:
    assert conversation_of(row) == found


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, 'needs "prompt" (text)'),
        ({"other": "x", "more": 1}, "its keys are other, more"),
        ({"prompt": ""}, '"prompt" is empty'),
        ({"prompt": 7}, '"prompt" is 7 (int), not a text'),
        ({"prompt": ["a", "b"]}, '"prompt" is a list of texts: give each prompt a row'),
        ({"turns": []}, '"turns" is empty'),
        ({"turns": "abc"}, '"turns" is a text, not a list'),
        ({"turns": ["a", " "]}, 'a text of "turns" is empty'),
        ({"turns": ["a", 1]}, "neither texts nor messages"),
        ({"messages": said(("user", ""))}, "a user's text is empty"),
        ({"messages": said(("user", None))}, "a user's text is nothing"),
        ({"messages": said(("assistant", "a"))}, '"messages" has no message of a user'),
        ({"messages": said(("user", "a"), ("tool", "b"))}, "a message of role tool"),
        ({"messages": said(("user", "a"), ("system", "b"))}, "a system message that is not"),
        (
            {"messages": said(("user", [*PARTS, {"type": "image_url", "image_url": {}}]))},
            "a part that is no text (image_url)",
        ),
        ({"prompt": "a\ud800"}, "half a character"),
        ({"body": {"model": "m"}}, "its keys are model"),
        (None, "holds nothing"),
        (3, "holds 3 (int)"),
    ],
)
def test_rows_that_ask_nothing(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        conversation_of(row)
    with pytest.raises(SharpDraftError) as named:
        tasks_from(tmp_path, json.dumps([{"prompt": "a"}, row]), "p.json")
    path = tmp_path / "p.json"
    assert str(named.value).startswith(f"{path}, row 2: ") and "\n" not in str(named.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "", "holds no prompt"),
        ("p.txt", " \n\t\n", "holds no prompt"),
        ("p.txt", b"\xff\xfe", "holds no prompt"),
        ("p.jsonl", '{"prompt": "x"}\n{"a"', "line 2: not JSON"),
        ("p.txt", 'fine\n\n{"other": "x"}', "line 3: a row needs"),
        ("p.jsonl", '{"prompt": "x"}\n"y', "line 2: not JSON"),
        ("p.json", '[{"prompt": "x"},\n]', "is not JSON"),
        ("p.json", "[]", "holds no prompt"),
        ("p.json", "[" * 9000, "is not JSON"),
        ("p.txt", b"\xc3\x28", "cannot read the prompt file"),
        ("p.txt", "a".encode("utf-16-le"), "zero bytes"),
        ("p.txt.gz", b"no gzip", "cannot read the prompt file"),
        ("p.txt.gz", gzip.compress(b"a b c")[:-9], "cannot read the prompt file"),
        ("p.docx", "x", "prompt files end with .txt"),
        ("p.csv", "prompt\na,b\n", "line 2: more cells"),
        ("p.csv", 'prompt\n"a\n', "unexpected end of data"),
        ("p.csv", "What is β?\nAnd γ?\n", "row 1: a row needs"),
        ("p.parquet", b"PAR1", "pyarrow"),
        (
            "p.jsonl",
            '{"name": "a", "prompt": "b"}\n{"name": "a", "prompt": "c"}',
            "every name must be given once, and a is twice",
        ),
    ],
)
def test_prompt_files_that_are_refused(
    tmp_path: Path,
    name: str,
    text: str | bytes,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SharpDraftError) as caught:
        tasks_from(tmp_path, text, name)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_prompt_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(SharpDraftError, match="cannot read the prompt file"):
            from_file(path, 5)


def test_tables(tmp_path: Path) -> None:
    rows = [
        {"name": "one", "messages": json.dumps(said(("system", "s"), ("user", "a"))), "prompt": ""},
        {"name": "", "messages": "", "prompt": 'b, "c"\nd'},
    ]
    assert tasks_from(tmp_path, table(rows), "p.csv") == [
        Task("one", ("a",), 50, "s"),
        Task("row-2", ('b, "c"\nd',), 50),
    ]


def test_long_cells(tmp_path: Path) -> None:
    text = "word " * 100_000
    assert tasks_from(tmp_path, table([{"prompt": text}]), "p.csv")[0].turns == (text,)


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "a", "turns": None}, {"prompt": None, "turns": ["b", "c"]}]

    def read_table(file: io.BytesIO) -> Any:
        assert file.read() == b"PAR1"
        return SimpleNamespace(to_pylist=lambda: rows)

    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(read_table=read_table))
    assert tasks_from(tmp_path, b"PAR1", "p.parquet") == [
        Task("row-1", ("a",), 50),
        Task("row-2", ("b", "c"), 50),
    ]


def test_what_is_left_out_is_noted(tmp_path: Path) -> None:
    rows = [{"messages": TALK}, {"body": {"max_tokens": 5, "prompt": "a"}}]
    with pytest.warns(SharpDraftNote) as noted:
        tasks_from(tmp_path, lines(rows), "p.jsonl")
    (note,) = noted
    assert str(note.message) == (
        f"{tmp_path / 'p.jsonl'}: what is asked are the users' texts; not used: max_tokens, "
        "recorded answers"
    )
