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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

from ..errors import SharpDraftError
from ..method.scale import Policy
from ..method.theory import attention_mass
from ..model.attention import CAUSAL, FixedRows, Rotary, Rows, Segments, chain_gains
from ..model.cache import KVCache
from ..model.causal_lm import CausalLM
from ..model.linear import Linear
from ..model.stack import Layer, Stack
from .base import MassProbe, Pick, likeliest
from .checkpoint import check_tensors, other_target, parsing, read_json, read_tensors, write

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3DraftModel",
    "Eagle3Speculator",
)
_DRAFTS = 5  # By default: what a chain's later tokens add does not pay for the passes they take.
_LONGEST = 32


class PairCache(KVCache):
    """Keys and Values of pairs (state, next token), and the states and tokens themselves.

    The last state of all waits for its token, so that one pair fewer is cached than there are
    tokens.
    """

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        hidden: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pairs = 0
        super().__init__(1, kv_heads, head_dim, capacity + _LONGEST, dtype=dtype, device=device)
        self.states = torch.empty(capacity, hidden, dtype=dtype, device=device)
        self.tokens = torch.empty(capacity, dtype=torch.long, device=device)

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        # Where a rolled-back text goes on otherwise, the pairs behind are others.
        self._length, self.pairs = length, min(self.pairs, max(length - 1, 0))

    def rows(self) -> range:
        """Positions whose pair is known and not yet cached."""
        return range(self.pairs, max(self.length - 1, 0))

    @contextmanager
    def borrowed(self, start: int, rows: int) -> Iterator[None]:
        """Stand at `start` for a while; pairs that are written over are made again from the
        states."""
        seen = self.length
        self.length = start
        try:
            yield
        finally:
            self.length = seen


class Eagle3:
    """An EAGLE-3 or 3.1 drafter bound to its target."""

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
        shapes = self._shapes(parsed, named)
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
        self.rotary = Rotary(
            LlamaRotaryEmbedding(parsed), max(self.max_positions, target.max_positions), device
        )

    def _read_config(self, config: Mapping[str, Any]) -> LlamaConfig:
        speculators = "transformer_layer_config" in config
        inner = {**config.get("transformer_layer_config", {}), **({} if speculators else config)}
        eagle = {**config, **(config.get("eagle_config") or {})}
        parsed = LlamaConfig(
            **{k: v for k, v in inner.items() if k not in ("architectures", "auto_map")}
        )
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
        methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        self.block_size = min(int(methods[0].get("speculative_tokens", _DRAFTS)), _LONGEST) + 1
        self.longest_block = _LONGEST + 1
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

    def _check_target(self, parsed: LlamaConfig) -> None:
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

    def _shapes(
        self, parsed: LlamaConfig, tensors: Mapping[str, Tensor]
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a whole checkpoint."""
        size, inner = self.hidden_size, parsed.intermediate_size
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = "layers.0"
        projections = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (size, len(self.taps) * size),
            "norm.weight": (size,),
            f"{layer}.self_attn.o_proj.weight": (size, q),
            f"{layer}.mlp.gate_proj.weight": (inner, size),
            f"{layer}.mlp.up_proj.weight": (inner, size),
            f"{layer}.mlp.down_proj.weight": (size, inner),
        }
        shapes |= {
            f"{layer}.self_attn.{name}.weight": (rows, 2 * size)
            for name, rows in projections.items()
        }
        if parsed.attention_bias:
            shapes |= {
                f"{layer}.self_attn.{name}.bias": (rows,) for name, rows in projections.items()
            }
        shapes |= {
            f"{layer}.{n}.weight": (size,)
            for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        }
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (len(self.taps) * size,)
        if self.has_tap_norms:
            shapes |= {f"fc_norm.{i}.weight": (size,) for i in range(len(self.taps))}
        if "embed_tokens.weight" in tensors:
            shapes["embed_tokens.weight"] = (self.vocab_size, size)
        reduced = self.draft_vocab_size != self.vocab_size
        if reduced or "lm_head.weight" in tensors:
            shapes["lm_head.weight"] = (self.draft_vocab_size, size)
        if reduced:
            shapes["d2t"] = (self.draft_vocab_size,)
        return shapes

    def new_cache(self, capacity: int) -> PairCache:
        return PairCache(
            self.kv_heads,
            self.head_dim,
            self.hidden_size,
            capacity,
            self.target.dtype,
            self.target.device,
        )

    @torch.inference_mode()
    def observe(
        self,
        caches: Sequence[PairCache],
        tokens: Sequence[Sequence[int]],
        features: Sequence[Tensor],
    ) -> None:
        """Append verified tokens and their fused states, and cache every pair whose token is known
        by that; see `family.Drafter`."""
        states = self._fused(features).split([len(each) for each in tokens])
        for cache, own, state in zip(caches, tokens, states, strict=True):
            end = cache.length + len(own)
            cache.states[cache.length : end] = state
            cache.tokens[cache.length : end] = torch.tensor(own)
            cache.length = end
        self._cache_pairs(caches)

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

    def _cache_pairs(self, caches: Sequence[PairCache]) -> None:
        waiting = [cache for cache in caches if cache.rows()]
        if not waiting:
            return
        known = [cache.rows() for cache in waiting]
        segments = Segments(waiting, [k.start for k in known], [len(k) for k in known], self.rotary)
        pairs = list(zip(waiting, known, strict=True))
        # With a single layer, what later rows need of a pair depends on the pair alone.
        states = torch.cat([cache.states[k.start : k.stop] for cache, k in pairs])
        tokens = torch.cat([cache.tokens[k.start + 1 : k.stop + 1] for cache, k in pairs])
        _, keys, values = self._qkv(self._row(states[None], tokens[None]), segments)
        for cache, start, own_keys, own_values in zip(
            waiting,
            segments.starts,
            keys.split(segments.counts, 2),
            values.split(segments.counts, 2),
            strict=True,
        ):
            cache.write(0, start, own_keys, own_values)
            cache.pairs = start + own_keys.shape[2]

    @torch.inference_mode()
    def catch_up(self, caches: Sequence[PairCache], policies: Sequence[Policy | None]) -> None:
        """Cache pairs that were written over; else they are cached as they are observed, whatever
        the policy."""
        self._cache_pairs(caches)

    @torch.inference_mode()
    def propose(
        self,
        caches: Sequence[PairCache],
        anchors: Sequence[int],
        count: int,
        policies: Sequence[Policy | None],
        picks: Sequence[Pick],
        probe: MassProbe | None = None,
    ) -> Tensor:
        """Draft `count` tokens behind each anchor, one by one; see `family.Drafter`."""
        if any(cache.length == 0 for cache in caches):
            raise SharpDraftError("EAGLE drafts behind at least one token that the target has read")
        self._cache_pairs(caches)
        states = torch.stack([cache.states[cache.length - 1] for cache in caches])[None]
        tokens = torch.tensor([list(anchors)], device=self.target.device)
        drafts, starts = [], [cache.length - 1 for cache in caches]
        gains = chain_gains(policies, starts, count, self.target.device)
        for step in range(count):
            segments = Segments(
                caches, [start + step for start in starts], [1] * len(caches), self.rotary
            )
            gain = None if gains is None else gains[:, step]
            normed, states = self._step(segments, states, tokens, gain, probe)
            logits = self.head(normed)[0].split(1)
            tokens = torch.cat(
                [pick(own, self.token_of) for pick, own in zip(picks, logits, strict=True)]
            )[None]
            drafts.append(tokens[0])
        return torch.stack(drafts, dim=1)

    def propose_fixed(
        self,
        cache: PairCache,
        start: Tensor,
        anchor: Tensor,
        count: int,
        policy: Policy | None,
        keys: int,
    ) -> Tensor:
        """Draft greedily by operations on the device alone; see `family.Drafter`."""
        states, tokens = cache.states.index_select(0, start - 1)[None], anchor[None]
        drafts = []
        for step in range(count):
            where = FixedRows(cache, start - 1 + step, 1, keys, self.rotary)
            normed, states = self._step(where, states, tokens, where.gains([policy]), None)
            tokens = likeliest(self.head(normed)[0], self.token_of)[None]
            drafts.append(tokens[0])
        return torch.cat(drafts)

    def observe_fixed(
        self, cache: PairCache, start: Tensor, tokens: Tensor, features: Sequence[Tensor], keys: int
    ) -> None:
        """Append a block's states, and the pairs that its tokens complete; see `family.Drafter`."""
        states = self._fused(features)
        before = torch.cat((cache.states.index_select(0, start - 1), states[:-1]))
        rows = FixedRows(cache, start - 1, len(tokens), keys, self.rotary)
        _, pair_keys, pair_values = self._qkv(self._row(before[None], tokens[None]), rows)
        rows.write(0, pair_keys, pair_values)
        cache.states.index_copy_(0, rows.at + 1, states)
        cache.tokens.index_copy_(0, rows.at + 1, tokens)

    def accept_fixed(self, cache: PairCache, tokens: Sequence[int]) -> None:
        """Count the tokens of a block that were accepted; see `family.Drafter`."""
        cache.length += len(tokens)
        cache.pairs = cache.length - 1

    def _step(
        self,
        segments: Rows,
        states: Tensor,
        tokens: Tensor,
        gain: Tensor | None,
        probe: MassProbe | None,
    ) -> tuple[Tensor, Tensor]:
        """One row a request: the normed outputs [1, requests, hidden], and the states they hand
        on."""
        size = (self.hidden_size,)

        def shown(index: int, query: Tensor, keys: Tensor, mask: Tensor | None) -> None:
            assert probe is not None
            probe(index, attention_mass(query, keys, mask))

        # A copy, as the sum may be made in its place and the states are also a request's own.
        residual = (
            F.rms_norm(states, size, self.state_norm, self.eps)
            if self.norm_before_residual
            else states.clone()
        )
        hidden, normed, _ = self.stack.run(
            residual,
            {CAUSAL: segments},
            {CAUSAL: gain},
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

    def _qkv(self, rows: Tensor, segments: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Query, Keys and Values [1, heads, rows, head_dim], the first two rotated to their
        positions."""
        heads = self.heads + 2 * self.kv_heads
        qkv = self.qkv(rows).view(1, rows.shape[1], heads, self.head_dim).transpose(1, 2)
        query, keys, values = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return segments.rotate(query), segments.rotate(keys), values


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 drafter."""
    named = set(config.get("architectures") or ())
    return bool(named & set(ARCHITECTURES)) or config.get("speculators_model_type") == "eagle3"


def save(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint directory in the layout of SafeAILab, which vLLM loads."""
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    write(directory, {**config, "architectures": [ARCHITECTURES[0]]}, named)
