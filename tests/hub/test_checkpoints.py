"""Where checkpoints come from."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from sharpdraft.errors import SharpDraftError
from sharpdraft.hub.checkpoints import checkpoint_dir
from sharpdraft.hub.targets import load_target
from support.hub import edit_config, load_error


def test_offline_hub_id_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    start = time.monotonic()
    message = load_error("nobody/no-such-model")
    assert "hub cannot be reached" in message and "give the path" in message
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("kind", "said"),
    [(GatedRepoError, "accept its terms"), (RepositoryNotFoundError, "check the spelling")],
)
def test_hub_refusals(monkeypatch: pytest.MonkeyPatch, kind: type[Exception], said: str) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(SharpDraftError, match=said) as caught:
        checkpoint_dir("some/model")
    assert isinstance(caught.value.__cause__, kind)


def test_hub_weights_are_not_fetched_for_an_unknown_architecture(
    monkeypatch: pytest.MonkeyPatch, llama: Path
) -> None:
    asked = []

    def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load_target("some/model", device="cpu")
    assert asked[0] == ["config.json"] and "*.safetensors" in asked[1]
    edit_config(llama, model_type="gpt2")
    asked.clear()
    load_error("some/model")
    assert asked == [["config.json"]]


@pytest.mark.parametrize("safe", [True, False])
def test_pickled_weights_are_fetched_where_there_are_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, safe: bool
) -> None:
    asked = []

    def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        if safe:
            (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert checkpoint_dir("some/model") == tmp_path
    assert asked[1:] == ([] if safe else [["pytorch_model*.bin"]])
    checkpoint_dir("some/model", files=("config.json",))
    assert asked[-1] == ["config.json"]
