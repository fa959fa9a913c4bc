"""DFlash from outside: z-lab's own package as the peer, scaling, counts, checkpoints that do not
fit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3Config

from conftest import (
    BLOCK,
    POSITIONS,
    PROMPT,
    VOCAB,
    Tiny,
    drafter_config,
    drafter_tensors,
    make_drafter,
    make_model,
    propose,
)
from sharpdraft.decode.session import Session
from sharpdraft.drafters.dflash import DFlash, save
from sharpdraft.errors import SharpDraftError
from sharpdraft.method.policies import Constant, FixedSlope
from sharpdraft.method.scale import Policy
from sharpdraft.model import attention, kernels
from sharpdraft.model.attention import Rotary, View, additive, attend, rotate
from sharpdraft.model.cache import KVCache
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.linear import Linear

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 24}
# Every kind of layer in the wild; the narrow non-causal window is the one that also cuts off Keys
# ahead.
LAYERS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"layer_types": [SLIDING, SLIDING], **WINDOW},
    "mixed": {"layer_types": [SLIDING, FULL], **WINDOW},
    "sliding, not causal": {"layer_types": [SLIDING, SLIDING], **WINDOW, "is_causal": False},
    "narrow, not causal": {
        "layer_types": [FULL, SLIDING],
        **WINDOW,
        "sliding_window": 4,
        "is_causal": False,
    },
    "causal": {"is_causal": True},
    "sliding from a layer on": {**WINDOW, "max_window_layers": 1},
}


def read(drafter: DFlash, text: list[int]) -> KVCache:
    """The drafter's cache behind a text."""
    session = Session(drafter.target, drafter)
    session.read(text)
    return session.drafts


def masses(
    drafter: DFlash, cache: KVCache, anchor: int, policy: Policy | None, count: int = BLOCK - 1
) -> list[Tensor]:
    found: list[Tensor] = []
    propose(drafter, cache, anchor, count, policy, lambda layer, mass: found.append(mass.clone()))
    return found


# The peer: z-lab's package


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
        session.size = block or BLOCK
        rounds = list(session.generate(llama.text[:prompt], count, stops or ()))[1:]
        assert session.tokens == peers.output_ids[0].tolist()
        # At the very end z-lab drafts one token more than can be written, which changes what the
        # others guess.
        whole = [r for r in rounds if r.context + session.size < prompt + count]
        assert [len(r.tokens) for r in whole] == peers.acceptance_lengths[: len(whole)]
        assert len(whole) > 10 and max(peers.acceptance_lengths) > 1


def test_zlabs_checkpoint_loads_here(zlab: ModuleType, llama: Tiny, tmp_path: Path) -> None:
    config = drafter_config(**LAYERS["mixed"])
    tensors = drafter_tensors(config)
    peer(zlab, config, tensors).save_pretrained(tmp_path)
    loaded, direct = DFlash.load(tmp_path, llama.target), DFlash(config, tensors, llama.target)
    assert (loaded.kinds, loaded.taps, loaded.block_size) == (
        direct.kinds,
        direct.taps,
        direct.block_size,
    )
    assert loaded.kinds == (View(True, 24), View(False, None))
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


# Scaling


def test_nothing_changes_up_to_the_reference(tiny: Tiny) -> None:
    for layers in ("full", "mixed", "causal"):
        drafter = make_drafter(tiny.target, **LAYERS[layers])
        cache = read(drafter, tiny.text[:90])
        for context in (90, 30, 1):
            cache.length = context
            keys = context + BLOCK
            anchor = tiny.text[context]
            policy = FixedSlope(max(keys, 33), slope=0.1, max_scale=50.0)
            plain, scaled = (masses(drafter, cache, anchor, p) for p in (None, policy))
            assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))
            drafts = [
                propose(drafter, cache, anchor, BLOCK - 1, p).tolist() for p in (None, policy)
            ]
            assert drafts[0] == drafts[1]


def with_query_norms(drafter: DFlash, factor: float) -> DFlash:
    """The drafter with `factor` in its Query norms: the same mathematics as one scale for all
    rows."""
    config = drafter_config()
    tensors = drafter_tensors(config)
    return DFlash(
        config,
        {n: t * factor if n.endswith("q_norm.weight") else t for n, t in tensors.items()},
        drafter.target,
    )


def check_scale_is_the_policys(tiny: Tiny) -> None:
    """Scores are multiplied by exactly β(N) with N = context + block, in every layer."""
    policy = FixedSlope(33, slope=5.0, max_scale=9.0)
    drafter = make_drafter(tiny.target)
    cache = read(drafter, tiny.text[:150])
    for context in (150, 60, 34):
        cache.length = context
        beta = float(policy.scale(torch.tensor(context + BLOCK)))
        assert beta > 1.2
        anchor = tiny.text[context]
        scaled = masses(drafter, cache, anchor, policy)
        expected = masses(with_query_norms(drafter, beta), cache, anchor, None)
        torch.testing.assert_close(scaled, expected, rtol=1e-4, atol=1e-5)
        constant = masses(drafter, cache, anchor, Constant(beta))
        torch.testing.assert_close(constant, expected, rtol=1e-4, atol=1e-5)


def test_scale_is_the_policys(tiny: Tiny) -> None:
    check_scale_is_the_policys(tiny)


def test_a_count_off_by_one_would_be_noticed(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    right, gain = View.count, attention._gain
    for error in (-1, 1):
        monkeypatch.setattr(View, "count", lambda self, c, r, e=error: right(self, c, r) + e)
        monkeypatch.setattr(
            attention, "_gain", lambda p, k, s, c, d, e=error: gain(p, k, s + e, c, d)
        )
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            check_scale_is_the_policys(llama)
        with pytest.raises(AssertionError):
            check_count(View(True, 7), 30, 5)


@pytest.mark.parametrize("layers", LAYERS)
def test_mass_rises_with_the_scale(llama: Tiny, layers: str) -> None:
    """Concentration, in the first layer, whose Queries and Keys nothing else has changed yet."""
    drafter = make_drafter(llama.target, **LAYERS[layers])
    cache = read(drafter, llama.text[:150])
    kind = drafter.kinds[0]
    for context in (150, 40):
        cache.length = context
        anchor = llama.text[context]
        policies = (None, FixedSlope(33), FixedSlope(33, slope=3.0, max_scale=3.0))
        frozen, low, high = (masses(drafter, cache, anchor, p)[0] for p in policies)
        if kind.window is not None and kind.window < 33:
            assert torch.equal(
                frozen, high
            )  # A window keeps every row's count below the reference.
            assert float(frozen.min()) == 1.0  # The top 32 are all there is.
        else:
            assert bool((frozen < low).all() and (low < high).all())


def test_rows_of_causal_layers_are_scaled_by_their_own_counts(llama: Tiny) -> None:
    """N0 inside the block: rows below it stay as they are to the bit, rows above are scaled."""
    drafter = make_drafter(llama.target, is_causal=True)
    cache = read(drafter, llama.text[:150])
    for row in range(1, BLOCK):
        policy = FixedSlope(150 + row, slope=0.5, max_scale=9.0)
        plain, scaled = (masses(drafter, cache, llama.text[150], p)[0] for p in (None, policy))
        # Row i sees 150 + i + 1 Keys; the mass has no row for the anchor.
        same = [bool((plain[:, i] == scaled[:, i]).all()) for i in range(BLOCK - 1)]
        assert same == [150 + i + 2 <= 150 + row for i in range(BLOCK - 1)]


def test_cached_context_is_never_touched(tiny: Tiny) -> None:
    drafter = make_drafter(tiny.target, **LAYERS["mixed"])
    cache = read(drafter, tiny.text[:120])
    keys, values = cache.keys[..., :120, :].clone(), cache.values[..., :120, :].clone()
    for policy in (None, FixedSlope(33), Constant(1.6), Constant(0.5)):
        propose(drafter, cache, tiny.text[120], BLOCK - 1, policy)
        assert torch.equal(cache.keys[..., :120, :], keys)
        assert torch.equal(cache.values[..., :120, :], values)
        assert cache.length == 120
    # A block's own Keys stand behind the context until the next write, and in the first layer they
    # too are the same.
    own = []
    for policy in (None, Constant(1.6)):
        propose(drafter, cache, tiny.text[120], BLOCK - 1, policy)
        own.append(cache.keys[0, ..., 120 : 120 + BLOCK, :].clone())
    assert torch.equal(*own)


def test_probe_measures_the_top_mass(llama: Tiny) -> None:
    """The probed mass, from Keys as they lie in the cache and Queries made again from the
    weights."""
    config = drafter_config()
    tensors = drafter_tensors(config)
    drafter = DFlash(config, tensors, llama.target)
    cache = read(drafter, llama.text[:100])
    found = masses(drafter, cache, llama.text[100], Constant(1.5))
    assert [m.shape for m in found] == [(6, BLOCK - 1)] * 2
    ids = torch.tensor([llama.text[100]] + [3] * (BLOCK - 1))
    normed = F.rms_norm(
        llama.target.embedding[ids], (32,), tensors["layers.0.input_layernorm.weight"], 1e-6
    )
    query = (
        (normed @ tensors["layers.0.self_attn.q_proj.weight"].T).view(BLOCK, 6, 8).transpose(0, 1)
    )
    query = 1.5 * F.rms_norm(query, (8,), tensors["layers.0.self_attn.q_norm.weight"], 1e-6)
    query = rotate(
        query,
        drafter.rotary.cos[100 : 100 + query.shape[-2]],
        drafter.rotary.sin[100 : 100 + query.shape[-2]],
    )
    keys = cache.keys[0, 0, :, : 100 + BLOCK].repeat_interleave(2, 0)
    share = (query @ keys.transpose(1, 2) / 8**0.5).softmax(-1)
    top = share.sort(-1, descending=True).values[..., :32].sum(-1)
    torch.testing.assert_close(found[0], top[:, 1:], rtol=1e-4, atol=1e-5)


def test_windowed_is_a_drafter_with_windows_on_the_same_weights(llama: Tiny) -> None:
    """What a windowed copy drafts and how it is counted, against a checkpoint that has the window
    in its config."""
    for own, window in (("full", 24), ("full", 3), ("causal", 40), ("mixed", 30)):
        whole = make_drafter(llama.target, **LAYERS[own])
        windowed = whole.windowed(window)
        kinds = [k if k.window else View(k.causal, window) for k in whole.kinds]
        assert windowed.kinds == tuple(kinds)
        cache = read(whole, llama.text[:120])
        before = masses(whole, cache, llama.text[120], None)
        limits: dict[str, Any] = {
            "use_sliding_window": True,
            "sliding_window": window,
            "layer_types": [SLIDING] * 2,
        }
        if own != "mixed":  # One window for all of them: a checkpoint can say that.
            direct = make_drafter(llama.target, **limits, is_causal=own == "causal")
            for policy in (None, FixedSlope(33, slope=1.0, max_scale=9.0)):
                found, expected = (
                    masses(d, cache, llama.text[120], policy) for d in (windowed, direct)
                )
                torch.testing.assert_close(found, expected)
                drafts = [
                    propose(d, cache, llama.text[120], BLOCK - 1, policy).tolist()
                    for d in (windowed, direct)
                ]
                assert drafts[0] == drafts[1]
        assert not torch.equal(before[1], masses(windowed, cache, llama.text[120], None)[1])
        after = masses(whole, cache, llama.text[120], None)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
            "the drafter itself must not change"
        )


# Counts


def check_count(kind: View, context: int, rows: int) -> None:
    mask = kind.mask(context, rows, torch.device("cpu"))
    sums = torch.full((rows,), context + rows) if mask is None else mask.sum(-1)
    assert kind.count(context, rows).tolist() == sums.tolist()


@settings(max_examples=300, deadline=None)
@given(
    st.booleans(),
    st.none() | st.integers(1, 40),
    st.integers(0, 60),
    st.integers(1, 20),
)
def test_count_is_the_masks(causal: bool, window: int | None, context: int, rows: int) -> None:
    kind = View(causal, window)
    check_count(kind, context, rows)
    mask = kind.mask(context, rows, torch.device("cpu"))
    for i in range(rows):
        for key in range(context + rows):
            at = context + i
            visible = (key <= at or not causal) and (window is None or abs(at - key) < window)
            assert visible if mask is None else bool(mask[i, key]) == visible


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, [(False, None)] * 2),
        ({"layer_types": [SLIDING, FULL], **WINDOW}, [(True, 24), (False, None)]),
        (
            {"layer_types": [SLIDING, FULL], **WINDOW, "is_causal": False},
            [(False, 24), (False, None)],
        ),
        ({"layer_types": [FULL, FULL], "is_causal": True}, [(True, None)] * 2),
        ({"causal": True}, [(True, None)] * 2),
        ({"causal": True, "is_causal": False}, [(False, None)] * 2),
        ({"use_swa": True, "swa_window_size": 16}, [(False, 16)] * 2),
        ({"use_swa": True, **WINDOW}, [(False, 24)] * 2),
    ],
)
def test_layer_kinds(
    llama: Tiny, changes: dict[str, Any], kinds: list[tuple[bool, int | None]]
) -> None:
    inner = {k: v for k, v in changes.items() if k in ("causal", "use_swa", "swa_window_size")}
    outer = {k: v for k, v in changes.items() if k not in inner}
    dflash = drafter_config()["dflash_config"] | inner
    assert make_drafter(llama.target, **outer, dflash_config=dflash).kinds == tuple(
        View(*k) for k in kinds
    )


# Checkpoints that do not fit


def load_error(
    target: CausalLM, config: dict[str, Any], tensors: dict[str, Tensor], folder: Path
) -> str:
    save(folder, config, tensors)
    return error_of(folder, target)


def error_of(folder: Path, target: CausalLM) -> str:
    with pytest.raises(SharpDraftError) as caught:
        DFlash.load(folder, target)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "its hidden size is 48, the target's 32"),
        ({"vocab_size": 65}, "its vocabulary size is 65, the target's 64"),
        ({"vocab_size": None}, "config.json is not one of a DFlash checkpoint"),
        ({"num_target_layers": 36}, "its number of target layers is 36, the target's 4"),
        (
            {"target_layer_ids": [0, 4]},
            "its list of target layer ids is [0, 4], the target's layers are 0 to 3",
        ),
        ({"target_layer_ids": [-1, 2]}, "its list of target layer ids is [-1, 2]"),
        ({"mask_token_id": 64}, "its mask token id is 64"),
        ({"mask_token_id": -1}, "its mask token id is -1"),
        (
            {"mask_token_id": None},
            "no integer dflash_config.mask_token_id: is it a DFlash checkpoint?",
        ),
        (
            {"target_layer_ids": None},
            "no dflash_config.target_layer_ids: is it a DFlash checkpoint?",
        ),
        ({"block_size": 1}, "block_size is 1: a block needs at least 2 tokens"),
        ({"architectures": ["LlamaForCausalLM"]}, "holds LlamaForCausalLM, not DFlashDraftModel"),
        ({"architectures": None}, "holds no named architecture, not DFlashDraftModel"),
        (
            {"layer_types": [SLIDING, FULL]},
            "sliding-window layers but its config gives no sliding_window",
        ),
    ],
)
def test_wrong_config(llama: Tiny, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = drafter_config()
    tensors = drafter_tensors(config)
    for key, value in changes.items():
        (config["dflash_config"] if key in config["dflash_config"] else config)[key] = value
    assert message in load_error(llama.target, config, tensors, tmp_path)


def edit(change: Callable[[dict[str, Tensor]], Any]) -> dict[str, Tensor]:
    tensors = drafter_tensors(drafter_config())
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), "lacks 1 tensors, first norm.weight"),
        (
            lambda t: [t.pop(k) for k in list(t) if k.startswith("layers.1")],
            "lacks 11 tensors, first layers.1.",
        ),
        (
            lambda t: t.update({"fc.weight": torch.zeros(32, 96)}),
            "fc.weight has shape (32, 96), its config says (32, 64)",
        ),
        (
            lambda t: t.update({"mask_embedding": torch.zeros(32)}),
            "does not know, first mask_embedding",
        ),
        (
            lambda t: t.update({"layers.0.self_attn.sinks": torch.zeros(6)}),
            "does not know, first layers.0.self_attn.sinks",
        ),
        (
            lambda t: t.update({"layers.2.input_layernorm.weight": torch.zeros(32)}),
            "does not know, first layers.2.input_layernorm.weight",
        ),
    ],
)
def test_wrong_tensors(
    llama: Tiny, tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    assert message in load_error(llama.target, drafter_config(), edit(change), tmp_path)


def test_copies_of_the_targets_tensors_are_ignored(llama: Tiny, tmp_path: Path) -> None:
    extra = {
        "embed_tokens.weight": torch.zeros(VOCAB, 32),
        "lm_head.weight": torch.zeros(VOCAB, 32),
    }
    save(tmp_path, drafter_config(), drafter_tensors(drafter_config()) | extra)
    DFlash.load(tmp_path, llama.target)


def test_broken_files(llama: Tiny, tmp_path: Path) -> None:
    config = drafter_config()
    save(tmp_path, config, drafter_tensors(config))
    weights, text = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole = weights.read_bytes()
    for cut in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        assert f"{weights} is truncated or corrupt" in error_of(tmp_path, llama.target)
    weights.unlink()
    assert f"{tmp_path} has no .safetensors file" in error_of(tmp_path, llama.target)
    weights.write_bytes(whole)
    for broken in ("", "{", json.dumps(config)[:-5]):
        text.write_text(broken)
        assert f"cannot read the drafter's {text}" in error_of(tmp_path, llama.target)
    text.write_bytes(b"\xff\xfe\x00")
    assert f"cannot read the drafter's {text}" in error_of(tmp_path, llama.target)
    text.unlink()
    assert f"cannot read the drafter's {text}" in error_of(tmp_path, llama.target)
    assert "cannot read the drafter's" in error_of(tmp_path / "nowhere", llama.target)


@pytest.mark.parametrize("content", ["[]", "7", '"DFlashDraftModel"'])
def test_config_that_is_no_object(llama: Tiny, tmp_path: Path, content: str) -> None:
    save(tmp_path, drafter_config(), drafter_tensors(drafter_config()))
    (tmp_path / "config.json").write_text(content)
    error_of(tmp_path, llama.target)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": "six"},
        {"dflash_config": [1]},
        {"num_hidden_layers": "2"},
        {"layer_types": [FULL]},
        {"layer_types": [FULL, "strange"]},
        {"hidden_size": None},
        {"dflash_config": {"target_layer_ids": "ab", "mask_token_id": 3}},
    ],
)
def test_config_with_values_of_the_wrong_kind(
    llama: Tiny, tmp_path: Path, changes: dict[str, Any]
) -> None:
    load_error(
        llama.target, drafter_config() | changes, drafter_tensors(drafter_config()), tmp_path
    )


# What target and drafter share


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.integers(1, 5),
    st.integers(0, 9),
    st.booleans(),
)
def test_attend(batch: int, heads: tuple[int, int], rows: int, past: int, as_bool: bool) -> None:
    """Causal rows behind cached Keys, against the attention of the textbook."""
    torch.manual_seed(batch + rows + past)
    query = torch.randn(batch, heads[0], rows, 8)
    keys, values = torch.randn(2, batch, heads[1], past + rows, 8)
    visible = torch.tensor(
        [[key <= past + row for key in range(past + rows)] for row in range(rows)]
    )
    mask = visible if as_bool else additive(visible, torch.float32)
    scores = query @ keys.repeat_interleave(heads[0] // heads[1], 1).transpose(2, 3) / 8**0.5
    shares = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    mixed = shares @ values.repeat_interleave(heads[0] // heads[1], 1)
    expected = mixed.transpose(1, 2).reshape(batch, rows, -1)
    torch.testing.assert_close(attend(query, keys, values, mask), expected, rtol=1e-4, atol=1e-5)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from([(4, 4), (4, 2), (6, 1), (9, 3)]),
    st.integers(1, 5),
    st.integers(8, 40),
    st.sampled_from([2, 3, 7]),
    st.sampled_from(["none", "bool", "additive"]),
)
def test_attention_in_chunks_is_attention(
    monkeypatch: pytest.MonkeyPatch,
    heads: tuple[int, int],
    rows: int,
    past: int,
    threads: int,
    kind: str,
) -> None:
    """However the Keys are divided among threads, with a rest or without."""
    monkeypatch.setattr(attention, "_CHUNKED_FROM", 8)
    torch.manual_seed(rows + past)
    query = torch.randn(1, heads[0], rows, 8)
    keys, values = torch.randn(2, 1, heads[1], past + rows, 8)
    visible = torch.ones(rows, past + rows, dtype=torch.bool).tril(past)
    masks = {"none": None, "bool": visible, "additive": additive(visible, torch.float32)}
    mask = masks[kind]
    calls: list[int] = []
    real = attention._attend_in_chunks
    with monkeypatch.context() as patch, torch.inference_mode():
        expected = attend(query, keys, values, mask)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        patch.setattr(attention, "_attend_in_chunks", lambda *a: calls.append(a[-1]) or real(*a))
        found = attend(query, keys, values, mask, past)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    even = heads[1] % threads == 0
    assert bool(calls) != even, "work is divided where heads are not"


def test_keys_that_a_mask_hides_are_never_taken_for_visible(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows hide Keys that were cached long ago: drafts are the same, however attention is
    divided."""
    config = drafter_config(layer_types=[FULL, SLIDING], **WINDOW)
    drafter = DFlash(config, drafter_tensors(config), llama.target)
    assert {kind.window for kind in drafter.kinds} == {None, 24}
    rng = torch.Generator().manual_seed(1)
    texts = torch.randint(0, VOCAB, (6, 121), generator=rng).tolist()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    drafts = []
    for chunked in (False, True):
        monkeypatch.setattr(attention, "_CHUNKED_FROM", 8 if chunked else 10**9)
        session = Session(llama.target, drafter)
        for text in texts:
            session.rewind(0)
            session.read(text[:120])
            found = [
                propose(drafter, session.drafts, text[120], BLOCK - 1, p).tolist()
                for p in (None, FixedSlope(33))
            ]
            drafts.append((chunked, found))
    assert [found for chunked, found in drafts if chunked] == [
        found for chunked, found in drafts if not chunked
    ]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@torch.inference_mode()
def test_linear_in_any_layout(bias: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, offset = torch.randn(24, 16), torch.randn(24) if bias else None
    if not compiled:
        monkeypatch.setattr(kernels, "library", lambda lanes: None)
    layer = Linear(weight, offset)
    assert torch.equal(layer.weight, weight)
    for rows in (1, 2, 3, 8, 31, 128, 129, 300):
        for x in (
            torch.randn(rows, 16),
            torch.randn(1, rows, 16),
            torch.randn(2, 16, rows).transpose(1, 2),
        ):
            expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
            torch.testing.assert_close(layer(x), expected.float(), rtol=1e-4, atol=1e-4)
    half = Linear(weight.bfloat16(), None if offset is None else offset.bfloat16())
    assert half(torch.randn(5, 16)).dtype == torch.bfloat16


def test_rotary_is_transformers(tiny: Tiny) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    module = tiny.model.model.rotary_emb
    rotary = Rotary(module, 50)
    x = torch.randn(2, 3, 7, 8)
    for start in (0, 1, 43):
        cos, sin = module(x, torch.arange(start, start + 7)[None])
        expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
        found = rotate(x, rotary.cos[start : start + 7], rotary.sin[start : start + 7])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_drafter_follows_its_targets_dtype(tmp_path: Path) -> None:
    model = make_model("llama").to(torch.bfloat16)
    config = drafter_config()
    save(tmp_path, config, drafter_tensors(config))
    drafter = DFlash.load(tmp_path, CausalLM(model))
    session = Session(drafter.target, drafter, FixedSlope(33))
    list(session.generate([5, 9, 12], 50))
    assert session.drafts.keys.dtype == torch.bfloat16
    assert len(session.tokens) == 53 and session.drafts.keys.shape[-2] == POSITIONS + BLOCK
