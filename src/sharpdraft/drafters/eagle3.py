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
from ..model.placement import Placement, Static
from ..model.rotary import rotary_of
from ..model.rows import RaggedRows, Rows
from ..model.stack import Stack
from .base import Draft, MassProbe, Pick
from .checkpoint import check_tensors, parsing, read_json, read_tensors, write
from .configs import EAGLE3, eagle3_taps, flag, merged, whole
from .formats import TRAINING, check_frequencies, eagle3_shapes, plain_names
from .pair_cache import PairCache
from .registry import drafts_of
from .vocabulary import VOCABULARY, Vocabulary, check_hidden_size, check_vocabulary
from .weights import Weights

ARCHITECTURE = "LlamaForCausalLMEagle3"
_MOST_DRAFTS = 32
_QUERY = "layers.0.self_attn.q_proj.weight"


class Eagle3:
    """An EAGLE-3 or 3.1 drafter bound to its target."""

    static = True

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: CausalLM
    ) -> None:
        """config: the checkpoint's config.json; tensors: its weights under their published names.

        Raises SharpDraftError if the drafter is not for this target or the checkpoint is not whole.
        """
        self.target = target
        values = merged(config, ("eagle_config",), EAGLE3, "llama")
        named = plain_names(tensors)
        with parsing("an EAGLE-3"):
            parsed = self._read_config(config, values, named)
        check_hidden_size(self.hidden_size, values, named, target)
        self._check_target()
        shapes = eagle3_shapes(parsed, self, named)
        frequencies = check_frequencies(parsed, named)
        check_tensors(shapes, named, known=(*VOCABULARY, *TRAINING, *frequencies))
        self.vocabulary = Vocabulary.of(named, target, parsed)
        weights, layer = Weights(named, parsed, target), "layers.0"
        self.fc = weights.linear("fc")
        self.fusion_norm = weights["input_norm.weight"] if self.norm_before_fc else None
        norms = range(len(self.taps) if self.has_tap_norms else 0)
        self.tap_norms = [weights[f"fc_norm.{i}.weight"] for i in norms]
        self.token_norm = weights[f"{layer}.input_layernorm.weight"]
        # Applied in `_row`, beside the token's.
        only = weights.layer(layer, "hidden_norm")
        self.state_norm, self.qkv = only.attn_norm, only.qkv
        self.q_norm, self.k_norm = only.q_norm, only.k_norm
        final = weights["norm.weight"]
        self.stack = Stack((only,), final, self.heads, self.kv_heads, self.eps)
        positions = max(self.max_positions, target.max_positions)
        self.rotary = rotary_of(parsed, positions, target.device)

    def _read_config(
        self, config: Mapping[str, Any], values: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Config:
        if "head_dim" not in values and (query := tensors.get(_QUERY)) is not None:
            # Classes differ in what they take it for.
            values = {**values, "head_dim": len(query) // whole(values, "num_attention_heads")}
        parsed = Config.of(values, "llama")
        self.hidden_size: int = parsed.hidden_size
        self.heads: int = parsed.num_attention_heads
        self.kv_heads: int = parsed.num_key_value_heads
        self.head_dim: int = parsed.head_dim
        self.eps: float = parsed.rms_norm_eps
        self.max_positions: int = parsed.max_position_embeddings
        self.vocab_size: int = parsed.vocab_size
        speculators = "transformer_layer_config" in config
        self.norm_before_residual = flag(values, "norm_before_residual", speculators)
        self.norm_before_fc = flag(values, "norm_before_fc")
        self.has_tap_norms = flag(values, "fc_norm")
        self.norm_output = flag(values, "norm_output")
        self.taps = eagle3_taps(config, self.target.num_layers)
        self.views = (_view(values, parsed),)
        self.max_drafts = _MOST_DRAFTS
        self.num_drafts = min(drafts_of(config, "eagle3"), self.max_drafts)
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
        config, tensors = read_json(directory), plain_names(read_tensors(directory))
        drafter = cls(config, tensors, target)
        check_vocabulary(drafter.vocab_size, tensors, target, directory)
        return drafter

    def _check_target(self) -> None:
        target = self.target
        if -1 in self.taps:
            raise SharpDraftError(
                "the drafter reads the target's embeddings (layer id 0), which is not supported: "
                "use one that reads outputs of layers"
            )
        if not all(0 <= i < target.num_layers for i in self.taps):
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
            self.rotary.limit,
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
            taps = [F.rms_norm(tap, tap.shape[-1:], norm, self.eps) for tap, norm in pairs]
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
        if self.k_norm is not None:
            keys = F.rms_norm(keys, (self.head_dim,), self.k_norm, self.eps)
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
        tokens, chosen, token_of = anchors[None], [], self.vocabulary.token_of
        for step in range(count):
            rows = at.rows(caches, [1] * len(caches), self.rotary, offset=step - 1)
            gains = rows.gains(scales, views)
            normed, states = self._step(rows, states, tokens, views, gains, probe)
            logits = self.vocabulary.logits(normed)[0].split(1)
            picked = [pick(own, token_of) for pick, own in zip(picks, logits, strict=True)]
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
        embedded = F.rms_norm(self.vocabulary.embed(tokens), size, self.token_norm, self.eps)
        return torch.cat((embedded, F.rms_norm(states, size, self.state_norm, self.eps)), dim=-1)


def _chain(steps: Sequence[tuple[Tensor, Tensor | None]]) -> Draft:
    """The draft of one request from what was picked at each step."""
    tokens = torch.cat([token for token, _ in steps])
    drawn = [own for _, own in steps if own is not None]
    return Draft.chain(tokens, torch.cat(drawn) if drawn else None)


def _view(values: Mapping[str, Any], parsed: Config) -> View:
    """What the rows of the one layer see."""
    if "sliding_attention" not in parsed.layer_types:
        return CAUSAL
    window = whole(values, "sliding_window")
    if window < 1:
        raise SharpDraftError(f"the drafter's sliding_window is {window}: it must be at least 1")
    return View(causal=True, window=window)


def save(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint directory in the layout of SafeAILab, which vLLM loads."""
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    write(directory, {**config, "architectures": [ARCHITECTURE]}, named)
