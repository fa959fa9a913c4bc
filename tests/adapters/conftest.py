"""One vLLM at a time, on a tiny target and drafter."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from sharpdraft.lab.backends.vllm import Engine
    from support.vllm_engine import Models, Start


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    from sharpdraft.drafters.dflash import save
    from support.drafters import drafter_config, drafter_tensors
    from support.tiny import make_model
    from support.vllm_engine import POSITIONS, VOCAB, Models

    folder = tmp_path_factory.mktemp("models")
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    }
    longer = {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "initializer_range": 0.3}
    model = make_model("llama", head_dim=32, **sizes, **longer)
    model.save_pretrained(folder / "target")
    config = drafter_config(
        vocab_size=VOCAB,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        rope_theta=10000.0,
        **sizes,
    )
    tensors = drafter_tensors(config)
    # vLLM 0.32 on CPU norms every layer's context Keys with the first layer's weights; with one
    # weight for all, what it computes is what the drafter is. The log's warning, looked for below,
    # says when that is no longer needed.
    for name in tensors:
        if name.endswith("k_norm.weight"):
            tensors[name] = tensors["layers.0.self_attn.k_norm.weight"]
    save(folder / "drafter", config, {name: tensor.clone() for name, tensor in tensors.items()})
    return Models(folder / "target", folder / "drafter", model)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    from support.vllm_engine import LENGTHS, VOCAB

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
