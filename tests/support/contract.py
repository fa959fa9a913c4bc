"""Hosts of the contract test, each with what is done by the package and what is done by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sharpdraft.adapters.attach import ATTACH, attach
from sharpdraft.adapters.vllm.layers import put_on
from sharpdraft.adapters.vllm.request import VLLM
from sharpdraft.decode.session import HOST as LAB
from sharpdraft.drafters.dflash import DFlash
from sharpdraft.drafters.eagle3 import Eagle3
from sharpdraft.drafters.pard import Pard
from sharpdraft.method.policies import Constant, FixedSlope, LayerSlopes
from sharpdraft.method.scale import Scale
from sharpdraft.method.settings import DraftSettings, Host, Window
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.placement import Placement, Ragged, Static
from support.drafters import append, drafter_config, drafter_tensors
from support.families import DIM, HEADS, KV, eagle_config, eagle_tensors, make_pard
from support.reference import Gain, Plain, Rule, dflash_logits, eagle3_logits, pard_logits
from support.tiny import VOCAB
from support.vllm_standin import Attention, ForwardPass, Metadata

DRAFTS = 5
LENGTHS = (6, 31)
"""Keys before the drafts of two requests."""

Both = tuple[Tensor, Tensor]
"""What a host made, and what is right."""

Layers = Sequence[tuple[bool, int | None]]
"""Of each layer as it is: whether it is causal, and its window."""


@dataclass(frozen=True)
class Example:
    """A policy of a kind for a drafter of so many layers, as steep as it can be, so that one Key
    more or less shows; and the gain that it stands for."""

    of: Callable[[int], Scale | None]
    gain: Gain


def _slope(keys: int, slope: float) -> float:
    """N0 = 3, k = 2, β_max = 50."""
    return min(50.0, 1 + math.log(max((keys - 2) / (3 - 2), 1)) / slope) - 1


EXAMPLES: dict[str, Example] = {
    "none": Example(lambda layers: None, lambda keys, layer: 0.0),
    "fixed_slope": Example(
        lambda layers: FixedSlope(3, 0.5, 2, 50.0), lambda keys, layer: _slope(keys, 0.5)
    ),
    "constant": Example(lambda layers: Constant(1.7), lambda keys, layer: 0.7),
    "layer_slopes": Example(
        lambda layers: LayerSlopes(3, (0.5, 0.9)[:layers], 2, 50.0),
        lambda keys, layer: _slope(keys, (0.5, 0.9)[layer]),
    ),
}
"""Of every registered kind of policy."""

VIEWS: dict[str, Window | None] = {
    "all": None,
    "window": Window(7),
    "window of a block": Window(DRAFTS + 1),
    "window and sinks": Window(8, 3),
    "window beyond the end": Window(200, 4),
}


class Case:
    """A policy and a view, as settings and by hand. off: see `Rule`."""

    def __init__(self, example: Example, view: Window | None, off: int = 0) -> None:
        self.example, self.view, self.off = example, view, off

    def settings(self, layers: int) -> DraftSettings:
        return DraftSettings(self.example.of(layers), self.view)

    def rules(self, own: Layers) -> list[Rule]:
        """own: what each layer sees as it is."""
        found = []
        for layer, (causal, window) in enumerate(own):
            sinks = 0
            if self.view is not None and window is None:
                window, sinks = self.view.keys, self.view.sinks
            elif self.view is not None:
                window = min(window, self.view.keys)
            found.append(Rule(layer, causal, window, sinks, self.example.gain, self.off))
        return found


# The lab's drafters


class Shown:
    """A greedy pick that keeps the logits it chose from."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, logits: Tensor, token_of: Tensor | None) -> tuple[Tensor, None]:
        self.logits.append(logits.double())
        return logits.argmax(-1), None


def lab(family: str, static: bool, target: CausalLM, case: Case) -> list[Both]:
    """Logits of drafts: by a pass of two requests, or by one whose rows stand at a slot that the
    device alone knows."""
    rng = torch.Generator().manual_seed(5)
    drafter, layers, right = _FAMILIES[family](target, case)
    settings = case.settings(layers)
    settings.check(LAB, layers=layers, drafts=DRAFTS)
    caches, texts, read = [], [], []
    for length in LENGTHS[1:] if static else LENGTHS:
        texts.append(torch.randint(0, VOCAB, (length + 1,), generator=rng).tolist())
        read.append([torch.randn(1, length, 32, generator=rng) for _ in drafter.taps])
        caches.append(drafter.new_cache(64))
        caches[-1].blank()
        append(drafter, caches[-1], texts[-1][:-1], read[-1])
    if static:
        drafter.catch_up(caches, [settings])
    at: Placement = Static(torch.tensor([LENGTHS[1]]), 64) if static else Ragged()
    picks = [Shown() for _ in caches]
    anchors = torch.tensor([text[-1] for text in texts])
    drafter.propose(at, caches, anchors, DRAFTS, [settings] * len(caches), picks)
    found = []
    for pick, text, states in zip(picks, texts, read, strict=True):
        features = torch.cat(states, -1)[0].double() if states else torch.empty(0)
        found.append((torch.cat(pick.logits), right(text, features)))
    return found


def _dflash(target: CausalLM, case: Case, layers: Layers, **changes: Any) -> Any:
    config = drafter_config(**changes)
    tensors = drafter_tensors(config)
    plain = Plain(tensors, 6, 3, 8, case.rules(layers))
    embedding, head = target.embedding.double(), target.head.weight.double()

    def right(text: list[int], features: Tensor) -> Tensor:
        return dflash_logits(plain, embedding, head, features, text[-1], 3, DRAFTS)

    return DFlash(config, tensors, target), 2, right


def _dflash_window(target: CausalLM, case: Case, causal: bool, window: int) -> Any:
    """The second layer has a window by its checkpoint."""
    types = ["full_attention", "sliding_attention"]
    own = {"layer_types": types, "use_sliding_window": True, "max_window_layers": 1}
    own |= {} if causal else {"is_causal": False}
    layers: Layers = [(False, None), (causal, window)]
    return _dflash(target, case, layers, sliding_window=window, **own)


def _eagle3(target: CausalLM, case: Case) -> Any:
    config = eagle_config()
    tensors = eagle_tensors(config, target)
    plain = Plain(tensors, HEADS, KV, DIM, case.rules([(True, None)]))
    embedding = target.embedding.double()

    def right(text: list[int], features: Tensor) -> Tensor:
        return eagle3_logits(plain, embedding, features, text, DRAFTS)

    return Eagle3(config, tensors, target), 1, right


def _pard(target: CausalLM, case: Case) -> Any:
    model = make_pard()
    plain = Plain(model.state_dict(), HEADS, KV, DIM, case.rules([(True, None)] * 2))

    def right(text: list[int], features: Tensor) -> Tensor:
        return pard_logits(plain, text, VOCAB - 1, DRAFTS)

    return Pard(CausalLM.of(model), VOCAB - 1, target), 2, right


_FAMILIES: dict[str, Callable[[CausalLM, Case], Any]] = {
    "dflash": partial(_dflash, layers=[(False, None)] * 2),
    "dflash, own window": partial(_dflash_window, causal=True, window=9),
    "dflash, window within the block": partial(_dflash_window, causal=False, window=4),
    "eagle3": _eagle3,
    "pard": _pard,
}


# Other people's PyTorch modules


class PlainAttention(nn.Module):
    """Attention that calls scaled_dot_product_attention."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, **how)


def modules(mask: str, target: CausalLM, case: Case) -> list[Both]:
    """What two attention modules give for the last six of the Keys, or for all of them.

    mask: how the call says what is seen: "none", "bool", "float" or "is_causal".
    """
    causal = mask != "none"
    drafter = nn.ModuleList([PlainAttention(), PlainAttention()])
    settings = case.settings(2)
    settings.check(ATTACH, layers=2, drafts=DRAFTS)
    rng = torch.Generator().manual_seed(6)
    found = []
    with attach(drafter, settings):
        for module, rule in zip(drafter, case.rules([(causal, None)] * 2), strict=True):
            for keys in LENGTHS:
                rows = keys if mask == "is_causal" else DRAFTS + 1
                slots = range(keys - rows, keys)
                query = torch.randn(1, 4, rows, 8, generator=rng)
                key, value = (torch.randn(1, 4, keys, 8, generator=rng) for _ in "kv")
                shown = torch.tensor([[slot <= own for slot in range(keys)] for own in slots])
                hidden = torch.zeros(shown.shape).masked_fill(~shown, -torch.inf)
                how: dict[str, Any] = {
                    "none": {},
                    "bool": {"attn_mask": shown},
                    "float": {"attn_mask": hidden},
                    "is_causal": {"is_causal": True},
                }[mask]
                own = [each[0].double() for each in (query, key, value)]
                right = rule.attend(*own, slots, 1 / math.sqrt(8))
                found.append((module(query, key, value, **how)[0].double(), right))
    return found


# vLLM, stood in for


def vllm(backend: str, causal: bool, target: CausalLM, case: Case) -> list[Both]:
    """What two attention layers give for a flat batch of two requests, a whole prompt and a
    block."""
    layers = {f"draft.{i}": Attention(backend=backend) for i in range(2)}
    settings, now = case.settings(2), ForwardPass()
    settings.check(VLLM, layers=2, drafts=DRAFTS)
    assert put_on(layers, settings, lambda: now) == {}
    rng = torch.Generator().manual_seed(7)
    rows = (LENGTHS[0], DRAFTS + 1)
    metadata = Metadata(torch.tensor([0, rows[0], sum(rows)]), torch.tensor(LENGTHS), causal)
    found = []
    for layer, rule in zip(layers.values(), case.rules([(causal, None)] * 2), strict=True):
        query = torch.randn(sum(rows), 2, 8, generator=rng)
        caches = [tuple(torch.randn(n, 8, generator=rng) for _ in "kv") for n in LENGTHS]
        out = layer.attend(query, caches, metadata).double()
        parts = zip(query.split(rows), out.split(rows), caches, LENGTHS, rows, strict=True)
        for own, made, (keys, values), length, count in parts:
            slots = range(length - count, length)
            each = keys.double()[None], values.double()[None]
            right = rule.attend(own.transpose(0, 1).double(), *each, slots, 1.0)
            found.append((made.transpose(0, 1), right))
    return found


@dataclass(frozen=True)
class Place:
    """A host, and one of the ways in which it runs: a function of a target and a case, of which
    hosts that are not ours need no target. compiled: whether by kernels; None where there are
    none."""

    host: Host
    run: Callable[[CausalLM, Case], list[Both]]
    compiled: bool | None = None


PLACES = {
    f"{family}, {way}": Place(LAB, partial(lab, family, way == "static"), way == "compiled")
    for family in _FAMILIES
    for way in ("compiled", "plain", "static")
}
PLACES |= {
    f"attach, {mask}": Place(ATTACH, partial(modules, mask))
    for mask in ("none", "bool", "float", "is_causal")
}
PLACES |= {
    f"vLLM, {backend}, {'causal' if causal else 'block'}": Place(
        VLLM, partial(vllm, backend, causal)
    )
    for backend in ("FLASH_ATTN", "CPU_ATTN")
    for causal in (True, False)
}
