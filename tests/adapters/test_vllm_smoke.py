"""One real vLLM with the plugin, in two minutes: every row that a draft layer attends for is
computed again by hand.

Run where vLLM is installed. In CI its absence is a failure.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.vllm_models import Models

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WINDOW = 24
POLICY = {"reference": 9, "slope": 0.7, "top_k": 4, "max_scale": 8.0}
ASKED = "window@24+sharpdraft@9:slope=0.7:top_k=4:max_scale=8.0"
LENGTHS = (5, 33, 90, 150)


@pytest.fixture(autouse=True)
def vllm_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        if os.environ.get("CI"):
            pytest.fail("vLLM is not installed here, and CI must not pass without it")
        pytest.skip("vLLM is not installed here")


def watched(
    models: Models, speculative: dict[str, Any], asked: str, log: Path, **expected: Any
) -> dict[str, Any]:
    """Answers of a vLLM whose draft layers are watched, as in support.vllm_watched."""
    rng = random.Random(2)
    nothing = dict.fromkeys(("window", *POLICY))
    job = {
        "target": str(models.target),
        "speculative": speculative,
        "asked": asked,
        "prompts": [[rng.randrange(192) for _ in range(n)] for n in LENGTHS],
        "new": 24,
        **nothing,
        **expected,
    }
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with open(log, "w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "support.vllm_watched"],
            input=json.dumps(job),
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=environment,
            timeout=300,
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    return dict(json.loads(done.stdout))


def test_a_window_and_scaling_in_vllm_itself(models: Models, tmp_path: Path) -> None:
    """The settings' length is what vLLM drafts, as its own config names none."""
    dflash = {"method": "dflash", "model": str(models.drafter)}
    frozen = watched(
        models, {**dflash, "num_speculative_tokens": 5}, "frozen", tmp_path / "frozen.log"
    )
    acting = watched(
        models, dflash, f"{ASKED}+drafts@5", tmp_path / "acting.log", window=WINDOW, **POLICY
    )
    assert acting["drafts"] == frozen["drafts"] == 5
    assert acting["tokens"] == frozen["tokens"]
    assert acting["proposals"] != frozen["proposals"]
    for answer in (frozen, acting):
        assert answer["rows"] > 500 and answer["worst"] < 1e-3
    assert frozen["hidden"] == 0 and max(frozen["counts"]) > max(LENGTHS)
    # A block is no row's window: rows in its front see those behind them as well.
    assert acting["hidden"] > 300 and max(acting["counts"]) == WINDOW + 5
    log = (tmp_path / "acting.log").read_text()
    assert "Queries of 2 draft layers are scaled by the Keys they see" in log
    assert f"In 2 draft layers only the last {WINDOW} Keys are seen" in log


def test_causal_rows_have_a_window_too(models: Models, tmp_path: Path) -> None:
    from support.vllm_models import eagle3

    drafter = eagle3(models, tmp_path / "eagle3")
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
    answer = watched(models, speculative, ASKED, tmp_path / "log", window=WINDOW, **POLICY)
    assert answer["rows"] > 500 and answer["worst"] < 1e-3
    assert answer["hidden"] > 300 and max(answer["counts"]) == WINDOW
