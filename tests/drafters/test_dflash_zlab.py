"""DFlash against z-lab's own package."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from sharpdraft.decode.session import Session
from sharpdraft.drafters.dflash import DFlash, save
from sharpdraft.method.visible import View
from support.dflash import LAYERS, read
from support.drafters import drafter_config, drafter_tensors, propose
from support.sessions import use
from support.tiny import BLOCK, PROMPT, Tiny


@pytest.fixture(scope="module")
def zlab() -> ModuleType:
    pytest.importorskip("dflash")
    from dflash import model

    model._cuda_time = time.perf_counter  # Its own asks CUDA.
    return model


def peer(zlab: ModuleType, config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    parsed = Qwen3Config(**{k: v for k, v in config.items() if k != "architectures"})
    parsed._attn_implementation = "sdpa"
    model = zlab.DFlashDraftModel(parsed).eval()
    model.load_state_dict(tensors)
    return model


@pytest.mark.parametrize("layers", LAYERS)
def test_drafts_equal_zlab(zlab: ModuleType, tiny: Tiny, layers: str) -> None:
    config = drafter_config(**LAYERS[layers])
    tensors = drafter_tensors(config)
    theirs, ours = peer(zlab, config, tensors), DFlash(config, tensors, tiny.target)
    with torch.inference_mode():
        states = tiny.model(torch.tensor([tiny.text]), output_hidden_states=True).hidden_states
    features = zlab.extract_context_feature(states, theirs.target_layer_ids)
    cache = read(ours, tiny.text[:180])
    seen = set()
    for context in (
        180,
        101,
        40,
        25,
        24,
        23,
        22,
        21,
        20,
        19,
        18,
        2,
        1,
    ):  # A block overwrites what lies behind.
        cache.length = context
        for count in (1, 3, BLOCK - 1):
            block = torch.full((1, count + 1), ours.mask_token)
            block[0, 0] = tiny.text[context]
            with torch.inference_mode():
                hidden = theirs(
                    position_ids=torch.arange(context + count + 1)[None],
                    noise_embedding=tiny.model.get_input_embeddings()(block),
                    target_hidden=features[:, :context],
                )
                expected = theirs.compute_logits(hidden, tiny.model.lm_head)[0, 1:].argmax(-1)
            drafts = propose(ours, cache, tiny.text[context], count)
            assert drafts.tolist() == expected.tolist(), (context, count)
            seen.add(tuple(drafts.tolist()))
    assert len(seen) > 10


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("layers", LAYERS)
def test_rounds_equal_zlab(zlab: ModuleType, llama: Tiny, layers: str) -> None:
    config = drafter_config(**LAYERS[layers])
    tensors = drafter_tensors(config)
    theirs = peer(zlab, config, tensors)
    session = Session(llama.target, DFlash(config, tensors, llama.target))
    answer = llama.text[PROMPT + 7 : PROMPT + 67]
    stop = max(answer, key=answer.index)  # The token that occurs last.
    for prompt, count, block, stops in ((PROMPT, 100, None, None), (PROMPT + 7, 60, 4, [stop])):
        ids = torch.tensor([llama.text[:prompt]])
        peers = zlab.dflash_generate(
            theirs, llama.model, ids, count, stops, block_size=block, return_stats=True
        )
        session.rewind(0)
        use(session, drafts=(block or BLOCK) - 1)
        rounds = list(session.generate(llama.text[:prompt], count, stops or ()))[1:]
        assert session.tokens == peers.output_ids[0].tolist()
        # At the very end z-lab drafts one token more than can be written, which changes what the
        # others guess.
        whole = [r for r in rounds if r.context + session.num_drafts + 1 < prompt + count]
        assert [len(r.tokens) for r in whole] == peers.acceptance_lengths[: len(whole)]
        assert len(whole) > 10 and max(peers.acceptance_lengths) > 1


def test_zlabs_checkpoint_loads_here(zlab: ModuleType, llama: Tiny, tmp_path: Path) -> None:
    config = drafter_config(**LAYERS["mixed"])
    tensors = drafter_tensors(config)
    peer(zlab, config, tensors).save_pretrained(tmp_path)
    loaded, direct = DFlash.load(tmp_path, llama.target), DFlash(config, tensors, llama.target)
    assert (loaded.views, loaded.taps, loaded.num_drafts) == (
        direct.views,
        direct.taps,
        direct.num_drafts,
    )
    assert loaded.views == (View(True, 24), View(False, None))
    keys, again = (read(drafter, llama.text[:50]).keys[..., :50, :] for drafter in (loaded, direct))
    assert torch.equal(keys, again)


def test_our_checkpoint_loads_in_zlab(zlab: ModuleType, tmp_path: Path) -> None:
    config = drafter_config(**LAYERS["mixed"])
    tensors = drafter_tensors(config)
    save(tmp_path / "new" / "drafter", config, tensors)
    model, info = zlab.DFlashDraftModel.from_pretrained(
        tmp_path / "new" / "drafter", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = model.state_dict()
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert (model.block_size, model.mask_token_id, model.target_layer_ids) == (BLOCK, 3, [0, 2])


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_sharded_checkpoint_and_embedding_scale(
    zlab: ModuleType, llama: Tiny, tmp_path: Path
) -> None:
    config = drafter_config(input_embedding_scale=2.5)
    tensors = drafter_tensors(config)
    theirs = peer(zlab, config, tensors)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = torch.tensor([llama.text[:PROMPT]])
    peers = zlab.dflash_generate(theirs, llama.model, ids, 60, None, return_stats=True)
    session = Session(llama.target, DFlash.load(tmp_path, llama.target))
    rounds = list(session.generate(llama.text[:PROMPT], 60))[1:]
    assert [len(r.tokens) for r in rounds][:-BLOCK] == peers.acceptance_lengths[
        : len(rounds) - BLOCK
    ]
