"""Text of a tiny target."""

from __future__ import annotations

import pytest
import torch

from sharpdraft.train.corpus import Corpus
from sharpdraft.train.sessions import save_wave, write_wave
from support.tiny import VOCAB, Tiny
from support.train import RECIPE, end_of


@pytest.fixture(scope="module")
def corpora(llama: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Corpus]:
    """Text to train on and to hold out, of the same kind: greedy answers to random prompts, some of
    them short."""
    folder = tmp_path_factory.mktemp("text")
    rng = torch.Generator().manual_seed(5)
    for name, count in (("train", 24), ("held", 8)):
        turns = [[torch.randint(0, VOCAB, (4,), generator=rng).tolist()] * 2 for _ in range(count)]
        wave = write_wave(llama.target, turns, 64, end_of(llama), taps=RECIPE.taps)
        save_wave(wave, folder / f"{name}.safetensors")
    return Corpus([folder / "train.safetensors"], RECIPE.taps), Corpus(
        [folder / "held.safetensors"], RECIPE.taps
    )
