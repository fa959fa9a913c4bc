"""Servers from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sharpdraft.errors import SharpDraftError
from sharpdraft.lab.backends.server import Server
from support.checkpoints import Checkpoints
from support.command import Run
from support.server import Handler, Odd, Plain, Refusing, Serving


def test_a_server_answers_at_once_and_tells_its_drafts(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    answer = Server(url + "/v1/").answer([[1, 2], [10]], 4)
    assert answer["tokens"] == ["3 4 5 6 ", "11 12 13 14 "]
    assert answer["decoded"] == 8 and answer["counts"] == [4, 20, 4]
    assert 0 < answer["first"] <= answer["seconds"]
    assert {json.dumps(body["prompt"]) for body in handler.asked} == {"[1, 2]", "[10]"}
    assert all(
        body["temperature"] == 0 and body["model"] == "tiny" and body["stream"]
        for body in handler.asked
    )


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(SharpDraftError, match="no OpenAI-compatible server answers at http://127"):
        Server("http://127.0.0.1:9")


def test_a_server_of_another_model(server: tuple[str, type[Handler]]) -> None:
    with pytest.raises(SharpDraftError, match="serves tiny, not other"):
        Server(server[0], "other")


def test_a_server_that_refuses_a_prompt(server: tuple[str, type[Handler]]) -> None:
    with pytest.raises(SharpDraftError, match="too long"):
        Server(server[0]).answer([[1] * 101], 4)


def test_bench_of_servers(
    run: Run, saved: Checkpoints, tmp_path: Path, server: tuple[str, type[Handler]]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w9 w10\nw11\nw12 w13 w14\n")
    options = (
        "bench",
        "--target",
        saved.target,
        "--prompts",
        prompts,
        "--answer-tokens",
        8,
        "--concurrency",
        2,
    )
    options += ("--base-url", f"frozen={server[0]},other={server[0]}", "--out", tmp_path / "out")
    result = run(*options)
    assert result.code == 0, result.err
    assert "other" in result.out and "frozen" in result.out
    rows = [
        json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()[1:]
    ]
    assert [row["requests"] for row in rows] == [2, 1]
    assert rows[0]["arms"]["frozen"]["counts"] == [6, 30, 10]
    asked = len(server[1].asked)
    assert run(*options).code == 0 and len(server[1].asked) == asked, (
        "a finished run is not run again"
    )


def test_streams_of_every_making(serving: Serving) -> None:
    answer = Server(serving(Odd)).answer([[1, 2]], 9)
    assert answer["tokens"] == ["caf\u00e9 \u03b2"] and answer["decoded"] == 9
    assert answer["counts"] is None, "a server without metrics counts no drafts"


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (Refusing, "did not answer a prompt of 2 tokens: 400 Bad Request .*context length is 7"),
        (Plain, "did not answer a prompt of 2 tokens: .*text/event-stream"),
    ],
)
def test_answers_that_are_none(serving: Serving, handler: type[Handler], message: str) -> None:
    with pytest.raises(SharpDraftError, match=message) as caught:
        Server(serving(handler)).answer([[1, 2]], 9)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize(
    ("metrics", "counts"),
    [
        (COUNTERS, [15, 75, 30]),
        ("python_gc_objects_collected_total 5.0\n", None),
        ("<html>no metrics</html>\n", None),
    ],
)
def test_counts_in_metrics(serving: Serving, metrics: str, counts: list[int] | None) -> None:
    handler = type("Metrics", (Handler,), {"metrics": lambda self: metrics})
    assert Server(serving(handler)).counts() == counts
