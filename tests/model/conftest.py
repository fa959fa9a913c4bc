"""Kernels, and life without them."""

from __future__ import annotations

import pytest

from sharpdraft.model.kernels import build


@pytest.fixture(scope="session")
def compiled() -> None:
    """What needs kernels."""
    if build.library(8) is None:
        pytest.skip("no C++ compiler here")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library", lambda lanes: None)
