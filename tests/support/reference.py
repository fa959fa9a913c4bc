"""Attention, its scaling and its views written out Key by Key in double precision, and drafters
made of it with nothing cached. It asks the package neither what a row sees nor how it is scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Gain = Callable[[int, int], float]
"""By hand: visible Keys and layer -> β - 1."""


@dataclass(frozen=True)
class Rule:
    """What is asked of a layer, by hand.

    causal: a row sees nothing behind its slot. window, sinks: it sees slots less than so many away,
    and the first ones. off: how many Keys too many are counted, for tests of the tests.
    """

    layer: int
    causal: bool
    window: int | None
    sinks: int
    gain: Gain
    off: int = 0

    def seen(self, own: int, keys: int) -> list[int]:
        """The slots that the row in slot `own` sees, of `keys` that hold something."""
        found = []
        for slot in range(keys):
            ahead = slot > own
            near = self.window is None or abs(slot - own) < self.window
            if not (ahead and self.causal) and (near or slot < self.sinks):
                found.append(slot)
        return found

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], scale: float
    ) -> Tensor:
        """query [heads, rows, dim] of rows in `slots`; keys, values [kv_heads, keys, dim] ->
        [heads, rows, dim]. scale: of the scores, before the policy's."""
        heads = query.unflatten(0, (len(keys), -1))
        out = torch.empty_like(heads)
        for row, own in enumerate(slots):
            seen = self.seen(own, keys.shape[1])
            factor = scale * (1 + self.gain(len(seen) + self.off, self.layer))
            scores = factor * (heads[:, :, row] @ keys[:, seen].mT)
            out[:, :, row] = scores.softmax(-1) @ values[:, seen]
        return out.flatten(0, 1)


class Plain:
    """A drafter's weights, and its layers run plainly on them.

    rotary_dim: how many dimensions of a head turn, None for all. interleaved: whether neighbours
    turn together.
    """

    rotary_dim: int | None = None
    interleaved = False

    def __init__(
        self, tensors: Mapping[str, Tensor], heads: int, kv_heads: int, dim: int, rules: list[Rule]
    ) -> None:
        """tensors: under their published names."""
        self.w = {name.removeprefix("model."): t.detach().double() for name, t in tensors.items()}
        self.heads, self.kv_heads, self.dim, self.rules = heads, kv_heads, dim, rules

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.w[f"{name}.weight"]

    def project(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def split(self, x: Tensor, name: str, heads: int, turn: Sequence[int] | None) -> Tensor:
        """A projection of x [rows, size] in heads, [heads, rows, dim], normed where there is a
        norm, and rotated to the positions `turn`."""
        out = self.project(x, f"{name}_proj").view(len(x), heads, self.dim).transpose(0, 1)
        if f"{name}_norm.weight" in self.w:
            out = self.norm(out, f"{name}_norm")
        if turn is None:
            return out
        return self.turned(out, turn)

    def turned(self, x: Tensor, turn: Sequence[int]) -> Tensor:
        """x [heads, rows, dim] rotated to positions, pair of dimensions by pair."""
        part = self.rotary_dim or self.dim
        at, out = torch.tensor(turn, dtype=torch.float64), x.clone()
        for pair in range(part // 2):
            one, other = (2 * pair, 2 * pair + 1) if self.interleaved else (pair, pair + part // 2)
            angle = at * 10_000.0 ** (-2 * pair / part)
            a, b = x[..., one], x[..., other]
            out[..., one] = a * angle.cos() - b * angle.sin()
            out[..., other] = b * angle.cos() + a * angle.sin()
        return out

    def keys(self, x: Tensor, attn: str, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        return (
            self.split(x, f"{attn}.k", self.kv_heads, slots),
            self.split(x, f"{attn}.v", self.kv_heads, None),
        )

    def layer(
        self,
        number: int,
        prefix: str,
        x: Tensor,
        slots: Sequence[int],
        row: Tensor,
        before: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """x [rows, size] through a layer; row: what is projected to Queries, Keys and Values;
        before: Keys and Values of slots that lie before the rows'."""
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        query = self.split(row, f"{attn}.q", self.heads, slots)
        keys, values = self.keys(row, attn, slots)
        if before is not None:
            keys, values = torch.cat((before[0], keys), 1), torch.cat((before[1], values), 1)
        mixed = self.rules[number].attend(query, keys, values, slots, 1 / math.sqrt(self.dim))
        x = x + self.project(mixed.transpose(0, 1).reshape(len(x), -1), f"{attn}.o_proj")
        inner = self.norm(x, f"{prefix}.post_attention_layernorm")
        gate = self.project(inner, f"{mlp}.gate_proj")
        up = self.project(inner, f"{mlp}.up_proj")
        return x + self.project(gate * gate.sigmoid() * up, f"{mlp}.down_proj")


def dflash_logits(
    plain: Plain, embedding: Tensor, head: Tensor, features: Tensor, anchor: int, mask: int, n: int
) -> Tensor:
    """Logits of `n` drafts behind a context of features [tokens, taps * size]: [n, vocab]."""
    context = plain.norm(plain.project(features, "fc"), "hidden_norm")
    past = range(len(context))
    slots = range(len(context), len(context) + n + 1)
    x = embedding[[anchor] + [mask] * n]
    for number in range(len(plain.rules)):
        prefix = f"layers.{number}"
        before = plain.keys(context, f"{prefix}.self_attn", past)
        row = plain.norm(x, f"{prefix}.input_layernorm")
        x = plain.layer(number, prefix, x, slots, row, before)
    return plain.norm(x, "norm")[1:] @ head.T


def eagle3_logits(
    plain: Plain, embedding: Tensor, features: Tensor, tokens: Sequence[int], n: int
) -> Tensor:
    """Logits of `n` drafts along the greedy chain, each over all rows anew: [n, vocab].

    features [tokens - 1, taps * size] of all tokens but the last, the anchor.
    """
    states = plain.project(features, "fc")
    behind, found = list(tokens[1:]), []
    while len(found) < n:
        normed = plain.norm(states, "midlayer.hidden_norm")
        row = torch.cat((plain.norm(embedding[behind], "midlayer.input_layernorm"), normed), -1)
        # With one layer, what a row gives depends on no other row's output.
        last = len(row) - 1
        before = plain.keys(row[:-1], "midlayer.self_attn", range(last))
        x = plain.layer(0, "midlayer", states[-1:], [last], row[-1:], before)
        found.append(plain.norm(x, "norm")[0] @ plain.w["lm_head.weight"].T)
        behind.append(int(found[-1].argmax()))
        states = torch.cat((states, x))
    return torch.stack(found)


def lm_logits(plain: Plain, tokens: Sequence[int]) -> Tensor:
    """Logits behind each token of a causal LM: [tokens, vocab]."""
    x = plain.w["embed_tokens.weight"][[*tokens]]
    for number in range(len(plain.rules)):
        prefix = f"layers.{number}"
        row = plain.norm(x, f"{prefix}.input_layernorm")
        x = plain.layer(number, prefix, x, range(len(x)), row)
    return plain.norm(x, "norm") @ plain.w["lm_head.weight"].T


def pard_logits(plain: Plain, tokens: Sequence[int], mask: int, n: int) -> Tensor:
    """Logits of `n` drafts behind the last token, in one pass over everything: [n, vocab]."""
    return lm_logits(plain, [*tokens] + [mask] * (n - 1))[-n:]
