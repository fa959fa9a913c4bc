"""Servers from outside, each with habits of its own."""

from __future__ import annotations

import json
import warnings
from email.utils import formatdate
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.lab.backends import server as module
from sharpdraft.lab.backends.server import Server
from support.server import (
    Busy,
    Chat,
    Connect,
    Handler,
    Loading,
    Locked,
    Plain,
    Refusing,
    Serving,
    fresh,
)


def test_a_server_answers_at_once_and_tells_its_drafts(
    server: tuple[str, type[Handler]], connect: Connect
) -> None:
    url, handler = server
    answer = connect(url + "/v1/").answer([[1, 2], [10]], 4)
    assert answer["tokens"] == ["3 4 5 6 ", "11 12 13 14 "]
    assert answer["decoded"] == 8 and answer["counted"] == "usage"
    assert answer["counts"] == [4, 20, 4] and answer["reasoning"] == [] and answer["retries"] == 0
    assert 0 < answer["first"] <= answer["seconds"]
    assert {json.dumps(body["prompt"]) for body in handler.asked} == {"[1, 2]", "[10]"}
    assert all(
        body["temperature"] == 0 and body["model"] == "tiny" and body["stream"]
        for body in handler.asked
    )


def test_a_server_behind_a_path(serving: Serving, connect: Connect) -> None:
    url = serving(fresh(Handler, prefix="/a/b"))
    answer = connect(f"{url}/a/b/v1").answer([[1]], 2)
    assert answer["tokens"] == ["2 3 "] and answer["counts"] == [1, 5, 1]


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (Refusing, "did not answer a prompt of 2 tokens: 400 Bad Request: maximum context len"),
        (Plain, "did not answer a prompt of 2 tokens: .*text/event-stream.*not streamed"),
        (Chat, "404 Not Found: Not Found; a server without /v1/completions is asked with --chat"),
    ],
)
def test_answers_that_are_none(
    serving: Serving, connect: Connect, handler: type[Handler], message: str
) -> None:
    with pytest.raises(SharpDraftError, match=message) as caught:
        connect(serving(handler)).answer([[1, 2]], 9)
    assert "\n" not in str(caught.value)


def test_one_of_several_prompts_that_is_refused(
    server: tuple[str, type[Handler]], connect: Connect
) -> None:
    asked = connect(server[0])
    with pytest.raises(SharpDraftError, match=r"prompt of 101 tokens: it sent an error: too long$"):
        asked.answer([[1], [1] * 101, [2]], 4)
    assert asked.answer([[1], [2]], 2)["tokens"] == ["2 3 ", "3 4 "]


# The model


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9",
        "http://127.0.0.1:port/v1",
        "http://127.0.0.1:99999",
        "127.0.0.1:9",
    ],
)
def test_a_server_that_is_not_there(url: str) -> None:
    with pytest.raises(SharpDraftError, match=r"no OpenAI-compatible server answers at .*127"):
        Server(url)


def test_a_name_and_password_in_an_address_are_not_shown() -> None:
    with pytest.raises(SharpDraftError, match="http://127") as caught:
        Server("http://me:hidden@127.0.0.1:9/v1")
    assert "hidden" not in str(caught.value)


def test_a_server_of_another_model(server: tuple[str, type[Handler]]) -> None:
    with pytest.raises(SharpDraftError, match="serves tiny, not other"):
        Server(server[0], "other")


NO_MODELS = ("{}", '{"data": []}', "[]", "<html></html>", "3", '[{"id": null}]', "[" * 20_000)


@pytest.mark.parametrize("models", [None, *NO_MODELS])
def test_a_server_that_lists_no_model(
    serving: Serving, connect: Connect, models: str | None
) -> None:
    handler = fresh(Handler, models=models)
    url = serving(handler)
    with pytest.raises(
        SharpDraftError, match=r"/v1/models: .*name what it serves with --served-mo"
    ):
        Server(url)
    assert connect(url, "mine").answer([[1]], 2)["tokens"] == ["2 3 "]
    assert handler.asked[0]["model"] == "mine"


def test_a_server_of_several_models(serving: Serving, connect: Connect) -> None:
    handler = fresh(Handler, models='[{"id": "a"}, {"id": "b"}]')
    url = serving(handler)
    with pytest.warns(SharpDraftNote, match="serves a, b: the first is asked"):
        first = connect(url)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = connect(url, "b")
    first.answer([[1]], 2)
    second.answer([[1]], 2)
    assert [body["model"] for body in handler.asked] == ["a", "b"]


# Waiting


class Clock:
    """Time that passes when it is asked for, and in sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slept = 1.0, list[float]()
        monkeypatch.setattr(module, "perf_counter", self)
        monkeypatch.setattr(module, "sleep", self.sleep)

    def __call__(self) -> float:
        self.now += 0.25
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


def test_a_busy_server_is_waited_for_and_the_wait_is_in_no_time(
    serving: Serving, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, said = Clock(monkeypatch), list[str]()
    handler = fresh(Busy, refusals=[])
    url = serving(handler)
    server = connect(url, say=said.append)
    plain = server.answer([[1]], 4)
    assert plain["retries"] == 0 and plain["seconds"] == 4 * 0.25
    past = formatdate(0, usegmt=True)
    handler.refusals = [
        (429, {}),
        (503, {"Retry-After": "7"}),
        (429, {"Retry-After": "0.5"}),
        (503, {"Retry-After": past}),
        (429, {"Retry-After": "soon"}),
    ]
    answer = server.answer([[1]], 4)
    assert clock.slept == [1, 7, 4, 8, 16]
    assert answer["retries"] == 5 and answer["tokens"] == plain["tokens"]
    assert (answer["seconds"], answer["first"]) == (plain["seconds"], plain["first"])
    assert said[1] == f"{url} is busy (503): asked again in 7 s" and len(said) == 5


def test_a_server_that_stays_busy(
    serving: Serving, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    server = connect(serving(fresh(Busy, refusals=[(429, {})] * 99)))
    with pytest.raises(SharpDraftError, match="429 Too Many Requests: Rate limit reached; it was"):
        server.answer([[1, 2]], 4)
    assert len(clock.slept) == 6 and all(b == 2 * a for a, b in pairwise(clock.slept))


@pytest.mark.parametrize("after", ["3600", formatdate(4e9, usegmt=True), "inf"])
def test_a_server_that_asks_to_wait_for_long(
    serving: Serving, connect: Connect, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    clock = Clock(monkeypatch)
    server = connect(serving(fresh(Busy, refusals=[(503, {"Retry-After": after})])))
    with pytest.raises(SharpDraftError, match=r"503 .*; it asks to wait for \S+ s: run this again"):
        server.answer([[1, 2]], 4)
    assert clock.slept == []


def test_a_server_that_is_still_loading(
    serving: Serving, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    assert connect(serving(fresh(Loading))).model == "tiny" and clock.slept == [1, 2]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=6))
def test_seconds_are_those_in_which_something_was_answered(spans: list[tuple[int, int]]) -> None:
    """With several at once: each second once, and none of those in which all wait."""
    seconds = {second for start, length in spans for second in range(start, start + length)}
    assert module._covered((start, start + length) for start, length in spans) == len(seconds)


# Chats and keys


def test_a_server_that_only_chats(serving: Serving, connect: Connect) -> None:
    handler = fresh(Chat)
    messages = {(1, 2): [{"role": "user", "content": "w7 w8"}]}
    server = connect(serving(handler), chat=messages, count=lambda text: len(text.split()))
    with pytest.warns(SharpDraftNote, match="by the target's tokenizer"):
        answer = server.answer([[1, 2]], 5)
    assert answer["tokens"] == ["w7 w8 "] and answer["reasoning"] == ["w1 w2 w3"]
    assert answer["decoded"] == 5 and answer["first"] <= answer["seconds"]
    assert handler.asked[0]["messages"] == messages[1, 2] and "prompt" not in handler.asked[0]


def test_a_server_that_does_not_chat(serving: Serving, connect: Connect) -> None:
    server = connect(serving(fresh(Handler)), chat={(1,): [{"role": "user", "content": "w7"}]})
    with pytest.raises(SharpDraftError, match="without /v1/chat/completions is asked without --ch"):
        server.answer([[1]], 5)


def test_a_key_is_sent_and_never_shown(serving: Serving, connect: Connect) -> None:
    url, wrong = serving(fresh(Locked)), "sk-wrong-9876543210"
    assert connect(url, key=f" {Locked.key}\n").answer([[1]], 2)["tokens"] == ["2 3 "]
    for key in (None, wrong):
        with pytest.raises(SharpDraftError, match=r"401 .*: Incorrect.*--api-key") as none:
            Server(url, key=key)
        assert wrong not in str(none.value) and none.value.__cause__ is None
    with pytest.raises(SharpDraftError, match="key has characters") as odd:
        Server(url, key=f"{wrong}\nHost: x")
    assert wrong not in str(odd.value)


# Metrics


COUNTERS = (
    "# HELP vllm:spec_decode_num_drafts Number of drafts.\n"
    "# TYPE vllm:spec_decode_num_drafts counter\n"
    'vllm:spec_decode_num_drafts_total{engine="0",model_name="a \\"}b{"} 1.2e+01\n'
    'vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 3 1700000000000\n'
    'vllm:spec_decode_num_draft_tokens_total{engine="0"} 75.0\n'
    'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 30.0\n'
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 999.0\n'
    "# TYPE vllm:spec_decode_num_drafts_created gauge\n"
    'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09\n'
    "python_gc_objects_collected_total 5.0\n"
)
SGLANG = (
    "# TYPE sglang:spec_accept_length gauge\n"
    'sglang:spec_accept_length{model_name="a"} 2.8\n'
    "# TYPE sglang:spec_verify_calls_total counter\n"
    'sglang:spec_verify_calls_total{model_name="a"} 8060.0\n'
)
LLAMA_CPP = "# TYPE llamacpp:tokens_predicted_total counter\nllamacpp:tokens_predicted_total 7801\n"


@pytest.mark.parametrize(
    ("metrics", "counts"),
    [
        (COUNTERS, [15, 75, 30]),
        (SGLANG, None),
        (LLAMA_CPP, None),
        ("python_gc_objects_collected_total 5.0\n", None),
        ("<html>no metrics</html>\n", None),
        ("vllm:spec_decode_num_drafts_total NaN\n", None),
        ("vllm:spec_decode_num_drafts_total +Inf\n", None),
    ],
)
def test_counts_in_metrics(
    serving: Serving, connect: Connect, metrics: str, counts: list[int] | None
) -> None:
    handler = type("Metrics", (Handler,), {"metrics": lambda self: metrics})
    assert connect(serving(handler)).counts() == counts


def test_counters_that_go_back_are_no_figures(serving: Serving, connect: Connect) -> None:
    class Anew(Handler):
        def complete(self, body: dict[str, Any]) -> None:
            if body["max_tokens"] == 3:
                type(self).drafts = 0
            super().complete(body)

    url = serving(fresh(Anew, drafts=7, accepted=3))
    server = connect(url)
    with pytest.raises(SharpDraftError, match="counts fewer drafts than before") as caught:
        server.answer([[1]], 3)
    assert str(caught.value).startswith(f"{url}/metrics ")
    assert server.answer([[1]], 4)["counts"] == [2, 10, 2]
