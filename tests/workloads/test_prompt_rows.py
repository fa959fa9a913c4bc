"""What a row has besides its question is asked with it or named, and what is no row says what to
do."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.workloads.prompts import Conversation, conversation_of
from sharpdraft.workloads.tasks import from_file

BEFORE = ("context", "passage", "document", "article", "input", "choices")
USER = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize("key", BEFORE)
@pytest.mark.parametrize("question", ["question", "prompt", "problem", "turns"])
def test_a_context_stands_before_the_question(key: str, question: str) -> None:
    asked: Any = ["q", "r"] if question == "turns" else "q"
    rest = ("r",) if question == "turns" else ()
    for value in ("long text", ["long", "text"], {"text": ["long", "text"], "label": ["A", "B"]}):
        text = "long text" if value == "long text" else "long\ntext"
        found = conversation_of({question: asked, key: value})
        assert found == Conversation((f"{text}\n\nq", *rest))


def test_contexts_of_well_known_sets() -> None:
    dolly = {"instruction": "q", "context": "long", "response": "x"}
    assert conversation_of(dolly) == Conversation(("long\n\nq",), None, frozenset({"response"}))
    alpaca = {"instruction": "q", "input": "i", "context": "long"}
    assert conversation_of(alpaca).turns == ("long\n\nq\n\ni",)
    mmlu = {"question": "q", "choices": ["a", "b"], "passage": "p"}
    assert conversation_of(mmlu).turns == ("p\n\na\nb\n\nq",)


def test_a_context_that_is_in_the_prompt_is_not_asked_twice() -> None:
    row = {"prompt": "Read: long. What is it?", "context": "long"}
    assert conversation_of(row) == Conversation(("Read: long. What is it?",))


@pytest.mark.parametrize("key", ["system", "system_prompt", "system_message", "system_instruction"])
def test_system_messages_by_every_name(key: str) -> None:
    assert conversation_of({"prompt": "q", key: "s"}) == Conversation(("q",), "s")
    assert conversation_of({"messages": USER, key: [{"type": "text", "text": "s"}]}).system == "s"
    assert conversation_of({"prompt": "q", key: ""}) == Conversation(("q",))
    other = {"messages": [{"role": "system", "content": "t"}, *USER], key: "s"}
    assert conversation_of(other) == Conversation(("q",), "t", frozenset({key}))


KEYS = st.text("abcdefgh", min_size=1).filter(lambda key: key not in ("data", "body"))


@given(
    others=st.dictionaries(KEYS, st.integers() | st.just("x") | st.just([1])),
    inside=st.sampled_from([None, "body", "request"]),
    asked=st.sampled_from([{"prompt": "q"}, {"messages": USER}]),
)
def test_every_key_that_is_not_used_is_named(
    others: dict[str, Any], inside: str | None, asked: dict[str, Any]
) -> None:
    row = asked | others
    for each in (row, {inside: row}, {inside: json.dumps(row)})[: 3 if inside else 1]:
        assert conversation_of(each) == Conversation(("q",), None, frozenset(others))


def test_a_context_that_is_no_text_is_named() -> None:
    row = {"question": "q", "context": [["title", ["a"]]], "document": {"html": "x"}}
    assert conversation_of(row) == Conversation(("q",), None, frozenset({"context", "document"}))
    row = {"messages": USER, "context": "long"}
    assert conversation_of(row) == Conversation(("q",), None, frozenset({"context"}))


def test_texts_in_a_list_of_parts() -> None:
    assert conversation_of([{"role": "user", "content": ["a", "b"]}]).turns == ("ab",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": '{"prompt": "q"'}, '"body" is not JSON'),
        ({"prompt": [1, 2]}, '"prompt" is a list of token ids: give each prompt a row'),
        ({"role": "assistant", "content": "a"}, "the row has no message of a user, and others"),
    ],
)
def test_rows_that_are_refused(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        conversation_of(row)


@pytest.mark.parametrize("name", ["p.txt", "p.md", "p"])
def test_a_line_of_a_text_file_that_is_no_json_is_a_text(tmp_path: Path, name: str) -> None:
    texts = ["{name} is who?", "two", '{"a": 1} is what?']
    (tmp_path / name).write_text("\n".join(texts))
    with pytest.warns(SharpDraftNote, match="are asked as texts: 2, first line 1") as noted:
        found = from_file(tmp_path / name, 5)
    assert [task.turns for task in found] == [(text,) for text in texts] and len(noted) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '"a"\n// c', "line 2: not JSON"),
        ("p.jsonl", '"a"\nplain', "or name a file of texts .txt"),
        ("p.jsonl", '{"prompt": "a"},\n{"prompt": "b"}', "line 1: not JSON (Extra data"),
        ("p.jsonl", '"a"\nnull', "line 2: holds nothing"),
        ("p.jsonl", "5\n6", "line 1: holds 5 (int)"),
        ("p.csv", "prompt,prompt\na,b\n", "line 1: prompt is named twice"),
        ("p.tsv", 'prompt\nfine\n"a" b\nc', "the row from line 3 on: "),
        ("p.tsv", 'prompt\n"a\nb', "the row from line 2 on: "),
        ("p.txt", b"fine\ncaf\xe9", "line 2 is no UTF-8: save the file as UTF-8"),
    ],
)
def test_files_that_say_what_to_do(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SharpDraftError, match=re.escape(message)) as caught:
        from_file(tmp_path / name, 5)
    assert "\n" not in str(caught.value)


def test_gzip_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(gzip.compress(b"a"))
    assert from_file(tmp_path / "p.txt", 5)[0].turns == ("a",)
