"""Distilling an EAGLE 3.1 drafter from text that its target wrote.

Many chains of a sequence are trained at once: each starts at an anchor, from the target's state
before it, and goes on from its own states, as it will when it drafts (training-time test, EAGLE-3,
arXiv 2503.01840). EAGLE 3.1 (arXiv 2605.09992) norms every tapped state before the fusion and hands
on its state after the final norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..drafters.checkpoint import read_json, read_tensors
from ..drafters.eagle3 import Eagle3, save
from ..model.attention import additive, attend
from ..model.causal_lm import CausalLM
from ..model.rotary import rotate
from . import trainer
from .corpus import (
    Corpus,
    draw_anchors,
    labels_behind,
    robust_scale,
    sample_features,
    states_before,
)
from .loss import Chains
from .modules import MLP, Attention, Norm, start_from
from .trainer import going_on


@dataclass(frozen=True)
class Recipe(trainer.Recipe):
    """How to train. Defaults made the drafter in this repository."""

    steps: int = 1500
    chain: int = 5
    taps: tuple[int, ...] = (1, 15, 28)
    start_layer: int | None = 29
    # Tokens that can be drafted: the whole vocabulary's head would cost several times the layer.
    vocabulary: int = 12288
    anchors: int = 64

    @property
    def reads(self) -> tuple[int, ...]:
        return self.taps

    @property
    def starts(self) -> tuple[int, ...]:
        return () if self.start_layer is None else (self.start_layer,)

    @classmethod
    def of(cls, directory: Path) -> Recipe:
        """The recipe that goes on with a drafter: its shape, fewer steps and a lower rate. Raises
        SharpDraftError for a directory that holds no EAGLE 3.1 checkpoint with a draft
        vocabulary."""
        config = read_json(directory)
        with going_on(directory):
            if not (config["fc_norm"] and config["norm_output"]):
                raise KeyError("fc_norm and norm_output, without which it is no EAGLE 3.1")
            return cls(
                taps=tuple(i - 1 for i in config["eagle_aux_hidden_state_layer_ids"]),
                start_layer=None,
                vocabulary=config["draft_vocab_size"],
                steps=400,
                rate=1e-3,
                warmup=40,
            )


class TrainableEagle3(nn.Module):
    """EAGLE 3.1's parameters under their published names, and a forward over many chains of many
    sequences."""

    scale: Tensor
    drafted: Tensor

    def __init__(self, target: CausalLM, recipe: Recipe, scale: Tensor, drafted: Tensor) -> None:
        """scale [taps, hidden]: see `robust_scale`, of normed states, which are divided by it
        within their norm; drafted int64: the tokens that can be drafted, ascending."""
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("drafted", drafted)
        self.heads, self.kv_heads, self.head_dim = target.heads, target.kv_heads, target.head_dim
        self.hidden, self.eps, self.rotary = target.hidden_size, target.eps, target.rotary
        self.fc = nn.Linear(len(recipe.taps) * self.hidden, self.hidden, bias=False)
        self.fc_norm = nn.ModuleList(Norm(self.hidden, eps=self.eps) for _ in recipe.taps)
        self.layers = nn.ModuleList([_Layer(self, target.config.intermediate_size)])
        self.norm = Norm(self.hidden, eps=self.eps)
        if recipe.start_layer is not None:
            self._start_from(target, recipe, recipe.start_layer)

    @torch.no_grad()
    def _start_from(self, target: CausalLM, recipe: Recipe, source: int) -> None:
        """Start from a layer of the target that reads the last tap passed through."""
        generator = torch.Generator(self.fc.weight.device).manual_seed(recipe.seed)
        nn.init.normal_(self.fc.weight, std=0.02, generator=generator)
        self.fc.weight[:, -self.hidden :] += torch.eye(self.hidden, device=self.fc.weight.device)
        layer = self.layer
        start_from(layer.self_attn, layer.mlp, target, source)
        layer.hidden_norm.weight.copy_(target.stack.layers[source].attn_norm)
        layer.post_attention_layernorm.weight.copy_(target.stack.layers[source].mlp_norm)
        self.norm.weight.copy_(target.stack.norm)

    @property
    def layer(self) -> _Layer:
        layer = self.layers[0]
        assert isinstance(layer, _Layer)
        return layer

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a drafter's weights under their published names; the states' scale comes out of
        their norms."""
        named = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
        for name, parameter in self.named_parameters():
            parameter.copy_(named[name])
        for norm, scale in zip(self.fc_norm, self.scale, strict=True):
            assert isinstance(norm, Norm)
            norm.weight.mul_(scale)

    def tensors(self) -> dict[str, Tensor]:
        """The weights under their published names, the states' scale within their norms."""
        named = {name: p.detach().cpu().clone() for name, p in self.named_parameters()}
        for i, scale in enumerate(self.scale.cpu()):
            named[f"fc_norm.{i}.weight"] /= scale
        return named

    def forward(self, taps: Tensor, tokens: Tensor, anchors: Tensor, chain: int) -> Tensor:
        """taps [batch, context, taps, hidden]; tokens (embeddings) [batch, context, hidden];
        anchors (positions, from 1 on) [batch, chains]. Returns hidden states [batch, chains, chain,
        hidden]."""
        batch, count = anchors.shape
        length = tokens.shape[1]
        normed = [
            norm(taps[:, :, i]) / self.scale[i].to(taps.dtype)
            for i, norm in enumerate(self.fc_norm)
        ]
        states = self.fc(torch.cat(normed, dim=-1))
        layer, row = self.layer, torch.arange(batch, device=anchors.device)[:, None]
        cos, sin = self.rotary.cos, self.rotary.sin
        pairs = layer.pair(states[:, :-1], tokens[:, 1:])
        keys = [rotate(layer.keys(pairs), cos[: length - 1], sin[: length - 1])]
        values = [layer.values(pairs)]
        # A chain's first row stands at the position before its anchor, whose pair the anchor
        # completes.
        seen = [torch.arange(length - 1, device=anchors.device) < anchors[..., None]]
        own = torch.eye(count, dtype=torch.bool, device=anchors.device).expand(batch, -1, -1)
        state, outputs = states[row, anchors - 1], []
        for step in range(chain):
            pair = layer.pair(state, tokens[row, (anchors + step).clamp(max=length - 1)])
            at = (anchors - 1 + step).clamp(max=length - 1)
            turn = cos[at][:, None], sin[at][:, None]
            if step:
                keys.append(rotate(layer.keys(pair), *turn))
                values.append(layer.values(pair))
                seen.append(own)
            query = rotate(layer.queries(pair), *turn)
            mask = additive(torch.cat(seen, dim=-1), query.dtype)[:, None]
            mixed = attend(
                query,
                torch.cat(keys, 2).to(query.dtype),
                torch.cat(values, 2).to(query.dtype),
                mask,
            )
            state = self.norm(layer(state, mixed))
            outputs.append(state)
        return torch.stack(outputs, dim=2)


class _Layer(nn.Module):
    def __init__(self, of: TrainableEagle3, inner: int) -> None:
        super().__init__()
        self.self_attn = Attention(2 * of.hidden, of.hidden, of.heads, of.kv_heads, of.head_dim)
        self.mlp = MLP(of.hidden, inner)
        self.input_layernorm = Norm(of.hidden, eps=of.eps)
        self.hidden_norm = Norm(of.hidden, eps=of.eps)
        self.post_attention_layernorm = Norm(of.hidden, eps=of.eps)

    def pair(self, states: Tensor, tokens: Tensor) -> Tensor:
        """[..., hidden] of each -> [..., 2 * hidden]"""
        return torch.cat(
            (self.input_layernorm(tokens).to(states.dtype), self.hidden_norm(states)), dim=-1
        )

    def queries(self, pairs: Tensor) -> Tensor:
        return self.self_attn.split(self.self_attn.q_proj(pairs))

    def keys(self, pairs: Tensor) -> Tensor:
        return self.self_attn.split(self.self_attn.k_proj(pairs))

    def values(self, pairs: Tensor) -> Tensor:
        return self.self_attn.split(self.self_attn.v_proj(pairs))

    def forward(self, states: Tensor, mixed: Tensor) -> Tensor:
        hidden = states + self.self_attn.o_proj(mixed)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def frequent_tokens(corpus: Corpus, count: int, vocab: int) -> Tensor:
    """The `count` tokens that the target wrote most often, int64 ascending.

    Of those that it wrote less than three times, which is chance, the first: tokenizers number what
    is frequent in text at large before what is rare.
    """
    often = torch.bincount(corpus.tokens[corpus.written], minlength=vocab)
    often[often < 3] = 0
    return often.sort(descending=True, stable=True).indices[:count].sort().values


class Trainer(trainer.Trainer):
    recipe: Recipe
    module: TrainableEagle3

    def __init__(
        self,
        target: CausalLM,
        recipe: Recipe,
        train: Corpus,
        held: Corpus,
        out: Path,
        start: Path | None = None,
    ) -> None:
        """start: a drafter to go on from. Raises SharpDraftError where it is not one for this
        target."""
        self.chain = recipe.chain
        tensors: dict[str, Tensor] = {}
        if start is not None:
            tensors = read_tensors(start)
            Eagle3(read_json(start), tensors, target)  # refuses a drafter of another target
        # Its head is the target's: which rows of it is free to choose, by the text at hand.
        drafted = frequent_tokens(train, recipe.vocabulary, target.vocab_size)
        sample = sample_features(train, recipe.taps).unflatten(-1, (-1, target.hidden_size))
        normed = F.rms_norm(sample, (target.hidden_size,), eps=target.eps)
        scale = torch.stack([robust_scale(tap) for tap in normed.unbind(1)]).to(target.device)
        with torch.device(target.device):
            module = TrainableEagle3(target, recipe, scale, drafted)
        if tensors:
            module.load(tensors)
        super().__init__(target, recipe, train, held, out, module)

    def drafted_tokens(self) -> Tensor:
        return self.module.drafted.cpu()

    def chains(
        self, corpus: Corpus, rows: Sequence[int], generator: torch.Generator, training: bool
    ) -> Chains:
        recipe = self.recipe
        tokens, written = corpus.tokens[list(rows)], corpus.written[list(rows)]
        anchors, usable = draw_anchors(written, recipe.anchors, recipe.chain + 1, generator)
        anchors.clamp_(min=1)
        labels, valid = labels_behind(tokens, written, anchors, recipe.chain)
        valid &= usable[..., None]
        taps = (
            corpus.features(rows, recipe.taps)
            .unflatten(-1, (-1, corpus.hidden))
            .to(self.device, self.dtype)
        )
        embedded = F.embedding(tokens.to(self.device), self.embedding)
        with self.autocast():
            hidden = self.module(taps, embedded, anchors.to(self.device), recipe.chain)
        final = states_before(corpus.final(rows), anchors, recipe.chain)
        return Chains(hidden[valid.to(self.device)], final[valid], labels, valid)

    def export(self, directory: Path) -> None:
        """Write the drafter in the layout of SafeAILab, which vLLM loads."""
        recipe, target, config = self.recipe, self.target, self.target.config
        drafted = self.drafted_tokens()
        parameters = dict(config.rope_parameters)
        tensors = {
            name: tensor.to(torch.bfloat16) for name, tensor in self.module.tensors().items()
        }
        tensors["lm_head.weight"] = (
            target.head.weight[drafted.to(target.device)].cpu().to(torch.bfloat16)
        )
        tensors["d2t"] = drafted - torch.arange(len(drafted))
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool)
        tensors["t2d"][drafted] = True
        save(
            directory,
            {
                "model_type": "llama",
                "dtype": "bfloat16",
                "fc_norm": True,
                "norm_output": True,
                "norm_before_residual": False,
                "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in recipe.taps],
                "vocab_size": target.vocab_size,
                "draft_vocab_size": len(drafted),
                "hidden_size": target.hidden_size,
                "target_hidden_size": target.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": 1,
                "num_attention_heads": target.heads,
                "num_key_value_heads": target.kv_heads,
                "head_dim": target.head_dim,
                "hidden_act": "silu",
                "rms_norm_eps": target.eps,
                "max_position_embeddings": target.max_positions,
                "rope_theta": parameters.get("rope_theta"),
                "rope_parameters": parameters,
                "attention_bias": False,
                "mlp_bias": False,
                "tie_word_embeddings": False,
            },
            tensors,
        )
