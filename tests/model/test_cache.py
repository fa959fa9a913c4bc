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
