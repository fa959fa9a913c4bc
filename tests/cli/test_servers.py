"""`bench --base-url` from outside, with servers that are scripted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharpdraft.lab.backends import server as module
from support.checkpoints import Checkpoints
from support.command import Result, Run, check_one_line
from support.server import Busy, Chat, Habit, Handler, Locked, Refusing, Serving, fresh


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


class Bench:
    """The command with its usual options, and the rows that it wrote."""

    def __init__(self, run: Run, saved: Checkpoints, folder: Path) -> None:
        self.run, self.saved, self.folder = run, saved, folder
        (folder / "prompts.txt").write_text("w9 w10\nw11\nw12 w13 w14\n")

    def __call__(self, *options: object) -> Result:
        line = ("bench", "--target", self.saved.target, "--prompts", self.folder / "prompts.txt")
        rest = ("--answer-tokens", 8, "--out", self.folder / "out")
        return self.run(*line, *rest, *options)

    @property
    def written(self) -> str:
        return (self.folder / "out" / "rows.jsonl").read_text()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.written.splitlines()[1:]]


@pytest.fixture
def bench(run: Run, saved: Checkpoints, tmp_path: Path) -> Bench:
    return Bench(run, saved, tmp_path)


USED = 'data: {{"choices": [], "usage": {{"completion_tokens": {}}}}}\n\n'


def stream(*texts: str, end: str = "data: [DONE]\n\n") -> bytes:
    events = (json.dumps({"choices": [{"text": text}]}) for text in texts)
    return ("".join(f"data: {event}\n\n" for event in events) + end).encode()


def test_servers_side_by_side(bench: Bench, server: tuple[str, type[Handler]]) -> None:
    servers = ("--base-url", f"frozen={server[0]},other={server[0]}", "--concurrency", 2)
    result = bench(*servers)
    assert result.code == 0, result.err
    assert "other" in result.out and "frozen" in result.out and "note:" not in result.err
    assert [row["requests"] for row in bench.rows] == [2, 1]
    assert bench.rows[0]["arms"]["frozen"]["counts"] == [6, 30, 10]
    assert bench.rows[0]["arms"]["frozen"]["counted"] == "usage"
    asked = len(server[1].asked)
    assert bench(*servers).code == 0
    assert len(server[1].asked) == asked, "a finished run is not run again"


def test_tokens_that_no_server_counts(bench: Bench, serving: Serving) -> None:
    """By the target's tokenizer, and said so once for each server."""
    url = serving(fresh(Habit, body=stream("w1 w2", " w3")))
    result = bench("--base-url", f"a={url},b={url}")
    assert result.code == 0, result.err
    assert result.err.count("does not count its tokens (usage): counted by the target's tok") == 2
    for row in bench.rows:
        assert row["arms"]["a"]["tokens"] == 3 and row["arms"]["a"]["counted"] == "tokenizer"
        assert "counts" not in row["arms"]["a"] and row["tokens"] == ["w1 w2 w3"]
    assert "nan" not in result.out


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (fresh(Habit, body=stream("w1", "w2", end="")), "the stream was cut off after 2 pieces"),
        (fresh(Habit, body=stream("w1", end=""), rest="break"), "peer closed connection"),
        (fresh(Habit, body=stream("")), "it wrote nothing: the stream ended without text in it"),
        (fresh(Habit, body=stream("w1", end=USED.format(-2))), "its usage says -2, which is no"),
        (fresh(Habit, body=b"data: " + b"[" * 20_000 + b"\n\n"), "it sent what is no completion"),
        (Refusing, "400 Bad Request: maximum context length is 7"),
        (Chat, "404 Not Found: Not Found; a server without /v1/completions is asked with --chat"),
    ],
)
def test_what_is_no_answer_is_one_line(
    bench: Bench, serving: Serving, handler: type[Handler], message: str
) -> None:
    url = serving(handler)
    check_one_line(bench("--base-url", url), url, "did not answer a prompt of ", message)
    assert all("skipped" in row for row in bench.rows)


def test_an_empty_answer_is_a_skipped_turn(bench: Bench, serving: Serving) -> None:
    """Not a turn of no tokens in which the arms agree."""

    class Silent(Habit):
        def complete(self, body: dict[str, Any]) -> None:
            # Each of the three prompts has a length of its own, modulo 3.
            said = "w1" if len(body["prompt"]) % 3 else ""
            self.body = stream(said, end=USED.format(0) + "data: [DONE]\n\n")
            super().complete(body)

    url = serving(fresh(Silent))
    result = bench("--base-url", f"a={url},b={url}")
    assert result.code == 3
    assert "skipped 1 turn, failed: " in result.err and "it wrote nothing" in result.err
    assert ["skipped" in row for row in bench.rows].count(True) == 1
    assert {row["arms"]["a"]["tokens"] for row in bench.rows if "arms" in row} == {1}


def test_a_character_in_two_events(bench: Bench, serving: Serving) -> None:
    url = serving(fresh(Habit, body=stream("w1 \ud83d", "\ude00")))
    result = bench("--base-url", f"a={url},b={url}")
    assert result.code == 0, result.err
    assert {row["tokens"][0] for row in bench.rows} == {"w1 😀"}


def test_a_busy_server_is_waited_for(
    bench: Bench, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(module, "sleep", sleep)
    handler = fresh(Busy, refusals=[(429, {"Retry-After": "9"}), (503, {})])
    assert bench("--base-url", serving(handler)).code == 0
    assert slept == [9, 2]
    assert [row["arms"]["server"].get("retries") for row in bench.rows] == [2, None, None]


def test_a_server_that_only_chats(bench: Bench, serving: Serving) -> None:
    handler = fresh(Chat, models=None)
    result = bench("--base-url", serving(handler), "--chat", "--served-model", "mine")
    assert result.code == 0, result.err
    assert [body["messages"] for body in handler.asked] == [
        [{"role": "user", "content": text}] for text in ("w9 w10", "w11", "w12 w13 w14")
    ]
    assert {body["model"] for body in handler.asked} == {"mine"}
    assert [row["tokens"] for row in bench.rows] == [["w9 w10 "], ["w11 "], ["w12 w13 w14 "]]
    assert {row["reasoning"][0] for row in bench.rows} == {"w1 w2 w3"}
    assert [row["arms"]["server"]["tokens"] for row in bench.rows] == [5, 4, 6]
    check_one_line(bench("--base-url", serving(handler)), "holds a run with other settings")


def test_a_system_message_is_a_message_of_the_chat(bench: Bench, serving: Serving) -> None:
    handler = fresh(Chat)
    result = bench("--base-url", serving(handler), "--chat", "--system", "w5 w6")
    assert result.code == 0, result.err
    assert [body["messages"][0] for body in handler.asked] == [
        {"role": "system", "content": "w5 w6"}
    ] * 3
    assert [row["tokens"] for row in bench.rows] == [["w9 w10 "], ["w11 "], ["w12 w13 w14 "]]


def test_arms_that_think_otherwise_differ(bench: Bench, serving: Serving) -> None:
    other = fresh(Chat, thoughts=("w1", " w4"))
    urls = f"a={serving(fresh(Chat))},b={serving(other)}"
    result = bench("--base-url", urls, "--chat")
    assert result.code == 0, result.err
    assert all("b" in row["differences"] for row in bench.rows)
    assert "b differs from a" in result.out


@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_key_is_used_and_nowhere_written(
    bench: Bench, serving: Serving, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    url, wrong = serving(fresh(Locked)), "sk-wrong-9876543210"

    def ask(key: str) -> Result:
        if by == "option":
            return bench("--base-url", url, "--api-key", key)
        monkeypatch.setenv("OPENAI_API_KEY", key)
        return bench("--base-url", url)

    refused = ask(wrong)
    check_one_line(refused, "401 Unauthorized: Incorrect API key", "--api-key or OPENAI_API_KEY")
    result = ask(Locked.key)
    assert result.code == 0, result.err
    for shown in (refused.err, result.out, result.err, bench.written):
        assert Locked.key not in shown and wrong not in shown
    assert Locked.key not in bench.run("bench", "--help").out


def test_each_server_by_its_own_name_of_the_model(bench: Bench, serving: Serving) -> None:
    models = json.dumps({"data": [{"id": "org/a"}, {"id": "b"}]})
    handlers = [fresh(Handler, models=models) for _ in range(3)]
    urls = dict(zip("xyz", map(serving, handlers), strict=True))
    named = ",".join(f"{name}={url}" for name, url in urls.items())
    result = bench("--base-url", named, "--served-model", "x=org/a,y=b")
    assert result.code == 0, result.err
    assert [handler.asked[0]["model"] for handler in handlers] == ["org/a", "b", "org/a"]
    assert result.err.count("serves org/a, b: the first is asked") == 1
    assert urls["z"] in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--base-url", "http://a,http://b"), "--base-url gives two without a name"),
        (("--base-url", "a=http://a,a=http://b"), "--base-url names a twice"),
        (("--base-url", "a="), "--base-url gives nothing for a"),
        (("--base-url", ","), "--base-url gives no address"),
        (("--base-url", "a=http://a", "--served-model", "b=m"), "--served-model names b"),
        (("--chat",), "--chat and --served-model are for servers: give --base-url"),
        (("--served-model", "m"), "--chat and --served-model are for servers: give --base-url"),
        (("--base-url", "http://me:hidden@127.0.0.1:9"), "server answers at http://127.0.0.1:9"),
    ],
)
def test_what_makes_no_sense_is_refused(
    bench: Bench, options: tuple[str, ...], message: str
) -> None:
    result = bench(*options)
    check_one_line(result, message)
    assert "hidden" not in result.err


def test_recorded_sessions_are_no_chat(run: Run, tmp_path: Path) -> None:
    result = run("bench", "--base-url", "http://127.0.0.1:9", "--chat", "--out", tmp_path / "out")
    check_one_line(result, "the recorded sessions are token ids", "give --prompts")


def test_a_chat_of_several_turns_is_refused(bench: Bench) -> None:
    (bench.folder / "prompts.txt").write_text('{"turns": ["w9", "w10"]}\n')
    check_one_line(bench("--base-url", "http://127.0.0.1:9", "--chat"), "has several turns")
