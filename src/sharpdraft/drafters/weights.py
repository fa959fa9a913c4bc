"""A drafter's layers, made of the tensors that its checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..model.causal_lm import CausalLM
from ..model.config import Config
from ..model.linear import Linear
from ..model.rotary import head_order, in_order
from ..model.stack import Layer


class Weights:
    """Tensors by their names in `formats`, in the dtype and on the device of the target."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Config, target: CausalLM) -> None:
        self._tensors, self._target = tensors, target
        self._order = head_order(config)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        # What is turned by positions, and of how many heads it is.
        self._turned = {"q_proj": heads, "k_proj": kv_heads, "q_norm": 1, "k_norm": 1}

    def __getitem__(self, name: str) -> Tensor:
        tensor, kind = self._tensors[name], name.split(".")[-2]
        if self._order is not None and kind in self._turned:
            tensor = in_order(tensor, self._order, self._turned[kind])
        return tensor.to(device=self._target.device, dtype=self._target.dtype)

    def get(self, name: str) -> Tensor | None:
        """The tensor, if there is one."""
        return self[name] if name in self._tensors else None

    def linear(self, *names: str) -> Linear:
        """Projections one behind the other, as one product."""
        weights = [self[f"{name}.weight"] for name in names]
        biases = [self.get(f"{name}.bias") for name in names]
        if all(bias is None for bias in biases):
            return Linear(torch.cat(weights))
        pairs = zip(weights, biases, strict=True)
        whole = [w.new_zeros(len(w)) if bias is None else bias for w, bias in pairs]
        return Linear(torch.cat(weights), torch.cat(whole))

    def layer(self, at: str, attn_norm: str) -> Layer:
        """A whole layer; attn_norm: the norm before its attention."""
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        return Layer(
            attn_norm=self[f"{at}.{attn_norm}.weight"],
            qkv=self.linear(*(f"{attn}.{part}_proj" for part in "qkv")),
            q_norm=self.get(f"{attn}.q_norm.weight"),
            k_norm=self.get(f"{attn}.k_norm.weight"),
            out=self.linear(f"{attn}.o_proj"),
            mlp_norm=self[f"{at}.post_attention_layernorm.weight"],
            gate_up=self.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=self.linear(f"{mlp}.down_proj"),
        )
