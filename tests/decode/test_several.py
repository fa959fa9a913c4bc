"""Drafters side by side on one session."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sharpdraft.decode.session import Arm, Session
from sharpdraft.drafters.eagle3 import save as save_eagle3
from support.checkpoints import Checkpoints
from support.command import Run, check_one_line
from support.families import drafter_of, eagle_config, eagle_tensors, make_pard
from support.sessions import settings_of
from support.tiny import PROMPT, VOCAB, Tiny


@pytest.fixture
def three(saved: Checkpoints, llama: Tiny, tmp_path: Path) -> dict[str, Path]:
    """A drafter of each family for the saved target, whose weights are the tiny Llama's."""
    config = eagle_config(fc_norm=True, norm_output=True)
    save_eagle3(tmp_path / "eagle", config, eagle_tensors(config, llama.target))
    model = make_pard()
    model.config.pard_token = VOCAB - 1
    model.save_pretrained(tmp_path / "pard")
    for name in ("eagle", "pard"):
        shutil.copy(saved.drafter / "sharpdraft.json", tmp_path / name)
    (tmp_path / "drafter").symlink_to(saved.drafter)
    return {name: tmp_path / name for name in ("drafter", "eagle", "pard")}


def test_drafters_side_by_side_draft_what_they_draft_alone(
    run: Run, saved: Checkpoints, three: dict[str, Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"name": "a", "turns": ["w9", "w10 w11", "w40 w41"]}\n{"name": "b", "prompt": "w30"}\n'
    )
    options = (
        "--target",
        saved.target,
        "--prompts",
        prompts,
        "--answer-tokens",
        25,
    )
    arms = ("--arms", "ar,frozen,sharpdraft", "--replay", "frozen,fixed@1.3", "--mass-every", 5)

    def rows(drafters: str, out: Path) -> list[dict[str, Any]]:
        result = run("bench", *options, *arms, "--drafter", drafters, "--out", out, "--json")
        assert result.code == 0, result.err
        assert json.loads(result.out)["differences"] == []
        return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()[1:]]

    together = rows(",".join(map(str, three.values())), tmp_path / "together")
    assert list(together[0]["arms"]) == [
        "ar",
        *(f"{n}:{a}" for n in three for a in ("frozen", "sharpdraft")),
    ]
    different = set()
    for name, folder in three.items():
        alone = rows(str(folder), tmp_path / f"alone-{name}")
        for one, all_ in zip(alone, together, strict=True):
            assert one["tokens"] == all_["tokens"]
            for place, kinds in (
                ("arms", ("frozen", "sharpdraft")),
                ("replayed", ("frozen", "fixed@1.3")),
            ):
                for kind in kinds:
                    mine, theirs = one[place][kind], all_[place][f"{name}:{kind}"]
                    assert mine["rounds"] == theirs["rounds"]
                    # Rounds of other lengths wrote the Keys, in another order of additions.
                    for own, other in zip(
                        mine.get("mass", []), theirs.get("mass", []), strict=True
                    ):
                        assert own == pytest.approx(other, abs=1e-5)
            different.add(json.dumps(one["arms"]["frozen"]["rounds"]))
    assert len(different) > len(together), (
        "the drafters must draft differently for this to say anything"
    )
    every, out = ",".join(map(str, three.values())), tmp_path / "together"
    shown = run("bench", *options, *arms, "--drafter", every, "--out", out, "--json")
    cells = json.loads(shown.out)["cells"]
    names = [cell["arm"] for cell in cells]
    assert names == [
        "ar",
        *(f"{n}:{a}" for n in three for a in ("frozen", "sharpdraft", "fixed@1.3")),
    ]
    gains = {cell["arm"] for cell in cells if cell["gain"] is not None}
    assert gains == {f"{n}:{a}" for n in three for a in ("sharpdraft", "fixed@1.3")}


def test_drafters_of_one_name_are_refused_and_every_one_takes_a_window(
    run: Run, saved: Checkpoints, three: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("w9\n")
    options = ("bench", "--target", saved.target, "--prompts", tmp_path / "prompts.txt")
    both = f"{three['drafter']},{three['eagle']}"
    check_one_line(run(*options, "--drafter", f"{both},{three['eagle']}"), "names must differ")
    check_one_line(run(*options, "--drafter", "eagle3"), "no eagle3 drafter comes with")
    windowed = run(*options, "--drafter", both, "--arms", "ar,sinks@2+window@8", "--json")
    assert windowed.code == 0, windowed.err
    assert json.loads(windowed.out)["differences"] == []
    assert [cell["arm"] for cell in json.loads(windowed.out)["cells"]] == [
        "ar",
        "drafter:sinks@2+window@8",
        "eagle:sinks@2+window@8",
    ]


def test_a_session_of_several_drafters(llama: Tiny) -> None:
    """One drafts at a time, whatever the others have read; read along, all have read all."""
    drafters = {kind: drafter_of(kind, llama) for kind in ("dflash", "eagle3", "pard")}
    session = Session(llama.target, drafters)
    assert (session.arm, session.num_drafts) == (None, 0)
    for number, name in enumerate([*drafters, *reversed(drafters)]):
        session.rewind(PROMPT)
        session.use(Arm(name, name, settings_of(drafts=3)))
        start = len(session.tokens)
        rounds = list(session.generate(llama.text[start : PROMPT + 5], 60))
        assert session.tokens == llama.text[: PROMPT + 65]
        alone = Session(llama.target, drafters[name], settings_of(drafts=3))
        expected = list(alone.generate(llama.text[: PROMPT + 5], 60))
        assert [r.accepted for r in rounds] == [r.accepted for r in expected]
        if number % 2:
            session.read_along()
            session.rewind(PROMPT)
            session.extend(llama.text[PROMPT : PROMPT + 9])
            assert all(c.length == PROMPT + 8 for c in (session.cache, *session._caches.values()))
