"""What z-lab's own DFlash says of a checkpoint, whatever way its heads are rotated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from support.published import CONTEXT, DRAFTS, outputs, over_target
from support.tiny import Tiny

_ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
_NORMS = ("q_norm.weight", "k_norm.weight")


class Rotary(nn.Module):
    """Cosines and sines that turn a part of each head, and leave the rest."""

    def __init__(self, config: Mapping[str, Any], turned: int) -> None:
        super().__init__()
        self.inner = Qwen3RotaryEmbedding(qwen3({**config, "head_dim": turned}))
        self.left = (config["head_dim"] - turned) // 2

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (each.chunk(2, -1)[0] for each in self.inner(x, position_ids))
        rest = (*cos.shape[:-1], self.left)
        cos, sin = (
            torch.cat((cos, cos.new_ones(rest)), -1),
            torch.cat((sin, sin.new_zeros(rest)), -1),
        )
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def qwen3(config: Mapping[str, Any]) -> Qwen3Config:
    """config.json as transformers reads it."""
    parsed = Qwen3Config(**{k: v for k, v in config.items() if k != "architectures"})
    parsed._attn_implementation = "sdpa"
    return parsed


def order(dim: int, turned: int, halves: bool) -> Tensor:
    """Places of a head's numbers such that a pair that is turned together stands half a head
    apart: the first `turned` are turned, in pairs of neighbours or of halves."""
    places = torch.arange(turned)
    firsts, seconds = places.chunk(2) if halves else (places[::2], places[1::2])
    one, other = torch.arange(turned, dim).chunk(2) if turned < dim else (places[:0], places[:0])
    return torch.cat((firsts, one, seconds, other))


def peer(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    turned: int | None = None,
    halves: bool = True,
) -> Any:
    """z-lab's module. turned: how many numbers of each head positions turn; None for all."""
    from dflash.model import DFlashDraftModel

    dim = config["head_dim"]
    turned = dim if turned is None else turned
    places = order(dim, turned, halves)

    def placed(name: str, tensor: Tensor) -> Tensor:
        if name.endswith(_NORMS):
            return tensor[places]
        if name.endswith(_ROTATED):
            return tensor.unflatten(0, (-1, dim))[:, places].flatten(0, 1)
        return tensor

    model = DFlashDraftModel(qwen3(config)).eval()
    rows, columns = tensors["fc.weight"].shape
    model.fc = nn.Linear(columns, rows, bias=False)  # Of a target that is wider or narrower.
    model.load_state_dict({name: placed(name, t).float() for name, t in tensors.items()})
    if turned != dim:
        model.rotary_emb = Rotary(config, turned)
    return model


def zlab_says(
    model: Any,
    tiny: Tiny,
    embedding: Tensor | None = None,
    head: Tensor | None = None,
    token_of: Tensor | None = None,
    scale: float = 1.0,
    text: Sequence[int] | None = None,
    count: int = DRAFTS,
) -> Tensor:
    """Its logits of drafts behind a text, [count, target vocab].

    embedding, head: the drafter's own; None for the target's. token_of: the target's tokens that
    rows of the head stand for.
    """
    text = tiny.text[:CONTEXT] if text is None else text
    states = outputs(tiny.model, text[:-1])
    features = torch.cat([states[i] for i in model.target_layer_ids], -1)[None]
    embedding = tiny.model.get_input_embeddings().weight if embedding is None else embedding
    head = tiny.model.lm_head.weight if head is None else head
    block = torch.tensor([text[-1]] + [model.mask_token_id] * count)
    with torch.inference_mode():
        hidden = model(
            position_ids=torch.arange(len(text) + count)[None],
            noise_embedding=embedding[block][None].float(),
            target_hidden=features,
        )
        logits = scale * (hidden[0, 1:] @ head.float().T)
    return over_target(logits, token_of)
