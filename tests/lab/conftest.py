"""Fixtures of the lab's room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sharpdraft.lab.backends.server import Server
    from support.server import Connect


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Servers whose connections are ended with the test."""
    from sharpdraft.lab.backends.server import Server

    opened: list[Server] = []

    def open_one(*args: Any, **about: Any) -> Server:
        opened.append(Server(*args, **about))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()
