"""Put a policy on a drafter that is not ours, and take it off again.

Attention that goes through `torch.nn.functional.scaled_dot_product_attention` shows, at that call,
the Query of every row and the Keys and mask that it is about to see; that is where Queries are
scaled, whatever class or cache the model has. Weights are not touched, and nothing is left behind
on detaching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import SharpDraftError
from ..method.scale import Policy, scale_queries
from ..method.visible import visible_keys

_FORWARD = "forward"


class Attached:
    """A policy on a drafter. `detach` takes it off; as a context manager it does so at the end.

    `policy` may be changed while attached; None is the drafter as released.
    """

    def __init__(self, layers: dict[str, nn.Module], policy: Policy | None) -> None:
        self.layers, self.policy = layers, policy
        for name, layer in layers.items():
            layer.forward = self._scaled(name, layer.forward)

    def detach(self) -> None:
        """Leave the drafter as it was. May be called more than once."""
        for layer in self.layers.values():
            # The instance's own forward hid that of its class.
            with suppress(AttributeError):
                delattr(layer, _FORWARD)
        self.layers = {}

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _scaled(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def scaled(*args: Any, **kwargs: Any) -> Any:
            if self.policy is None:
                return forward(*args, **kwargs)
            with _ScaledAttention(self.policy) as mode:
                out = forward(*args, **kwargs)
            if not mode.calls:
                raise SharpDraftError(
                    f"{name} attends without scaled_dot_product_attention, so that its Keys cannot "
                    "be counted: load "
                    'the drafter with attn_implementation="sdpa", or name its attention modules'
                )
            return out

        return scaled


def attach(
    drafter: nn.Module, policy: Policy | None, attention: Sequence[str] | None = None
) -> Attached:
    """Scale the Queries of a PyTorch drafter from now on, by the Keys that each of them really
    sees.

    drafter: any module whose attention calls `scaled_dot_product_attention`: z-lab's
    `DFlashDraftModel`, a transformers model that `generate` is given as `assistant_model`, one of
    your own. attention: names of its attention modules, as in `named_modules`; by default those
    whose class is called an attention.

    Raises SharpDraftError: no attention module is found or named, one is attached to already, or
    the drafter's configuration says that another kernel attends (flash attention, eager), where no
    Keys can be counted. A module that turns out not to call scaled_dot_product_attention raises it
    at its first forward.
    """
    kernel = getattr(getattr(drafter, "config", None), "_attn_implementation", None)
    if kernel not in (None, "sdpa"):
        raise SharpDraftError(
            f'the drafter attends with "{kernel}", which shows no mask to count Keys by: load it with '
            'attn_implementation="sdpa", or call its set_attn_implementation("sdpa")'
        )
    every = dict(drafter.named_modules())
    if attention is None:
        found = {
            name: module
            for name, module in every.items()
            if type(module).__name__.endswith("Attention")
        }
        # Of nested ones the outer is the layer's.
        names = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    else:
        names = list(attention)
        if missing := [name for name in names if name not in every]:
            raise SharpDraftError(
                f"the drafter has no module {missing[0]}: named_modules() lists what it has"
            )
    if not names:
        raise SharpDraftError(
            "the drafter has no module whose class is called an attention: name them in `attention`"
        )
    layers = {name: every[name] for name in names}
    if taken := [name for name, layer in layers.items() if _FORWARD in vars(layer)]:
        raise SharpDraftError(
            f"{taken[0]} has a forward of its own already, perhaps from another attach: detach that"
        )
    return Attached(layers, policy)


class _ScaledAttention(TorchFunctionMode):
    """Scales the Query of every scaled_dot_product_attention within."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.calls += 1
        given = (
            dict(
                zip(
                    ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
                    args,
                    strict=False,
                )
            )
            | kwargs
        )
        keys = visible_keys(
            given["query"], given["key"], given.get("attn_mask"), given.get("is_causal", False)
        )
        given["query"] = scale_queries(given["query"], self.policy.gain(keys))
        return func(**given)
