"""The drafters that come with the built-in target, and those that share tensors with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.hub.checkpoints import drafter_dir
from sharpdraft.hub.smollm2 import DRAFTER_FAMILIES, SMOLLM2, completed, recording
from sharpdraft.method.settings import FILE, DraftSettings, read_settings
from support.disk import full_disk


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> torch.Tensor:
    """A cache with a target of 50 tokens in it; returns its embedding."""
    monkeypatch.setenv("SHARPDRAFT_CACHE", str(tmp_path / "cache"))
    embedding = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    (tmp_path / "cache" / SMOLLM2).mkdir(parents=True)
    save_file(
        {"model.embed_tokens.weight": embedding}, tmp_path / "cache" / SMOLLM2 / "model.safetensors"
    )
    return embedding


def test_a_drafter_gets_back_what_it_shares_with_its_target(
    own_cache: torch.Tensor, tmp_path: Path
) -> None:
    kept = torch.tensor([1, 4, 9, 30])
    stored = {
        "eagle": {"d2t": kept - torch.arange(4), "fc.weight": torch.ones(2, 2)},
        "pard": {"model.norm.weight": torch.ones(3)},
    }
    for name, tensors in stored.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
        made = completed(tmp_path / name)
        found = load_file(made / "model.safetensors")
        shared = own_cache.bfloat16()
        extra = (
            {"lm_head.weight": shared[kept]}
            if name == "eagle"
            else {"model.embed_tokens.weight": shared}
        )
        assert found.keys() == {*tensors, *extra}
        assert all(torch.equal(found[key], tensor) for key, tensor in (tensors | extra).items())
        assert (made / "config.json").exists()
        # It is made once, and anew for other weights.
        times = made.stat().st_mtime_ns, (made / "model.safetensors").stat().st_mtime_ns
        assert completed(tmp_path / name) == made
        assert (made.stat().st_mtime_ns, (made / "model.safetensors").stat().st_mtime_ns) == times
    save_file({"model.norm.weight": torch.zeros(3)}, tmp_path / "pard" / "model.safetensors")
    assert completed(tmp_path / "pard") != made
    assert not list((tmp_path / "cache").glob(".*")), "nothing half done is left"


def test_a_drafter_that_cannot_be_completed(own_cache: torch.Tensor, tmp_path: Path) -> None:
    (tmp_path / "pard").mkdir()
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "pard" / "model.safetensors")
    with (
        full_disk(200),
        pytest.raises(SharpDraftError, match=r"could not be completed in .*SHARPDRAFT_CACHE"),
    ):
        completed(tmp_path / "pard")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [SMOLLM2]


def test_drafters_by_name(tmp_path: Path) -> None:
    assert drafter_dir("some/target", None) is None
    with pytest.raises(SharpDraftError, match="no eagle3 drafter comes with some/target"):
        drafter_dir("some/target", "eagle3")
    assert drafter_dir("some/target", str(tmp_path)) == tmp_path


def test_a_directory_called_like_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not hide the drafter that comes with a target, and is found where none does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dflash").mkdir()
    assert drafter_dir("some/target", "dflash") == Path("dflash")
    with pytest.warns(SharpDraftNote, match=r"for the directory say \./dflash"):
        assert drafter_dir(SMOLLM2, "dflash") != Path("dflash")
    assert drafter_dir(SMOLLM2, "./dflash") == Path("dflash")


def test_a_target_that_is_not_there_is_what_is_said(tmp_path: Path) -> None:
    for name in (None, "eagle3"):
        with pytest.raises(SharpDraftError, match=r"nowhere.* does not exist"):
            drafter_dir(str(tmp_path / "nowhere"), name)


def test_drafters_that_come_with_the_target() -> None:
    import sharpdraft_smollm2

    texts = {"pard": "sharpdraft@8192+drafts@3"}
    for family in DRAFTER_FAMILIES:
        directory = sharpdraft_smollm2.path("drafters", f"{family}-smollm2-135m")
        settings = read_settings(directory / FILE)
        assert settings == DraftSettings.parse(texts.get(family, "sharpdraft@512"))
        assert {"config.json", "model.safetensors", "README.md"} <= {
            path.name for path in directory.iterdir()
        }
    assert drafter_dir(SMOLLM2, None) == sharpdraft_smollm2.path("drafters", "dflash-smollm2-135m")
    assert recording().is_file()


def test_without_the_package_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sharpdraft_smollm2", None)
    for asked in (recording, *(lambda f=f: drafter_dir(SMOLLM2, f) for f in (None, "pard"))):
        with pytest.raises(SharpDraftError) as caught:
            asked()
        assert 'pip install "sharpdraft[smollm2]"' in str(caught.value)
        assert "\n" not in str(caught.value)
    assert drafter_dir("some/target", None) is None
