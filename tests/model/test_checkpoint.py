"""Our own reader of checkpoints against transformers' on every layout that is published."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sharpdraft.errors import SharpDraftError
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.checkpoint import read_causal_lm, read_config, tensor_shapes

CPU = torch.device("cpu")
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# What published checkpoints of each family differ in.
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("llama", {"num_key_value_heads": 4, "rope_parameters": YARN}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"rope_parameters": YARN | {"rope_type": "linear"}}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    ("qwen3", {"head_dim": 8, "attention_bias": True, "rope_parameters": YARN}),
]


def make(family: str, **changes: Any) -> Any:
    """A random model; norms and biases too, where leaving one out would otherwise not show."""
    config, model_class = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config(**SIZES | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@torch.no_grad()
def check_equal(directory: Path, **how: Any) -> CausalLM:
    """What is read has the logits of what transformers reads."""
    dtype = how.get("dtype")
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype or "auto")
    found = read_causal_lm(directory, device=CPU, **how)
    assert found.dtype == expected.dtype
    ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    close = 1e-4 if found.dtype == torch.float32 else 0.15
    torch.testing.assert_close(
        found.forward(ids, found.new_cache(48))[0], expected(ids).logits, rtol=close, atol=close
    )
    return found


@pytest.mark.parametrize("shard", [None, "20KB"])
@pytest.mark.parametrize(
    ("family", "changes"), LAYOUTS, ids=[f"{f}: {', '.join(c)}" for f, c in LAYOUTS]
)
def test_published_layouts(
    family: str, changes: dict[str, Any], shard: str | None, tmp_path: Path
) -> None:
    model = make(family, **changes)
    model.save_pretrained(tmp_path, **({"max_shard_size": shard} if shard else {}))
    assert len(list(tmp_path.glob("*.safetensors"))) > (shard is not None)
    check_equal(tmp_path)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16])
def test_dtypes(stored: torch.dtype, asked: torch.dtype | None, tmp_path: Path) -> None:
    make("qwen3", head_dim=16).to(stored).save_pretrained(tmp_path)
    assert check_equal(tmp_path, dtype=asked).dtype == (asked or stored)
    # Where the configuration does not say, the weights do; transformers 4 said it so.
    edit(tmp_path, dtype=None)
    assert read_causal_lm(tmp_path, device=CPU).dtype == stored
    edit(tmp_path, torch_dtype="bfloat16")
    assert read_causal_lm(tmp_path, device=CPU).dtype == torch.bfloat16


def test_the_config_of_transformers_4(tmp_path: Path) -> None:
    make("llama", rope_parameters=YARN).save_pretrained(tmp_path)
    old = {k: v for k, v in YARN.items() if k != "rope_theta"} | {"type": "yarn"}
    edit(tmp_path, rope_parameters=None, rope_scaling=old, rope_theta=1e6, head_dim=None)
    check_equal(tmp_path)


def test_a_model_saved_without_its_head(tmp_path: Path) -> None:
    make("qwen2", tie_word_embeddings=True).model.save_pretrained(tmp_path)
    check_equal(tmp_path)


def test_tensors_of_different_dtypes(tmp_path: Path) -> None:
    """Norms, or some matrices, in another dtype than the rest."""
    make("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in ("self_attn.k_proj.weight", "input_layernorm.weight"):
        tensors[f"model.layers.1.{name}"] = tensors[f"model.layers.1.{name}"].bfloat16()
    save_file(tensors, path, {"format": "pt"})
    check_equal(tmp_path)


def test_rounded_matrices(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path / "exact")
    found = read_causal_lm(tmp_path / "exact", device=CPU, rounded=True)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.bfloat16())
    model.save_pretrained(tmp_path / "rounded")
    expected = read_causal_lm(tmp_path / "rounded", device=CPU)
    for one, other in zip(found.stack.layers, expected.stack.layers, strict=True):
        assert torch.equal(one.qkv.weight, other.qkv.weight)
        assert torch.equal(one.attn_norm, other.attn_norm)
    assert torch.equal(found.embedding, expected.embedding)


class TestTied:
    """Embedding and head are one matrix, however often it is stored."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        make("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
        return tmp_path

    @staticmethod
    def store(directory: Path, **changes: Any) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        embedding = tensors.pop("model.embed_tokens.weight")
        whole = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 0.0}
        chosen = {name: whole[name] + add for name, add in changes.items()}
        save_file(tensors | chosen, path, {"format": "pt"})

    def test_they_share_memory(self, directory: Path, without_kernels: None) -> None:
        for names in (["model.embed_tokens.weight"], ["lm_head.weight"], ["both"]):
            if names == ["both"]:
                names = ["model.embed_tokens.weight", "lm_head.weight"]
            self.store(directory, **dict.fromkeys(names, 0.0))
            found = check_equal(directory)
            assert found.head.weight.data_ptr() == found.embedding.data_ptr(), names
            make("llama", tie_word_embeddings=True).save_pretrained(directory)

    def test_a_head_that_differs_is_the_head(self, directory: Path) -> None:
        self.store(directory, **{"model.embed_tokens.weight": 0.0, "lm_head.weight": 0.5})
        found = check_equal(directory)
        torch.testing.assert_close(found.head.weight, found.embedding + 0.5)


def test_memory_for_the_weights_is_needed_once(compiled: None) -> None:
    """Of what is read for a layer nothing is left but its panels when the next one is read."""
    model = make("llama", num_hidden_layers=3)
    tensors, most = model.state_dict(), 0
    read: list[weakref.ref[Any]] = []
    config = CausalLM.of(model).config

    def reader(*names: str) -> Tensor | None:
        nonlocal most
        found = [tensors[name] for name in names if name in tensors]
        if not found:
            return None
        # A tensor's memory lives as long as the array that it is made from.
        memory = torch.cat(found).numpy().copy()
        if memory.ndim > 1 and ".layers." in names[0]:
            most = max(most, sum(each() is not None for each in read))
            read.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    kept = CausalLM(config, reader)
    assert len(read) == 3 * 4 and kept.num_layers == 3
    assert most <= 1 and all(each() is None for each in read)


def test_names_of_a_whole_checkpoint(tmp_path: Path) -> None:
    for family, changes in LAYOUTS:
        model = make(family, **changes)
        model.config.save_pretrained(tmp_path)
        expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        assert tensor_shapes(read_config(tmp_path)) == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.layers.0.mlp.up_proj.bias": torch.ones(48)}, "see model.layers.0.mlp.up_proj.b"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}, "do not belong to its config.json"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "holds weights of dtype I8"),
        ({"lm_head.weight": torch.ones(97, 32)}, "do not belong to its config.json: see lm_head"),
    ],
)
def test_weights_that_do_not_fit(change: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    make("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | change, path, {"format": "pt"})
    with pytest.raises(SharpDraftError, match=said):
        read_causal_lm(tmp_path, device=CPU)


def test_tensors_that_mean_nothing_to_us_are_passed_over(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "value_head.weight": torch.ones(1, 32),
    }
    save_file(load_file(path) | more, path, {"format": "pt"})
    read_causal_lm(tmp_path, device=CPU)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": "absent.safetensors"}}'])
def test_a_broken_index(text: str, tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(SharpDraftError, match="incomplete or damaged"):
        read_causal_lm(tmp_path, device=CPU)


def test_an_architecture_that_has_no_forward() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9))
    with pytest.raises(SharpDraftError, match="'gpt2' is not supported; supported: llama, qwen2"):
        CausalLM.of(model)
