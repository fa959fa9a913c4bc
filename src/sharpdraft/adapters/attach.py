"""Put settings on a drafter that is not ours, and take them off again.

Attention that goes through `torch.nn.functional.scaled_dot_product_attention` shows, at that call,
the Query of every row and the Keys and mask that it is about to see; that is where Keys are hidden
and Queries scaled, whatever class or cache the model has. While attached, an attention module is of
a class derived from its own, whose call does that. Weights and `forward` are not touched, so that
others may wrap and unwrap it in any order, and nothing is left behind on detaching.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import SharpDraftError, note
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
_ATTACHED = "_attached"
_RELEASED = "_class_as_released"
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

Settings = DraftSettings | Scale | None


class Attached:
    """Settings on a drafter. `detach` takes them off; as a context manager it does so at the end.

    `settings` may be changed while attached; None is the drafter as released. What is done to the
    drafter goes for deep copies that are made of it meanwhile as well, which run on their own
    weights; detaching leaves them, too, as they were. A drafter that is pickled is so as released.
    """

    def __init__(self, layers: Mapping[str, nn.Module], settings: Settings) -> None:
        self._layers = [_Layer(name, module) for name, module in layers.items()]
        self.settings = settings
        for layer, module in zip(self._layers, layers.values(), strict=True):
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
        for layer in self._layers:
            layer.take_off()

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

    Attention modules have to be called, as models do: `module.forward(...)` goes past what is
    attached. In a model that torch.compile compiles they run as they are, uncompiled.

    A view measures from each row's own Key. Under a causal mask that is the last Key the row sees;
    without a mask, or under one that shows all rows the same last Key, rows own the last Keys in
    their order; with is_causal the first, as PyTorch has it. Sinks are the first Keys that the mask
    shows a row, so that padding on the left is none.

    Raises SharpDraftError: no attention module is found or named, one is part of another or is
    attached to already, the settings have a length or are for another number of layers, or the
    drafter's configuration says that another kernel attends (flash attention, eager), where no Keys
    can be counted. A module that turns out not to call scaled_dot_product_attention raises it at
    its first call.
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
    if inner := [name for name in names for other in names if name.startswith(f"{other}.")]:
        raise SharpDraftError(
            f"{inner[0]} is part of another module that is named, and would be scaled twice: name "
            "one of them"
        )
    if taken := [name for name in names if _ATTACHED in vars(every[name])]:
        raise SharpDraftError(
            f"{taken[0]} is attached to already: detach that, or set its settings"
        )
    return Attached({name: every[name] for name in names}, settings)


class _Layer:
    """What is put on one attention module, and on deep copies of it. own: the window that it has
    anyway. packed: the heads and rows of a Query in which transformers lays the heads of one token
    that share a Key into rows; None where none do."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.own = name, View(window=_window(module))
        heads = getattr(getattr(module, "config", None), "num_key_value_heads", None)
        groups = getattr(module, "num_key_value_groups", 1)
        self.packed = (heads, groups) if groups != 1 else None
        self.policy: Policy | None = None
        self.view: View | None = None
        # Weakly, so that a drafter that nobody else has is freed, attached or not.
        self.modules: WeakSet[nn.Module] = WeakSet()

    def __deepcopy__(self, memo: object) -> _Layer:
        return self

    def put_on(self, module: nn.Module) -> None:
        """Have the module's calls run with what is said here."""
        base = type(module)
        about = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
        vars(module)[_ATTACHED] = self
        module.__class__ = type(base.__name__, (base,), about | {_RELEASED: base} | _methods())
        self.modules.add(module)

    def take_off(self) -> None:
        """Give modules the class that they had."""
        for module in set(self.modules):
            vars(module).pop(_ATTACHED, None)
            # Others may have derived a class from ours.
            if (base := vars(type(module)).get(_RELEASED)) is not None:
                module.__class__ = base
        self.modules.clear()


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of an attached module."""
    run = getattr(type(module), _RELEASED).__call__
    layer: _Layer | None = vars(module).get(_ATTACHED)
    if layer is None or (layer.policy is None and layer.view is None):
        return run(module, *args, **kwargs)
    with _Attention(layer) as mode:
        out = run(module, *args, **kwargs)
    if not mode.calls:
        raise SharpDraftError(
            f"{layer.name} attends without scaled_dot_product_attention, so that its Keys cannot "
            'be counted: load the drafter with attn_implementation="sdpa", or name its attention '
            "modules"
        )
    return out


def _deepcopy(module: Any, memo: dict[int, Any]) -> Any:
    """A copy that is attached as well."""
    rebuild, args, state, *_ = getattr(type(module), _RELEASED).__reduce_ex__(module, 4)
    memo[id(module)] = copied = rebuild(*args)
    copied.__setstate__(deepcopy(state, memo))
    if (layer := vars(copied).get(_ATTACHED)) is not None:
        layer.modules.add(copied)
    return copied


def _reduce(module: Any, protocol: Any) -> Any:
    """What is pickled: the module as released."""
    note("an attached drafter is pickled as released: attach to what is made of it")
    base = getattr(type(module), _RELEASED)
    # Later protocols insist on the class that the module has now.
    rebuild, args, state = base.__reduce_ex__(module, 1)
    args = tuple(base if each is type(module) else each for each in args)
    return rebuild, args, {key: value for key, value in state.items() if key != _ATTACHED}


@cache
def _methods() -> dict[str, Any]:
    """What a module's class has while attached."""
    # Compiled, a mode is traced and then on as well while what was traced runs: scaled twice.
    call = torch.compiler.disable(_call)
    return {"__call__": call, "__deepcopy__": _deepcopy, "__reduce_ex__": _reduce}


class _Attention(TorchFunctionMode):
    """Hides Keys of every scaled_dot_product_attention within, and scales its Queries."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.policy, self.view, self.packed = layer.policy, layer.view, layer.packed
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
            packed = tuple(query.shape[-3:-1]) == self.packed
            mask, causal = narrowed(self.view, query, key, mask, causal, packed), False
            given |= {"attn_mask": mask, "is_causal": causal}
        if self.policy is not None:
            keys = visible_keys(query, key, mask, causal)
            given["query"] = scale_queries(query, self.policy.gain(keys))
        return func(**given)


def narrowed(
    view: View,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool,
    packed: bool = False,
) -> Tensor:
    """The mask of a scaled_dot_product_attention call, with what a view hides hidden as well.

    query [..., rows, dim], key [..., keys, dim]; mask and causal as in the call. packed: the rows
    are heads of one token. Returns bool or, if the mask is so, floating [..., rows, keys].
    """
    rows, keys = query.shape[-2], key.shape[-2]
    row, slot = (torch.arange(n, device=query.device) for n in (rows, keys))
    seen = None if mask is None else _seen(mask).expand(*mask.shape[:-2], rows, keys)
    behind = torch.zeros_like(row) if packed else rows - 1 - row
    if causal:
        own, seen = row, slot <= row[:, None]
    elif seen is None or (rows == keys and not packed):
        own = keys - 1 - behind
    else:
        last = (seen * (slot + 1)).amax(-1) - 1
        own = torch.where(last[..., :1] == last[..., -1:], last - behind, last)
    # Behind padding the first Keys are not those of the first slots.
    nth = slot + 1 if seen is None else seen.cumsum(-1)
    near = ((own[..., None] - slot).abs() < _width(view)) | (nth <= view.sinks)
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
