"""attach beside what else is done to a module: copies, pickles, accelerate's hooks, garbage."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sharpdraft import Constant
from sharpdraft.adapters.attach import Attached, attach
from sharpdraft.errors import SharpDraftNote
from support.attention import ProjectedAttention
from support.tiny import make_model

SETTINGS = Constant(3.0)


def inputs() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(1, 1, 2, 4, generator=rng), torch.randn(1, 1, 12, 4, generator=rng)


def outputs(scaled: bool) -> Tensor:
    """Of a module whose weight is 1."""
    module = nn.Sequential(ProjectedAttention())
    with attach(module, SETTINGS if scaled else None):
        return module[0](*inputs()).detach()


def weighing(module: nn.Module, weight: float) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(weight)
    return module


def check_released(module: nn.Module) -> None:
    """Nothing of ours is left on it."""
    assert type(module) is ProjectedAttention
    assert set(vars(module)) <= {*vars(ProjectedAttention()), "forward"}
    if "forward" in vars(module):  # put there by accelerate
        assert module.forward.__func__ is ProjectedAttention.forward
        assert module.forward.__self__ is module


# Copies


def by_others(module: nn.Module) -> None:
    """A forward on the instance that knows its module, as accelerate puts there."""

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        module.hooked += 1
        return module.forward_before(*args, **kwargs)

    module.hooked, module.forward_before = 0, module.forward
    module.forward = partial(new_forward, module)


@pytest.mark.parametrize("hooked", ["before", "behind", "not"])
def test_deep_copies_run_on_their_own_weights_until_detached(hooked: str) -> None:
    """Copies of copies and of parents too: scaled as the original is, and as released with it."""
    plain, scaled = outputs(False), outputs(True)
    assert not torch.equal(plain, scaled)
    module = nn.Sequential(ProjectedAttention())
    if hooked == "before":
        by_others(module[0])
    handle = attach(module, SETTINGS)
    if hooked == "behind":
        by_others(module[0])
    copied = weighing(copy.deepcopy(module), 2.0)
    again = weighing(copy.deepcopy(nn.ModuleDict({"draft": copied})), 4.0)["draft"]
    every = {1.0: module, 2.0: copied, 4.0: again}

    def check(expected: Tensor) -> None:
        for weight, each in every.items():
            assert torch.equal(each[0](*inputs()), weight * expected)

    check(scaled)
    handle.settings = None
    check(plain)
    handle.settings = SETTINGS
    check(scaled)
    handle.detach()
    check(plain)
    handle.settings = SETTINGS
    check(plain)
    for each in every.values():
        if hooked == "not":
            check_released(each[0])
        else:
            assert type(each[0]) is ProjectedAttention and each[0].hooked == 5
    with attach(copied, SETTINGS):
        assert torch.equal(copied[0](*inputs()), 2 * scaled)
        assert torch.equal(again[0](*inputs()), 4 * plain)


def test_a_shallow_copy_shares_weights_and_is_as_released() -> None:
    module = nn.Sequential(ProjectedAttention())
    with attach(module, SETTINGS):
        with pytest.warns(SharpDraftNote, match="as released"):
            copied = copy.copy(module[0])
        check_released(copied)
        assert copied.weight is module[0].weight
        assert torch.equal(copied(*inputs()), outputs(False))
        assert torch.equal(module[0](*inputs()), outputs(True))


def by_pickle(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def by_torch(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("through", [by_pickle, by_torch])
def test_a_pickled_drafter_is_as_released(through: Callable[[nn.Module], nn.Module]) -> None:
    """And says so. The settings are nowhere in it, and what is attached stays so."""
    module = weighing(nn.Sequential(ProjectedAttention()), 2.0)
    with attach(module, SETTINGS):
        with pytest.warns(SharpDraftNote, match="pickled as released"):
            loaded = through(module)
        copied = copy.deepcopy(module)
        with pytest.warns(SharpDraftNote, match="pickled as released"):
            check_released(through(copied)[0])
        check_released(loaded[0])
        weighing(loaded, 4.0)
        assert torch.equal(loaded[0](*inputs()), 4 * outputs(False))
        assert torch.equal(module[0](*inputs()), 2 * outputs(True))
        with attach(loaded, SETTINGS):
            assert torch.equal(loaded[0](*inputs()), 4 * outputs(True))
    for each in (module, copied, loaded):
        check_released(each[0])
        check_released(through(each)[0])


def test_a_deep_copy_of_a_model_of_transformers() -> None:
    """Its own weights, scaled: what the model that is given them says, attached by itself."""
    model, other = make_model("llama"), make_model("llama", initializer_range=0.2)
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        with attach(other, SETTINGS):
            expected = other(ids).logits
        with attach(model, SETTINGS):
            before = model(ids).logits
            copied = copy.deepcopy(model)
            copied.load_state_dict(other.state_dict())
            assert torch.equal(copied(ids).logits, expected)
            assert torch.equal(model(ids).logits, before) and not torch.equal(before, expected)
        assert torch.equal(copied(ids).logits, other(ids).logits)


# accelerate


def hooks_of_accelerate(kind: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """What puts hooks on a model, and what takes them off."""
    hooks = pytest.importorskip("accelerate.hooks")

    class Counted(hooks.ModelHook):  # type: ignore[misc]
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            module.weight.calls = getattr(module.weight, "calls", 0) + 1
            return args, kwargs

    def put_on(model: Any) -> None:
        if kind == "offload":
            from accelerate import cpu_offload

            cpu_offload(model, torch.device("cpu"))
        else:
            hooks.add_hook_to_module(model[0], Counted())
            if kind == "two hooks":
                hooks.add_hook_to_module(model[0], Counted(), append=True)

    return put_on, lambda model: hooks.remove_hook_from_module(model, recurse=True)


STEPS = ("attach", "detach", "hook", "unhook")
ORDERS = [
    order
    for order in itertools.permutations(STEPS)
    if order.index("attach") < order.index("detach") and order.index("hook") < order.index("unhook")
]


@pytest.mark.parametrize("kind", ["a hook", "two hooks", "offload"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_accelerates_hooks_in_any_order(order: tuple[str, ...], kind: str) -> None:
    """After every step the model is scaled if it is attached to, and in the end as released."""
    put_on, take_off = hooks_of_accelerate(kind)
    module = nn.Sequential(ProjectedAttention())
    handle: Attached | None = None
    calls = {"a hook": 1, "two hooks": 2, "offload": 0}[kind]
    for step in order:
        before = getattr(module[0].weight, "calls", 0)
        if step == "attach":
            handle = attach(module, SETTINGS)
        elif step == "detach":
            assert handle is not None
            handle.detach()
            handle = None
        elif step == "hook":
            put_on(module)
        else:
            take_off(module)
        before = getattr(module[0].weight, "calls", 0)
        with torch.no_grad():
            assert torch.equal(module[0](*inputs()), outputs(handle is not None))
        hooked = hasattr(module[0], "_hf_hook")
        if kind != "offload":
            assert getattr(module[0].weight, "calls", 0) - before == calls * hooked
    check_released(module[0])


def test_a_dispatched_model() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, alone = make_model("llama"), make_model("llama")
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        with attach(alone, SETTINGS):
            expected = alone(ids).logits
        plain = alone(ids).logits
        with attach(model, SETTINGS):
            model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
            assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model(ids).logits, plain)
        with attach(model, SETTINGS):
            assert torch.equal(model(ids).logits, expected)
            accelerate.hooks.remove_hook_from_submodules(model)
            assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model(ids).logits, plain)


# torch.compile


@pytest.mark.parametrize("first", ["compiled", "attached"])
def test_a_compiled_model_is_scaled_once(first: str) -> None:
    model = make_model("llama")
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        with attach(model, SETTINGS):
            expected = model(ids, use_cache=False).logits
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        if first == "compiled":
            assert torch.equal(compiled(ids, use_cache=False).logits, plain)
        with attach(model, SETTINGS):
            assert torch.equal(compiled(ids, use_cache=False).logits, expected)
        assert torch.equal(compiled(ids, use_cache=False).logits, plain)


# Garbage


def test_a_drafter_that_nobody_has_is_freed_while_attached() -> None:
    """Without the collector, and though its handle is there."""
    module = nn.Sequential(ProjectedAttention())
    handle = attach(module, SETTINGS)
    module[0](*inputs())
    copied = copy.deepcopy(module)
    gone = [weakref.ref(module[0]), weakref.ref(copied[0])]
    gc.disable()
    try:
        del module
        assert gone[0]() is None
        assert torch.equal(copied[0](*inputs()), outputs(True))
        del copied
        assert gone[1]() is None
    finally:
        gc.enable()
    handle.detach()


def test_a_class_is_what_it_was_to_others_while_attached() -> None:
    module = nn.Sequential(ProjectedAttention())
    with attach(module, SETTINGS):
        assert isinstance(module[0], ProjectedAttention)
        assert repr(module) == repr(nn.Sequential(ProjectedAttention()))
        assert module[0].forward.__func__ is ProjectedAttention.forward
        assert list(module.state_dict()) == ["0.weight"]
    check_released(module[0])
