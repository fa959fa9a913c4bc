"""PARD (arXiv 2504.18583): a small causal LM that drafts K tokens in one pass, from mask tokens.

It reads the verified tokens as any LM does, and does not look at the target. A pass takes the
anchor and K - 1 mask tokens behind it; the anchor's row says the first draft, each mask's row the
next. Rows are causal: a mask row sees all before it, masks included, whose Keys are written over
once the real tokens are known.

Checkpoints are those that AMD publishes and vLLM loads: a Llama, Qwen2 or Qwen3 LM whose config
names its `pard_token`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import SharpDraftError
from ..method.scale import Policy
from ..model.attention import FixedRows
from ..model.cache import KVCache
from ..model.causal_lm import CausalLM
from .base import MassProbe, Pick, likeliest
from .checkpoint import other_target, read_json

_DRAFTS = (
    7  # Where the config does not say how many it was trained for (`num_drafts`, which is ours).
)
_LONGEST = 32
_READ_ROWS = 512


class TokenCache:
    """The verified tokens, and the draft LM's Keys and Values of those it has read."""

    def __init__(self, keys: KVCache) -> None:
        self.keys = keys
        self.tokens: list[int] = []
        # The same tokens where a pass of fixed shape finds them.
        self.ids = torch.zeros(keys.capacity, dtype=torch.long, device=keys.keys.device)
        # Behind the first layer, Keys depend on how the Queries before were scaled.
        self.policy: Policy | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @length.setter
    def length(self, length: int) -> None:
        del self.tokens[length:]
        self.keys.length = min(self.keys.length, length)

    @property
    def capacity(self) -> int:
        return self.keys.capacity

    def blank(self) -> None:
        self.keys.blank()

    def unread(self, policy: Policy | None) -> list[int]:
        """The tokens whose Keys are not cached as they are under `policy`."""
        if self.policy != policy:
            self.keys.length, self.policy = 0, policy
        return self.tokens[self.keys.length :]

    @contextmanager
    def borrowed(self, start: int, rows: int) -> Iterator[None]:
        """Stand at `start` for a while; what is written over is read again."""
        whole = self.tokens
        self.tokens = whole[:start]
        self.keys.length = min(self.keys.length, start)
        try:
            yield
        finally:
            self.tokens = whole


class Pard:
    """A PARD drafter bound to its target."""

    taps: tuple[int, ...] = ()

    def __init__(
        self, model: CausalLM, mask_token: int, target: CausalLM, drafts: int = _DRAFTS
    ) -> None:
        """model: the draft LM; drafts: tokens drafted by default. Raises SharpDraftError if it has
        not the target's vocabulary."""
        # A padded embedding has rows behind the vocabulary's end; it must have all that the target
        # can say.
        if model.vocab_size < target.vocab_size:
            raise other_target("vocabulary size", model.vocab_size, target.vocab_size)
        if not 0 <= mask_token < model.vocab_size:
            raise SharpDraftError(
                f"the drafter's pard_token is {mask_token}, its vocabulary has {model.vocab_size}"
            )
        self.model, self.mask_token, self.vocab_size = model, mask_token, target.vocab_size
        self.block_size, self.longest_block = min(drafts, _LONGEST) + 1, _LONGEST + 1

    @classmethod
    def load(cls, directory: Path, target: CausalLM) -> Pard:
        """Read a published checkpoint directory. Raises SharpDraftError for anything that does not
        fit."""
        from ..hub.models import load_model

        config = read_json(directory)
        mask, drafts = config.get("pard_token"), config.get("num_drafts", _DRAFTS)
        if not isinstance(mask, int):
            raise SharpDraftError(
                f"{directory / 'config.json'} has no pard_token: is it a PARD checkpoint?"
            )
        if not isinstance(drafts, int) or drafts < 1:
            raise SharpDraftError(
                f"{directory / 'config.json'}: num_drafts is {drafts}, it must be at least 1"
            )
        return cls(
            load_model(directory, dtype=target.dtype, device=target.device), mask, target, drafts
        )

    def new_cache(self, capacity: int) -> TokenCache:
        # A draft LM with fewer positions than the target drafts as far as it has any.
        room = min(capacity + _LONGEST, self.model.max_positions)
        return TokenCache(self.model.new_cache(room))

    def observe(
        self,
        caches: Sequence[TokenCache],
        tokens: Sequence[Sequence[int]],
        features: Sequence[Tensor] = (),
    ) -> None:
        """Append verified tokens; they are read with the next draft."""
        for cache, own in zip(caches, tokens, strict=True):
            start = cache.length
            cache.tokens.extend(own)
            room = cache.ids[start : cache.length]
            room.copy_(torch.tensor(list(own)[: len(room)], dtype=torch.long))

    def catch_up(self, caches: Sequence[TokenCache], policies: Sequence[Policy | None]) -> None:
        """Read what was observed, all of it where the policy is another than before."""
        for cache, policy in zip(caches, policies, strict=True):
            while cache.unread(policy):
                self._forward([cache.keys], [cache.unread(policy)[:_READ_ROWS]], [policy], 1, None)

    def propose(
        self,
        caches: Sequence[TokenCache],
        anchors: Sequence[int],
        count: int,
        policies: Sequence[Policy | None],
        picks: Sequence[Pick],
        probe: MassProbe | None = None,
    ) -> Tensor:
        """Draft `count` tokens behind each anchor in one pass; see `family.Drafter`."""
        masks = [self.mask_token] * (count - 1)
        blocks = []
        for cache, anchor, policy in zip(caches, anchors, policies, strict=True):
            if cache.length + count > cache.keys.capacity:
                raise SharpDraftError(
                    f"the drafter has {cache.keys.capacity} positions and shall draft at "
                    f"{cache.length}: limit the context to what it was made for, or go on without "
                    "it"
                )
            while len(unread := cache.unread(policy)) > _READ_ROWS:
                self._forward([cache.keys], [unread[:_READ_ROWS]], [policy], 1, None)
            blocks.append([*unread, anchor, *masks])
        logits = self._forward([cache.keys for cache in caches], blocks, policies, count, probe)
        for cache in caches:
            cache.keys.length = cache.length
        return torch.stack([pick(own, None) for pick, own in zip(picks, logits, strict=True)])

    def propose_fixed(
        self,
        cache: TokenCache,
        start: Tensor,
        anchor: Tensor,
        count: int,
        policy: Policy | None,
        keys: int,
    ) -> Tensor:
        """Draft greedily by operations on the device alone; see `family.Drafter`. The tokens that
        may be unread, which are those of a block, are read again."""
        known = count + 1
        read = cache.ids.index_select(0, start - known + torch.arange(known, device=start.device))
        ids = torch.cat((read, anchor, anchor.new_full((count - 1,), self.mask_token)))[None]
        where = FixedRows(cache.keys, start - known, known + count, keys, self.model.rotary)
        logits, _, _ = self.model.run(ids, where, wanted=slice(-count, None), policies=[policy])
        return likeliest(logits[0, :, : self.vocab_size], None)

    def observe_fixed(
        self,
        cache: TokenCache,
        start: Tensor,
        tokens: Tensor,
        features: Sequence[Tensor],
        keys: int,
    ) -> None:
        """Keep a block's tokens; see `family.Drafter`."""
        cache.ids.index_copy_(0, start + torch.arange(len(tokens), device=start.device), tokens)

    def accept_fixed(self, cache: TokenCache, tokens: Sequence[int]) -> None:
        """Count the tokens of a block that were accepted; see `family.Drafter`."""
        # All before the block was read with its draft, and so was its anchor.
        cache.keys.length = cache.length + 1
        cache.tokens.extend(tokens)

    def _forward(
        self,
        keys: Sequence[KVCache],
        blocks: Sequence[Sequence[int]],
        policies: Sequence[Policy | None],
        wanted: int,
        probe: MassProbe | None,
    ) -> Tensor:
        """Logits [requests, wanted, vocab] of each request's last rows."""
        counts = [len(block) for block in blocks]
        ends = torch.tensor(counts).cumsum(0)
        rows = (ends[:, None] - torch.arange(wanted, 0, -1)).flatten()
        device = self.model.device
        logits, _, _ = self.model.forward(
            torch.tensor([[token for block in blocks for token in block]], device=device),
            keys,
            rows=counts,
            logits_from=rows.to(device),
            policies=policies,
            probe=probe,
        )
        return logits.view(len(blocks), wanted, -1)[..., : self.vocab_size]


def is_pard(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a PARD drafter."""
    return "pard_token" in config
