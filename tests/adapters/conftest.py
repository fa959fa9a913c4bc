"""One vLLM at a time, on a tiny target and drafter."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from sharpdraft.lab.backends.vllm import Engine
    from support.vllm_engine import Start
    from support.vllm_models import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    from support.vllm_models import save_models

    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    from support.vllm_engine import LENGTHS
    from support.vllm_models import VOCAB

    rng = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCAB, (n,), generator=rng).tolist() for n in LENGTHS]


@pytest.fixture(scope="session")
def start(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """One engine at a time: each takes gigabytes."""
    from sharpdraft.lab.backends.vllm import Engine
    from support.vllm_engine import DRAFTS, OPTIONS

    logs = tmp_path_factory.mktemp("logs")

    def call(asked: object, drafter: bool = True, **options: Any) -> AbstractContextManager[Engine]:
        log = logs / f"{len(list(logs.iterdir()))}.log"
        used = models.drafter if drafter else None
        return closing(Engine(models.target, used, DRAFTS, asked, {**OPTIONS, **options}, log))

    return call


@pytest.fixture(scope="session")
def ar(start: Start, prompts: list[list[int]]) -> dict[str, Any]:
    from support.vllm_engine import NEW

    with start(None, drafter=False) as engine:
        return engine.answer(prompts, NEW)
