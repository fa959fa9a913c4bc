"""DFlash (arXiv 2602.06036): a block-diffusion drafter that reads the target's hidden states.

Hidden states of several target layers are fused, normed and projected to each drafter layer's Keys
and Values once, and cached. A block (the anchor, then mask tokens) attends to that context and to
itself, and all its positions are predicted in one pass through the target's own embedding and head.

Checkpoints are those that z-lab publishes and vLLM loads: `config.json` of a Qwen3-like
`DFlashDraftModel` and `model.safetensors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3RotaryEmbedding

from ..errors import SharpDraftError
from ..method.scale import Policy
from ..method.theory import attention_mass
from ..model.attention import FixedRows, Rotary, Rows, Segments, View
from ..model.cache import KVCache
from ..model.causal_lm import CausalLM
from ..model.linear import Linear
from ..model.stack import Layer, Stack
from .base import MassProbe, Pick, likeliest
from .checkpoint import check_tensors, other_target, parsing, read_json, read_tensors, write

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
        weights = _expected(self, parsed.intermediate_size, bool(parsed.attention_bias))
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
        for i, kind in enumerate(self.kinds):
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
                    kind=kind,
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
        self._windowed: dict[int, DFlash] = {}
        self.rotary = Rotary(
            Qwen3RotaryEmbedding(parsed), max(self.max_positions, target.max_positions), device
        )

    def _read_config(self, config: Mapping[str, Any]) -> Qwen3Config:
        dflash = config.get("dflash_config") or {}
        parsed = Qwen3Config(
            **{k: v for k, v in config.items() if k not in ("architectures", "auto_map")}
        )
        self.block_size = self.longest_block = int(
            dflash.get("block_size", config.get("block_size", 16))
        )
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
        self.kinds = tuple(_layer_kind(config, dflash, parsed, i) for i in range(self.num_layers))
        return parsed

    @classmethod
    def load(cls, directory: Path, target: CausalLM) -> DFlash:
        """Read a published checkpoint directory. Raises SharpDraftError for anything that does not
        fit."""
        config, tensors = read_checkpoint(directory)
        return cls(config, tensors, target)

    def windowed(self, window: int) -> DFlash:
        """The same drafter with every full layer seeing only the last `window` Keys: the rival that
        keeps their number small by dropping them. Shares the weights; caches are
        interchangeable."""
        if (known := self._windowed.get(window)) is not None:
            return known
        self._windowed[window] = other = copy(self)
        other.kinds = tuple(
            kind if kind.window else replace(kind, window=window) for kind in self.kinds
        )
        layers = zip(self.stack.layers, other.kinds, strict=True)
        other.stack = replace(
            self.stack, layers=tuple(replace(layer, kind=kind) for layer, kind in layers)
        )
        return other

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
        if self.block_size < 2:
            raise SharpDraftError(
                f"the drafter's block_size is {self.block_size}: a block needs at least 2 tokens"
            )

    def new_cache(self, capacity: int) -> KVCache:
        """Room for the context's `capacity` Keys and one block behind them."""
        return KVCache(
            self.num_layers,
            self.kv_heads,
            self.head_dim,
            capacity + self.block_size,
            dtype=self.target.dtype,
            device=self.target.device,
        )

    @torch.inference_mode()
    def observe(
        self, caches: Sequence[KVCache], tokens: Sequence[Sequence[int]], features: Sequence[Tensor]
    ) -> None:
        """Append verified tokens' Keys and Values; see `family.Drafter`."""
        counts = [len(each) for each in tokens]
        segments = Segments(caches, [cache.length for cache in caches], counts, self.rotary)
        keys, values = self._context(segments, features)
        for cache, own_keys, own_values in zip(
            caches, keys.split(counts, 2), values.split(counts, 2), strict=True
        ):
            start, end = cache.length, cache.length + own_keys.shape[2]
            cache.keys[:, 0, :, start:end] = own_keys
            cache.values[:, 0, :, start:end] = own_values
            cache.length = end

    def _context(self, rows: Rows, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated Keys, and Values, of verified tokens for all layers, [layers, kv_heads, rows,
        head_dim]."""
        fused = self.fc(torch.cat(list(features), dim=-1))
        context = F.rms_norm(fused, (self.hidden_size,), self.hidden_norm, self.eps)
        shape = (fused.shape[1], self.num_layers, 2, self.kv_heads, self.head_dim)
        keys, values = self.context_kv(context)[0].view(shape).permute(2, 1, 3, 0, 4)
        return rows.rotate(
            F.rms_norm(keys, (self.head_dim,), None, self.eps) * self.k_norms
        ), values

    def catch_up(self, caches: Sequence[KVCache], policies: Sequence[Policy | None]) -> None:
        """Nothing is left to do: verified tokens are cached as they are observed, whatever the
        policy."""

    @torch.inference_mode()
    def propose(
        self,
        caches: Sequence[KVCache],
        anchors: Sequence[int],
        count: int,
        policies: Sequence[Policy | None],
        picks: Sequence[Pick],
        probe: MassProbe | None = None,
    ) -> Tensor:
        """Draft `count` tokens behind each anchor, whose position is its cache's length; see
        `family.Drafter`."""
        requests, rows = len(caches), count + 1
        contexts, counts = [cache.length for cache in caches], [rows] * requests
        ids = torch.full((requests, rows), self.mask_token)
        ids[:, 0] = torch.tensor(anchors)
        where = {
            kind: Segments(caches, contexts, counts, self.rotary, kind) for kind in set(self.kinds)
        }
        final = self._block(ids.view(1, -1).to(self.target.device), where, policies, probe)
        logits = self.target.head(final.view(requests, rows, self.hidden_size)[:, 1:])
        return torch.stack([pick(own, None) for pick, own in zip(picks, logits, strict=True)])

    def propose_fixed(
        self,
        cache: KVCache,
        start: Tensor,
        anchor: Tensor,
        count: int,
        policy: Policy | None,
        keys: int,
    ) -> Tensor:
        """Draft greedily by operations on the device alone; see `family.Drafter`."""
        ids = torch.cat((anchor, anchor.new_full((count,), self.mask_token)))[None]
        where = {
            kind: FixedRows(cache, start, count + 1, keys, self.rotary, kind)
            for kind in set(self.kinds)
        }
        final = self._block(ids, where, [policy], None)
        return likeliest(self.target.head(final[:, 1:])[0], None)

    def observe_fixed(
        self, cache: KVCache, start: Tensor, tokens: Tensor, features: Sequence[Tensor], keys: int
    ) -> None:
        """Append a block's Keys and Values; see `family.Drafter`."""
        rows = FixedRows(cache, start, len(tokens), keys, self.rotary)
        for whole, new in zip(
            (cache.keys, cache.values), self._context(rows, features), strict=True
        ):
            whole[:, 0].index_copy_(2, rows.at, new)

    def accept_fixed(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """Count the tokens of a block that were accepted; see `family.Drafter`."""
        cache.length += len(tokens)

    def _block(
        self,
        ids: Tensor,
        where: Mapping[View, Rows],
        policies: Sequence[Policy | None],
        probe: MassProbe | None,
    ) -> Tensor:
        """The normed outputs [1, rows, hidden] of blocks [1, rows], each an anchor and masks."""
        hidden = F.embedding(ids, self.target.embedding)
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        gains = {kind: own.gains(policies) for kind, own in where.items()}
        return self.stack.run(
            hidden, where, gains, probe=None if probe is None else partial(_show, probe)
        )[1]


def _show(probe: MassProbe, index: int, query: Tensor, keys: Tensor, mask: Tensor | None) -> None:
    """Show a probe the attention mass of all rows but the anchor's, which proposes nothing."""
    probe(index, attention_mass(query[:, :, 1:], keys, None if mask is None else mask[1:] == 0))


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


def _layer_kind(
    config: Mapping[str, Any], dflash: Mapping[str, Any], parsed: Qwen3Config, layer: int
) -> View:
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
    window = dflash.get("swa_window_size", parsed.sliding_window) if sliding else None
    if sliding and window is None:
        raise SharpDraftError(
            "the drafter has sliding-window layers but its config gives no sliding_window (with "
            "use_sliding_window)"
        )
    return View(bool(causal), window)


def _expected(drafter: DFlash, inner: int, bias: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a whole checkpoint."""
    size, dim = drafter.hidden_size, drafter.head_dim
    q, kv = drafter.heads * dim, drafter.kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(drafter.taps) * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for i in range(drafter.num_layers):
        attn, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        out_in = {
            "q_proj": (q, size),
            "k_proj": (kv, size),
            "v_proj": (kv, size),
            "o_proj": (size, q),
        }
        for name, shape in out_in.items():
            shapes[f"{attn}.{name}.weight"] = shape
            if bias:
                shapes[f"{attn}.{name}.bias"] = shape[:1]
        shapes |= {f"{attn}.q_norm.weight": (dim,), f"{attn}.k_norm.weight": (dim,)}
        shapes |= {f"{mlp}.gate_proj.weight": (inner, size), f"{mlp}.up_proj.weight": (inner, size)}
        shapes |= {f"{mlp}.down_proj.weight": (size, inner)}
        shapes |= {
            f"layers.{i}.{n}.weight": (size,)
            for n in ("input_layernorm", "post_attention_layernorm")
        }
    return shapes


def _integer(value: object, name: str) -> int:
    if not isinstance(value, int):
        raise SharpDraftError(
            f"the drafter's config has no integer dflash_config.{name}: is it a DFlash checkpoint?"
        )
    return value
