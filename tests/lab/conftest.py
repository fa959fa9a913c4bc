"""Scripted servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import ThreadingHTTPServer

import pytest

from support.server import Handler, Serving


@pytest.fixture
def serving() -> Iterator[Serving]:
    with ExitStack() as running:

        def start(handler: type[Handler]) -> str:
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            running.callback(server.server_close)
            running.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield start


@pytest.fixture
def server(serving: Serving) -> tuple[str, type[Handler]]:
    handler = type("Fresh", (Handler,), {"asked": [], "drafts": 7, "accepted": 3})
    return serving(handler), handler
