"""DFlash from outside: scaling, views, and what is measured of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sharpdraft.drafters.dflash import DFlash
from sharpdraft.method.policies import Constant, FixedSlope
from sharpdraft.method.scale import Scale
from sharpdraft.method.settings import Window
from sharpdraft.method.visible import View
from sharpdraft.model import rows
from sharpdraft.model.cache import KVCache
from sharpdraft.model.rotary import rotate
from support.dflash import LAYERS, SLIDING, read
from support.drafters import drafter_config, drafter_tensors, make_drafter, propose
from support.tiny import BLOCK, Tiny
from support.views import check_count


def masses(
    drafter: DFlash,
    cache: KVCache,
    anchor: int,
    scale: Scale | None,
    count: int = BLOCK - 1,
    view: Window | None = None,
) -> list[Tensor]:
    found: list[Tensor] = []
    keep = lambda layer, mass: found.append(mass.clone())  # noqa: E731
    propose(drafter, cache, anchor, count, scale, keep, view)
    return found


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
    right, gain = View.count, rows._gain
    for error in (-1, 1):
        monkeypatch.setattr(View, "count", lambda self, c, r, e=error: right(self, c, r) + e)
        monkeypatch.setattr(rows, "_gain", lambda p, k, s, c, d, e=error: gain(p, k, s + e, c, d))
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            check_scale_is_the_policys(llama)
        with pytest.raises(AssertionError):
            check_count(View(True, 7), 30, 5)


@pytest.mark.parametrize("layers", LAYERS)
def test_mass_rises_with_the_scale(llama: Tiny, layers: str) -> None:
    """Concentration, in the first layer, whose Queries and Keys nothing else has changed yet."""
    drafter = make_drafter(llama.target, **LAYERS[layers])
    cache = read(drafter, llama.text[:150])
    own = drafter.views[0]
    for context in (150, 40):
        cache.length = context
        anchor = llama.text[context]
        policies = (None, FixedSlope(33), FixedSlope(33, slope=3.0, max_scale=3.0))
        frozen, low, high = (masses(drafter, cache, anchor, p)[0] for p in policies)
        if own.window is not None and own.window < 33:
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


def test_a_window_of_the_settings_is_one_of_the_checkpoints(llama: Tiny) -> None:
    """What is drafted behind a window and how it is counted, against a checkpoint that has the
    window in its config."""
    for own, window in (("full", 24), ("full", 3), ("causal", 40), ("mixed", 30)):
        whole = make_drafter(llama.target, **LAYERS[own])
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
                found = masses(whole, cache, llama.text[120], policy, view=Window(window))
                expected = masses(direct, cache, llama.text[120], policy)
                torch.testing.assert_close(found, expected)
                drafts = [
                    propose(d, cache, llama.text[120], BLOCK - 1, policy, view=view).tolist()
                    for d, view in ((whole, Window(window)), (direct, None))
                ]
                assert drafts[0] == drafts[1]
        seen = masses(whole, cache, llama.text[120], None, view=Window(window))
        assert not torch.equal(before[1], seen[1])
        after = masses(whole, cache, llama.text[120], None)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
            "the drafter itself must not change"
        )
