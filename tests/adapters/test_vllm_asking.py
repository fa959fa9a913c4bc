"""What a vLLM is asked for, and what is said of it before a weight is read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from torch import Tensor

from sharpdraft import FixedSlope, SharpDraftError
from sharpdraft.adapters.vllm.checks import warnings_for, windows_of
from sharpdraft.adapters.vllm.request import fill_in, is_asked, settings_in
from sharpdraft.method.policies import LayerSlopes
from sharpdraft.method.registry import forget, register
from sharpdraft.method.settings import FROZEN, DraftSettings, Window, asked_settings
from support.vllm_standin import config


def test_off_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARPDRAFT", raising=False)
    assert settings_in(config()) is None and not is_asked(config())
    assert not is_asked(config(False))
    monkeypatch.setenv("SHARPDRAFT", "0")
    assert not is_asked(config())


def test_ways_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sharpdraft.json"
    file.write_text(json.dumps({"policy": {"kind": "fixed_slope", "reference": 700}}))
    own = config(True)
    own.speculative_config.model = str(tmp_path)
    for asked in (
        config({"reference": 700}),
        config({"policy": {"kind": "fixed_slope", "reference": 700}}),
        config(str(file)),
        config(str(tmp_path)),
        own,
    ):
        assert settings_in(asked) == DraftSettings(FixedSlope(700))
    assert settings_in(config(FROZEN)) == DraftSettings() and is_asked(config(FROZEN))
    monkeypatch.setenv("SHARPDRAFT", str(file))
    assert settings_in(config()) == DraftSettings(FixedSlope(700))
    monkeypatch.setenv("SHARPDRAFT", '{"reference": 900}')
    assert settings_in(config()) == DraftSettings(FixedSlope(900))
    assert settings_in(config({"reference": 700})) == DraftSettings(FixedSlope(700)), (
        "vLLM's own setting comes first"
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"reference": 8}, "above top_k"),
        ({"referense": 800}, "fixed_slope: no field 'referense'"),
        ({}, "was asked for {}"),
        ({"policy": "x"}, "settings are wrong"),
        ("/nowhere/at/all.json", "is no settings file"),
        (True, "no sharpdraft.json"),
        (7, "was asked for 7"),
    ],
)
def test_wrong_settings_are_one_clear_error(asked: object, message: str) -> None:
    with pytest.raises(SharpDraftError, match=message):
        asked_settings(asked, "/nowhere")


def test_asked_without_a_drafter() -> None:
    with pytest.raises(SharpDraftError, match="no drafter is"):
        settings_in(config({"reference": 700}, speculative=None))


def test_environment_that_is_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARPDRAFT", "{reference: 5}")
    with pytest.raises(SharpDraftError, match="neither JSON"):
        settings_in(config())


def test_warnings_of_what_costs_acceptance_at_length() -> None:
    settings = DraftSettings(FixedSlope(2048))
    assert warnings_for(config(), settings, [None]) == []
    (one,) = warnings_for(config(draft={"max_model_len": 4096}), settings, [None])
    assert "4096" in one and "8192" in one
    (one,) = warnings_for(config(), settings, [None, 1024])
    assert "window of 1024" in one
    (one,) = warnings_for(
        config(target={"max_model_len": 2048}, draft={"max_model_len": 2048}), settings, [None]
    )
    assert "scaling never acts" in one
    yarn = {"hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "yarn"})}
    (one,) = warnings_for(config(target=yarn), settings, [None])
    assert "yarn" in one
    (one,) = warnings_for(config(connector=object()), settings, [None])
    assert "connector" in one


def test_a_view_counts_among_the_windows_that_are_warned_of() -> None:
    settings = DraftSettings(FixedSlope(2048), Window(1024))
    (one,) = warnings_for(config(), settings, [1024])
    assert "window of 1024" in one


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("window@512", DraftSettings(view=Window(512))),
        ("window@512+sharpdraft@400", DraftSettings(FixedSlope(400), Window(512))),
        ("slopes@400:slopes=3/5", DraftSettings(LayerSlopes(400, (3, 5)))),
        ({"view": {"kind": "window", "keys": 512}}, DraftSettings(view=Window(512))),
    ],
)
def test_any_settings_that_vllm_can_do(
    asked: Any, expected: DraftSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"hf_text_config": SimpleNamespace(num_hidden_layers=2)}
    assert settings_in(config(asked, draft=own)) == expected
    monkeypatch.setenv("SHARPDRAFT", asked if isinstance(asked, str) else json.dumps(asked))
    assert settings_in(config(draft=own)) == expected


@pytest.fixture
def scores() -> Iterator[None]:
    """A policy that no host can run, registered as "scores"."""

    @register("scale", "scores", "scores")
    @dataclass(frozen=True)
    class Scores:
        needs: ClassVar[tuple[str, ...]] = ("keys", "scores")

        def gain(self, keys: Tensor) -> Tensor:
            raise AssertionError

    yield
    forget("scores")


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (
            "sinks@4+window@508",
            ["view (", "keep the first Keys beside a window", "leave sinks out"],
        ),
        ("slopes@400:slopes=3/5/7", ["scale (", "for 3 layers", "drafter has 2"]),
        ("window@5", ["view (window@5)", "block of 6 tokens"]),
        ("drafts@4", ["length (drafts@4)", "drafts 5 tokens", "num_speculative_tokens"]),
        ("window@512+window@256", ["view is named twice"]),
    ],
)
def test_settings_that_vllm_cannot_do_are_refused_by_name(asked: str, parts: list[str]) -> None:
    wrong = config(asked, draft={"hf_text_config": SimpleNamespace(num_hidden_layers=2)}, drafts=5)
    with pytest.raises(SharpDraftError) as caught:
        settings_in(wrong)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_a_policy_that_needs_scores_is_refused(scores: None) -> None:
    with pytest.raises(SharpDraftError, match=r"scale \(scores\): .*show no scores"):
        settings_in(config("scores"))


def test_layers_that_the_config_does_not_tell_are_not_guessed() -> None:
    """The configuration of an MTP head is its target's."""
    asked = config("slopes@400:slopes=3/5", drafts=5)
    asked.speculative_config.method = "mtp"
    asked.speculative_config.draft_model_config.hf_text_config.num_hidden_layers = 61
    assert settings_in(asked) == DraftSettings(LayerSlopes(400, (3, 5)))


# Lengths


def arguments(asked: object, speculative: Any, **changes: Any) -> SimpleNamespace:
    """Stands for EngineArgs."""
    return SimpleNamespace(
        additional_config={"sharpdraft": asked}, speculative_config=speculative, **changes
    )


def test_the_settings_length_is_what_vllm_drafts_where_it_is_told_none(tmp_path: Path) -> None:
    (tmp_path / "sharpdraft.json").write_text('{"length": {"kind": "fixed", "drafts": 3}}')
    for asked, speculative, changes in (
        ("drafts@3", {"model": "x"}, {}),
        ("sharpdraft@700+drafts@3", {"method": "mtp"}, {}),
        (True, {"model": str(tmp_path)}, {}),
        (True, None, {"spec_model": str(tmp_path), "spec_tokens": None}),
    ):
        given = arguments(asked, speculative, **changes)
        before = dict(speculative or {})
        fill_in(given)
        assert given.speculative_config == before | {"num_speculative_tokens": 3}
        assert speculative in (None, before), "what the caller holds is left alone"


@pytest.mark.parametrize(
    ("asked", "speculative", "changes"),
    [
        ("drafts@3", {"model": "x", "num_speculative_tokens": 5}, {}),
        ("drafts@3", {"model": "x", "num-speculative-tokens": 5}, {}),
        ("drafts@3", {"model": "x"}, {"spec_tokens": 5}),
        ("drafts@3", None, {}),
        ("sharpdraft@700", {"model": "x"}, {}),
        (False, {"model": "x"}, {}),
        (True, {"method": "mtp"}, {}),
    ],
)
def test_what_vllm_is_told_itself_stays(asked: object, speculative: Any, changes: Any) -> None:
    given = arguments(asked, speculative, **changes)
    fill_in(given)
    assert given.speculative_config == speculative


def test_a_length_that_agrees_is_accepted() -> None:
    agreeing = config("drafts@4", drafts=4)
    settings = settings_in(agreeing)
    assert settings is not None and settings.drafts == 4


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, [None, None]),
        ({"sliding_window": 128}, [None, None]),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128},
            [128, None],
        ),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 64}}, [64, 64]),
        (
            {
                "dflash_config": {"use_swa": True},
                "sliding_window": 32,
                "layer_types": ["full_attention"] * 2,
            },
            [32, 32],
        ),
    ],
)
def test_windows_that_a_drafter_names(fields: dict[str, Any], windows: list[int | None]) -> None:
    assert windows_of(SimpleNamespace(num_hidden_layers=2, **fields)) == windows


def test_importing_the_plugin_needs_torch_alone() -> None:
    """It is loaded into every process that vLLM starts."""
    code = (
        "import sys, sharpdraft.adapters.vllm.register as p; p.register(); p.register()\n"
        "bad = [m for m in ('transformers', 'vllm', 'typer', 'rich', 'huggingface_hub') if m in "
        "sys.modules]\nassert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
