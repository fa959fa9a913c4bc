"""What the chat template is told, and what stands between turns, from outside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from sharpdraft.errors import SharpDraftError
from sharpdraft.train import pipeline
from sharpdraft.workloads.tasks import built_in
from support.checkpoints import CHAT, Checkpoints
from support.command import Run, check_one_line
from support.tiny import continuation

THINKING = CHAT.replace(
    "assistant\n{% endif %}", "assistant\n{% if enable_thinking %}w50 {% endif %}w51 {% endif %}"
)
# Ends an answer with "w40", which the tokenizer does not call its end.
OTHER_END = CHAT.replace("<|im_end|>", "w40")
END, WRONG = 40, 41
WRITTEN = 13
"""What the target does write, for an end."""

Edited = Callable[..., Path]


@pytest.fixture
def edited(saved: Checkpoints, tmp_path: Path) -> Edited:
    """A copy of the target with another template and other ends of a turn."""

    def make(template: str | None, ends: list[int] | None = None) -> Path:
        target = shutil.copytree(saved.target, tmp_path / "edited", dirs_exist_ok=True)
        (target / "chat_template.jinja").unlink()
        if template is not None:
            (target / "chat_template.jinja").write_text(template)
        if ends is not None:
            for name in ("config.json", "generation_config.json"):
                config = json.loads((target / name).read_text())
                (target / name).write_text(json.dumps(config | {"eos_token_id": ends}))
        tokenizer = AutoTokenizer.from_pretrained(target)
        tokenizer.add_special_tokens({"additional_special_tokens": ["w40", f"w{WRITTEN}"]})
        template_file = (target / "chat_template.jinja").read_text() if template else None
        tokenizer.chat_template = template_file
        tokenizer.save_pretrained(target)
        return target

    return make


def prompts_of(folder: Path, *rows: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def rendered(target: Path, messages: list[dict[str, str]], **told: Any) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(target)
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **told
    )
    return list(ids)


def said(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]


def test_behind_a_cut_answer_stands_the_templates_end_of_turn(
    run: Run, saved: Checkpoints, edited: Edited, tmp_path: Path
) -> None:
    """Not the first of several ends, as Llama 3.1's configuration has them."""
    target, out = edited(OTHER_END, [WRONG, END]), tmp_path / "out"
    prompts = prompts_of(tmp_path, {"turns": ["w9", "w30", "w12"]})
    result = run(
        *("bench", "--target", target, "--drafter", saved.drafter, "--prompts", prompts),
        *("--answer-tokens", 6, "--arms", "ar,frozen", "--out", out),
    )
    assert (result.code, result.err) == (0, "")
    _, *rows = rows_in(out)
    tokenizer = AutoTokenizer.from_pretrained(target)
    contents: list[str] = []
    for row, turn in zip(rows, ("w9", "w30", "w12"), strict=True):
        contents.append(turn)
        ids = rendered(target, said(*contents))
        assert row["context"] == len(ids)
        assert row["tokens"] == continuation(saved.model, ids, 6, eos_token_id=[WRONG, END])
        assert row["tokens"][-1] not in (WRONG, END), "an answer that is cut"
        contents.append(tokenizer.decode(row["tokens"]))


def test_an_end_that_the_configuration_does_not_name_is_a_stop(
    run: Run, saved: Checkpoints, edited: Edited
) -> None:
    target = edited(CHAT.replace("<|im_end|>", f"w{WRITTEN}"), [2])
    for text in (f"w{i} w20" for i in range(6, WRITTEN)):
        ids = rendered(target, said(text))
        answer = continuation(saved.model, ids, 60, eos_token_id=[2, WRITTEN])
        if answer[-1] == WRITTEN:
            break
    assert answer[-1] == WRITTEN
    result = run("generate", text, "--target", target, "--arm", "ar", "--json")
    assert result.err.startswith("note: the target's chat template ends a turn with w13 (13)")
    found = json.loads(result.out)
    assert (found["token_ids"], found["finish"]) == (answer, "stop")


def test_record_puts_the_templates_end_behind_cut_answers(
    run: Run, edited: Edited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_writing_dtype", lambda device: None)
    monkeypatch.setattr("sharpdraft.train.sessions._ANSWER_LIMIT", 6)
    ends = [WRITTEN, WRONG, END]
    target, file = edited(OTHER_END, ends), tmp_path / "r.safetensors"
    options = ("--sessions", 1, "--length", 240, "--system", "w7")
    result = run("record", "--target", target, "--out", file, *options)
    assert (result.code, result.err) == (0, "")
    task = built_in()[0]
    tensors = load_file(file)
    tokens, turns = (tensors[f"{task.name}.{part}"].tolist() for part in ("tokens", "turns"))
    system = [{"role": "system", "content": "w7"}]
    assert tokens[: turns[0][1]] == rendered(target, system + said(task.turns[0]))
    answers = [(tokens[answer:end], tokens[end]) for _, answer, end in turns[:-1]]
    cut = {behind for answer, behind in answers if answer[-1] not in ends}
    ended = {behind for answer, behind in answers if answer[-1] == WRITTEN}
    assert (cut, ended) == ({END}, {1}), "the next turn's first token is 1"
    assert all(not {*answer[:-1]} & {*ends} for answer, _ in answers)


def test_generate_tells_the_template(run: Run, saved: Checkpoints, edited: Edited) -> None:
    target = edited(THINKING)
    options = ("--target", target, "--drafter", saved.drafter, "--max-new-tokens", 8)
    told = ("--system", "w7 w8", "--template-arg", "enable_thinking=true")
    result = run("generate", "w9", *options, *told, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    messages = [{"role": "system", "content": "w7 w8"}, *said("w9")]
    ids = rendered(target, messages, enable_thinking=True)
    assert ids[-2:] == [50, 51] and found["prompt_tokens"] == len(ids)
    assert found["token_ids"] == continuation(saved.model, ids, 8)
    assert found["template"] == {"system": "w7 w8", "arguments": {"enable_thinking": True}}
    shown = run("generate", "w9", *options, *told)
    assert 'chat template: system "w7 w8", enable_thinking=true' in shown.err
    unset = run("generate", "w9", *options, "--json")
    assert json.loads(unset.out)["template"] == {}
    assert unset.err.startswith("note: the target's chat template knows enable_thinking")
    assert unset.err.count("\n") == 1


def test_generate_without_a_chat_template_says_so(
    run: Run, saved: Checkpoints, edited: Edited
) -> None:
    target = edited(None)
    options = ("--target", target, "--drafter", saved.drafter, "--max-new-tokens", 20, "--json")
    result, raw = run("generate", "w9 w30", *options), run("generate", "w9 w30", *options, "--raw")
    for each in (result, raw):
        assert json.loads(each.out)["token_ids"] == continuation(saved.model, [9, 30], 20)
        assert json.loads(each.out)["template"] == {"raw": True}
    assert result.err.startswith("note: the target has no chat template: the text is continued")
    assert raw.err == ""
    line = run("generate", "w9", *options, "--system", "w7")
    check_one_line(line, "the target has no chat template")


def test_options_that_make_no_sense(
    run: Run, saved: Checkpoints, edited: Edited, tmp_path: Path
) -> None:
    both = ("--target", saved.target, "--drafter", saved.drafter)
    prompts = prompts_of(tmp_path, {"turns": ["w9", "w10"]})
    for command in (("generate", "w9"), ("bench", "--prompts", prompts)):
        check_one_line(
            run(*command, *both, "--raw", "--system", "w7"), "--raw leaves the chat template out"
        )
        check_one_line(run(*command, *both, "--template-arg", "thinking"), "write NAME=VALUE")
        check_one_line(
            run(*command, *both, "--template-arg", "messages=[]"), "messages: that is no variable"
        )
    check_one_line(
        run("bench", *both, "--prompts", prompts, "--raw"), "--raw is for single prompts"
    )
    refusing = edited("{{ raise_exception('only on Sundays') }}")
    # Met before weights are read.
    (refusing / "model.safetensors").unlink()
    for command in (("generate", "w9"), ("bench", "--prompts", prompts)):
        line = run(*command, "--target", refusing, "--drafter", saved.drafter)
        check_one_line(line, "refuses a conversation of user: only on Sundays")


def test_bench_tells_the_template_and_its_rows_say_so(
    run: Run, saved: Checkpoints, edited: Edited, tmp_path: Path
) -> None:
    target = edited(THINKING)
    prompts = prompts_of(
        tmp_path,
        {"prompt": "w9", "name": "a"},
        {"messages": [{"role": "system", "content": "w5"}, *said("w9")], "name": "b"},
    )
    command = ("bench", "--target", target, "--drafter", saved.drafter, "--prompts", prompts)
    options = ("--answer-tokens", 6, "--arms", "ar,frozen")
    told = ("--system", "w7", "--template-arg", "enable_thinking=false")
    result = run(*command, *options, *told, "--out", tmp_path / "told", "--json")
    assert (result.code, result.err) == (0, "")
    template = {"system": "w7", "arguments": {"enable_thinking": False}}
    assert json.loads(result.out)["template"] == template
    header, *rows = rows_in(tmp_path / "told")
    assert header["plan"]["template"] == template
    for row, system in zip(rows, ("w7", "w5"), strict=True):
        messages = [{"role": "system", "content": system}, *said("w9")]
        ids = rendered(target, messages, enable_thinking=False)
        assert row["context"] == len(ids)
        assert row["tokens"] == continuation(saved.model, ids, 6)
    again = run(*command, *options, *told, "--out", tmp_path / "told")
    assert 'chat template: system "w7", enable_thinking=false' in again.out
    other = run(*command, *options, "--system", "w7", "--out", tmp_path / "told")
    assert other.code == 1 and "holds a run with other settings" in other.err


def test_bench_of_raw_texts(run: Run, saved: Checkpoints, edited: Edited, tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, {"prompt": "w9 w30"})
    for target in (saved.target, edited(None)):
        out = tmp_path / f"out-{target.name}"
        result = run(
            *("bench", "--target", target, "--drafter", saved.drafter, "--prompts", prompts),
            *("--raw", "--answer-tokens", 9, "--arms", "ar,frozen", "--out", out),
        )
        assert (result.code, result.err) == (0, "")
        assert "chat template: none, texts as they are" in result.out
        header, row = rows_in(out)
        assert header["plan"]["template"] == {"raw": True}
        assert row["tokens"] == continuation(saved.model, [9, 30], 9)


def test_a_template_as_it_is_leaves_no_trace(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    """So that runs from before there was anything to tell it go on."""
    prompts = prompts_of(tmp_path, {"prompt": "w9"})
    result = run(
        *("bench", "--target", saved.target, "--drafter", saved.drafter, "--prompts", prompts),
        *("--answer-tokens", 4, "--arms", "ar", "--out", tmp_path / "out"),
    )
    assert result.code == 0 and "chat template" not in result.out
    assert "template" not in rows_in(tmp_path / "out")[0]["plan"]


def test_what_nothing_here_renders_is_refused(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, {"prompt": "w9"})
    servers = ("bench", "--base-url", "http://127.0.0.1:9")
    for option in (("--system", "w7"), ("--template-arg", "a=1"), ("--raw",)):
        for command in (("bench",), servers):
            check_one_line(run(*command, *option), "written with the chat template as it is")
    chat = (*servers, "--target", saved.target, "--prompts", prompts, "--chat")
    for option in (("--template-arg", "a=1"), ("--raw",)):
        check_one_line(run(*chat, *option), "the template is the server's")


def test_servers_are_told_the_system_message(
    run: Run, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Server:
        def __init__(self, url: str, model: str | None, *, chat: Any, **_: Any) -> None:
            asked.extend(chat.values())
            raise SharpDraftError("enough")

    monkeypatch.setattr("sharpdraft.lab.backends.server.Server", Server)
    own = {"messages": [{"role": "system", "content": "w5"}, *said("w9")]}
    prompts = prompts_of(tmp_path, {"prompt": "w9"}, own)
    chat = ("bench", "--base-url", "http://127.0.0.1:9", "--target", saved.target, "--chat")
    check_one_line(run(*chat, "--prompts", prompts, "--system", "w7"), "enough")
    assert asked == [
        [{"role": "system", "content": system}, *said("w9")] for system in ("w7", "w5")
    ]
