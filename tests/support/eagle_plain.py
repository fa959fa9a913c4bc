"""EAGLE-3 by its definition, in double precision, with nothing cached: all rows anew for every
draft."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from support.published import CONTEXT, DRAFTS, outputs, over_target
from support.tiny import Tiny


class Chain:
    """A checkpoint's meaning, said in plain words.

    tensors: under the names of SafeAILab. taps: layers of the target whose outputs are fused.
    rope: rotary parameters as config.json has them. turned: how many numbers of each head are
    turned; halves: whether pairs are halves of these, or neighbours.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 8,
        taps: Sequence[int] = (0, 1, 2),
        window: int | None = None,
        normed_residual: bool = False,
        normed_state: bool = False,
        rope: Mapping[str, Any] | None = None,
        turned: int | None = None,
        halves: bool = True,
        scale: float = 1.0,
        eps: float = 1e-6,
    ) -> None:
        self.w = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        self.heads, self.kv_heads, self.dim, self.taps = heads, kv_heads, dim, tuple(taps)
        self.window, self.scale, self.halves, self.eps = window, scale, halves, eps
        self.normed_residual, self.normed_state = normed_residual, normed_state
        self.turned = dim if turned is None else turned
        own = {"max_position_embeddings": 256, "rope_theta": 10_000.0} | dict(rope or {})
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=heads * dim, num_attention_heads=heads, head_dim=self.turned, **own
            )
        )

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.w[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def turn(self, x: Tensor) -> Tensor:
        """x [heads, rows, dim], rotated by each row's place."""
        cos, sin = self.rotary(x.float(), torch.arange(x.shape[1])[None])
        cos, sin = (each[0].chunk(2, -1)[0].double() for each in (cos, sin))
        own, rest = x[..., : self.turned], x[..., self.turned :]
        a, b = own.chunk(2, -1) if self.halves else (own[..., ::2], own[..., 1::2])
        a, b = a * cos - b * sin, b * cos + a * sin
        own = torch.cat((a, b), -1) if self.halves else torch.stack((a, b), -1).flatten(-2)
        return torch.cat((own, rest), -1)

    def split(self, x: Tensor, name: str, heads: int) -> Tensor:
        out = self.linear(x, f"midlayer.self_attn.{name}_proj")
        out = out.view(len(x), heads, self.dim).transpose(0, 1)
        if f"midlayer.self_attn.{name}_norm.weight" in self.w:
            out = self.norm(out, f"midlayer.self_attn.{name}_norm")
        return out if name == "v" else self.turn(out)

    def last(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows of states and the embeddings of the tokens behind them: the last row's output,
        normed, and the state that it hands on."""
        normed = self.norm(states, "midlayer.hidden_norm")
        row = torch.cat((self.norm(embedded, "midlayer.input_layernorm"), normed), -1)
        groups = self.heads // self.kv_heads
        query = self.split(row, "q", self.heads)[:, -1:]
        keys, values = (
            self.split(row, name, self.kv_heads).repeat_interleave(groups, 0) for name in "kv"
        )
        if self.window is not None:
            keys, values = keys[:, -self.window :], values[:, -self.window :]
        share = (query @ keys.mT / math.sqrt(self.dim)).softmax(-1)
        mixed = self.linear((share @ values).flatten(), "midlayer.self_attn.o_proj")
        x = (normed if self.normed_residual else states)[-1] + mixed
        inner = self.norm(x, "midlayer.post_attention_layernorm")
        gate = self.linear(inner, "midlayer.mlp.gate_proj")
        up = self.linear(inner, "midlayer.mlp.up_proj")
        x = x + self.linear(gate * gate.sigmoid() * up, "midlayer.mlp.down_proj")
        final = self.norm(x, "norm")
        return final, final if self.normed_state else x

    def says(self, tiny: Tiny, text: Sequence[int] | None = None, count: int = DRAFTS) -> Tensor:
        """Logits along the greedy chain behind a text, [count, target vocab]."""
        text = tiny.text[:CONTEXT] if text is None else text
        layers = outputs(tiny.model, text[:-1])
        taps = [layers[tap].double() for tap in self.taps]
        if "fc_norm.0.weight" in self.w:
            taps = [self.norm(tap, f"fc_norm.{i}") for i, tap in enumerate(taps)]
        fused = torch.cat(taps, -1)
        if "input_norm.weight" in self.w:
            fused = self.norm(fused, "input_norm")
        states = self.linear(fused, "fc")
        embedding = self.w.get(
            "embed_tokens.weight", tiny.model.get_input_embeddings().weight.double()
        )
        head = self.w.get("lm_head.weight", tiny.model.lm_head.weight.double())
        token_of = torch.arange(len(head))
        if "d2t" in self.w:
            token_of = token_of + self.w["d2t"]
        behind, found = list(text[1:]), []
        for _ in range(count):
            final, state = self.last(states, embedding[behind])
            found.append(over_target((self.scale * (final @ head.T))[None], token_of))
            behind.append(int(found[-1].argmax()))
            states = torch.cat((states, state[None]))
        return torch.cat(found).detach()
