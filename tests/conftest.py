"""Fixtures that several rooms use; each imports what it needs, so that a room is tested alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from support.checkpoints import Checkpoints
    from support.command import Run
    from support.server import Handler, Serving
    from support.tiny import Tiny


pytest.register_assert_rewrite("support")
_CORES = torch.get_num_threads()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tiny models have nothing to share out among threads, which then wait for each other: ten
    times as long on a machine that is busy otherwise. The kernels' own room and SmolLM2 use all
    cores."""
    whole = item.get_closest_marker("model") or item.path.parent.name == "model"
    torch.set_num_threads(_CORES if whole else 1)


@pytest.fixture(scope="session")
def kernels_built() -> None:
    """Built for this machine, or missed and said so, before a test looks at what is printed."""
    from sharpdraft.model.kernels.build import library_for

    for dim in (8, 16):
        library_for(dim)


@pytest.fixture(scope="session")
def llama() -> Tiny:
    from support.tiny import make_tiny

    return make_tiny("llama")


@pytest.fixture(scope="session")
def qwen3() -> Tiny:
    from support.tiny import make_tiny

    return make_tiny("qwen3")


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    from support.checkpoints import save_checkpoints

    return save_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def run(
    kernels_built: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Run:
    from support.command import command_line

    return command_line(monkeypatch, capsys, tmp_path)


@pytest.fixture
def serving() -> Iterator[Serving]:
    from support.server import serve

    with serve() as start:
        yield start


@pytest.fixture
def server(serving: Serving) -> tuple[str, type[Handler]]:
    from support.server import Handler

    handler = type("Fresh", (Handler,), {"asked": [], "drafts": 7, "accepted": 3})
    return serving(handler), handler
