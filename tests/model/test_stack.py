"""A pass in one call against the same pass in PyTorch operations."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sharpdraft import FixedSlope, Session
from sharpdraft.errors import SharpDraftError
from sharpdraft.method.policies import Constant, LayerSlopes
from sharpdraft.method.scale import Scale
from sharpdraft.method.settings import DraftSettings, FixedLength
from sharpdraft.method.visible import CAUSAL, View
from sharpdraft.model import kernels
from sharpdraft.model.cache import KVCache
from sharpdraft.model.kernels import build
from sharpdraft.model.linear import Linear
from sharpdraft.model.rows import RaggedRows
from sharpdraft.model.stack import Layer, Stack
from support.families import drafter_of
from support.kernels import CAPACITY, filled, rotary_for, unseen_as_nan
from support.tiny import Tiny

SCALES = [
    None,
    FixedSlope(33),
    FixedSlope(100, slope=0.3, max_scale=4.0),
    Constant(1.3),
    LayerSlopes(40, (0.4, 3.0, 0.9)),
]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def some_stack(
    count: int, normed: bool, biased: bool, head_norms: bool, dim: int, inner: int
) -> Stack:
    """Layers of random weights, 4 heads in 2 groups, 40 wide; the first projects rows of 56 if it
    is `normed`."""
    rng = torch.Generator().manual_seed(count + dim)
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
        )
        for i in range(count)
    )
    return Stack(layers, torch.rand(size, generator=rng), 4, 2, 1e-5)


def run_stack(
    stack: Stack,
    views: list[View],
    spans: list[tuple[int, int]],
    batch: int = 1,
    normed: bool = False,
    scale: Scale | None = None,
    taps: Collection[int] = (),
    cached_layers: int | None = None,
    dirty: bool = False,
) -> list[Tensor]:
    """What a stack makes of random rows behind random caches, and the caches afterwards. dirty:
    with no numbers where no row of a layer sees any."""
    dim = stack.layers[0].qkv.outs // 8
    rng = torch.Generator().manual_seed(0)
    rows = sum(count for _, count in spans)
    hidden = torch.randn(batch, rows, 40, generator=rng)
    own = torch.randn(batch, rows, 56, generator=rng) if normed else None
    layers = len(views) if cached_layers is None else cached_layers
    caches = [KVCache(layers, 2, dim, CAPACITY, batch=batch) for _ in spans]
    for cache, (start, _) in zip(caches, spans, strict=True):
        cache.keys.copy_(filled(2, dim, start, 0, batch).keys[:1])
        cache.values.copy_(filled(2, dim, start, 1, batch).values[:1])
        cache.length = start
    starts, counts = [start for start, _ in spans], [count for _, count in spans]
    new = RaggedRows(caches, starts, counts, rotary_for(dim))
    gains = new.gains([scale] * len(spans), views)
    with unseen_as_nan(views if dirty else [], caches):
        last, final, tapped = stack.run(hidden, new, views, gains, normed=own, taps=taps)
    assert set(tapped) == set(taps)
    written = [each for cache in caches for each in (cache.keys, cache.values)]
    return [last, final, *(tapped[tap] for tap in sorted(taps)), *written]


@pytest.mark.usefixtures("compiled")
@settings(max_examples=80, deadline=None)
@given(
    views=st.lists(
        st.sampled_from(
            [
                CAUSAL,
                View(False),
                View(True, 20),
                View(False, 9),
                View(True, 20, 4),
                View(False, 9, 70),
            ]
        ),
        min_size=1,
        max_size=3,
    ),
    spans=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 20)), min_size=1, max_size=3),
    batch=st.integers(1, 2),
    normed=st.booleans(),
    biased=st.booleans(),
    head_norms=st.booleans(),
    scale=st.sampled_from(SCALES),
    dim=st.sampled_from([8, 16, 24]),
    inner=st.sampled_from([72, 1700]),
    taps=st.sets(st.integers(0, 2)),
)
def test_a_pass_in_one_call_is_pytorchs(
    views: list[View],
    spans: list[tuple[int, int]],
    batch: int,
    normed: bool,
    biased: bool,
    head_norms: bool,
    scale: Scale | None,
    dim: int,
    inner: int,
    taps: set[int],
) -> None:
    batch = batch if len(spans) == 1 else 1
    stack = some_stack(len(views), normed, biased, head_norms, dim, inner)
    args = (views, spans, batch, normed, scale, {tap for tap in taps if tap < len(views)})
    with pytest.MonkeyPatch.context() as patch:
        made = []
        right = kernels.layers
        patch.setattr(kernels, "layers", lambda *args: made.append(right(*args)) or made[-1])
        ours = run_stack(stack, *args, dirty=True)
        assert len(made) == 1 and made[0] is not None
        patch.setattr(build, "library", lambda lanes: None)
        theirs = run_stack(stack, *args)
        assert len(made) == 1
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert not ours[0].isnan().any()


def test_what_a_stack_refuses() -> None:
    stack, views = some_stack(2, False, False, False, 16, 72), [CAUSAL, CAUSAL]
    for taps in ([-1], [2]):
        with pytest.raises(SharpDraftError, match="there are 0 to 1"):
            run_stack(stack, views, [(5, 2)], taps=taps)
    with pytest.raises(SharpDraftError, match="a row of every request"):
        run_stack(stack, views, [(200, 1), (150, 0)])
    with pytest.raises((SharpDraftError, IndexError)):
        run_stack(stack, views, [(5, 2)], cached_layers=1)
    with pytest.raises(SharpDraftError, match="1 views and 1 gains for 2 layers"):
        run_stack(stack, [CAUSAL], [(5, 2)])

    class Double:
        def gain(self, keys: Tensor) -> Tensor:
            return keys.double()

    with pytest.raises(TypeError, match="gain must be float32"):
        run_stack(stack, views, [(5, 2)], scale=Double())


@pytest.mark.usefixtures("compiled")
def test_a_copy_of_a_stack_stands_on_its_own() -> None:
    stack = some_stack(1, False, True, True, 16, 72)
    expected = run_stack(stack, [CAUSAL], [(50, 3)])
    other = copy.deepcopy(stack)
    del stack
    assert all(map(torch.equal, run_stack(other, [CAUSAL], [(50, 3)])[:2], expected[:2]))


@pytest.mark.usefixtures("compiled")
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
    asked = DraftSettings(FixedSlope(33), length=FixedLength(3))
    session = Session(llama.target, drafter, asked)
    session.prefill(llama.text[:40])
    monkeypatch.setattr(kernels, "layers", noting)
    session.round(10)
    stack = drafter.model.stack if family == "pard" else drafter.stack
    passes = 3 if family == "eagle3" else 1
    assert made == [len(stack.layers)] * passes + [llama.target.num_layers]
