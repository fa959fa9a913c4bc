"""Distilling a DFlash drafter from text that its target wrote.

Many blocks of a sequence are trained at once: each block is an anchor token and mask tokens, sees
the context before its anchor and itself, and learns what the target says at each of its positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..drafters.dflash import ARCHITECTURE, DFlash, read_checkpoint, save
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

    block: int = 6
    layers: int = 3
    taps: tuple[int, ...] = (1, 8, 15, 22, 28)
    start_layers: tuple[int, ...] = (9, 19, 29)
    mask_token: int = 4
    anchors: int = 40

    @property
    def reads(self) -> tuple[int, ...]:
        return self.taps

    @property
    def starts(self) -> tuple[int, ...]:
        return self.start_layers

    @classmethod
    def of(cls, directory: Path) -> Recipe:
        """The recipe that goes on with a drafter: its shape, fewer steps and a lower rate. Raises
        SharpDraftError for a directory that holds no DFlash checkpoint."""
        config, _ = read_checkpoint(directory)
        with going_on(directory):
            return cls(
                block=config["block_size"],
                layers=config["num_hidden_layers"],
                taps=tuple(config["dflash_config"]["target_layer_ids"]),
                mask_token=config["dflash_config"]["mask_token_id"],
                start_layers=(),
                steps=400,
                rate=1e-3,
                warmup=40,
            )


class TrainableDFlash(nn.Module):
    """DFlash's parameters under their published names, and a forward over many blocks of many
    sequences."""

    scale: Tensor

    def __init__(self, target: CausalLM, recipe: Recipe, scale: Tensor) -> None:
        """scale [taps * hidden]: see `robust_scale`; features are divided by it, within the fusion
        product."""
        super().__init__()
        self.register_buffer("scale", scale)
        config = target.config
        self.heads, self.kv_heads, self.head_dim = target.heads, target.kv_heads, target.head_dim
        self.hidden, self.eps, self.rotary = target.hidden_size, target.eps, target.rotary
        self.fc = nn.Linear(len(recipe.taps) * self.hidden, self.hidden, bias=False)
        self.hidden_norm = Norm(self.hidden, eps=self.eps)
        self.layers = nn.ModuleList(
            _Block(
                self.hidden,
                config.intermediate_size,
                self.heads,
                self.kv_heads,
                self.head_dim,
                self.eps,
            )
            for _ in range(recipe.layers)
        )
        self.norm = Norm(self.hidden, eps=self.eps)
        if recipe.start_layers:
            self._start_from(target, recipe)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a drafter's weights under their published names; the features' scale comes out of
        the fusion's."""
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])
        self.fc.weight *= self.scale

    def tensors(self) -> dict[str, Tensor]:
        """The weights under their published names, the features' scale within the fusion's."""
        named = {name: p.detach().cpu().clone() for name, p in self.named_parameters()}
        named["fc.weight"] /= self.scale.cpu()
        return named

    @torch.no_grad()
    def _start_from(self, target: CausalLM, recipe: Recipe) -> None:
        """Start from layers of the target, and from its last tap passed through."""
        generator = torch.Generator(self.fc.weight.device).manual_seed(recipe.seed)
        nn.init.normal_(self.fc.weight, std=0.02, generator=generator)
        self.fc.weight[:, -self.hidden :] += torch.eye(self.hidden, device=self.fc.weight.device)
        for block, source in zip(self.layers, recipe.start_layers, strict=True):
            assert isinstance(block, _Block)
            start_from(block.self_attn, block.mlp, target, source)
            block.input_layernorm.weight.copy_(target.stack.layers[source].attn_norm)
            block.post_attention_layernorm.weight.copy_(target.stack.layers[source].mlp_norm)
        self.norm.weight.copy_(target.stack.norm)

    def forward(self, features: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """features [batch, context, taps * hidden]; blocks (embeddings) [batch, anchors, block,
        hidden]; anchors (positions) [batch, anchors]. Returns hidden states [batch, anchors, block,
        hidden]."""
        batch, count, size, width = blocks.shape
        length = features.shape[1]
        context = self.hidden_norm(F.linear(features, self.fc.weight / self.scale))
        at = (anchors[..., None] + torch.arange(size, device=anchors.device)).view(
            batch, count * size
        )
        mask = additive(block_mask(anchors, size, length), context.dtype)[:, None]
        tables = [
            (table[:length], table[at][:, None]) for table in (self.rotary.cos, self.rotary.sin)
        ]
        hidden = blocks.reshape(batch, count * size, width)
        for layer in self.layers:
            hidden = layer(hidden, context, tables, mask)
        return self.norm(hidden).view(batch, count, size, width)


class _NormedAttention(Attention):
    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int, eps: float) -> None:
        super().__init__(hidden, hidden, heads, kv_heads, dim)
        self.q_norm = Norm(dim, eps=eps)
        self.k_norm = Norm(dim, eps=eps)


class _Block(nn.Module):
    def __init__(
        self, hidden: int, inner: int, heads: int, kv_heads: int, dim: int, eps: float
    ) -> None:
        super().__init__()
        self.self_attn = _NormedAttention(hidden, heads, kv_heads, dim, eps)
        self.mlp = MLP(hidden, inner)
        self.input_layernorm = Norm(hidden, eps=eps)
        self.post_attention_layernorm = Norm(hidden, eps=eps)

    def forward(
        self, hidden: Tensor, context: Tensor, tables: Sequence[tuple[Tensor, Tensor]], mask: Tensor
    ) -> Tensor:
        (context_cos, cos), (context_sin, sin) = tables
        attn, split = self.self_attn, self.self_attn.split
        normed = self.input_layernorm(hidden)
        query = rotate(attn.q_norm(split(attn.q_proj(normed))), cos, sin)
        own = rotate(attn.k_norm(split(attn.k_proj(normed))), cos, sin)
        past = rotate(attn.k_norm(split(attn.k_proj(context))), context_cos, context_sin)
        keys = torch.cat((past, own), dim=2)
        values = torch.cat((split(attn.v_proj(context)), split(attn.v_proj(normed))), dim=2)
        hidden = hidden + attn.o_proj(
            attend(query, keys.to(query.dtype), values.to(query.dtype), mask)
        )
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def block_mask(anchors: Tensor, block: int, length: int) -> Tensor:
    """Visible Keys bool [batch, anchors * block, length + anchors * block]: the context before the
    anchor, then the row's own block."""
    rows = anchors.repeat_interleave(block, dim=1)
    owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block)
    context = torch.arange(length, device=anchors.device) < rows[..., None]
    own = (owner[:, None] == owner).expand(len(anchors), -1, -1)
    return torch.cat((context, own), dim=-1)


class Trainer(trainer.Trainer):
    recipe: Recipe
    module: TrainableDFlash

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
        self.chain = recipe.block - 1
        with torch.device(target.device):
            scale = robust_scale(sample_features(train, recipe.taps)).to(target.device)
            module = TrainableDFlash(target, recipe, scale)
        if start is not None:
            config, tensors = read_checkpoint(start)
            DFlash(config, tensors, target)  # refuses a drafter of another target
            module.load(tensors)
        super().__init__(target, recipe, train, held, out, module)

    def chains(
        self, corpus: Corpus, rows: Sequence[int], generator: torch.Generator, training: bool
    ) -> Chains:
        recipe = self.recipe
        tokens, written = corpus.tokens[list(rows)], corpus.written[list(rows)]
        anchors, usable = draw_anchors(written, recipe.anchors, recipe.block, generator)
        labels, valid = labels_behind(tokens, written, anchors, self.chain)
        valid &= usable[..., None]
        ids = torch.full((*anchors.shape, recipe.block), recipe.mask_token)
        ids[..., 0] = tokens.gather(1, anchors)
        blocks = F.embedding(ids.to(self.device), self.embedding)
        features = corpus.features(rows, recipe.taps).to(self.device, self.dtype)
        with self.autocast():
            hidden = self.module(features, blocks, anchors.to(self.device))[:, :, 1:]
        final = states_before(corpus.final(rows), anchors, self.chain)
        return Chains(hidden[valid.to(self.device)], final[valid], labels, valid)

    def export(self, directory: Path) -> None:
        """Write the drafter in the published format."""
        recipe, config = self.recipe, self.target.config
        parameters = dict(config.rope_parameters)
        save(
            directory,
            {
                "architectures": [ARCHITECTURE],
                "model_type": "qwen3",
                "dtype": "bfloat16",
                "block_size": recipe.block,
                "dflash_config": {
                    "target_layer_ids": list(recipe.taps),
                    "mask_token_id": recipe.mask_token,
                },
                "num_target_layers": self.target.num_layers,
                "vocab_size": self.target.vocab_size,
                "hidden_size": self.target.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": recipe.layers,
                "num_attention_heads": self.target.heads,
                "num_key_value_heads": self.target.kv_heads,
                "head_dim": self.target.head_dim,
                "hidden_act": "silu",
                "rms_norm_eps": self.target.eps,
                "max_position_embeddings": self.target.max_positions,
                "rope_theta": parameters.get("rope_theta"),
                "rope_parameters": parameters,
                "attention_bias": False,
                "attention_dropout": 0.0,
                "tie_word_embeddings": False,
                "use_cache": True,
            },
            {name: tensor.to(torch.bfloat16) for name, tensor in self.module.tensors().items()},
        )
