"""PARD against its definition run plainly with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sharpdraft import FixedSlope, SharpDraftError
from sharpdraft.adapters.attach import attach
from sharpdraft.drafters.pard import Pard
from sharpdraft.drafters.registry import load_drafter
from sharpdraft.method.scale import Policy
from sharpdraft.model.causal_lm import CausalLM
from support.drafters import append, propose
from support.families import make_pard, pard_of
from support.tiny import POSITIONS, VOCAB, Tiny

LOW = FixedSlope(9, slope=0.7, top_k=4, max_scale=8.0)


@pytest.mark.parametrize("policy", [None, LOW], ids=["frozen", "scaled"])
def test_pard_drafts_what_transformers_says_at_its_masks(
    llama: Tiny, policy: Policy | None
) -> None:
    drafter, model = pard_of(llama)
    cache = drafter.new_cache(POSITIONS)
    varied = set()
    for length, count in ((1, 3), (20, 5), (21, 1), (60, 5)):
        append(drafter, cache, llama.text[cache.length : length - 1])
        drafts = propose(drafter, cache, llama.text[length - 1], count, policy).tolist()
        with torch.inference_mode(), attach(model, policy):
            ids = torch.tensor([llama.text[:length] + [VOCAB - 1] * (count - 1)])
            expected = model(ids).logits[0, -count:].argmax(-1).tolist()
        assert drafts == expected
        varied.add(tuple(drafts))
    assert len(varied) > 2


def test_pard_checkpoint(llama: Tiny, tmp_path: Path) -> None:
    model = make_pard()
    model.config.pard_token = VOCAB - 1
    model.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, llama.target)
    assert isinstance(loaded, Pard) and loaded.mask_token == VOCAB - 1
    cache = loaded.new_cache(POSITIONS)
    append(loaded, cache, llama.text[:19])
    own = Pard(CausalLM.of(model), VOCAB - 1, llama.target)
    other = own.new_cache(POSITIONS)
    append(own, other, llama.text[:19])
    assert torch.equal(
        propose(loaded, cache, llama.text[19], 5), propose(own, other, llama.text[19], 5)
    )


def test_pard_checkpoints_that_do_not_fit(llama: Tiny, tmp_path: Path) -> None:
    with pytest.raises(SharpDraftError, match="pard_token is 64"):
        Pard(CausalLM.of(make_pard()), VOCAB, llama.target)
    make_pard().save_pretrained(tmp_path)
    with pytest.raises(SharpDraftError, match="has no pard_token"):
        Pard.load(tmp_path, llama.target)
