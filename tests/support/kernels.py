"""Caches and passes for comparisons of the compiled kernels with PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from sharpdraft.method.visible import CAUSAL, View
from sharpdraft.model.cache import KVCache
from sharpdraft.model.kernels import build
from sharpdraft.model.rotary import Rotary
from sharpdraft.model.rows import RaggedRows

no_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs AVX-512"
)
WIDTHS = [8, pytest.param(16, marks=no_avx512)]
CAPACITY = 440


def rotary_for(dim: int, positions: int = CAPACITY) -> Rotary:
    return Rotary(1e4 ** -(torch.arange(0, dim, 2) / dim), 1.0, positions)


def filled(kv_heads: int, dim: int, length: int, seed: int, batch: int = 1) -> KVCache:
    """A cache of two layers whose Keys behind `length` are NaN: whoever reads them is found out."""
    own = KVCache(2, kv_heads, dim, CAPACITY, batch=batch)
    rng = torch.Generator().manual_seed(seed)
    for tensor in (own.keys, own.values):
        tensor.copy_(torch.randn(tensor.shape, generator=rng))
        tensor[..., length:, :] = torch.nan
    own.length = length
    return own


@contextmanager
def unseen_as_nan(views: Sequence[View], caches: Sequence[KVCache]) -> Iterator[None]:
    """For a while, no numbers in the slots of each layer between the sinks and what the first new
    row, and thus any, has in its window: whoever reads or writes there is found out."""
    kept = []
    for cache in caches:
        for layer, view in enumerate(views):
            if view.window is not None:
                slots = slice(view.sinks, max(view.sinks, cache.length - view.window + 1))
                for memory in (cache.keys, cache.values):
                    hidden = memory[layer, ..., slots, :]
                    kept.append((hidden, hidden.clone()))
                    hidden.fill_(torch.nan)
    yield
    for hidden, before in kept:
        assert bool(hidden.isnan().all())
        hidden.copy_(before)


def both_ways(
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    heads: tuple[int, int],
    dim: int,
    spans: list[tuple[int, int]],
    batch: int = 1,
    view: View = CAUSAL,
    scaled: bool = False,
    normed: bool = False,
    seed: int = 0,
    positions: Sequence[int] | None = None,
) -> list[list[Tensor]]:
    """Attention's result and the caches afterwards, by the kernel of `width` lanes and by PyTorch.
    What no row sees is NaN for the kernel, which shall not read it."""
    rng = torch.Generator().manual_seed(seed)
    rotary = rotary_for(dim)
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
        hidden = unseen_as_nan([view] * 2 if lanes else [], caches)
        with monkeypatch.context() as patch, hidden:
            patch.setattr(build, "lanes", lambda size, lanes=lanes: lanes)
            new = RaggedRows(
                caches, [s for s, _ in spans], [c for _, c in spans], rotary, positions
            )
            assert (new.place is not None) == bool(lanes)
            mixed = new.attention(1, qkv.clone(), *heads, view, norms=norms, gain=gain)
        found.append([mixed, *(t for cache in caches for t in (cache.keys, cache.values))])
    return found


def textbook(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention as it is written: query [heads, rows, dim], keys, values [kv_heads, keys, dim],
    visible bool [rows, keys] -> [rows, heads * dim]."""
    group = len(query) // len(keys)
    scores = query @ keys.repeat_interleave(group, 0).transpose(1, 2) / query.shape[-1] ** 0.5
    shares = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (shares @ values.repeat_interleave(group, 0)).transpose(0, 1).flatten(1)
