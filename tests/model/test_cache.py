"""A cache writes where it is told."""

from __future__ import annotations

import torch

from sharpdraft.model.cache import KVCache


def test_cache_writes_where_it_is_told_and_rolls_back_by_length() -> None:
    cache = KVCache(2, 3, 4, 8, batch=2)
    keys = torch.randn(2, 3, 5, 4)
    cache.write(1, 0, keys, -keys)
    cache.length = 5
    more = torch.randn(2, 3, 2, 4)
    all_keys, all_values = cache.write(1, 3, more, -more)
    assert torch.equal(all_keys, torch.cat((keys[:, :, :3], more), dim=2))
    assert torch.equal(all_values, -all_keys)
    assert cache.capacity == 8 and cache.length == 5  # The caller says what is valid.


def test_where_long_texts_begin_to_be_read() -> None:
    cache = KVCache(1, 1, 4, 100, limit=30)
    assert cache.since is None  # Nobody has said anything.
    cache.reads(0, 30)
    assert cache.since == 30
    cache.length = 35  # Read and decoded.
    cache.reads(35, 50)
    assert cache.since == 30
    cache.rewind(21)
    assert (cache.length, cache.since) == (20, 30)
    cache.reads(20, 40)
    assert cache.since == 20
    cache.length = 39
    cache.rewind(31)  # Still a long text, read as one.
    assert (cache.length, cache.since) == (30, 20)
    cache.rewind(30)  # Now a short one, of which the last rows were turned as in a long one.
    assert (cache.length, cache.since) == (20, 30)
    cache.rewind(0)
    assert cache.length == 0


def test_without_a_limit_there_is_nothing_to_say() -> None:
    cache = KVCache(1, 1, 4, 100)
    cache.reads(0, 90)
    cache.length = 90
    cache.rewind(50)
    assert (cache.length, cache.since) == (49, None)
