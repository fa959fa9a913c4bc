"""Our own reader of checkpoints against transformers' on every layout that is published."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.checkpoint import read_causal_lm, read_config, tensor_shapes
from sharpdraft.model.keys import Keys
from support.layouts import CPU, YARN, check_equal, edit, make

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
        ({"value_head.weight": torch.ones(1, 32)}, "to its config.json: see value_head.weight"),
        ({"target_proj.weight": torch.ones(32, 32)}, "to its config.json: see target_proj.weight"),
        ({"model.norm.bias": torch.ones(32)}, "to its config.json: see model.norm.bias"),
    ],
)
def test_weights_that_do_not_fit(change: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    make("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | change, path, {"format": "pt"})
    with pytest.raises(SharpDraftError, match=said):
        read_causal_lm(tmp_path, device=CPU)


def test_where_it_was_read_from(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path)
    assert read_causal_lm(tmp_path, device=CPU).directory == tmp_path
    assert CausalLM.of(model).directory is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "the drafter in .* holds quantised"),
        ({"compression_config": {"bits": 4}}, "the drafter in .* holds quantised weights"),
        ({"quantization": {"bits": 4}}, "the drafter in .* holds quantised weights"),
        ({"hidden_act": "gelu"}, "the drafter in .* uses the activation 'gelu'"),
        ({"model_type": "mistral"}, "the drafter in .*'mistral', .* not supported as drafter"),
        ({"logit_scale": 2.0}, "the drafter's .*config.json: logit_scale is 2.0, which is not"),
        ({"my_kind": "b"}, "the drafter's .*my_kind is 'b', which is not supported; .* 'a'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "the drafter in .*: rotary .* 'dynamic'"),
        (
            {"layer_types": ["sliding_attention"] * 2},
            "the drafter in .* uses sliding-window .* not supported in a drafter",
        ),
    ],
)
def test_messages_say_whose_checkpoint_it_is(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make("qwen3").save_pretrained(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(SharpDraftError, match=said):
        read_config(tmp_path, extra=Keys.of(my_kind=("a",)), role="drafter")


def test_keys_that_nobody_knows_are_noted_once(tmp_path: Path) -> None:
    make("qwen3").save_pretrained(tmp_path)
    edit(tmp_path, zeta_scale=2, alpha_scale=3, spd_type="x", beta_scale=None, use_qk_norm=True)
    with pytest.warns(SharpDraftNote) as caught:
        read_causal_lm(tmp_path, device=CPU, extra=Keys.of(idle="spd_type"))
    (only,) = caught
    assert "config.json: not known here and left out: alpha_scale, zeta_scale;" in str(only.message)


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


def test_weights_are_called_the_drafters(tmp_path: Path) -> None:
    make("qwen3").save_pretrained(tmp_path)
    edit(tmp_path, num_hidden_layers=1, layer_types=None)
    with pytest.raises(SharpDraftError, match=r"the weights of the drafter in .* do not belong"):
        read_causal_lm(tmp_path, device=CPU, role="drafter")
