"""DFlash (arXiv 2602.06036): a block-diffusion drafter that reads the target's hidden states.

Hidden states of several target layers are fused, normed and projected to each drafter layer's Keys
and Values once, and cached. A block (the anchor, then mask tokens) attends to that context and to
itself, and all its positions are predicted in one pass through the target's own embedding and head.

Checkpoints are those that z-lab publishes and vLLM loads: `config.json` of a Qwen3-like
`DFlashDraftModel` and `model.safetensors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SharpDraftError
from ..method.settings import DraftSettings
from ..method.theory import attention_mass
from ..method.visible import View
from ..model.cache import KVCache
from ..model.causal_lm import CausalLM
from ..model.config import Config
from ..model.placement import Placement
from ..model.rotary import rotary_of
from ..model.rows import Rows
from ..model.stack import Stack
from .base import Draft, MassProbe, Pick
from .checkpoint import check_tensors, other_target, parsing, read_json, read_tensors, write
from .configs import DFLASH, dflash_taps, flag, merged, number, whole
from .formats import TRAINING, check_frequencies, dflash_shapes, plain_names
from .registry import block_of, drafts_of, family_in
from .vocabulary import VOCABULARY, Vocabulary, check_hidden_size, check_vocabulary
from .weights import Weights

ARCHITECTURE = "DFlashDraftModel"


class DFlash:
    """A DFlash drafter bound to its target."""

    static = True

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: CausalLM
    ) -> None:
        """config: the checkpoint's config.json; tensors: its weights under their published names.

        Raises SharpDraftError if the drafter is not for this target or the checkpoint is not whole.
        """
        self.target = target
        values = merged(config, ("eagle_config", "dflash_config"), DFLASH, "qwen3")
        with parsing("a DFlash"):
            parsed = self._read_config(config, values)
        named = plain_names(tensors)
        check_hidden_size(self.hidden_size, values, named, target)
        self._check_target(values)
        shapes = dflash_shapes(parsed, len(self.taps), target.hidden_size, named)
        frequencies = check_frequencies(parsed, named)
        check_tensors(shapes, named, known=(*VOCABULARY, *TRAINING, *frequencies))
        scale = number(values, "output_multiplier", 1.0)
        self.vocabulary = Vocabulary.of(named, target, parsed, scale)
        rows = len(self.vocabulary.embedding)
        if not 0 <= self.mask_token < rows:
            raise other_target("mask token id", self.mask_token, f"vocabulary has {rows}")
        weights = Weights(named, parsed, target)
        self.fc = weights.linear("fc")
        self.hidden_norm = weights["hidden_norm.weight"]
        names = [f"layers.{i}" for i in range(self.num_layers)]
        layers = tuple(weights.layer(name, "input_layernorm") for name in names)
        self.stack = Stack(layers, weights["norm.weight"], self.heads, self.kv_heads, self.eps)
        # Context Keys and Values of all layers come out of one product.
        self.context_kv = weights.linear(
            *(f"{name}.self_attn.{part}_proj" for name in names for part in "kv")
        )
        self.k_norms = torch.stack([weights[f"{name}.self_attn.k_norm.weight"] for name in names])[
            :, None, None
        ]
        positions = max(self.max_positions, target.max_positions)
        self.rotary = rotary_of(parsed, positions, target.device)

    def _read_config(self, config: Mapping[str, Any], values: Mapping[str, Any]) -> Config:
        parsed = Config.of(values, "qwen3")
        self.max_drafts = block_of(values) - 1
        self.num_drafts = drafts_of(config, "dflash")
        self.hidden_size: int = parsed.hidden_size
        self.vocab_size: int = parsed.vocab_size
        self.num_layers: int = parsed.num_hidden_layers
        self.heads: int = parsed.num_attention_heads
        self.kv_heads: int = parsed.num_key_value_heads
        self.head_dim: int = parsed.head_dim
        self.eps: float = parsed.rms_norm_eps
        self.max_positions: int = parsed.max_position_embeddings
        self.embedding_scale = number(values, "input_embedding_scale", 1.0)
        self.mask_token = whole(values, "mask_token_id")
        self.taps = dflash_taps(values)
        self.views = tuple(_view(values, parsed, i) for i in range(self.num_layers))
        return parsed

    @classmethod
    def load(cls, directory: Path, target: CausalLM) -> DFlash:
        """Read a published checkpoint directory. Raises SharpDraftError for anything that does not
        fit."""
        if (mask := directory / "mask_embedding.pt").exists():
            raise SharpDraftError(
                f"{mask} takes the place of the mask token's embedding, which is not supported: "
                "use a DFlash without one"
            )
        config, tensors = read_json(directory), plain_names(read_tensors(directory))
        drafter = cls(config, tensors, target)
        check_vocabulary(drafter.vocab_size, tensors, target, directory)
        return drafter

    def _check_target(self, values: Mapping[str, Any]) -> None:
        target = self.target
        layers = values.get("num_target_layers", target.num_layers)
        if layers != target.num_layers:
            raise other_target("number of target layers", layers, target.num_layers)
        if not all(0 <= i < target.num_layers for i in self.taps):
            raise other_target(
                "list of target layer ids",
                list(self.taps),
                f"layers are 0 to {target.num_layers - 1}",
            )
        if self.num_drafts < 1:
            raise SharpDraftError(
                f"the drafter's block_size is {self.max_drafts + 1}: a block needs at least 2 "
                f"tokens, of which {self.num_drafts} are drafted"
            )

    def new_cache(self, capacity: int) -> KVCache:
        """Room for the Keys of a context of `capacity` tokens and one block behind them."""
        return KVCache(
            self.num_layers,
            self.kv_heads,
            self.head_dim,
            capacity + self.max_drafts + 1,
            dtype=self.target.dtype,
            device=self.target.device,
            limit=self.rotary.limit,
        )

    @torch.inference_mode()
    def append(
        self,
        at: Placement,
        caches: Sequence[KVCache],
        tokens: Tensor,
        counts: Sequence[int],
        features: Sequence[Tensor],
    ) -> None:
        """Write the tokens' Keys and Values; see `base.Drafter`."""
        rows = at.rows(caches, counts, self.rotary)
        rows.write(slice(None), *self._context(rows, features))

    def commit(
        self, at: Placement, caches: Sequence[KVCache], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Count verified tokens; see `base.Drafter`."""
        for cache, own in zip(caches, tokens, strict=True):
            cache.length += len(own)

    def _context(self, rows: Rows, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated Keys, and Values, of tokens for all layers, [layers, kv_heads, rows,
        head_dim]."""
        fused = self.fc(torch.cat(list(features), dim=-1))
        context = F.rms_norm(fused, (self.hidden_size,), self.hidden_norm, self.eps)
        shape = (fused.shape[1], self.num_layers, 2, self.kv_heads, self.head_dim)
        keys, values = self.context_kv(context)[0].view(shape).permute(2, 1, 3, 0, 4)
        normed = F.rms_norm(keys, (self.head_dim,), None, self.eps) * self.k_norms
        return rows.rotate(normed), values

    def catch_up(self, caches: Sequence[KVCache], settings: Sequence[DraftSettings]) -> None:
        """Nothing is left to do: tokens are cached as they are appended, whatever the settings."""

    @torch.inference_mode()
    def propose(
        self,
        at: Placement,
        caches: Sequence[KVCache],
        anchors: Tensor,
        count: int,
        settings: Sequence[DraftSettings],
        picks: Sequence[Pick],
        probe: MassProbe | None = None,
    ) -> list[Draft]:
        """Draft `count` tokens behind each anchor in one pass; see `base.Drafter`."""
        requests = len(caches)
        ids = anchors.new_full((requests, count + 1), self.mask_token)
        ids[:, 0] = anchors
        hidden = self.vocabulary.embed(ids.view(1, -1))
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        rows = at.rows(caches, [count + 1] * requests, self.rotary)
        views = settings[0].views(self.views)
        gains = rows.gains([each.scale for each in settings], views)
        shown = None if probe is None else partial(_show, probe)
        final = self.stack.run(hidden, rows, views, gains, probe=shown)[1]
        logits = self.vocabulary.logits(final.view(requests, count + 1, self.hidden_size)[:, 1:])
        token_of = self.vocabulary.token_of
        chosen = [pick(own, token_of) for pick, own in zip(picks, logits, strict=True)]
        return [Draft.chain(*each) for each in chosen]


def _show(probe: MassProbe, index: int, query: Tensor, keys: Tensor, mask: Tensor | None) -> None:
    """Show a probe the attention mass of all rows but the anchor's, which proposes nothing."""
    probe(index, attention_mass(query[:, :, 1:], keys, None if mask is None else mask[1:]))


def read_checkpoint(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors of a DFlash directory. Raises SharpDraftError where it does not
    hold them whole."""
    if (family := family_in(directory)) != "dflash":
        raise SharpDraftError(f"{directory} holds a drafter of the family {family}, no DFlash")
    return read_json(directory), read_tensors(directory)


def save(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint directory that this package, z-lab's `dflash` and vLLM load."""
    write(directory, config, tensors)


def _view(values: Mapping[str, Any], parsed: Config, layer: int) -> View:
    """Causality and window of a layer, in the order of precedence that vLLM and z-lab's package
    agree on."""
    # Where the file names no types, max_window_layers says from which layer on a window slides.
    types = parsed.layer_types
    every_sliding = flag(values, "use_swa") and "sliding_attention" not in types
    sliding = every_sliding or types[layer] == "sliding_attention"
    # Speculators' own key: within a block, rows of a sliding layer see each other both ways.
    both_ways = flag(values, "sliding_window_non_causal")
    default = flag(values, "causal", types[layer] == "sliding_attention" and not both_ways)
    causal = flag(values, "is_causal", default)
    limit = values.get("sliding_window", 4096) if flag(values, "use_sliding_window") else None
    window = values.get("swa_window_size", limit) if sliding else None
    if sliding and window is None:
        raise SharpDraftError(
            "the drafter has sliding-window layers but its config gives no sliding_window (with "
            "use_sliding_window)"
        )
    return View(causal, window)
