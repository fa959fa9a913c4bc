"""One key of a valid config.json set to something else: it is refused or noted by its name, or the
model computes what transformers computes with that configuration."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.model import checkpoint
from sharpdraft.model.checkpoint import read_causal_lm
from sharpdraft.model.config import Config
from sharpdraft.model.keys import CAUSAL_LM
from support.tiny import VOCAB, make_model

CPU = torch.device("cpu")
LINEAR = {"rope_type": "linear", "factor": 3.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ROPES: list[Any] = [
    None,
    {},
    "yarn",
    LINEAR,
    {"type": "linear", "factor": 3.0},
    {"rope_type": "linear"},
    LLAMA3,
    LLAMA3 | {"factor": "8"},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"type": "yarn", "factor": 4.0, "beta_fast": 8},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    LONGROPE,
    LONGROPE | {"attention_factor": 1.3},
    LONGROPE | {"long_factor": [1.0]},
    {"rope_type": "dynamic", "factor": 2.0},
    {"type": "mrope", "mrope_section": [1, 1, 2]},
    {"rope_type": "default", "mrope_section": [1, 1, 2]},
    {"rope_type": "default", "factor": 2.0},
    {"rope_type": "su", "factor": 2.0},
    {"rope_theta": 500.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
]
FLAGS = [None, True, False, "yes", 1]
SCALES = [None, 1, 1.0, 0.5, "x"]
POOL: dict[str, list[Any]] = {
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
    "rope_theta": [None, 10_000.0, 500.0, 1, "x"],
    "rms_norm_eps": [None, 1e-6, 1e-2, -1, "x"],
    "hidden_act": [None, "silu", "swish", "gelu", "relu", "x", 3],
    "tie_word_embeddings": FLAGS,
    "attention_bias": FLAGS,
    "mlp_bias": FLAGS,
    "head_dim": [None, 8, 16, 7, "x"],
    "num_key_value_heads": [None, 2, 4, 3, "x"],
    "num_attention_heads": [None, 4, 2, 0, "x"],
    "num_hidden_layers": [2, 1, 3, "x"],
    "hidden_size": [32, 64, "x"],
    "intermediate_size": [48, 40, None],
    "vocab_size": [VOCAB, VOCAB - 1, VOCAB + 1],
    "max_position_embeddings": [256, 64, 32, None, "x"],
    "original_max_position_embeddings": [16, None],
    "use_sliding_window": FLAGS,
    "sliding_window": [None, 4],
    "max_window_layers": [None, 0, 1, 2],
    "layer_types": [
        None,
        ["full_attention", "full_attention"],
        ["full_attention", "sliding_attention"],
        ["full_attention"],
        ["linear_attention", "full_attention"],
    ],
    "dtype": [None, "float32", "bfloat16", "float16"],
    "torch_dtype": [None, "bfloat16"],
    "model_type": ["llama", "qwen2", "qwen3", "mistral", "gemma", None],
    "quantization_config": [None, {"quant_method": "awq", "bits": 4}],
    "compression_config": [None, {"format": "x"}],
    "eos_token_id": [None, 2, [2, 3]],
    "pad_token_id": [None, 0],
    "attention_dropout": [0.0, 0.5],
    "initializer_range": [0.02, 0.5],
    "use_cache": [True, False],
    "pretraining_tp": [1, 2],
    "architectures": [None, ["LlamaModel"], ["Anything"]],
    "tie_last_hidden_states": [True],
    "chunk_size_feed_forward": [0, 4],
    "no_rope_layers": [None, [], [1, 0]],
    "pruned_heads": [None, {}, {"0": [1]}],
    "rotary_dim": [None, 4],
    "num_experts": [None, 0, 8],
    "num_nextn_predict_layers": [None, 0, 1],
    "attn_temperature_tuning": [None, False, 4],
    "unheard_of": [None, 1, "x", [], {}],
    "qk_norm": FLAGS,
    "is_causal": FLAGS,
    "qkv_bias": FLAGS,
    **dict.fromkeys(("logit_scale", "logits_scaling", "residual_multiplier"), SCALES),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "scale_emb"), SCALES),
    "attn_logit_softcapping": [None, 30.0, "x"],
    "final_logit_softcapping": [None, 30.0, "x"],
}
# What tensors a configuration wants is told from these; then a message names a tensor.
SHAPES = {
    "attention_bias",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "tie_word_embeddings",
    "vocab_size",
}
OTHER_TENSORS = ("do not belong to its config.json: see", "lack ")
CHANGES = st.sampled_from(sorted(POOL)).flatmap(
    lambda key: st.tuples(st.just(key), st.sampled_from(POOL[key]))
)
IDS = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole checkpoints, whose every norm matters."""
    found = {}
    for family in ("llama", "qwen3"):
        model = make_model(family, num_hidden_layers=2, initializer_range=0.3)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        found[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(found[family])
    return found


def theirs(directory: Path) -> torch.Tensor | None:
    """The logits of transformers, None where it does not take the configuration."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
            return model.eval()(IDS).logits.float()  # type: ignore[no-any-return]
    except Exception:
        return None


def verdict(base: Path, directory: Path, key: str, value: Any) -> str:
    """ "refused", "noted" or "equal", or else what is wrong."""
    values = json.loads((base / "config.json").read_text())
    changed = directory / "config.json"
    changed.write_text(json.dumps(values | {key: value}))
    shutil.copy(base / "model.safetensors", directory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = read_causal_lm(directory, device=CPU)
            found = model.forward(IDS, model.new_cache(24))[0].float()
        except SharpDraftError as error:
            named = [key, *(value if isinstance(value, dict) else {}), "rotary positions", "rope_"]
            if key == "layer_types" or "sliding" in key or "window" in key:
                named += ["sliding-window", "layer_types"]
            if key == "hidden_act":
                named += ["activation"]
            if key == "model_type":
                named += ["architecture"]
            if key in ("quantization_config", "compression_config"):
                named += ["quantised"]
            if key in SHAPES:
                named += OTHER_TENSORS
            return "refused" if any(name in str(error) for name in named) else f"said: {error}"
    for each in caught:
        if issubclass(each.category, SharpDraftNote):
            inner = value if isinstance(value, dict) else {}
            return "noted" if any(k in str(each.message) for k in (key, *inner)) else "odd note"
    expected = theirs(directory)
    if expected is None and value is None:
        # It counts as absent, which transformers has not at every key.
        changed.write_text(json.dumps({k: v for k, v in values.items() if k != key}))
        expected = theirs(directory)
    if expected is None:
        # Junk in a key that nothing goes by.
        return "equal" if key not in CAUSAL_LM.used else "transformers refuses it"
    close = 1e-4 if model.dtype == torch.float32 else 0.05
    off = float((found - expected).abs().max() / expected.abs().max())
    return "equal" if off < close else f"{off:.3g} off"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(change=CHANGES)
def test_one_key(
    family: str, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, change: Any
) -> None:
    found = verdict(bases[family], tmp_path_factory.mktemp("changed"), *change)
    assert found in ("refused", "noted", "equal"), change


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", LINEAR),
        ("rope_scaling", LONGROPE),
        ("rope_theta", "x"),
        ("rms_norm_eps", 1e-2),
        ("hidden_act", "gelu"),
        ("layer_types", ["full_attention", "sliding_attention"]),
    ],
)
def test_a_key_that_is_passed_over_would_be_seen(
    key: str, value: Any, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(Config):
        @classmethod
        def of(cls, values: Any, family: str | None = None) -> Config:
            return Config.of({k: v for k, v in values.items() if k != key}, family)

    (tmp_path / "heard").mkdir()
    (tmp_path / "unheard").mkdir()
    ok = ("refused", "noted", "equal")
    base = bases["qwen3"]
    if key == "rope_theta":
        # The form of transformers 4, where the parameters do not have it.
        base = tmp_path
        shutil.copy(bases["qwen3"] / "model.safetensors", base)
        values = json.loads((bases["qwen3"] / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(values | {"rope_parameters": None}))
    assert verdict(base, tmp_path / "heard", key, value) in ok
    monkeypatch.setattr(checkpoint, "Config", Deaf)
    assert verdict(base, tmp_path / "unheard", key, value) not in ok
