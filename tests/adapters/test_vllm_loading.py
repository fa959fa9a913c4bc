"""A drafter that vLLM loads is scaled, or serves on as it is and the log says so."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sharpdraft import FixedSlope, scale_queries
from sharpdraft.adapters.vllm import register as plugin
from sharpdraft.method.settings import FROZEN
from support.vllm_standin import Attention, ForwardPass, Metadata, attached, config


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname.lower()}: {record.getMessage()}")


@pytest.fixture
def log() -> Iterator[Log]:
    """What is logged where vLLM prints it."""
    log, logger = Log(), logging.getLogger("vllm.sharpdraft")
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    yield log
    logger.setLevel(level)
    logger.removeHandler(log)


class Proposer:
    """Stands for vLLM's proposer of a drafter."""

    names = True

    def __init__(self, layers: int = 1, **changes: Any) -> None:
        self.layers = {f"draft.{i}": Attention() for i in range(layers)}
        self.layer = self.layers["draft.0"]
        self.vllm_config = config(changes.pop("asked", {"reference": 700}), **changes)
        every = self.vllm_config.compilation_config.static_forward_context
        every |= {"target.0": Attention(), **self.layers}
        self.vllm_config.device_config = SimpleNamespace(device_type="cuda")

    def load_model(self, target: str) -> str:
        if self.names:
            self._draft_attn_layer_names = set(self.layers)
        return f"loaded for {target}"


@pytest.fixture
def proposer(monkeypatch: pytest.MonkeyPatch) -> type[Proposer]:
    """A fresh class with the plugin's wrapper on it, and stand-ins for what is imported from
    vLLM."""
    vllm, context, ops = (
        ModuleType("vllm"),
        ModuleType("vllm.forward_context"),
        ModuleType("vllm._custom_ops"),
    )
    vllm.__version__, vllm._custom_ops = "0.32.1", ops  # type: ignore[attr-defined]
    context.get_forward_context = ForwardPass  # type: ignore[attr-defined]
    for name, module in (
        ("vllm", vllm),
        ("vllm.forward_context", context),
        ("vllm._custom_ops", ops),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    fresh = type("Fresh", (Proposer,), {"load_model": Proposer.load_model})
    module = ModuleType("proposer")
    module.Fresh = fresh  # type: ignore[attr-defined]
    plugin.watch_drafter(module, "Fresh")
    plugin.watch_drafter(module, "Fresh")
    return fresh


def scaled(layer: Attention) -> bool:
    query = torch.ones(1, 1, 2)
    return not torch.equal(
        layer.call(query, Metadata(torch.tensor([0, 1]), torch.tensor([5000]))), query
    )


def test_a_loaded_drafter_is_scaled_and_the_log_says_so(proposer: type[Proposer], log: Log) -> None:
    drafter = proposer()
    assert drafter.load_model("x") == "loaded for x"
    assert scaled(drafter.layer)
    assert log.lines == [
        "info: sharpdraft: Queries of 1 draft layers are scaled by the Keys they see "
        "(fixed slope: N0 = 700, k = 32, s = 5, cap 1.649): draft.0"
    ]


def test_a_view_alone_is_put_on_and_the_log_says_so(proposer: type[Proposer], log: Log) -> None:
    drafter = proposer(asked="window@64")
    drafter.load_model("x")
    assert drafter.layer.impl.sliding_window == (63, 0) and not scaled(drafter.layer)
    assert log.lines == [
        "info: sharpdraft: In 1 draft layers only the last 64 Keys are seen: draft.0"
    ]


def test_each_layer_is_scaled_by_its_own_slope(proposer: type[Proposer], log: Log) -> None:
    """In the order in which the model made them, which is not that of their names."""
    slopes = tuple(float(s) for s in range(2, 14))
    asked = {"kind": "layer_slopes", "reference": 700, "slopes": list(slopes)}
    drafter = proposer(layers=12, asked={"scale": asked})
    drafter.load_model("x")
    query, metadata = torch.ones(1, 1, 2), Metadata(torch.tensor([0, 1]), torch.tensor([5000]))
    for layer, slope in zip(drafter.layers.values(), slopes, strict=True):
        gain = FixedSlope(700, slope=slope).gain(torch.tensor([5000]))
        assert torch.equal(layer.call(query, metadata), scale_queries(query, gain[:, None]))


def test_slopes_for_other_layers_than_were_loaded_are_refused(
    proposer: type[Proposer], log: Log
) -> None:
    drafter = proposer(layers=3, asked="slopes@700:slopes=3/5")
    drafter.load_model("x")
    assert not scaled(drafter.layer)
    (line,) = log.lines
    assert line.startswith("error") and "for 2 layers, and the drafter has 3" in line


def test_a_layer_that_cannot_be_run_as_asked_is_named(proposer: type[Proposer], log: Log) -> None:
    drafter = proposer(layers=2, asked="window@64+sharpdraft@700")
    drafter.layers["draft.1"].attn_backend = SimpleNamespace(get_name=lambda: "FLASHINFER")
    drafter.load_model("x")
    assert "error: sharpdraft: draft.1 stays as released: backend FLASHINFER" in log.lines[0]
    assert "of 1 draft layers are scaled" in log.lines[1] and log.lines[2].endswith("seen: draft.0")
    assert "window of 64 Keys never exceeds N0 = 700" in log.lines[3]


def test_an_untested_version_is_warned_of(proposer: type[Proposer], log: Log) -> None:
    sys.modules["vllm"].__version__ = "0.99.0"  # type: ignore[attr-defined]
    drafter = proposer()
    drafter.load_model("x")
    assert scaled(drafter.layer) and "0.99.0" in log.lines[1] and "not tested" in log.lines[1]


@pytest.mark.parametrize("what", ["names", "config", "nothing asked", "frozen"])
def test_a_drafter_that_cannot_or_shall_not_be_scaled_serves_on(
    what: str, proposer: type[Proposer], log: Log
) -> None:
    drafter = proposer(
        asked={"nothing asked": None, "frozen": FROZEN}.get(what, {"reference": 700})
    )
    if what == "config":
        del drafter.vllm_config.parallel_config
    if what == "names":
        drafter.names = False
        drafter.load_model("x")
    else:
        assert drafter.load_model("x") == "loaded for x"
    assert not scaled(drafter.layer)
    expected = {
        "names": "names no attention layers",
        "config": "not as relied on",
        "frozen": "Frozen as asked",
    }
    assert (
        [expected[what] in line for line in log.lines] == [True]
        if what in expected
        else log.lines == []
    )


def test_a_vllm_without_the_hook_is_told(log: Log) -> None:
    plugin.watch_drafter(ModuleType("empty"), "SpecDecodeBaseProposer")
    assert "no SpecDecodeBaseProposer.load_model" in log.lines[0]


def test_metadata_that_does_not_tell_leaves_the_query_as_it_is(log: Log) -> None:
    layer = Attention()
    attached(layer)
    query = torch.randn(2, 1, 2)
    per_request = Metadata(torch.tensor([0, 2]), torch.tensor([5000]), causal=torch.tensor([1]))
    for odd in (SimpleNamespace(), ForwardPass(), per_request):
        assert torch.equal(layer.call(query, odd), query)
    assert "does not say" in log.lines[0]


def test_wrong_settings_end_the_start_in_one_line() -> None:
    class EngineArgs:
        speculative_config: Any = None
        additional_config: Any = None

        def create_engine_config(self, context: str, headless: bool = False) -> Any:
            made = config(drafts=(self.speculative_config or {}).get("num_speculative_tokens"))
            made.additional_config = self.additional_config
            return made

    module = ModuleType("arg_utils")
    module.EngineArgs = EngineArgs  # type: ignore[attr-defined]
    plugin.watch_config(module)
    plugin.watch_config(module)
    given = EngineArgs()
    given.speculative_config = {"model": "x"}
    given.additional_config = {"sharpdraft": "drafts@3"}
    made = given.create_engine_config("server", headless=True)
    assert made.speculative_config.num_speculative_tokens == 3
    given.speculative_config = {"model": "x", "num_speculative_tokens": 5}
    with pytest.raises(ValueError, match=r"length \(drafts@3\).* drafts 5 tokens"):
        given.create_engine_config("server")
    given.additional_config = {"sharpdraft": "sinks@4+window@60"}
    with pytest.raises(ValueError, match="leave sinks out"):
        given.create_engine_config("server")


def test_a_vllm_without_the_config_hook_is_told(log: Log) -> None:
    plugin.watch_config(ModuleType("empty"))
    assert "no EngineArgs.create_engine_config" in log.lines[0]
