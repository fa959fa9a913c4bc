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
from ..model.linear import Linear
from ..model.placement import Placement
from ..model.rotary import rotary_of
from ..model.rows import Rows
from ..model.stack import Layer, Stack
from .base import Draft, MassProbe, Pick
from .checkpoint import check_tensors, other_target, parsing, read_json, read_tensors, write
from .formats import dflash_shapes
from .registry import drafts_of

ARCHITECTURE = "DFlashDraftModel"


class DFlash:
    """A DFlash drafter bound to its target."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: CausalLM
    ) -> None:
        """config: the checkpoint's config.json; tensors: its weights under their published names.

        Raises SharpDraftError if the drafter is not for this target or the checkpoint is not whole.
        """
        self.target = target
        with parsing("a DFlash"):
            parsed = self._read_config(config)
        self._check_target(config, target)

        dtype, device = target.dtype, target.device
        weights = dflash_shapes(self, parsed.intermediate_size, parsed.attention_bias)
        check_tensors(weights, tensors, known={"embed_tokens.weight", "lm_head.weight"})
        get = {name: tensors[name].to(device=device, dtype=dtype) for name in weights}

        def linear(names: Sequence[str]) -> Linear:
            weight = torch.cat([get[f"{n}.weight"] for n in names])
            bias = (
                torch.cat([get[f"{n}.bias"] for n in names]) if f"{names[0]}.bias" in get else None
            )
            return Linear(weight, bias)

        self.fc = linear(["fc"])
        self.hidden_norm = get["hidden_norm.weight"]
        layers = []
        for i in range(self.num_layers):
            attn, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            layers.append(
                Layer(
                    attn_norm=get[f"layers.{i}.input_layernorm.weight"],
                    qkv=linear([f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"]),
                    q_norm=get[f"{attn}.q_norm.weight"],
                    k_norm=get[f"{attn}.k_norm.weight"],
                    out=linear([f"{attn}.o_proj"]),
                    mlp_norm=get[f"layers.{i}.post_attention_layernorm.weight"],
                    gate_up=linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
                    down=linear([f"{mlp}.down_proj"]),
                )
            )
        self.stack = Stack(tuple(layers), get["norm.weight"], self.heads, self.kv_heads, self.eps)
        # Context Keys and Values of all layers come out of one product.
        self.context_kv = linear(
            [f"layers.{i}.self_attn.{p}_proj" for i in range(self.num_layers) for p in ("k", "v")]
        )
        self.k_norms = torch.stack(
            [get[f"layers.{i}.self_attn.k_norm.weight"] for i in range(self.num_layers)]
        )[:, None, None]
        positions = max(self.max_positions, target.max_positions)
        self.rotary = rotary_of(parsed, positions, device)

    def _read_config(self, config: Mapping[str, Any]) -> Config:
        dflash = config.get("dflash_config") or {}
        parsed = Config.of(config, "qwen3")
        self.num_drafts = self.max_drafts = drafts_of(config)
        self.hidden_size: int = parsed.hidden_size
        self.num_layers: int = parsed.num_hidden_layers
        self.heads: int = parsed.num_attention_heads
        self.kv_heads: int = parsed.num_key_value_heads
        self.head_dim: int = parsed.head_dim
        self.eps: float = parsed.rms_norm_eps
        self.max_positions: int = parsed.max_position_embeddings
        self.embedding_scale = float(
            dflash.get("input_embedding_scale", config.get("input_embedding_scale", 1.0))
        )
        self.mask_token = _integer(
            dflash.get("mask_token_id", config.get("mask_token_id")), "mask_token_id"
        )
        layer_ids = dflash.get("target_layer_ids", config.get("target_layer_ids"))
        if not layer_ids:
            raise SharpDraftError(
                "the drafter's config has no dflash_config.target_layer_ids: is it a DFlash "
                "checkpoint?"
            )
        self.taps = tuple(int(i) for i in layer_ids)
        self.views = tuple(_view(config, dflash, parsed, i) for i in range(self.num_layers))
        return parsed

    @classmethod
    def load(cls, directory: Path, target: CausalLM) -> DFlash:
        """Read a published checkpoint directory. Raises SharpDraftError for anything that does not
        fit."""
        config, tensors = read_checkpoint(directory)
        return cls(config, tensors, target)

    def _check_target(self, config: Mapping[str, Any], target: CausalLM) -> None:
        if self.hidden_size != target.hidden_size:
            raise other_target("hidden size", self.hidden_size, target.hidden_size)
        if config.get("vocab_size") != target.vocab_size:
            raise other_target("vocabulary size", config.get("vocab_size"), target.vocab_size)
        if config.get("num_target_layers", target.num_layers) != target.num_layers:
            raise other_target(
                "number of target layers", config["num_target_layers"], target.num_layers
            )
        if not all(0 <= i < target.num_layers for i in self.taps):
            raise other_target(
                "list of target layer ids",
                list(self.taps),
                f"layers are 0 to {target.num_layers - 1}",
            )
        if not 0 <= self.mask_token < target.vocab_size:
            raise other_target(
                "mask token id", self.mask_token, f"vocabulary has {target.vocab_size}"
            )
        if self.num_drafts < 1:
            raise SharpDraftError(
                f"the drafter's block_size is {self.num_drafts + 1}: a block needs at least 2 "
                "tokens"
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
        hidden = F.embedding(ids.view(1, -1), self.target.embedding)
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        rows = at.rows(caches, [count + 1] * requests, self.rotary)
        views = settings[0].views(self.views)
        gains = rows.gains([each.scale for each in settings], views)
        shown = None if probe is None else partial(_show, probe)
        final = self.stack.run(hidden, rows, views, gains, probe=shown)[1]
        logits = self.target.head(final.view(requests, count + 1, self.hidden_size)[:, 1:])
        chosen = [pick(own, None) for pick, own in zip(picks, logits, strict=True)]
        return [Draft.chain(*each) for each in chosen]


def _show(probe: MassProbe, index: int, query: Tensor, keys: Tensor, mask: Tensor | None) -> None:
    """Show a probe the attention mass of all rows but the anchor's, which proposes nothing."""
    probe(index, attention_mass(query[:, :, 1:], keys, None if mask is None else mask[1:]))


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a DFlash directory. Raises SharpDraftError where it is none."""
    config = read_json(directory)
    architectures = config.get("architectures") or []
    if ARCHITECTURE not in architectures:
        raise SharpDraftError(
            f"{directory} holds {', '.join(architectures) or 'no named architecture'}, not "
            f"{ARCHITECTURE}: give a DFlash, EAGLE-3 or PARD checkpoint as the drafter"
        )
    return config


def read_checkpoint(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors of a DFlash directory. Raises SharpDraftError where it does not
    hold them whole."""
    return read_config(directory), read_tensors(directory)


def save(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint directory that this package, z-lab's `dflash` and vLLM load."""
    write(directory, config, tensors)


def _view(config: Mapping[str, Any], dflash: Mapping[str, Any], parsed: Config, layer: int) -> View:
    """Causality and window of a layer, in the order of precedence that vLLM and z-lab's package
    agree on."""
    # Where the file names no types, max_window_layers says from which layer on a window slides.
    types = parsed.layer_types
    every_sliding = bool(dflash.get("use_swa", False)) and "sliding_attention" not in types
    sliding = every_sliding or types[layer] == "sliding_attention"
    causal = config.get("is_causal")
    if causal is None:
        causal = dflash.get("causal")
    if causal is None:
        causal = types[layer] == "sliding_attention"
    limit = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    window = dflash.get("swa_window_size", limit) if sliding else None
    if sliding and window is None:
        raise SharpDraftError(
            "the drafter has sliding-window layers but its config gives no sliding_window (with "
            "use_sliding_window)"
        )
    return View(bool(causal), window)


def _integer(value: object, name: str) -> int:
    if not isinstance(value, int):
        raise SharpDraftError(
            f"the drafter's config has no integer dflash_config.{name}: is it a DFlash checkpoint?"
        )
    return value
