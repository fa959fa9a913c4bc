"""The vLLM plugin from outside, with stand-ins for the few vLLM objects it touches;
tests/test_vllm.py runs vLLM."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sharpdraft import FixedSlope, SharpDraftError, scale_queries
from sharpdraft.adapters.imports import when_imported
from sharpdraft.adapters.vllm import register as plugin
from sharpdraft.adapters.vllm import stats
from sharpdraft.adapters.vllm.checks import warnings_for, windows_of
from sharpdraft.method.settings import FROZEN, asked_policy

POLICY = FixedSlope(40, top_k=8)


class ForwardPass:
    """Stands for vLLM's forward context."""


@dataclass
class Metadata:
    query_start_loc: Tensor
    seq_lens: Tensor
    causal: Any = True


class Impl:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any = None,
    ) -> Any:
        self.seen.append(query.clone())
        return output


class Attention(torch.nn.Module):
    """Stands for vLLM's layer of that name."""

    def __init__(
        self, window: int | None = None, backend: str = "FLASH_ATTN", quant: Any = None
    ) -> None:
        super().__init__()
        self.impl = Impl()
        self.sliding_window = window
        self.attn_backend = SimpleNamespace(get_name=lambda: backend)
        self.query_quant = quant
        self._q_scale = torch.tensor(2.0)
        self.use_direct_call = False

    def call(self, query: Tensor, metadata: Any) -> Tensor:
        """As vLLM's opaque attention op calls it; returns the Query that the backend got."""
        self.impl.forward(self, query, None, None, None, metadata, output=torch.empty(0))
        return self.impl.seen[-1]


def attached(*layers: Attention, **kwargs: Any) -> tuple[dict[str, str], SimpleNamespace]:
    now = SimpleNamespace(it=ForwardPass())
    named = {f"layer.{i}": layer for i, layer in enumerate(layers)}
    return plugin.scale_draft_layers(named, POLICY, lambda: now.it, **kwargs), now


def visible(lengths: list[tuple[int, int]], causal: bool, window: int | None) -> list[int]:
    """Keys of each row, by definition: requests as (context, rows); one mask entry a Key."""
    counts = []
    for context, rows in lengths:
        for row in range(rows):
            at = context + row
            counts.append(
                sum(
                    (not causal or key <= at) and (window is None or at - key < window)
                    for key in range(context + rows)
                )
            )
    return counts


@given(
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 6)), min_size=1, max_size=5),
    causal=st.booleans(),
    window=st.none() | st.integers(6, 120),
    padding=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_queries_are_scaled_by_the_keys_each_row_sees(
    lengths: list[tuple[int, int]],
    causal: bool,
    window: int | None,
    padding: int,
    dtype: torch.dtype,
) -> None:
    """Any batch mix, any window, padding rows behind; the arithmetic is the method's to the bit."""
    layer = Attention(window)
    attached(layer)
    rows = sum(r for _, r in lengths)
    starts = torch.tensor(
        [0, *torch.tensor([r for _, r in lengths]).cumsum(0).tolist()], dtype=torch.int32
    )
    metadata = Metadata(
        starts, torch.tensor([c + r for c, r in lengths], dtype=torch.int32), causal
    )
    query = torch.randn(rows + padding, 3, 4, generator=torch.Generator().manual_seed(rows)).to(
        dtype
    )
    got = layer.call(query, metadata)
    gain = POLICY.gain(torch.tensor(visible(lengths, causal, window) + [0] * padding))
    assert torch.equal(got, scale_queries(query, gain[:, None]))
    assert torch.equal(got[rows:], query[rows:])


def test_identity_to_the_bit_where_nothing_exceeds_the_reference() -> None:
    layer = Attention()
    attached(layer)
    query = torch.tensor([[[0.0, -0.0, 1e-42, 3.4e38]]])
    got = layer.call(query, Metadata(torch.tensor([0, 1]), torch.tensor([40]), causal=False))
    assert got.numpy().tobytes() == query.numpy().tobytes()


def test_metadata_updated_in_place_between_passes_is_counted_anew() -> None:
    """Sequential drafting: the same metadata object, one Key more each step; a module a step (MTP)
    included."""
    first, second = Attention(), Attention()
    _, now = attached(first, second)
    metadata = Metadata(torch.tensor([0, 1]), torch.tensor([100]))
    query = torch.ones(1, 1, 2)
    for layer in (first, second, first):
        expected = scale_queries(query, POLICY.gain(metadata.seq_lens)[:, None])
        assert torch.equal(layer.call(query, metadata), expected)
        metadata.seq_lens += 1
        now.it = ForwardPass()


def test_layers_of_one_pass_share_their_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    gain = FixedSlope.gain
    monkeypatch.setattr(
        FixedSlope, "gain", lambda self, keys: computed.append(1) or gain(self, keys)
    )
    layers = [Attention(), Attention(), Attention(window=64)]
    _, now = attached(*layers)
    metadata = Metadata(torch.tensor([0, 2]), torch.tensor([100]))
    for layer in layers:
        layer.call(torch.ones(2, 1, 2), metadata)
    assert len(computed) == 2
    now.it = ForwardPass()
    layers[0].call(torch.ones(2, 1, 2), metadata)
    assert len(computed) == 3


def test_metadata_of_a_finished_pass_is_not_kept_alive() -> None:
    layer = Attention()
    attached(layer)
    metadata = Metadata(torch.tensor([0, 1]), torch.tensor([100]))
    before = sys.getrefcount(metadata)
    layer.call(torch.ones(1, 1, 2), metadata)
    assert sys.getrefcount(metadata) == before


def test_without_metadata_nothing_happens() -> None:
    """vLLM's profiling run has none."""
    layer = Attention()
    attached(layer)
    query = torch.randn(3, 1, 2)
    assert torch.equal(layer.call(query, None), query)


def test_a_quantised_query_is_scaled_before_it_is_quantised() -> None:
    class Quant(torch.nn.Module):
        def forward(self, query: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            assert query.dim() == 2, "vLLM quantises [tokens, heads * head_dim]"
            return (query / scale).round(), scale

    layer = Attention(quant=Quant())
    attached(layer)
    assert layer.query_quant is None, (
        "else the layer quantises first, and what is left to scale is 8 bits wide"
    )
    query = torch.randn(1, 2, 4) * 9
    metadata = Metadata(torch.tensor([0, 1]), torch.tensor([400]))
    scaled = scale_queries(query, POLICY.gain(metadata.seq_lens)[:, None])
    assert torch.equal(layer.call(query, metadata), (scaled / 2).round())


def test_layers_that_cannot_be_counted_are_refused_with_the_reason() -> None:
    class MLAAttention(Attention):
        pass

    class Odd(Attention):
        pass

    direct = Attention()
    direct.use_direct_call = True
    other_hooks = Attention()
    other_hooks.impl.forward = lambda query, layer: None  # type: ignore[assignment, misc]
    reasons, _ = attached(
        MLAAttention(), Attention(backend="FLASHINFER"), direct, other_hooks, Attention()
    )
    assert list(reasons) == ["layer.0", "layer.1", "layer.2", "layer.3"]
    assert "MLAAttention" in reasons["layer.0"]
    assert "FLASHINFER" in reasons["layer.1"] and "attention_backend" in reasons["layer.1"]
    assert "run time" in reasons["layer.2"]
    assert "(query, layer, ...)" in reasons["layer.3"]
    reasons, _ = attached(Attention(), context_parallel=True)
    assert "context parallelism" in reasons["layer.0"]


def test_counts_are_read_when_a_graph_of_the_pass_is_replayed() -> None:
    """What a CUDA graph needs, shown with a traced graph: no host read, shapes from shapes, counts
    from buffers."""
    policy = POLICY

    def step(query: Tensor, start: Tensor, lengths: Tensor) -> Tensor:
        layer = Attention()
        plugin.scale_draft_layers({"x": layer}, policy, ForwardPass)
        return layer.call(query, Metadata(start, lengths, causal=False))

    from torch.fx.experimental.proxy_tensor import make_fx

    query, start = torch.randn(4, 1, 2), torch.tensor([0, 2, 4])
    # Symbolic tracing stops at anything that reads a value, such as .item() or a branch on a
    # tensor.
    graph = make_fx(step, tracing_mode="fake")(query, start, torch.tensor([10, 10]))
    for lengths in ([10, 10], [100, 41], [5000, 80]):
        expected = scale_queries(
            query, policy.gain(torch.tensor(lengths).repeat_interleave(2))[:, None]
        )
        assert torch.equal(graph(query, start, torch.tensor(lengths)), expected)


# Settings


def config(additional: Any = None, **changes: Any) -> SimpleNamespace:
    model = {
        "max_model_len": 8192,
        "hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "default"}),
    }
    speculative = SimpleNamespace(
        model="/nowhere",
        method="dflash",
        draft_model_config=SimpleNamespace(**{**model, **changes.pop("draft", {})}),
    )
    return SimpleNamespace(
        additional_config={} if additional is None else {"sharpdraft": additional},
        speculative_config=changes.pop("speculative", speculative),
        model_config=SimpleNamespace(**{**model, **changes.pop("target", {})}),
        kv_transfer_config=changes.pop("connector", None),
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )


def test_off_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARPDRAFT", raising=False)
    assert plugin.policy_in(config()) is None and not plugin.is_asked(config())
    assert not plugin.is_asked(config(False))
    monkeypatch.setenv("SHARPDRAFT", "0")
    assert not plugin.is_asked(config())


def test_ways_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sharpdraft.json"
    file.write_text(json.dumps({"policy": {"kind": "fixed_slope", "reference": 700}}))
    own = config(True)
    own.speculative_config.model = str(tmp_path)
    for asked in (
        config({"reference": 700}),
        config({"policy": {"kind": "fixed_slope", "reference": 700}}),
        config(str(file)),
        config(str(tmp_path)),
        own,
    ):
        assert plugin.policy_in(asked) == FixedSlope(700)
    assert plugin.policy_in(config(FROZEN)) is None and plugin.is_asked(config(FROZEN))
    monkeypatch.setenv("SHARPDRAFT", str(file))
    assert plugin.policy_in(config()) == FixedSlope(700)
    monkeypatch.setenv("SHARPDRAFT", '{"reference": 900}')
    assert plugin.policy_in(config()) == FixedSlope(900)
    assert plugin.policy_in(config({"reference": 700})) == FixedSlope(700), (
        "vLLM's own setting comes first"
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"reference": 8}, "above top_k"),
        ({"referense": 800}, "unknown fixed_slope settings referense"),
        ({}, "was asked for {}"),
        ({"policy": "x"}, "settings are wrong"),
        ("/nowhere/at/all.json", "is not a settings file"),
        (True, "no sharpdraft.json"),
        (7, "was asked for 7"),
    ],
)
def test_wrong_settings_are_one_clear_error(asked: object, message: str) -> None:
    with pytest.raises(SharpDraftError, match=message):
        asked_policy(asked, "/nowhere")


def test_asked_without_a_drafter() -> None:
    with pytest.raises(SharpDraftError, match="no drafter is"):
        plugin.policy_in(config({"reference": 700}, speculative=None))


def test_environment_that_is_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARPDRAFT", "{reference: 5}")
    with pytest.raises(SharpDraftError, match="neither JSON"):
        plugin.policy_in(config())


# Warnings


def test_warnings_of_what_costs_acceptance_at_length() -> None:
    policy = FixedSlope(2048)
    assert warnings_for(config(), policy, [None]) == []
    (one,) = warnings_for(config(draft={"max_model_len": 4096}), policy, [None])
    assert "4096" in one and "8192" in one
    (one,) = warnings_for(config(), policy, [None, 1024])
    assert "window of 1024" in one
    (one,) = warnings_for(
        config(target={"max_model_len": 2048}, draft={"max_model_len": 2048}), policy, [None]
    )
    assert "scaling never acts" in one
    yarn = {"hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "yarn"})}
    (one,) = warnings_for(config(target=yarn), policy, [None])
    assert "yarn" in one
    (one,) = warnings_for(config(connector=object()), policy, [None])
    assert "connector" in one


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, [None, None]),
        ({"sliding_window": 128}, [None, None]),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128},
            [128, None],
        ),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 64}}, [64, 64]),
        (
            {
                "dflash_config": {"use_swa": True},
                "sliding_window": 32,
                "layer_types": ["full_attention"] * 2,
            },
            [32, 32],
        ),
    ],
)
def test_windows_that_a_drafter_names(fields: dict[str, Any], windows: list[int | None]) -> None:
    assert windows_of(SimpleNamespace(num_hidden_layers=2, **fields)) == windows


# Hooks


@pytest.fixture
def late_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "late_module.py").write_text("class Thing:\n    value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "late_module", raising=False)
    return "late_module"


def test_a_module_is_patched_when_it_is_imported(late_module: str) -> None:
    seen: list[ModuleType] = []
    when_imported(late_module, seen.append)
    assert not seen and late_module not in sys.modules
    module = importlib.import_module(late_module)
    assert seen == [module] and module.Thing.value == 1
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    when_imported(late_module, seen.append)
    assert seen == [module, module]
    assert not any(
        type(finder).__name__ == "_Finder" and finder.name == late_module
        for finder in sys.meta_path
    )


def test_importing_the_plugin_needs_torch_alone() -> None:
    """It is loaded into every process that vLLM starts."""
    code = (
        "import sys, sharpdraft.adapters.vllm.register as p; p.register(); p.register()\n"
        "bad = [m for m in ('transformers', 'vllm', 'typer', 'rich', 'huggingface_hub') if m in "
        "sys.modules]\nassert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Acceptance by context


def test_buckets() -> None:
    assert [stats.bucket(n) for n in (0, 1, 512, 513, 1024, 1025, 2048, 2049)] == [
        0,
        0,
        0,
        1,
        1,
        2,
        2,
        3,
    ]
    assert [stats.label(stats.bucket(n)) for n in (512, 513, 8192)] == [
        "0-512",
        "512-1024",
        "4096-8192",
    ]
    assert stats.label(stats.bucket(10**9)) == "524288-inf"


@dataclass
class Counted:
    """Stands for vLLM's SpecDecodingStats."""

    num_spec_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    other: list[int] = field(default_factory=list)


class Scheduler:
    def __init__(self, lengths: dict[str, int], asked: bool = True) -> None:
        self.requests = {
            name: SimpleNamespace(num_tokens=length) for name, length in lengths.items()
        }
        self.vllm_config = config(FROZEN if asked else None)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: Any,
        request_id: str,
    ) -> Any:
        if not num_draft_tokens:
            return None
        return spec_decoding_stats or Counted()


def test_the_scheduler_counts_by_context() -> None:
    module = ModuleType("metrics")
    module.SpecDecodingStats = Counted  # type: ignore[attr-defined]
    stats._extend_statistics(module)
    stats._extend_statistics(module)
    assert Counted().by_context == {}  # type: ignore[attr-defined]
    assert Counted(5) == Counted(5) and Counted(5) != Counted(5, by_context={0: [1, 2, 3]})  # type: ignore[call-arg]

    class Here(Scheduler):
        pass

    Here.make_spec_decoding_stats = Scheduler.make_spec_decoding_stats  # type: ignore[method-assign]
    stats._count_in(Here, plugin.is_asked)
    scheduler = Here({"a": 513, "b": 514, "c": 9000})
    made = None
    for name, drafted, accepted, invalid in (
        ("a", 5, 2, None),
        ("b", 5, 0, {"b": 2}),
        ("c", 5, 5, None),
        ("a", 5, 1, {}),
    ):
        made = scheduler.make_spec_decoding_stats(
            made,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            num_invalid_spec_tokens=invalid,
            request_id=name,
        )
    assert made.by_context == {0: [2, 10, 3], 1: [1, 3, 0], 5: [1, 5, 5]}
    unasked = Here({"a": 513}, asked=False)
    assert unasked.make_spec_decoding_stats(None, 5, 2, None, "a").by_context == {}
    assert stats.mal_line(made.by_context) == "0-512: 2.50, 512-1024: 1.00, 8192-16384: 6.00"


def test_another_scheduler_than_the_known_one_is_left_alone() -> None:
    class Other:
        def make_spec_decoding_stats(self, something_else: Any) -> Any:
            return something_else

    before = Other.make_spec_decoding_stats
    stats._count_in(Other, plugin.is_asked)
    assert Other.make_spec_decoding_stats is before


# A vLLM that is not as relied on


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __getattr__(self, level: str) -> Any:
        return lambda text, *values: self.lines.append(
            f"{level}: {text % values if values else text}"
        )


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(plugin, "_log", lambda: log)
    return log


class Proposer:
    """Stands for vLLM's proposer of a drafter with one attention layer."""

    def __init__(self, **changes: Any) -> None:
        self.layer = Attention()
        self.vllm_config = config(changes.pop("asked", {"reference": 700}), **changes)
        self.vllm_config.compilation_config.static_forward_context["draft.0"] = self.layer
        self.vllm_config.device_config = SimpleNamespace(device_type="cuda")

    def load_model(self, target: str) -> str:
        self._draft_attn_layer_names = {"draft.0"}
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
    plugin._scale_after_load(module, "Fresh")
    plugin._scale_after_load(module, "Fresh")
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
        "(N0 = 700, k = 32, s = 5, cap 1.649): draft.0"
    ]


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
        drafter.load_model = lambda target: None  # type: ignore[method-assign]
        plugin._scaled_once_loaded(drafter, lambda self: None)
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
    plugin._scale_after_load(ModuleType("empty"), "SpecDecodeBaseProposer")
    assert "no SpecDecodeBaseProposer.load_model" in log.lines[0]


def test_metadata_that_does_not_tell_leaves_the_query_as_it_is(log: Log) -> None:
    layer = Attention()
    attached(layer)
    query = torch.randn(2, 1, 2)
    per_request = Metadata(torch.tensor([0, 2]), torch.tensor([5000]), causal=torch.tensor([1]))
    for odd in (SimpleNamespace(), ForwardPass(), per_request):
        assert torch.equal(layer.call(query, odd), query)
    assert "does not say" in log.lines[0]
