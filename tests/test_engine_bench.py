"""Benching engines and servers from outside, with an HTTP server and an engine child that are
scripted here."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from conftest import Checkpoints, Run, check_one_line
from sharpdraft.errors import SharpDraftError
from sharpdraft.lab.backends.server import Server
from sharpdraft.lab.backends.vllm import Engine, speculative_config
from sharpdraft.lab.engines import Group, Prompt, asked_for, groups_of, recorded_prompts, run_groups
from sharpdraft.lab.report import summarise
from sharpdraft.lab.runs import Plan, arm
from sharpdraft.method.policies import FixedSlope
from sharpdraft.method.settings import asked_policy
from sharpdraft.workloads.tasks import Recording, Turn

EDGES = (16, 32, 64)


class Handler(BaseHTTPRequestHandler):
    """Answers a prompt with its ids counted on, in chunks of one to three tokens, and counts drafts
    as vLLM does."""

    drafts = accepted = 0
    asked: list[dict[str, Any]]
    lock = threading.Lock()

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._say(json.dumps({"data": [{"id": "tiny"}]}))
        elif self.path == "/metrics":
            cls = type(self)
            labels = '{engine="0",model_name="a b}"}'
            self._say(
                f"# HELP vllm:spec_decode_num_drafts_total Number.\n"
                f"vllm:spec_decode_num_drafts_total{labels} {cls.drafts:.1f}\n"
                f"vllm:spec_decode_num_draft_tokens_total{labels} {cls.drafts * 5:.1f}\n"
                f"vllm:spec_decode_num_accepted_tokens_total{labels} {cls.accepted:.1f}\n"
                f'vllm:spec_decode_num_drafts_by_context_total{{context="0-512",engine="0"}} 99999.0\n'
            )
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cls = type(self)
        with cls.lock:
            cls.asked.append(body)
        if len(body["prompt"]) > 100:
            self._say('data: {"error": {"message": "too long"}}\n\n')
            return
        words = [str(body["prompt"][-1] + 1 + i) for i in range(body["max_tokens"])]
        lines = []
        while words:
            chunk, words = words[:3], words[3:]
            with cls.lock:
                cls.drafts += 1
                cls.accepted += len(chunk) - 1
            lines.append(json.dumps({"choices": [{"text": " ".join(chunk) + " "}]}))
        lines.append(
            json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        )
        self._say("".join(f"data: {line}\n\n" for line in lines) + "data: [DONE]\n\n")

    def _say(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    handler = type("Fresh", (Handler,), {"asked": [], "drafts": 7, "accepted": 3})
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", handler
    running.shutdown()
    running.server_close()


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


# Groups


def test_groups_hold_prompts_of_one_bucket() -> None:
    lengths = [10, 40, 12, 16, 17, 64, 65]
    prompts = [Prompt(f"p{n}", tuple(range(n)), n) for n in lengths]
    groups = groups_of(prompts, EDGES, 2)
    assert [[len(p) for p in group.prompts] for group in groups] == [[10, 12], [16], [17], [40, 64]]
    assert [group.name for group in groups] == ["p10+p12", "p16", "p17", "p40+p64"]
    assert [group.answer_tokens for group in groups] == [12, 16, 17, 64]


def test_recorded_prompts_are_the_labs_turns() -> None:
    recording = Recording("r", tuple(range(64)), (Turn(0, 2, 40), Turn(40, 44, 64)))
    plan = Plan("t", "d", 6, (arm("ar", FixedSlope(64)),), (), 1, EDGES)
    assert (
        recorded_prompts([recording], plan, 64) == [Prompt("r-0", (0, 1), 38)]
        or recorded_prompts([recording], plan, 64) == []
    )


def test_what_arms_ask_of_an_engine() -> None:
    policy = FixedSlope(64, slope=4.0)
    assert asked_for(arm("ar", policy)) is None
    assert asked_policy(asked_for(arm("frozen", policy)), None) is None
    assert asked_policy(asked_for(arm("sharpdraft", policy)), None) == policy
    assert asked_policy(asked_for(arm("sharpdraft@99", policy)), None) == FixedSlope(99, slope=4.0)
    assert asked_policy(asked_for(arm("fixed@1.2", policy)), None).scale == 1.2  # type: ignore[union-attr]


class Scripted:
    def __init__(
        self, log: list[str], name: str, accepted: int, wrong_at: int | None = None
    ) -> None:
        self.log, self.name, self.accepted, self.wrong_at = log, name, accepted, wrong_at

    def answer(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[int] = ()
    ) -> dict[str, Any]:
        self.log.append(self.name)
        texts = [[p[-1]] * max_tokens for p in prompts]
        if self.wrong_at is not None:
            texts[-1][self.wrong_at] = -1
        rounds = [[(len(p), 5, self.accepted)] * 3 for p in prompts] if self.accepted else []
        return {
            "tokens": texts,
            "rounds": rounds,
            "first": 0.5,
            "seconds": 2.0,
            "decoded": max_tokens * len(prompts),
        }


def test_arms_take_turns_and_rows_become_the_labs_table() -> None:
    groups = [Group(f"g{i}", ((1,) * 10, (2,) * 12), 6) for i in range(4)]
    log: list[str] = []
    rows: list[dict[str, Any]] = []
    backends = {
        "ar": Scripted(log, "ar", 0),
        "frozen": Scripted(log, "frozen", 1),
        "sharpdraft": Scripted(log, "sharpdraft", 2),
    }
    run_groups(groups, backends, (), [], rows.append)
    names = list(backends)
    assert log == [*names, "frozen", "sharpdraft", "ar", "sharpdraft", "ar", "frozen", *names]
    assert [list(row["arms"]) for row in rows] == [["ar", "frozen", "sharpdraft"]] * 4
    assert all(row["differences"] == {} and row["context"] == 11 for row in rows)
    cells = {cell.arm: cell for cell in summarise(json.loads(json.dumps(rows)), EDGES)}
    assert cells["frozen"].mal and cells["frozen"].mal.value == 2.0
    assert cells["sharpdraft"].mal and cells["sharpdraft"].mal.value == 3.0
    assert cells["sharpdraft"].speedup and cells["sharpdraft"].speedup.value == 1.0
    assert cells["ar"].speed and cells["ar"].speed.value == 6.0
    again: list[dict[str, Any]] = []
    run_groups(groups, backends, (), rows[:3], again.append)
    assert [row["session"] for row in again] == ["g3"]


def test_a_difference_is_told() -> None:
    rows: list[dict[str, Any]] = []
    log: list[str] = []
    backends = {"ar": Scripted(log, "ar", 0), "frozen": Scripted(log, "frozen", 1, wrong_at=4)}
    run_groups([Group("g", ((1,), (2,)), 6)], backends, (), [], rows.append)
    assert rows[0]["differences"] == {"frozen": {"request": 1, "at": 4}}


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["DFlashDraftModel"]}, {"method": "dflash"}),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, {"method": "eagle3"}),
        ({"speculators_model_type": "eagle3"}, {"method": "eagle3"}),
        ({"pard_token": 7}, {"method": "draft_model", "parallel_drafting": True}),
    ],
)
def test_what_vllm_is_told_of_a_drafter(
    tmp_path: Path, config: dict[str, Any], method: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = {**method, "model": str(tmp_path), "num_speculative_tokens": 4}
    assert speculative_config(tmp_path, 4) == expected


# The command


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "llama.cpp"), "known is vllm"),
        (("--engine", "vllm", "--base-url", "http://x"), "not both"),
        (("--engine", "vllm", "--engine-args", "{"), "no JSON"),
        (("--engine", "vllm", "--arms", "window@64"), "leave out window@64"),
        (
            ("--engine", "vllm", "--reference", "8"),
            "--reference: reference (N0) must be above top_k",
        ),
        (("--base-url", "http://127.0.0.1:9"), "no OpenAI-compatible server"),
    ],
)
def test_bench_refuses(
    run: Run, saved: Checkpoints, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w9\n")
    common = ("bench", "--target", saved.target, "--drafter", saved.drafter, "--prompts", prompts)
    result = run(*common, *options)
    check_one_line(result, message)


def test_an_engine_where_vllm_is_not_installed(tmp_path: Path) -> None:
    """The child is a process of its own, so that what is missing here is missing there."""
    if "vllm" in sys.modules or Engine is None:
        pytest.skip("vLLM is installed")
    with pytest.raises(SharpDraftError, match="install vllm"):
        Engine(tmp_path, None, 5, None, log=tmp_path / "log")


def test_an_engine_child_that_dies(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(SharpDraftError, match="exit code 3"):
        Engine(tmp_path, None, 5, None, log=tmp_path / "log", python=str(python))
