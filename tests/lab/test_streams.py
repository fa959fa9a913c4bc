"""Streams of servers from outside, each with habits of its own: what comes is an answer that is
read right, or one line on what was wrong."""

from __future__ import annotations

import json
import os
import signal
import warnings
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.lab.backends import server as module
from sharpdraft.lab.backends.stream import Streamed, StreamError
from support.server import Connect, Habit, Odd, Serving, fresh


def data(said: object) -> bytes:
    return b"data: " + (said if isinstance(said, bytes) else json.dumps(said).encode()) + b"\n\n"


def text(said: object, **rest: Any) -> bytes:
    return data({"choices": [{"index": 0, "text": said, "finish_reason": None, **rest}]})


def delta(**said: Any) -> bytes:
    return data({"choices": [{"index": 0, "delta": said}]})


def usage(tokens: object) -> bytes:
    return data({"choices": [], "usage": {"completion_tokens": tokens}})


USAGE = usage(5)
DONE = data(b"[DONE]")
BODY = text("a ") + text("b ") + text("c")
GOOD = BODY + USAGE + DONE
END = text(None, finish_reason="stop")


def running(written: str, *, last: bytes) -> bytes:
    """Every event says how many tokens came so far."""
    events = (
        {"choices": [{"text": each}], "usage": {"completion_tokens": number}}
        for number, each in enumerate(written, 1)
    )
    return b"".join(map(data, events)) + last


ANSWERS: dict[str, tuple[bytes, str, int, str]] = {
    "as it should be": (GOOD, "a b c", 5, "usage"),
    "lines end with CR LF": (GOOD.replace(b"\n", b"\r\n"), "a b c", 5, "usage"),
    "comments": (b": keep-alive\n\n:\n\n" + GOOD, "a b c", 5, "usage"),
    "a comment behind an id": (b"id: 1\n:\n\n:\n\n" + GOOD, "a b c", 5, "usage"),
    "comments between": (text("a ") + b": hm\n\n" + text("c") + USAGE + DONE, "a c", 5, "usage"),
    "named events": (b"event: completion\nid: 1\n" + GOOD, "a b c", 5, "usage"),
    "a retry line": (b"retry: 3000\n\n" + GOOD, "a b c", 5, "usage"),
    "no space": (GOOD.replace(b"data: ", b"data:"), "a b c", 5, "usage"),
    "usage so far": (running("abc", last=DONE), "abc", 3, "usage"),
    "usage null": (BODY + data({"choices": [], "usage": None}) + DONE, "a b c", 3, "tokenizer"),
    "usage 0": (BODY + data({"usage": {"completion_tokens": 0}}) + DONE, "a b c", 3, "tokenizer"),
    "no usage": (BODY + DONE, "a b c", 3, "tokenizer"),
    "no [DONE], usage": (BODY + USAGE, "a b c", 5, "usage"),
    "no [DONE], a reason": (BODY + END, "a b c", 3, "tokenizer"),
    "text null": (BODY + END + USAGE + DONE, "a b c", 5, "usage"),
    "empty text first": (text("") + GOOD, "a b c", 5, "usage"),
    "error null": (data({"error": None, "choices": [{"text": "a"}]}) + DONE, "a", 1, "tokenizer"),
    "more behind [DONE]": (GOOD + text("d"), "a b c", 5, "usage"),
    "no blank line at the end": (BODY + END + b"data: [DONE]", "a b c", 3, "tokenizer"),
    "usage as a string": (BODY + usage("5") + DONE, "a b c", 5, "usage"),
    "usage before the text": (usage(1) + BODY + DONE, "a b c", 3, "tokenizer"),
    "a BOM": (b"\xef\xbb\xbf" + GOOD, "a b c", 5, "usage"),
    "a BOM in the text": (text("\ufeffa") + DONE, "\ufeffa", 1, "tokenizer"),
    "a character in halves": (text("\ud83d") + text("\ude00 b") + DONE, "😀 b", 2, "tokenizer"),
    "half a character": (text("a\ud83d") + USAGE + DONE, "a\ufffd", 5, "usage"),
    "a message": (
        data({"choices": [{"message": {"role": "assistant", "content": "a b"}}]}) + DONE,
        "a b",
        2,
        "tokenizer",
    ),
    "parts": (
        delta(content=[{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]) + DONE,
        "a b",
        2,
        "tokenizer",
    ),
    "a refusal": (delta(content=None, refusal="a b") + DONE, "a b", 2, "tokenizer"),
    "a ping": (data({"type": "ping"}) + GOOD, "a b c", 5, "usage"),
    "more than ASCII": (
        data(b'{"choices": [{"text": "\xce\xb2"}]}') + DONE,
        "β",
        1,
        "tokenizer",
    ),
}


@pytest.mark.filterwarnings("ignore::sharpdraft.errors.SharpDraftNote")
@pytest.mark.parametrize("habit", ANSWERS)
def test_streams_that_are_answers(serving: Serving, connect: Connect, habit: str) -> None:
    body, written, decoded, counted = ANSWERS[habit]
    url = serving(fresh(Habit, body=body))
    answer = connect(url, count=lambda text: len(text.split())).answer([[1, 2, 3]], 8)
    assert answer["tokens"] == [written]
    assert (answer["decoded"], answer["counted"]) == (decoded, counted)
    assert answer["counts"] is None, "a server without metrics counts no drafts"
    assert 0 < answer["first"] <= answer["seconds"]


THOUGHTS: dict[str, dict[str, Any]] = {
    "reasoning_content": {"reasoning_content": "hm hm"},
    "said twice": {"reasoning": "hm hm", "reasoning_details": [{"text": "hm hm"}]},
    "reasoning_details": {
        "reasoning_details": [
            {"type": "reasoning.text", "text": "hm "},
            {"type": "reasoning.summary", "summary": "hm"},
            {"type": "reasoning.encrypted", "data": "x"},
        ]
    },
    "thinking": {"thinking": "hm hm"},
    "thinking in parts": {
        "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm hm"}]}]
    },
}


@pytest.mark.filterwarnings("ignore::sharpdraft.errors.SharpDraftNote")
@pytest.mark.parametrize("habit", THOUGHTS)
def test_thoughts_are_read_wherever_they_are(
    serving: Serving, connect: Connect, habit: str
) -> None:
    url = serving(fresh(Habit, body=delta(**THOUGHTS[habit]) + delta(content="a") + DONE))
    answer = connect(url, count=lambda text: len(text.split())).answer([[1]], 8)
    assert answer["reasoning"] == ["hm hm"] and answer["tokens"] == ["a"]
    assert answer["decoded"] == 3


@pytest.mark.parametrize(
    "kind", ["Text/Event-Stream", "text/event-stream ; charset=latin-1", "text/event-stream;a=b"]
)
def test_a_stream_by_any_spelling_of_its_kind(
    serving: Serving, connect: Connect, kind: str
) -> None:
    """A stream is UTF-8 whatever else it says."""
    url = serving(
        fresh(Habit, body=data('{"choices": [{"text": "β"}]}'.encode()) + USAGE, kind=kind)
    )
    assert connect(url).answer([[1]], 8)["tokens"] == ["β"]


def test_bytes_one_by_one(serving: Serving, connect: Connect) -> None:
    answer = connect(serving(Odd)).answer([[1, 2]], 9)
    assert answer["tokens"] == ["caf\u00e9 \u03b2"] and answer["decoded"] == 9


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "cut off": ({"body": text("a") + text("b")}, "cut off after 2 pieces of text"),
    "cut off, usage so far": ({"body": running("ab", last=b"")}, "cut off after 2 pieces"),
    "nothing": ({"body": b": hm\n\n"}, "cut off after 0 pieces"),
    "[DONE] alone": ({"body": DONE}, "it wrote nothing: the stream ended without text in it$"),
    "no text": ({"body": END + usage(0) + DONE}, "it wrote nothing: .* without text in it$"),
    "no text, counted": (
        {"body": text("") + USAGE + DONE},
        "it wrote nothing: .*, though its usage counts 5 tokens$",
    ),
    "cut off, usage first": ({"body": usage(1) + BODY}, "cut off after 3 pieces"),
    **{
        f"usage {said}": (
            {"body": BODY + usage(said) + DONE},
            rf"usage says {said}, which is no nu",
        )
        for said in (-2, 2.5, 10**12)
    },
    "usage without end": (
        {"body": BODY + data(b'{"usage": {"completion_tokens": 1e999}}') + DONE},
        "its usage says Infinity, which is no number of tokens$",
    ),
    "nested deeply": ({"body": data(b"[" * 20_000) + DONE}, r"what is no completion: \[\[\["),
    "an error nested deeply": (
        {"body": b"event: error\ndata: " + b'{"error":' * 20_000 + b"\n\n"},
        "it sent an error: {",
    ),
    "two choices": (
        {"body": data({"choices": [{"text": "a"}] * 2}) + DONE},
        "several answers",
    ),
    "two choices by turns": ({"body": text("a") + text("b", index=1) + DONE}, "several answers"),
    "a choice with an error": (
        {"body": text("a") + text("", error={"message": "upstream died", "code": 502}) + DONE},
        "it sent an error: upstream died$",
    ),
    "a detail": ({"body": text("a") + data({"detail": "no"}) + DONE}, "it sent an error: no$"),
    "a message that is none": (
        {"body": text("a") + data({"code": 5, "message": "no"}) + DONE},
        "it sent an error: no$",
    ),
    "an error by its type": (
        {"body": text("a") + data({"type": "error", "code": 7}) + DONE},
        'it sent an error: {"type": "error", "code": 7}$',
    ),
    "a tool": (
        {"body": delta(content="a") + delta(tool_calls=[{"index": 0}]) + DONE},
        "it calls a tool",
    ),
    "filtered": ({"body": BODY + text("", finish_reason="content_filter")}, "content_filter"),
    "a part that is no text": (
        {"body": delta(content=[{"type": "image_url", "image_url": "x"}]) + DONE},
        "what is no completion",
    ),
    "error": (
        {"body": text("a") + data({"error": {"message": "out of\nmemory"}}) + DONE},
        "it sent an error: out of memory$",
    ),
    "error as text": ({"body": data({"error": "no \ud83d"})}, "it sent an error: no \ufffd$"),
    "error without a message": ({"body": data({"error": {"code": 7}})}, r'error: {"code": 7}$'),
    "an object that is an error": (
        {"body": text("a") + data({"object": "error", "message": "engine died", "code": 500})},
        "it sent an error: engine died$",
    ),
    "an error event": ({"body": b"event: error\ndata: engine died\n\n"}, "error: engine died$"),
    "an error event in JSON": (
        {"body": b'event: error\ndata: {"error": {"message": "died"}}\n\n'},
        "it sent an error: died$",
    ),
    "broken off": ({"body": text("a", finish_reason="abort") + DONE}, "finish_reason abort"),
    "no JSON": ({"body": text("a") + data(b"oh no") + DONE}, "what is no completion: oh no$"),
    "a list": ({"body": data([1]) + DONE}, r"what is no completion: \[1\]$"),
    "text that is none": ({"body": text(["a"]) + DONE}, "what is no completion"),
    "broken inside of a chunk": ({"body": text("a"), "rest": "break"}, "peer closed connection"),
    "silence": ({"body": text("a"), "rest": "silent"}, r"it said nothing for 0\.3 s$"),
    "one body": (
        {"body": b'{"choices": [{"text": "abc"}]}', "kind": "application/json"},
        r'stream \(text/event-stream\) was asked for, and application/json came: {"choices',
    ),
    "a page": ({"body": b"<html>\nhi", "kind": "text/html"}, "text/html came: <html> hi$"),
}


@pytest.mark.parametrize("habit", FAILURES)
def test_streams_that_are_no_answers(
    serving: Serving, connect: Connect, monkeypatch: pytest.MonkeyPatch, habit: str
) -> None:
    """One line, which names the server, the prompt and what was said; the next prompt is asked."""
    about, message = FAILURES[habit]
    monkeypatch.setattr(module, "_TIMEOUT", 0.3)
    handler = fresh(Habit, **about)
    url = serving(handler)
    server = connect(url)
    with pytest.raises(SharpDraftError, match=message) as caught:
        server.answer([[1, 2, 3]], 9)
    assert str(caught.value).startswith(f"{url} did not answer a prompt of 3 tokens: ")
    assert "\n" not in str(caught.value)
    handler.body, handler.rest, handler.kind = GOOD, "end", "text/event-stream"
    assert server.answer([[1, 2, 3]], 9)["tokens"] == ["a b c"]


@pytest.mark.parametrize("rest", ["break", "silent"])
def test_how_a_connection_ends_behind_an_answer_is_no_matter(
    serving: Serving, connect: Connect, monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    monkeypatch.setattr(module, "_TIMEOUT", 0.3)
    url = serving(fresh(Habit, body=BODY + END + USAGE, rest=rest))
    answer = connect(url).answer([[1]], 9)
    assert answer["tokens"] == ["a b c"] and answer["decoded"] == 5


def test_who_counted_is_noted_once(serving: Serving, connect: Connect) -> None:
    server = connect(serving(fresh(Habit, body=BODY + DONE)))
    with pytest.warns(SharpDraftNote, match="does not count its tokens.*events that brought text"):
        answer = server.answer([[1], [2]], 9)
    assert answer["decoded"] == 6 and answer["counted"] == "events"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        server.answer([[1]], 9)


def test_ctrl_c_ends_a_stream_at_once(serving: Serving, connect: Connect) -> None:
    class Interrupting(Habit):
        def complete(self, body: dict[str, Any]) -> None:
            if body["max_tokens"] == 9:
                os.kill(os.getpid(), signal.SIGINT)
            super().complete(body)

    handler = fresh(Interrupting, body=BODY, rest="silent")
    server = connect(serving(handler))
    with pytest.raises(KeyboardInterrupt):
        server.answer([[1]], 9)
    handler.body = GOOD
    assert server.answer([[1]], 8)["tokens"] == ["a b c"]


@dataclass
class Event:
    """As httpx_sse has them."""

    data: str
    event: str = "message"


WORDS = (
    "choices delta message text content reasoning reasoning_details thinking refusal index usage"
    " completion_tokens finish_reason error detail object type tool_calls"
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters()),
    st.just("\ud83d"),
)
SAID = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS.split()), inner, max_size=3)
    ),
)
CHOICE = st.dictionaries(st.sampled_from(WORDS.split()), SAID, max_size=3)
EVENTS = st.one_of(
    SAID,
    st.builds(lambda choice: {"choices": [choice]}, CHOICE),
    st.builds(lambda choice: {"choices": [{"delta": choice}]}, CHOICE),
    st.builds(lambda said: {"usage": {"completion_tokens": said}}, SAID),
)


@given(st.lists(EVENTS, max_size=4), st.booleans())
def test_whatever_comes_is_an_answer_or_said(events: list[Any], named: bool) -> None:
    answer, wrong = Streamed(0.0), ""
    try:
        for each in [*map(json.dumps, events), "[DONE]"]:
            event = Event(each, "error" if named and each != "[DONE]" else "message")
            if not answer.take(cast(Any, event), 1.0):
                break
        answer.end()
    except StreamError as error:
        wrong = str(error)
    if wrong:
        assert wrong.encode() and "\n" not in wrong
    else:
        assert (answer.text + answer.reasoning).encode()
        assert answer.count(len)[0] > 0
