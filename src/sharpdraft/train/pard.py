"""Making a PARD drafter (arXiv 2504.18583) out of its target: some of its layers, its embedding and
its head.

First the cut model learns to be a language model again, on text that the target wrote; then it
learns to draft several tokens at once, from mask tokens behind every position. Of the masks of one
depth only a share goes on to the next (conditional drop), so that a step costs about as much
however many tokens are drafted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ..drafters.checkpoint import read_json, read_tensors
from ..hub.quiet import quiet_transformers
from ..model.attention import additive
from ..model.causal_lm import CausalLM
from . import trainer
from .corpus import Corpus, draw_anchors, labels_behind, states_before
from .loss import Chains
from .trainer import going_on


@dataclass(frozen=True)
class Recipe(trainer.Recipe):
    """How to train. Defaults made the drafter in this repository."""

    steps: int = 760
    # Steps as an ordinary language model, before any mask.
    plain_steps: int = 300
    start_layers: tuple[int, ...] = (0, 6, 12, 18, 24, 29)
    mask_token: int = 4
    chain: int = 6
    # Of those, what is drafted by default: the last are rarely right, and each is a row to verify.
    drafts: int = 4
    anchors: int = 128
    # Share of the chains of one depth that go on to the next.
    kept: float = 0.7

    @property
    def reads(self) -> tuple[int, ...]:
        return ()

    @property
    def starts(self) -> tuple[int, ...]:
        return self.start_layers

    @classmethod
    def of(cls, directory: Path) -> Recipe:
        """The recipe that goes on with a drafter: its shape, fewer steps and a lower rate, masks
        from the start. Raises SharpDraftError for a directory that holds no PARD checkpoint."""
        config = read_json(directory)
        with going_on(directory):
            return cls(
                start_layers=tuple(range(config["num_hidden_layers"])),
                mask_token=config["pard_token"],
                plain_steps=0,
                steps=400,
                rate=5e-4,
                warmup=40,
            )


def cut(target: CausalLM, layers: Sequence[int]) -> Any:
    """A causal LM of transformers, float32: the target's embedding, head and final norm, and some
    of its layers."""
    changes = {"num_hidden_layers": len(layers), "layer_types": None}
    config = AutoConfig.for_model(**{**target.config.source, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to_empty(device=target.device)
    tensors: dict[str, Tensor | None] = {
        "model.embed_tokens.weight": target.embedding,
        "model.norm.weight": target.stack.norm,
        "lm_head.weight": target.head.weight,
    }
    width = target.head_dim
    sizes = [target.heads * width, target.kv_heads * width, target.kv_heads * width]
    for place, source in enumerate(layers):
        layer, name = target.stack.layers[source], f"model.layers.{place}"
        qkv, gate_up = layer.qkv.weight.split(sizes), layer.gate_up.weight.chunk(2)
        biases = (None,) * 3 if layer.qkv.bias is None else layer.qkv.bias.split(sizes)
        for projection, weight, bias in zip("qkv", qkv, biases, strict=True):
            tensors[f"{name}.self_attn.{projection}_proj.weight"] = weight
            tensors[f"{name}.self_attn.{projection}_proj.bias"] = bias
        tensors |= {
            f"{name}.self_attn.q_norm.weight": layer.q_norm,
            f"{name}.self_attn.k_norm.weight": layer.k_norm,
            f"{name}.self_attn.o_proj.weight": layer.out.weight,
            f"{name}.mlp.gate_proj.weight": gate_up[0],
            f"{name}.mlp.up_proj.weight": gate_up[1],
            f"{name}.mlp.down_proj.weight": layer.down.weight,
            f"{name}.input_layernorm.weight": layer.attn_norm,
            f"{name}.post_attention_layernorm.weight": layer.mlp_norm,
        }
    model.load_state_dict({name: t.float().clone() for name, t in tensors.items() if t is not None})
    model.tie_weights()
    # Buffers of rotary positions are not among the weights.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(target.device)
    return model


def mask_rows(anchors: int, chain: int, kept: float) -> tuple[Tensor, Tensor]:
    """Which chain, and how deep in it (from 1), each mask row is, int64 [rows]: `anchors` rows of
    depth 1, and of each further depth the share `kept` of the one before, always of the first
    chains."""
    rows = [
        (i, depth + 1)
        for depth in range(chain - 1)
        for i in range(max(1, round(anchors * kept**depth)))
    ]
    chains, depths = torch.tensor(rows, dtype=torch.long).view(-1, 2).T
    return chains, depths


def visible(anchors: Tensor, chains: Tensor, depths: Tensor, length: int) -> Tensor:
    """What each row sees, bool [batch, length + masks, length + masks]: a token all up to itself, a
    mask all up to its chain's anchor and its own chain's masks up to itself."""
    batch, masks = len(anchors), len(chains)
    tokens = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, -1, -1)
    before = torch.arange(length) <= anchors[:, chains, None]
    own = ((chains[:, None] == chains) & (depths[:, None] >= depths)).expand(batch, -1, -1)
    hidden = torch.zeros(batch, length, masks, dtype=torch.bool)
    return torch.cat((torch.cat((tokens, hidden), -1), torch.cat((before, own), -1)), 1)


class Trainer(trainer.Trainer):
    recipe: Recipe

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
        self.model = cut(target, recipe.start_layers)
        if start is not None:
            from ..drafters.pard import Pard

            Pard.load(start, target)  # refuses a drafter of another target
            named = {name: tensor.float() for name, tensor in read_tensors(start).items()}
            self.model.load_state_dict(named, strict=False)
        body: nn.Module = self.model.model
        body.embed_tokens.requires_grad_(False)
        super().__init__(target, recipe, train, held, out, body)

    def chains(
        self, corpus: Corpus, rows: Sequence[int], generator: torch.Generator, training: bool
    ) -> Chains:
        recipe = self.recipe
        tokens, written = corpus.tokens[list(rows)], corpus.written[list(rows)]
        batch, length = tokens.shape
        plain = training and self.step < recipe.plain_steps
        chain = 1 if plain else recipe.chain
        anchors, usable = draw_anchors(written, recipe.anchors, recipe.chain + 1, generator)
        of, depths = mask_rows(recipe.anchors, chain, recipe.kept if training else 1.0)
        every = torch.arange(length - 1).expand(batch, -1)
        labels, valid = labels_behind(tokens, written, every, chain)
        # Where in the forward's output the draft of each position and depth is; -1: nowhere.
        place = torch.full((batch, length - 1, chain), -1)
        place[..., 0] = every
        spot = length + torch.arange(len(of)).expand(batch, -1)
        session = torch.arange(batch)[:, None]
        place[session, anchors[:, of], depths] = torch.where(usable[:, of], spot, -1)
        if not training:
            drawn = torch.zeros(batch, length - 1, dtype=torch.bool).scatter_(1, anchors, usable)
            valid &= drawn[..., None]
        valid &= place >= 0
        hidden = self._forward(tokens, anchors, of, depths)
        at = place[valid]
        sequence = torch.arange(batch)[:, None, None].expand(valid.shape)[valid]
        final = states_before(corpus.final(rows), every, chain)
        return Chains(
            hidden[sequence.to(self.device), at.to(self.device)], final[valid], labels, valid
        )

    def _forward(self, tokens: Tensor, anchors: Tensor, of: Tensor, depths: Tensor) -> Tensor:
        """Hidden states [batch, length + masks, hidden]."""
        batch, length = tokens.shape
        masks = torch.full((batch, len(of)), self.recipe.mask_token)
        at = torch.cat((torch.arange(length).expand(batch, -1), anchors[:, of] + depths), dim=1)
        seen = additive(visible(anchors, of, depths, length), self.dtype)[:, None]
        with self.autocast():
            out = self.module(
                input_ids=torch.cat((tokens, masks), dim=1).to(self.device),
                attention_mask=seen.to(self.device),
                position_ids=at.to(self.device),
                use_cache=False,
            )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def export(self, directory: Path) -> None:
        """Write the drafter in AMD's layout, which vLLM loads as a parallel draft model."""
        config = self.model.config
        config.pard_token, config.num_drafts = self.recipe.mask_token, self.recipe.drafts
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.to(torch.bfloat16) for name, t in self.model.state_dict().items()}
        with quiet_transformers():
            self.model.save_pretrained(directory, state_dict=tensors)
        path = directory / "config.json"
        written = json.loads(path.read_text(encoding="utf-8")) | {"dtype": "bfloat16"}
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
