"""DFlash drafters for the tiny targets, and a drafter that knows what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sharpdraft.drafters.base import Draft, likeliest
from sharpdraft.drafters.dflash import DFlash
from sharpdraft.method.scale import Scale
from sharpdraft.method.settings import DraftSettings, Window
from sharpdraft.method.visible import View
from sharpdraft.model.cache import KVCache
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.placement import Placement, Ragged
from support.tiny import BLOCK, POSITIONS, VOCAB


def drafter_config(**changes: Any) -> dict[str, Any]:
    """config.json of a drafter for the tiny targets, as published ones have it."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "max_position_embeddings": POSITIONS,
        "num_target_layers": 4,
        "block_size": BLOCK,
        "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 3},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    } | changes


def drafter_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Random weights under the published names; norms too, where leaving one out would otherwise
    not show."""
    size, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(config["dflash_config"]["target_layer_ids"]) * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.self_attn.q_proj.weight": (q, size),
            f"layers.{i}.self_attn.k_proj.weight": (kv, size),
            f"layers.{i}.self_attn.v_proj.weight": (kv, size),
            f"layers.{i}.self_attn.o_proj.weight": (size, q),
            f"layers.{i}.self_attn.q_norm.weight": (dim,),
            f"layers.{i}.self_attn.k_norm.weight": (dim,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, size),
            f"layers.{i}.mlp.up_proj.weight": (inner, size),
            f"layers.{i}.mlp.down_proj.weight": (size, inner),
            f"layers.{i}.input_layernorm.weight": (size,),
            f"layers.{i}.post_attention_layernorm.weight": (size,),
        }
    rng = torch.Generator().manual_seed(seed)
    return {
        name: 0.4 * torch.randn(shape, generator=rng)
        if len(shape) > 1
        else 1 + 0.2 * torch.randn(shape, generator=rng)
        for name, shape in shapes.items()
    }


def make_drafter(target: CausalLM, seed: int = 1, **changes: Any) -> DFlash:
    config = drafter_config(**changes)
    return DFlash(config, drafter_tensors(config, seed), target)


class Oracle:
    """Drafts the known text, but never at the positions in `wrong`; notes the settings it was
    given."""

    def __init__(
        self, text: Sequence[int], wrong: Sequence[int] = (), num_drafts: int = BLOCK - 1
    ) -> None:
        self.text, self.wrong = text, set(wrong)
        self.num_drafts = self.max_drafts = num_drafts
        self.taps, self.views = (1,), (View(),)
        self.settings: list[DraftSettings] = []

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(1, 1, 1, capacity + self.max_drafts + 1)

    def append(
        self,
        at: Placement,
        caches: Sequence[KVCache],
        tokens: Tensor,
        counts: Sequence[int],
        features: Sequence[Tensor],
    ) -> None:
        (tapped,) = features
        assert tapped.shape[1] == len(tokens) == sum(counts)
        for cache, own in zip(caches, tokens.split(list(counts)), strict=True):
            assert own.tolist() == list(self.text[cache.length : cache.length + len(own)])

    def commit(
        self, at: Placement, caches: Sequence[KVCache], tokens: Sequence[Sequence[int]]
    ) -> None:
        for cache, own in zip(caches, tokens, strict=True):
            assert list(own) == list(self.text[cache.length : cache.length + len(own)])
            cache.length += len(own)

    def catch_up(self, caches: Sequence[KVCache], settings: Sequence[DraftSettings]) -> None:
        pass

    def propose(
        self,
        at: Placement,
        caches: Sequence[KVCache],
        anchors: Tensor,
        count: int,
        settings: Sequence[DraftSettings],
        picks: Sequence[Any],
        probe: Any = None,
    ) -> list[Draft]:
        drafts = []
        for cache, anchor in zip(caches, anchors.tolist(), strict=True):
            first = cache.length + 1
            assert anchor == self.text[first - 1]
            spots = range(first, first + count)
            tokens = [(self.text[spot] + (spot in self.wrong)) % VOCAB for spot in spots]
            drafts.append(Draft.chain(torch.tensor(tokens)))
        self.settings.extend(settings)
        return drafts


def append(
    drafter: Any, cache: Any, tokens: Sequence[int], features: Sequence[Tensor] = ()
) -> None:
    """Let a drafter take in verified tokens of a single request."""
    drafter.append(Ragged(), [cache], torch.tensor(list(tokens)), [len(tokens)], features)
    drafter.commit(Ragged(), [cache], [list(tokens)])


def propose(
    drafter: Any,
    cache: Any,
    anchor: int,
    count: int,
    scale: Scale | None = None,
    probe: Any = None,
    view: Window | None = None,
) -> Tensor:
    """The drafts of a single request, int64 [count]."""
    settings, anchors = [DraftSettings(scale, view)], torch.tensor([anchor])
    (draft,) = drafter.propose(Ragged(), [cache], anchors, count, settings, [likeliest], probe)
    tokens: Tensor = draft.tokens
    return tokens
