"""EAGLE-3 and 3.1 (arXiv 2503.01840; 2605.09992 for what 3.1 repairs): one decoder layer that
drafts token by token.

The hidden states of three target layers are fused into one state per token. A row pairs the state
of position p with the token at p + 1 and says which token follows; the next row pairs its own
output with that token, and so on along a chain. EAGLE 3.1 norms each tapped state before the fusion
(`fc_norm`) and feeds back the output after the final norm (`norm_output`).

Checkpoints are read in the layouts of SafeAILab and SpecForge (`LlamaForCausalLMEagle3`, a
`midlayer`) and of speculators (`layers.0`, `transformer_layer_config`); vLLM loads both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SharpDraftError
from ..method.settings import DraftSettings
from ..method.theory import attention_mass
from ..method.visible import CAUSAL, View
from ..model.causal_lm import CausalLM
from ..model.config import Config
from ..model.linear import Linear
from ..model.placement import Placement, Static
from ..model.rotary import rotary_of
from ..model.rows import RaggedRows, Rows
from ..model.stack import Layer, Stack
from .base import Draft, MassProbe, Pick
from .checkpoint import check_tensors, other_target, parsing, read_json, read_tensors, write
from .formats import eagle3_shapes
from .pair_cache import PairCache
from .registry import drafts_of

ARCHITECTURE = "LlamaForCausalLMEagle3"
_MOST_DRAFTS = 32


class Eagle3:
    """An EAGLE-3 or 3.1 drafter bound to its target."""

    views: tuple[View, ...] = (CAUSAL,)

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: CausalLM
    ) -> None:
        """config: the checkpoint's config.json; tensors: its weights under their published names.

        Raises SharpDraftError if the drafter is not for this target or the checkpoint is not whole.
        """
        self.target = target
        with parsing("an EAGLE-3"):
            parsed = self._read_config(config)
        self._check_target(parsed)
        named = {
            name.replace("midlayer.", "layers.0.").removeprefix("model."): t
            for name, t in tensors.items()
        }
        shapes = eagle3_shapes(self, parsed.intermediate_size, parsed.attention_bias, named)
        check_tensors(shapes, named, known={"t2d", "embed_tokens.weight", "lm_head.weight", "d2t"})
        dtype, device = target.dtype, target.device
        get = {name: named[name].to(device=device, dtype=dtype) for name in shapes if name != "d2t"}

        def linear(*names: str) -> Linear:
            bias = (
                torch.cat([get[f"{n}.bias"] for n in names]) if f"{names[0]}.bias" in get else None
            )
            return Linear(torch.cat([get[f"{n}.weight"] for n in names]), bias)

        layer = "layers.0"
        self.fc = linear("fc")
        self.fusion_norm = get.get("input_norm.weight")
        self.tap_norms = (
            [get[f"fc_norm.{i}.weight"] for i in range(len(self.taps))]
            if self.has_tap_norms
            else []
        )
        self.token_norm = get[f"{layer}.input_layernorm.weight"]
        self.state_norm = get[f"{layer}.hidden_norm.weight"]
        self.qkv = linear(*(f"{layer}.self_attn.{p}_proj" for p in "qkv"))
        only = Layer(
            attn_norm=self.state_norm,  # applied in `_row`, beside the token's
            qkv=self.qkv,
            q_norm=None,
            k_norm=None,
            out=linear(f"{layer}.self_attn.o_proj"),
            mlp_norm=get[f"{layer}.post_attention_layernorm.weight"],
            gate_up=linear(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
            down=linear(f"{layer}.mlp.down_proj"),
        )
        self.stack = Stack((only,), get["norm.weight"], self.heads, self.kv_heads, self.eps)
        self.embedding = get.get("embed_tokens.weight", target.embedding)
        self.head = linear("lm_head") if "lm_head.weight" in get else target.head
        self.token_of: Tensor | None = None
        if "d2t" in shapes:
            offsets = named["d2t"].to(device).long()
            self.token_of = torch.arange(len(offsets), device=device) + offsets
            if not bool(((self.token_of >= 0) & (self.token_of < target.vocab_size)).all()):
                raise SharpDraftError(
                    "the drafter's d2t maps to tokens outside the target's vocabulary"
                )
        positions = max(self.max_positions, target.max_positions)
        self.rotary = rotary_of(parsed, positions, device)

    def _read_config(self, config: Mapping[str, Any]) -> Config:
        speculators = "transformer_layer_config" in config
        inner = {**config.get("transformer_layer_config", {}), **({} if speculators else config)}
        eagle = {**config, **(config.get("eagle_config") or {})}
        parsed = Config.of(inner, "llama")
        self.hidden_size: int = parsed.hidden_size
        self.heads: int = parsed.num_attention_heads
        self.kv_heads: int = parsed.num_key_value_heads
        self.head_dim: int = parsed.head_dim
        self.eps: float = parsed.rms_norm_eps
        self.max_positions: int = parsed.max_position_embeddings
        self.vocab_size: int = parsed.vocab_size
        self.draft_vocab_size = int(config.get("draft_vocab_size") or parsed.vocab_size)
        self.norm_before_residual = bool(config.get("norm_before_residual", speculators))
        self.norm_before_fc = bool(eagle.get("norm_before_fc", False))
        self.has_tap_norms = bool(config.get("fc_norm", False))
        self.norm_output = bool(config.get("norm_output", False))
        # The published ids name the layer whose input is read, which is the output of the one
        # before.
        count = self.target.num_layers
        ids = eagle.get("eagle_aux_hidden_state_layer_ids") or (2, count // 2, count - 3)
        self.taps = tuple(int(i) - 1 for i in ids)
        self.max_drafts = _MOST_DRAFTS
        self.num_drafts = min(drafts_of(config), self.max_drafts)
        if parsed.num_hidden_layers != 1:
            raise SharpDraftError(
                f"the drafter has {parsed.num_hidden_layers} layers: EAGLE-3 drafters of one are "
                "run"
            )
        return parsed

    @classmethod
    def load(cls, directory: Path, target: CausalLM) -> Eagle3:
        """Read a published checkpoint directory. Raises SharpDraftError for anything that does not
        fit."""
        return cls(read_json(directory), read_tensors(directory), target)

    def _check_target(self, parsed: Config) -> None:
        target = self.target
        for what, ours, theirs in (
            ("hidden size", self.hidden_size, target.hidden_size),
            ("vocabulary size", self.vocab_size, target.vocab_size),
        ):
            if ours != theirs:
                raise other_target(what, ours, theirs)
        if not self.taps or not all(0 <= i < target.num_layers for i in self.taps):
            raise SharpDraftError(
                "this drafter belongs to another target: it reads the outputs of layers "
                f"{list(self.taps)}, the target's are 0 to {target.num_layers - 1}"
            )

    def new_cache(self, capacity: int) -> PairCache:
        return PairCache(
            self.kv_heads,
            self.head_dim,
            self.hidden_size,
            capacity,
            self.max_drafts,
            self.target.dtype,
            self.target.device,
        )

    @torch.inference_mode()
    def append(
        self,
        at: Placement,
        caches: Sequence[PairCache],
        tokens: Tensor,
        counts: Sequence[int],
        features: Sequence[Tensor],
    ) -> None:
        """Keep the tokens and their fused states, and cache every pair whose token is known by
        that; see `base.Drafter`."""
        states = self._fused(features)
        if isinstance(at, Static):
            (cache,) = caches
            slots = at.start + torch.arange(len(tokens), device=tokens.device)
            cache.states.index_copy_(0, slots, states)
            cache.tokens.index_copy_(0, slots, tokens)
            rows = at.rows(caches, counts, self.rotary, offset=-1)
            self._cache_pairs(rows, cache.states.index_select(0, slots - 1), tokens)
            return
        ends = [cache.length + count for cache, count in zip(caches, counts, strict=True)]
        parts = zip(
            caches, ends, states.split(list(counts)), tokens.split(list(counts)), strict=True
        )
        for cache, end, own_states, own_tokens in parts:
            cache.states[cache.length : end] = own_states
            cache.tokens[cache.length : end] = own_tokens
        self._cache_up_to(caches, ends)

    def commit(
        self, at: Placement, caches: Sequence[PairCache], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Count verified tokens; see `base.Drafter`."""
        for cache, own in zip(caches, tokens, strict=True):
            cache.length += len(own)
            cache.pairs = max(cache.length - 1, 0)

    def _fused(self, features: Sequence[Tensor]) -> Tensor:
        """One state for each row's tapped ones: [rows, hidden]."""
        taps = list(features)
        if self.tap_norms:
            pairs = zip(taps, self.tap_norms, strict=True)
            taps = [F.rms_norm(tap, (self.hidden_size,), norm, self.eps) for tap, norm in pairs]
        fused = torch.cat(taps, dim=-1)
        if self.fusion_norm is not None:
            fused = F.rms_norm(fused, (fused.shape[-1],), self.fusion_norm, self.eps)
        return self.fc(fused)[0]

    def _cache_up_to(self, caches: Sequence[PairCache], ends: Sequence[int]) -> None:
        """Cache the pairs of the first tokens of each cache, up to its end, that are not cached
        yet; the last token's state waits for the next."""
        known = [
            (cache, range(cache.pairs, end - 1)) for cache, end in zip(caches, ends, strict=True)
        ]
        known = [(cache, pairs) for cache, pairs in known if pairs]
        if not known:
            return
        waiting, starts = [cache for cache, _ in known], [pairs.start for _, pairs in known]
        rows = RaggedRows(waiting, starts, [len(pairs) for _, pairs in known], self.rotary)
        # With a single layer, what later rows need of a pair depends on the pair alone.
        states = torch.cat([cache.states[p.start : p.stop] for cache, p in known])
        tokens = torch.cat([cache.tokens[p.start + 1 : p.stop + 1] for cache, p in known])
        self._cache_pairs(rows, states, tokens)
        for cache, pairs in known:
            cache.pairs = pairs.stop

    def _cache_pairs(self, rows: Rows, states: Tensor, tokens: Tensor) -> None:
        """Write Keys and Values of pairs: states [rows, hidden], and the tokens [rows] behind
        them."""
        row = self._row(states[None], tokens[None])
        heads = self.heads + 2 * self.kv_heads
        qkv = self.qkv(row).view(1, row.shape[1], heads, self.head_dim).transpose(1, 2)
        _, keys, values = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        rows.write(0, rows.rotate(keys), values)

    @torch.inference_mode()
    def catch_up(self, caches: Sequence[PairCache], settings: Sequence[DraftSettings]) -> None:
        """Cache pairs that were written over; else they are cached as they are appended, whatever
        the settings."""
        self._cache_up_to(caches, [cache.length for cache in caches])

    @torch.inference_mode()
    def propose(
        self,
        at: Placement,
        caches: Sequence[PairCache],
        anchors: Tensor,
        count: int,
        settings: Sequence[DraftSettings],
        picks: Sequence[Pick],
        probe: MassProbe | None = None,
    ) -> list[Draft]:
        """Draft `count` tokens behind each anchor, one by one; see `base.Drafter`."""
        if isinstance(at, Static):
            states = caches[0].states.index_select(0, at.start - 1)[None]
        else:
            if any(cache.length == 0 for cache in caches):
                raise SharpDraftError(
                    "EAGLE drafts behind at least one token that the target has read"
                )
            self.catch_up(caches, settings)
            states = torch.stack([cache.states[cache.length - 1] for cache in caches])[None]
        views, scales = settings[0].views(self.views), [each.scale for each in settings]
        tokens, chosen = anchors[None], []
        for step in range(count):
            rows = at.rows(caches, [1] * len(caches), self.rotary, offset=step - 1)
            gains = rows.gains(scales, views)
            normed, states = self._step(rows, states, tokens, views, gains, probe)
            logits = self.head(normed)[0].split(1)
            picked = [pick(own, self.token_of) for pick, own in zip(picks, logits, strict=True)]
            tokens = torch.cat([token for token, _ in picked])[None]
            chosen.append(picked)
        return [_chain(steps) for steps in zip(*chosen, strict=True)]

    def _step(
        self,
        rows: Rows,
        states: Tensor,
        tokens: Tensor,
        views: Sequence[View],
        gains: Sequence[Tensor | None],
        probe: MassProbe | None,
    ) -> tuple[Tensor, Tensor]:
        """One row a request: the normed outputs [1, requests, hidden], and the states they hand
        on."""

        def shown(index: int, query: Tensor, keys: Tensor, mask: Tensor | None) -> None:
            assert probe is not None
            probe(index, attention_mass(query, keys, mask))

        residual = (
            states.clone()
        )  # The sum may be made in its place, and the states are a cache's own.
        if self.norm_before_residual:
            residual = F.rms_norm(states, (self.hidden_size,), self.state_norm, self.eps)
        hidden, normed, _ = self.stack.run(
            residual,
            rows,
            views,
            gains,
            normed=self._row(states, tokens),
            probe=None if probe is None else shown,
        )
        return normed, normed if self.norm_output else hidden

    def _row(self, states: Tensor, tokens: Tensor) -> Tensor:
        """states [1, rows, hidden] and the tokens behind them [1, rows] -> [1, rows, 2 *
        hidden]."""
        size = (self.hidden_size,)
        embedded = F.rms_norm(F.embedding(tokens, self.embedding), size, self.token_norm, self.eps)
        return torch.cat((embedded, F.rms_norm(states, size, self.state_norm, self.eps)), dim=-1)


def _chain(steps: Sequence[tuple[Tensor, Tensor | None]]) -> Draft:
    """The draft of one request from what was picked at each step."""
    tokens = torch.cat([token for token, _ in steps])
    drawn = [own for _, own in steps if own is not None]
    return Draft.chain(tokens, torch.cat(drawn) if drawn else None)


def save(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint directory in the layout of SafeAILab, which vLLM loads."""
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    write(directory, {**config, "architectures": [ARCHITECTURE]}, named)
