"""Put settings on a drafter that is not ours, and take them off again.

Attention that goes through `torch.nn.functional.scaled_dot_product_attention` shows, at that call,
the Query of every row and the Keys and mask that it is about to see; that is where Keys are hidden
and Queries scaled, whatever class or cache the model has. Weights are not touched, and nothing is
left behind on detaching.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import SharpDraftError
from ..method.scale import Policy, Scale, policy_at, scale_queries
from ..method.settings import DraftSettings, Host, as_settings
from ..method.visible import View, visible_keys

ATTACH = Host(
    "attach",
    provides={"keys", "layer", "window", "sinks"},
    lacks={
        "length": "how many tokens are drafted is up to the code that drafts (in transformers, "
        "num_assistant_tokens): say it there, and leave length out here",
        "scores": "attach sees Queries and Keys, no attention scores",
    },
)
_FORWARD = "forward"
_ATTACHED = "_attached"
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

Settings = DraftSettings | Scale | None


class Attached:
    """Settings on a drafter. `detach` takes them off; as a context manager it does so at the end.

    `settings` may be changed while attached; None is the drafter as released. What is done to the
    drafter goes for its deep copies as well.
    """

    def __init__(self, layers: Mapping[str, nn.Module], settings: Settings) -> None:
        self._modules = list(layers.values())
        self._layers = [_Layer(name, View(window=_window(m))) for name, m in layers.items()]
        self.settings = settings
        for layer, module in zip(self._layers, self._modules, strict=True):
            layer.put_on(module)

    @property
    def settings(self) -> DraftSettings:
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        new = as_settings(settings)
        new.check(ATTACH, layers=len(self._layers))
        self._settings = new
        for number, layer in enumerate(self._layers):
            layer.policy = policy_at(new.scale, number)
            layer.view = None if new.view is None else new.view.on(layer.own)

    def detach(self) -> None:
        """Leave the drafter as it was. May be called more than once."""
        self.settings = None
        for layer, module in zip(self._layers, self._modules, strict=True):
            layer.take_off(module)

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def attach(
    drafter: nn.Module, settings: Settings, attention: Sequence[str] | None = None
) -> Attached:
    """Run a PyTorch drafter with settings from now on: hide Keys as its `view` says, and scale
    Queries by the Keys that each of them is left to see.

    drafter: any module whose attention calls `scaled_dot_product_attention`: z-lab's
    `DFlashDraftModel`, a transformers model that `generate` is given as `assistant_model`, one of
    your own. settings: all of them, a policy alone, or None for the drafter as released.
    attention: names of its attention modules, as in `named_modules`; by default those whose class
    is called an attention. Their order is that of the layers.

    A view measures from each row's own Key. Under a causal mask that is the last Key the row sees;
    without a mask, or under one that shows all rows the same last Key, rows own the last Keys in
    their order; with is_causal the first, as PyTorch has it.

    Raises SharpDraftError: no attention module is found or named, one is attached to already, the
    settings have a length or are for another number of layers, or the drafter's configuration says
    that another kernel attends (flash attention, eager), where no Keys can be counted. A module
    that turns out not to call scaled_dot_product_attention raises it at its first forward.
    """
    kernel = getattr(getattr(drafter, "config", None), "_attn_implementation", None)
    if kernel not in (None, "sdpa"):
        raise SharpDraftError(
            f'the drafter attends with "{kernel}", which shows no mask to count Keys by: load it '
            'with attn_implementation="sdpa", or call its set_attn_implementation("sdpa")'
        )
    every = dict(drafter.named_modules())
    if attention is None:
        found = [n for n, module in every.items() if type(module).__name__.endswith("Attention")]
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
    layers = {name: vars(every[name]).get(_ATTACHED) for name in names}
    if taken := [name for name, layer in layers.items() if layer is not None and layer.on]:
        raise SharpDraftError(
            f"{taken[0]} has a forward of its own already, from another attach: detach that"
        )
    return Attached({name: every[name] for name in names}, settings)


class _Layer:
    """What is put on one attention module. own: the window that it has anyway."""

    def __init__(self, name: str, own: View) -> None:
        self.name, self.own = name, own
        self.policy: Policy | None = None
        self.view: View | None = None
        self.on = False
        # Where the module keeps the forward that it had: in its own dictionary, as that of a deep
        # copy is the copy's.
        self.key = f"_forward_before_attach_{id(self):x}"

    def __deepcopy__(self, memo: object) -> _Layer:
        return self

    def put_on(self, module: nn.Module) -> None:
        """Run the module's forward with what is said here."""

        @wraps(type(module).forward)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = vars(module)[self.key] or partial(type(module).forward, module)
            if self.policy is None and self.view is None:
                return inner(*args, **kwargs)
            with _Attention(self.policy, self.view) as mode:
                out = inner(*args, **kwargs)
            if not mode.calls:
                raise SharpDraftError(
                    f"{self.name} attends without scaled_dot_product_attention, so that its Keys "
                    'cannot be counted: load the drafter with attn_implementation="sdpa", or name '
                    "its attention modules"
                )
            return out

        self.on = True
        # Hooks of others, such as accelerate's, may have put a forward on the instance already.
        vars(module)[self.key] = vars(module).get(_FORWARD)
        vars(module)[_ATTACHED] = self
        # Bound, not closed over the module: a deep copy is bound to the copy.
        module.forward = self.forward = MethodType(forward, module)

    def take_off(self, module: nn.Module) -> None:
        """Give the module back what it had. What others have wrapped around ours since then keeps
        calling it, and it does nothing."""
        self.on = False
        if vars(module).get(_ATTACHED) is self:
            del vars(module)[_ATTACHED]
        if vars(module).get(_FORWARD) is self.forward:
            inner = vars(module).pop(self.key)
            if inner is None:
                del vars(module)[_FORWARD]
            else:
                module.forward = inner


class _Attention(TorchFunctionMode):
    """Hides Keys of every scaled_dot_product_attention within, and scales its Queries."""

    def __init__(self, policy: Policy | None, view: View | None) -> None:
        super().__init__()
        self.policy, self.view = policy, view
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.calls += 1
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        query, key = given["query"], given["key"]
        mask, causal = given.get("attn_mask"), given.get("is_causal", False)
        # Among fewer Keys a window hides none.
        if self.view is not None and key.shape[-2] > _width(self.view):
            mask, causal = narrowed(self.view, query, key, mask, causal), False
            given |= {"attn_mask": mask, "is_causal": causal}
        if self.policy is not None:
            keys = visible_keys(query, key, mask, causal)
            given["query"] = scale_queries(query, self.policy.gain(keys))
        return func(**given)


def narrowed(view: View, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The mask of a scaled_dot_product_attention call, with what a view hides hidden as well.

    query [..., rows, dim], key [..., keys, dim]; mask and causal as in the call. Returns bool or,
    if the mask is so, floating [..., rows, keys].
    """
    rows, keys = query.shape[-2], key.shape[-2]
    row, slot = (torch.arange(n, device=query.device) for n in (rows, keys))
    seen = None if mask is None else _seen(mask).expand(*mask.shape[:-2], rows, keys)
    if causal:
        own, seen = row, slot <= row[:, None]
    elif seen is None or rows == keys:
        own = keys - rows + row
    else:
        last = (seen * (slot + 1)).amax(-1) - 1
        own = torch.where(last[..., :1] == last[..., -1:], last - (rows - 1 - row), last)
    near = ((own[..., None] - slot).abs() < _width(view)) | (slot < view.sinks)
    if mask is not None and mask.is_floating_point():
        return torch.where(near, mask, -torch.inf)
    return near if seen is None else near & seen


def _width(view: View) -> int:
    return sys.maxsize if view.window is None else view.window


def _seen(mask: Tensor) -> Tensor:
    return mask > torch.finfo(mask.dtype).min if mask.is_floating_point() else mask


def _window(module: nn.Module) -> int | None:
    """The sliding window that transformers' attention modules name."""
    own = getattr(module, "sliding_window", None)
    return own if isinstance(own, int) and own > 0 else None
