"""The compiled kernels against the PyTorch operations that they stand for, and life without
them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

from conftest import Tiny
from sharpdraft import FixedSlope, Session, mask_keys
from sharpdraft.errors import SharpDraftError
from sharpdraft.method.policies import Constant
from sharpdraft.method.scale import Policy
from sharpdraft.model import kernels
from sharpdraft.model.attention import CAUSAL, Rotary, Segments, View
from sharpdraft.model.cache import KVCache
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.kernels import add_norm, gated, library
from sharpdraft.model.linear import Linear
from sharpdraft.model.stack import Layer, Stack
from test_fixed import drafter_of

compiled = pytest.mark.skipif(library(8) is None, reason="no C++ compiler here")
no_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs AVX-512"
)
WIDTHS = [8, pytest.param(16, marks=no_avx512)]
CAPACITY = 440
POLICIES = [None, FixedSlope(33), FixedSlope(100, slope=0.3, max_scale=4.0), Constant(1.3)]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "library", lambda lanes: None)


def filled(kv_heads: int, dim: int, length: int, seed: int, batch: int = 1) -> KVCache:
    """A cache of two layers whose Keys behind `length` are NaN: whoever reads them is found out."""
    own = KVCache(2, kv_heads, dim, CAPACITY, batch=batch)
    rng = torch.Generator().manual_seed(seed)
    for tensor in (own.keys, own.values):
        tensor.copy_(torch.randn(tensor.shape, generator=rng))
        tensor[..., length:, :] = torch.nan
    own.length = length
    return own


@compiled
@pytest.mark.parametrize("width", WIDTHS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1), (9, 3)]),
    vectors=st.integers(1, 9),
    spans=st.lists(st.tuples(st.integers(0, 330), st.integers(1, 70)), min_size=1, max_size=4),
    batch=st.integers(1, 3),
    kind=st.builds(View, st.booleans(), st.sampled_from([None, 1, 2, 7, 64, 65, 130])),
    scaled=st.booleans(),
    normed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_is_pytorchs(
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    heads: tuple[int, int],
    vectors: int,
    spans: list[tuple[int, int]],
    batch: int,
    kind: View,
    scaled: bool,
    normed: bool,
    seed: int,
) -> None:
    """Any number of requests at any length, seeing what their kind of layer sees; and what is
    cached."""
    batch = batch if len(spans) == 1 else 1
    ours, theirs = both_ways(
        monkeypatch, width, heads, width * vectors, spans, batch, kind, scaled, normed, seed
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert not ours[0].isnan().any()


def both_ways(
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    heads: tuple[int, int],
    dim: int,
    spans: list[tuple[int, int]],
    batch: int = 1,
    kind: View = CAUSAL,
    scaled: bool = False,
    normed: bool = False,
    seed: int = 0,
) -> list[list[Tensor]]:
    """Attention's result and the caches afterwards, by the kernel of `width` lanes and by
    PyTorch."""
    rng = torch.Generator().manual_seed(seed)
    rotary = Rotary(
        LlamaRotaryEmbedding(LlamaConfig(hidden_size=dim, num_attention_heads=1, head_dim=dim)),
        CAPACITY,
    )
    rows = sum(count for _, count in spans)
    qkv = torch.randn(batch, rows, (heads[0] + 2 * heads[1]) * dim, generator=rng) * 2
    gain = torch.rand(rows, generator=rng) if scaled else None
    norms = (
        (torch.rand(dim, generator=rng), torch.rand(dim, generator=rng), 1e-5) if normed else None
    )
    found = []
    for lanes in (width, 0):
        caches = [
            filled(heads[1], dim, start, seed + i, batch) for i, (start, _) in enumerate(spans)
        ]
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "lanes", lambda size, lanes=lanes: lanes)
            segments = Segments(caches, [s for s, _ in spans], [c for _, c in spans], rotary, kind)
            assert (segments._requests is not None) == bool(lanes)
            mixed = segments.attention(1, qkv.clone(), *heads, norms=norms, gain=gain)
        found.append([mixed, *(t for cache in caches for t in (cache.keys, cache.values))])
    return found


@compiled
@pytest.mark.parametrize("off", [1, -1])
def test_a_row_that_sees_another_key_is_noticed(monkeypatch: pytest.MonkeyPatch, off: int) -> None:
    """What the test above would say if a position were off by one."""
    right = kernels.requests

    def wrong(caches: Any, starts: Any, counts: Any) -> Any:
        found = right(caches, starts, counts)
        for each in found or ():
            each.start += off
        return found

    monkeypatch.setattr(kernels, "requests", wrong)
    ours, theirs = both_ways(monkeypatch, 8, (4, 2), 16, [(100, 3)])
    assert not torch.allclose(ours[0], theirs[0], rtol=1e-3, atol=1e-4)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 380), st.integers(1, 17), st.sampled_from(POLICIES)),
        min_size=1,
        max_size=4,
    ),
    st.builds(View, st.booleans(), st.sampled_from([None, 1, 7, 65])),
)
def test_gains_are_the_policys_at_the_keys_each_row_sees(
    requests: list[tuple[int, int, Policy | None]], kind: View
) -> None:
    caches = [KVCache(1, 1, 8, CAPACITY) for _ in requests]
    rotary = Rotary(
        LlamaRotaryEmbedding(LlamaConfig(hidden_size=8, num_attention_heads=1, head_dim=8)),
        CAPACITY,
    )
    segments = Segments(
        caches, [s for s, _, _ in requests], [c for _, c, _ in requests], rotary, kind
    )
    found = segments.gains([policy for _, _, policy in requests])
    expected = []
    for start, count, policy in requests:
        seen = mask_keys(kind.sees(torch.arange(start, start + count), start + count))
        expected.append(torch.zeros(count) if policy is None else policy.gain(seen))
    if found is None:
        assert all(policy is None for _, _, policy in requests)
    else:
        assert torch.equal(found, torch.cat(expected))


@compiled
@pytest.mark.parametrize("width", WIDTHS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.integers(1, 4), min_size=0, max_size=1),
    st.integers(1, 40),
    st.one_of(st.integers(1, 90), st.sampled_from([512, 600, 1100])),
    st.one_of(st.integers(1, 140), st.just(577)),
    st.booleans(),
    st.booleans(),
)
def test_linear(
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    lead: list[int],
    rows: int,
    size: int,
    outs: int,
    narrow: bool,
    biased: bool,
) -> None:
    """Any number of rows, inputs and outputs, few enough for one thread and more; a row is to the
    bit the same whatever rows it comes with."""
    torch.manual_seed(rows + size + outs)
    x, weight = torch.randn(*lead, rows, size), torch.randn(outs, size)
    weight = weight.bfloat16().float() if narrow else weight
    bias = torch.randn(outs) if biased else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    layer = Linear(weight, bias)
    assert layer.panels is not None and torch.equal(layer.weight, weight)
    assert layer.panels.dtype == (
        torch.bfloat16 if torch.equal(weight.bfloat16().float(), weight) else torch.float32
    )
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "widest", lambda: library(width))
        found, first = layer(x), layer(x[..., :1, :])
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(first, found[..., :1, :])


@compiled
def test_weights_that_bfloat16_holds_are_kept_as_such_and_no_weight_twice() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 32)
    for exact in (True, False):
        layer = Linear(weight.bfloat16().float() if exact else weight)
        kept = [each for each in vars(layer).values() if isinstance(each, Tensor)]
        assert sum(each.nbytes for each in kept) == 64 * 32 * (2 if exact else 4)


def some_stack(
    kinds: list[View], normed: bool, biased: bool, head_norms: bool, dim: int, inner: int
) -> Stack:
    """Layers of random weights, 4 heads in 2 groups, 40 wide; the first projects rows of 56 if it
    is `normed`."""
    rng = torch.Generator().manual_seed(len(kinds) + dim)
    size = 40

    def weight(outs: int, ins: int) -> Linear:
        bias = torch.randn(outs, generator=rng) if biased else None
        return Linear(torch.randn(outs, ins, generator=rng) / ins**0.5, bias)

    layers = tuple(
        Layer(
            attn_norm=torch.rand(size, generator=rng),
            qkv=weight(8 * dim, 56 if normed and i == 0 else size),
            q_norm=torch.rand(dim, generator=rng) if head_norms else None,
            k_norm=torch.rand(dim, generator=rng) if head_norms else None,
            out=weight(size, 4 * dim),
            mlp_norm=torch.rand(size, generator=rng),
            gate_up=weight(2 * inner, size),
            down=weight(size, inner),
            kind=kind,
        )
        for i, kind in enumerate(kinds)
    )
    return Stack(layers, torch.rand(size, generator=rng), 4, 2, 1e-5)


def run_stack(
    stack: Stack,
    spans: list[tuple[int, int]],
    batch: int = 1,
    normed: bool = False,
    policy: Policy | None = None,
    taps: Collection[int] = (),
    cached_layers: int = 3,
) -> list[Tensor]:
    """What a stack makes of random rows behind random caches, and the caches afterwards."""
    dim = stack.layers[0].qkv.outs // 8
    rotary = Rotary(
        LlamaRotaryEmbedding(LlamaConfig(hidden_size=dim, num_attention_heads=1, head_dim=dim)),
        CAPACITY,
    )
    rng = torch.Generator().manual_seed(0)
    rows = sum(count for _, count in spans)
    hidden = torch.randn(batch, rows, 40, generator=rng)
    own = torch.randn(batch, rows, 56, generator=rng) if normed else None
    caches = [KVCache(cached_layers, 2, dim, CAPACITY, batch=batch) for _ in spans]
    for cache, (start, _) in zip(caches, spans, strict=True):
        cache.keys.copy_(filled(2, dim, start, 0, batch).keys[:1])
        cache.values.copy_(filled(2, dim, start, 1, batch).values[:1])
    where: dict[View, Any] = {
        layer.kind: Segments(
            caches, [s for s, _ in spans], [c for _, c in spans], rotary, layer.kind
        )
        for layer in stack.layers
    }
    gains = {kind: each.gains([policy] * len(spans)) for kind, each in where.items()}
    last, final, tapped = stack.run(hidden, where, gains, normed=own, taps=taps)
    assert set(tapped) == set(taps)
    written = [each for cache in caches for each in (cache.keys, cache.values)]
    return [last, final, *(tapped[tap] for tap in sorted(taps)), *written]


@compiled
@settings(max_examples=80, deadline=None)
@given(
    kinds=st.lists(
        st.sampled_from([CAUSAL, View(False), View(True, 20), View(False, 9)]),
        min_size=1,
        max_size=3,
    ),
    spans=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 20)), min_size=1, max_size=3),
    batch=st.integers(1, 2),
    normed=st.booleans(),
    biased=st.booleans(),
    head_norms=st.booleans(),
    policy=st.sampled_from(POLICIES),
    dim=st.sampled_from([8, 16, 24]),
    inner=st.sampled_from([72, 1700]),
    taps=st.sets(st.integers(0, 2)),
)
def test_a_pass_in_one_call_is_pytorchs(
    kinds: list[View],
    spans: list[tuple[int, int]],
    batch: int,
    normed: bool,
    biased: bool,
    head_norms: bool,
    policy: Policy | None,
    dim: int,
    inner: int,
    taps: set[int],
) -> None:
    batch = batch if len(spans) == 1 else 1
    stack = some_stack(kinds, normed, biased, head_norms, dim, inner)
    args = (spans, batch, normed, policy, {tap for tap in taps if tap < len(kinds)}, len(kinds))
    with pytest.MonkeyPatch.context() as patch:
        made = []
        right = kernels.layers
        patch.setattr(kernels, "layers", lambda *args: made.append(right(*args)) or made[-1])
        ours = run_stack(stack, *args)
        assert len(made) == 1 and made[0] is not None
        patch.setattr(kernels, "library", lambda lanes: None)
        theirs = run_stack(stack, *args)
        assert len(made) == 1
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert not ours[0].isnan().any()


def test_what_a_stack_refuses() -> None:
    stack = some_stack([CAUSAL, CAUSAL], False, False, False, 16, 72)
    for taps in ([-1], [2]):
        with pytest.raises(SharpDraftError, match="there are 0 to 1"):
            run_stack(stack, [(5, 2)], taps=taps, cached_layers=2)
    with pytest.raises(SharpDraftError, match="a row of every request"):
        run_stack(stack, [(200, 1), (150, 0)], cached_layers=2)
    with pytest.raises((SharpDraftError, IndexError)):
        run_stack(stack, [(5, 2)], cached_layers=1)

    class Double:
        def gain(self, keys: Tensor) -> Tensor:
            return keys.double()

    with pytest.raises(TypeError, match="gain must be float32"):
        run_stack(stack, [(5, 2)], policy=Double(), cached_layers=2)


@compiled
def test_a_copy_of_a_stack_stands_on_its_own() -> None:
    stack = some_stack([CAUSAL], False, True, True, 16, 72)
    expected = run_stack(stack, [(50, 3)], cached_layers=1)
    other = copy.deepcopy(stack)
    del stack
    assert all(map(torch.equal, run_stack(other, [(50, 3)], cached_layers=1)[:2], expected[:2]))


@compiled
@pytest.mark.parametrize("family", ["dflash", "eagle3", "pard"])
def test_target_and_drafters_run_in_one_call_a_pass(
    family: str, llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    right = kernels.layers

    def noting(table: Any, *args: Any) -> Any:
        found = right(table, *args)
        made.append(0 if found is None else len(table))
        return found

    drafter = drafter_of(family, llama)
    session = Session(llama.target, drafter, FixedSlope(33), block=4)
    session.prefill(llama.text[:40])
    monkeypatch.setattr(kernels, "layers", noting)
    session.round(10)
    stack = drafter.model.stack if family == "pard" else drafter.stack
    passes = 3 if family == "eagle3" else 1
    assert made == [len(stack.layers)] * passes + [llama.target.num_layers]


@compiled
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 70), st.booleans(), st.sampled_from([1e-6, 1.0, 30.0, 1e4])
)
def test_add_norm_and_gated(rows: int, size: int, added: bool, scale: float) -> None:
    torch.manual_seed(rows + size)
    hidden, weight = torch.randn(1, rows, size) * scale, torch.randn(size)
    delta = torch.randn(1, rows, size) * scale if added else None
    total = hidden if delta is None else hidden + delta
    expected = F.rms_norm(total.double(), (size,), weight.double(), 1e-5).float()
    summed, normed = add_norm(hidden.clone(), delta, weight, 1e-5)
    torch.testing.assert_close(summed, total)
    torch.testing.assert_close(normed, expected, rtol=1e-4, atol=1e-6)
    both = torch.randn(1, rows, 2 * size) * scale
    gate, up = both.double().chunk(2, -1)
    torch.testing.assert_close(gated(both), (F.silu(gate) * up).float(), rtol=1e-4, atol=1e-6)


def test_gradients_are_left_to_pytorch() -> None:
    """Training runs the same functions."""
    with torch.inference_mode(False), torch.enable_grad():
        x, norm = torch.randn(2, 16, requires_grad=True), torch.ones(16)
        weight = torch.randn(8, 16)
        torch.testing.assert_close(Linear(weight)(x), F.linear(x, weight))
        hidden, normed = add_norm(x, x, norm, 1e-5)
        (hidden.sum() + normed.sum() + gated(x).sum() + Linear(weight)(x).sum()).backward()
        assert x.grad is not None


@pytest.mark.parametrize("family", ["none", "dflash", "eagle3", "pard"])
def test_the_same_is_written_without_kernels(
    family: str, llama: Tiny, without_kernels: None
) -> None:
    plain = replace(llama, target=CausalLM(llama.model))
    session = Session(plain.target, drafter_of(family, plain), FixedSlope(33))
    assert [t for r in session.generate(llama.text[:25], 60) for t in r.tokens] == llama.text[25:85]


def test_a_model_that_is_taken_over_is_let_go(tiny: Tiny) -> None:
    model = copy.deepcopy(tiny.model)
    session = Session(CausalLM(model, release=True))
    assert all(parameter.is_meta for parameter in model.model.layers.parameters())
    assert [t for r in session.generate(tiny.text[:25], 60) for t in r.tokens] == tiny.text[25:85]


@pytest.mark.parametrize("fault", ["no compiler", "a compiler that fails"])
def test_a_machine_that_cannot_build_them_says_so_and_goes_on(
    fault: str,
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = tmp_path / "cxx"
    bad.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho sorry, no >&2; exit 1\n')
    bad.chmod(0o755)
    monkeypatch.setenv(
        "CXX", str(bad) if fault == "a compiler that fails" else str(tmp_path / "absent")
    )
    monkeypatch.setenv("SHARPDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "library", library.__wrapped__)
    with caplog.at_level(logging.WARNING):
        session = Session(tiny.target)
        assert [t for r in session.generate(tiny.text[:25], 5) for t in r.tokens] == tiny.text[
            25:30
        ]
    assert ("no C++ compiler" if fault == "no compiler" else "sorry, no") in caplog.text
    assert not list((tmp_path / "cache").rglob("*.so"))


@compiled
def test_they_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARPDRAFT_CACHE", str(tmp_path))
    assert library.__wrapped__(8) is not None
    (built,) = tmp_path.rglob("*.so")
    made = built.stat().st_mtime_ns
    assert library.__wrapped__(8) is not None
    assert [path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")] == [made]
