"""Small checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
