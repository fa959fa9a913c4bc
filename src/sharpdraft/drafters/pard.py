"""PARD (arXiv 2504.18583): a small causal LM that drafts K tokens in one pass, from mask tokens.

It reads the verified tokens as any LM does, and does not look at the target. A pass takes the
anchor and K - 1 mask tokens behind it; the anchor's row says the first draft, each mask's row the
next. Rows are causal: a mask row sees all before it, masks included, whose Keys are written over
once the real tokens are known.

Checkpoints are those that AMD publishes and vLLM loads: a Llama, Qwen2 or Qwen3 LM whose config
names its `pard_token`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import SharpDraftError
from ..method.settings import DraftSettings
from ..method.visible import CAUSAL
from ..model.cache import KVCache
from ..model.causal_lm import CausalLM
from ..model.checkpoint import read_causal_lm
from ..model.placement import Placement, Static
from .base import Draft, MassProbe, Pick
from .checkpoint import read_json
from .configs import PARD
from .family import MASK_KEYS
from .registry import drafts_of
from .vocabulary import check_size

_MOST_DRAFTS = 32
_READ_ROWS = 512


class TokenCache:
    """The verified tokens, and the draft LM's Keys and Values of those it has read."""

    def __init__(self, keys: KVCache) -> None:
        self.keys = keys
        self.tokens: list[int] = []
        # The same tokens, where a pass finds them without the host.
        self.ids = torch.zeros(keys.capacity, dtype=torch.long, device=keys.keys.device)
        # Behind the first layer, Keys depend on what the Queries before saw, and how.
        self.settings = DraftSettings()

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

    @property
    def limit(self) -> int | None:
        return self.keys.limit

    def reads(self, start: int, end: int) -> None:
        self.keys.reads(start, end)

    def rewind(self, length: int) -> None:
        self.keys.rewind(length)
        self.length = min(self.length, max(length - 1, 0))

    def blank(self) -> None:
        self.keys.blank()

    def unread(self, settings: DraftSettings) -> range:
        """Positions of the tokens whose Keys are not cached as they are under `settings`; none
        behind the last that the draft LM has."""
        own = replace(settings, length=None)
        if self.settings != own:
            self.keys.length, self.settings = 0, own
        return range(self.keys.length, min(self.length, self.capacity))

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
    static = True

    def __init__(
        self, model: CausalLM, mask_token: int, target: CausalLM, num_drafts: int = 7
    ) -> None:
        """model: the draft LM; num_drafts: tokens drafted by default. Raises SharpDraftError if it
        has no such mask token."""
        if not 0 <= mask_token < model.vocab_size:
            raise SharpDraftError(
                f"the drafter's pard_token is {mask_token}, its vocabulary has {model.vocab_size}"
            )
        self.model, self.mask_token = model, mask_token
        # Either may have rows behind the end of what both can say.
        self.vocab_size = min(model.vocab_size, target.vocab_size)
        self.token_of: Tensor | None = None
        if model.vocab_size < target.vocab_size:
            self.token_of = torch.arange(model.vocab_size, device=model.device)
        self.num_drafts, self.max_drafts = min(num_drafts, _MOST_DRAFTS), _MOST_DRAFTS
        self.views = (CAUSAL,) * model.num_layers

    @classmethod
    def load(cls, directory: Path, target: CausalLM) -> Pard:
        """Read a published checkpoint directory. Raises SharpDraftError for anything that does not
        fit."""
        config, path = read_json(directory), directory / "config.json"
        masks = {key: config[key] for key in MASK_KEYS if config.get(key) is not None}
        if len(set(map(repr, masks.values()))) > 1:
            raise SharpDraftError(
                f"{path} says the mask token twice: {masks}; remove the wrong one"
            )
        mask = next(iter(masks.values()), None)
        if type(mask) is not int:
            what = f"pard_token is {mask!r}, not a token's id" if masks else "has no pard_token"
            raise SharpDraftError(f"{path} {what}: is it a PARD checkpoint?")
        drafts = drafts_of(config, "pard")
        model = read_causal_lm(
            directory, dtype=target.dtype, device=target.device, extra=PARD, role="drafter"
        )
        check_size(model.vocab_size, target, directory)
        logits, _, _ = model.forward(torch.tensor([[0]], device=model.device), model.new_cache(1))
        if not bool(logits.isfinite().all()):
            raise SharpDraftError(
                f"the drafter in {directory} says NaN or infinite logits: its conversion is "
                "broken, download it again or take it in another dtype"
            )
        return cls(model, mask, target, drafts)

    def _known(self, tokens: Tensor) -> Tensor:
        """The target's tokens, those that the draft LM does not have being masks to it."""
        if self.token_of is None:
            return tokens
        return torch.where(tokens < self.model.vocab_size, tokens, self.mask_token)

    def new_cache(self, capacity: int) -> TokenCache:
        # A draft LM with fewer positions than the target drafts as far as it has any.
        room = min(capacity + _MOST_DRAFTS, self.model.max_positions)
        return TokenCache(self.model.new_cache(room))

    def append(
        self,
        at: Placement,
        caches: Sequence[TokenCache],
        tokens: Tensor,
        counts: Sequence[int],
        features: Sequence[Tensor] = (),
    ) -> None:
        """Keep the tokens, which are read with the next draft; see `base.Drafter`."""
        tokens = self._known(tokens)
        if isinstance(at, Static):
            slots = at.start + torch.arange(len(tokens), device=tokens.device)
            caches[0].ids.index_copy_(0, slots, tokens)
            return
        for cache, own in zip(caches, tokens.split(list(counts)), strict=True):
            room = cache.ids[cache.length : cache.length + len(own)]
            room.copy_(own[: len(room)])

    def commit(
        self, at: Placement, caches: Sequence[TokenCache], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Count verified tokens; see `base.Drafter`."""
        for cache, own in zip(caches, tokens, strict=True):
            if isinstance(at, Static):
                # All before the block was read with its draft, and so was its anchor.
                cache.keys.length = cache.length + 1
            cache.tokens.extend(own)

    @torch.inference_mode()
    def catch_up(self, caches: Sequence[TokenCache], settings: Sequence[DraftSettings]) -> None:
        """Read what was appended, all of it where the settings are others than before."""
        for cache, own in zip(caches, settings, strict=True):
            self._read(cache, own, leave=0)

    def _read(self, cache: TokenCache, settings: DraftSettings, leave: int) -> None:
        """Read tokens that are unread until at most `leave` are left."""
        while len(unread := cache.unread(settings)) > leave:
            rows = min(len(unread), _READ_ROWS)
            ids = cache.ids[unread.start : unread.start + rows][None]
            own = [settings.scale]
            self.model.forward(ids, cache.keys, logits_from=-1, scales=own, window=settings.view)

    @torch.inference_mode()
    def propose(
        self,
        at: Placement,
        caches: Sequence[TokenCache],
        anchors: Tensor,
        count: int,
        settings: Sequence[DraftSettings],
        picks: Sequence[Pick],
        probe: MassProbe | None = None,
    ) -> list[Draft]:
        """Draft `count` tokens behind each anchor in one pass; see `base.Drafter`."""
        keys, anchors = [cache.keys for cache in caches], self._known(anchors)
        masks = anchors.new_full((count - 1,), self.mask_token)
        if isinstance(at, Static):
            # The tokens that may be unread are those of the last block: they are read again.
            known = count + 1
            slots = at.start - known + torch.arange(known, device=anchors.device)
            ids = torch.cat((caches[0].ids.index_select(0, slots), anchors, masks))
            counts = [known + count]
            offset = -known
        else:
            blocks = []
            for cache, anchor, own in zip(caches, anchors.split(1), settings, strict=True):
                _require_room(cache, cache.length + count)
                self._read(cache, own, leave=_READ_ROWS)
                unread = cache.unread(own)
                blocks.append(torch.cat((cache.ids[unread.start : unread.stop], anchor, masks)))
            ids, counts, offset = torch.cat(blocks), [len(block) for block in blocks], 0
        rows = at.rows(keys, counts, self.model.rotary, offset)
        logits, _, _ = self.model.run(
            ids[None],
            rows,
            wanted=_last(counts, count, ids.device),
            scales=[each.scale for each in settings],
            window=settings[0].view,
            probe=probe,
        )
        if not isinstance(at, Static):
            for cache in caches:
                cache.keys.length = cache.length
        own_logits = logits.view(len(caches), count, -1)[..., : self.vocab_size]
        chosen = [pick(own, self.token_of) for pick, own in zip(picks, own_logits, strict=True)]
        return [Draft.chain(*each) for each in chosen]


def _last(counts: Sequence[int], count: int, device: torch.device) -> slice | Tensor:
    """The last `count` rows of each request."""
    if len(counts) == 1:
        return slice(-count, None)
    ends = torch.tensor(counts).cumsum(0)
    return (ends[:, None] - torch.arange(count, 0, -1)).flatten().to(device)


def _require_room(cache: TokenCache, end: int) -> None:
    if end > cache.keys.capacity:
        raise SharpDraftError(
            f"the drafter has {cache.keys.capacity} positions and shall draft at {cache.length}: "
            "limit the context to what it was made for, or go on without it"
        )
