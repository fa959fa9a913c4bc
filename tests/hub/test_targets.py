"""Targets from checkpoints: CausalLM computes what transformers does, and what is wrong is said
plainly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoTokenizer, GPT2Config

from sharpdraft.errors import SharpDraftError
from sharpdraft.hub.targets import load_target, load_tokenizer, read_tokenizer
from sharpdraft.workloads.chat import Chat
from support.hub import edit_config, edit_weights, load_error, make_model, save


@torch.no_grad()
def test_forward_equals_transformers(checkpoint: tuple[Any, Path]) -> None:
    model, directory = checkpoint
    target, tokenizer = load_target(str(directory), device="cpu")
    assert tokenizer("a b").input_ids == [64, 94, 65]
    taps = list(range(target.num_layers - 1))
    ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    cache = target.new_cache(48, batch=2)
    # Prefill, one token, some rows; then back to 20 and on with other tokens, as after a rejected
    # draft.
    for start, rows in ((0, 17), (17, 1), (18, 6), (20, 5), (25, 1), (26, 14)):
        if start == 20:
            ids[:, 20:] = ids[:, 20:].flip(1)
            cache.length = 20
        logits, tapped, final = target.forward(ids[:, start : start + rows], cache, taps)
        expected = model(ids[:, : start + rows], output_hidden_states=True)
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(logits, expected.logits[:, start:], **close)
        torch.testing.assert_close(final, expected.hidden_states[-1][:, start:], **close)
        for tap, hidden in zip(taps, tapped, strict=True):
            torch.testing.assert_close(hidden, expected.hidden_states[tap + 1][:, start:], **close)
        assert cache.length == start + rows


def test_only_asked_logits_are_computed(llama: Path) -> None:
    target, _ = load_target(str(llama), device="cpu")
    ids = torch.arange(9)[None]
    every = target.forward(ids, target.new_cache(16))[0]
    last, _, final = target.forward(ids, target.new_cache(16), logits_from=-2)
    assert last.shape == (1, 2, 96) and final.shape == (1, 2, 32)
    torch.testing.assert_close(last, every[:, -2:])


def test_context_beyond_the_cache_is_refused(llama: Path) -> None:
    target, _ = load_target(str(llama), device="cpu")
    cache = target.new_cache(8)
    target.forward(torch.zeros(1, 6, dtype=torch.long), cache)
    with pytest.raises(SharpDraftError, match="6 \\+ 3 tokens do not fit into 8"):
        target.forward(torch.zeros(1, 3, dtype=torch.long), cache)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = make_model("qwen2")
    directory = save(model, tmp_path / "sharded", max_shard_size="30KB")
    shards = sorted(directory.glob("*.safetensors"))
    assert len(shards) > 1
    target, _ = load_target(str(directory), device="cpu")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            target.forward(ids, target.new_cache(16))[0], model(ids).logits, rtol=1e-4, atol=1e-4
        )
    shards[1].unlink()
    assert "weights" in load_error(directory)


def test_end_tokens_come_from_the_generation_config(llama: Path) -> None:
    path = llama / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, 7]}))
    target, _ = load_target(str(llama), device="cpu")
    assert target.config.eos_token_id == [2, 7]


def test_dtype(llama: Path) -> None:
    make_model("llama").bfloat16().save_pretrained(llama)
    assert load_target(str(llama), device="cpu")[0].dtype == torch.float32
    assert load_target(str(llama), device="cpu", dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    with pytest.raises(SharpDraftError, match="no device 'abacus' here"):
        load_target(str(llama), device="abacus")


def test_truncated_weights(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "incomplete or damaged" in load_error(llama)


def test_corrupt_weights(llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(os.urandom(4096))
    assert "incomplete or damaged" in load_error(llama)


def test_missing_tensor_is_not_made_up(llama: Path) -> None:
    edit_weights(llama, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    assert "lack model.layers.1.mlp.up_proj.weight" in load_error(llama)


def test_missing_head(tmp_path: Path) -> None:
    directory = save(make_model("qwen2"), tmp_path / "model")
    edit_weights(directory, lambda weights: weights.pop("lm_head.weight"))
    assert "lack lm_head.weight" in load_error(directory)


def test_tensor_of_another_size(llama: Path) -> None:
    edit_weights(llama, lambda weights: weights.update({"model.norm.weight": torch.ones(33)}))
    assert "do not belong to its config.json: see model.norm.weight" in load_error(llama)


def test_weights_of_another_architecture(tmp_path: Path) -> None:
    directory = save(make_model("qwen3"), tmp_path / "model")
    edit_config(directory, model_type="llama", architectures=["LlamaForCausalLM"])
    assert "do not belong to its config.json" in load_error(directory)


def test_unknown_architecture_needs_no_weights(tmp_path: Path) -> None:
    GPT2Config(n_layer=2, n_head=2, n_embd=32).save_pretrained(tmp_path)
    message = load_error(tmp_path)
    assert "'gpt2'" in message and "llama, qwen2, qwen3" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic'",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'dynamic'",
        ),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_unsupported_configuration(llama: Path, changes: dict[str, Any], said: str) -> None:
    edit_config(llama, **changes)
    assert said in load_error(llama)


def test_sliding_window(tmp_path: Path) -> None:
    directory = save(make_model("qwen3"), tmp_path / "model")
    edit_config(
        directory, use_sliding_window=True, layer_types=["full_attention", "sliding_attention"]
    )
    assert "sliding-window" in load_error(directory)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("config.json", "holds no config.json"),
        ("tokenizer.json", "holds no tokenizer"),
        ("model.safetensors", "holds no model.safetensors, no pytorch_model.bin"),
    ],
)
def test_missing_file(llama: Path, lost: str, said: str) -> None:
    (llama / lost).unlink()
    assert said in load_error(llama)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"model_type"', '{"model_type": "llama", "hidden_size": "wide"}']
)
def test_broken_configuration(llama: Path, text: str) -> None:
    (llama / "config.json").write_text(text)
    assert "config.json cannot be read as a model configuration" in load_error(llama)


def test_broken_tokenizer(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{")
    assert "the tokenizer in" in load_error(llama)


def test_path_that_is_no_directory(llama: Path) -> None:
    assert "does not exist" in load_error(llama / "nowhere")
    assert "is a file" in load_error(llama / "config.json")


@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast", None])
def test_the_tokenizer_is_that_of_transformers(
    named: str | None, checkpoint: tuple[Any, Path], tmp_path: Path
) -> None:
    _, directory = checkpoint
    path = directory / "tokenizer_config.json"
    before = json.loads(path.read_text())
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    changes = {"tokenizer_class": named, "bos_token": "a", "chat_template": template}
    path.write_text(json.dumps(before | changes))
    found = load_tokenizer(str(directory))[1]
    expected = AutoTokenizer.from_pretrained(directory)
    path.write_text(json.dumps(before))
    assert type(found) is type(expected)
    assert found.get_vocab() == expected.get_vocab()
    assert found.special_tokens_map == expected.special_tokens_map
    chat = [{"role": "user", "content": "xyz"}]
    ids = found.apply_chat_template(chat, return_dict=False)
    assert ids == expected.apply_chat_template(chat, return_dict=False)
    assert ids == [64, 87, 88, 89, 95]


def test_what_an_engine_needs_of_a_target(checkpoint: tuple[Any, Path]) -> None:
    _, directory = checkpoint
    where, tokenizer, limit, ends = load_tokenizer(str(directory))
    assert (where, tokenizer("a b").input_ids, limit, ends) == (directory, [64, 94, 65], 64, (2,))


def test_a_broken_generation_config(llama: Path) -> None:
    (llama / "generation_config.json").write_text("[]")
    assert "cannot be read as a generation configuration" in load_error(llama)


def test_no_modelling_code_is_imported(llama: Path) -> None:
    """It takes longer than all the rest of loading a small model."""
    code = (
        "import sys\nfrom sharpdraft import load_target\nload_target(sys.argv[1], device='cpu')\n"
        "print([name for name in sys.modules if '.modeling' in name or '.auto.' in name])"
    )
    command = [sys.executable, "-c", code, str(llama)]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"[]\n"


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, sharpdraft\nassert 'torch' not in sys.modules and sharpdraft.__all__"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_tokenizer_comes_before_the_weights(
    monkeypatch: pytest.MonkeyPatch, llama: Path
) -> None:
    """So that what is wrong with a chat template is met before gigabytes are fetched."""
    asked: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    tokenizer = read_tokenizer("some/model")
    assert tokenizer("a b").input_ids == [64, 94, 65]
    assert asked and "safetensors" not in str(asked) and ".bin" not in str(asked)
    (llama / "tokenizer.json").unlink()
    assert load_target(str(llama), device="cpu", tokenizer=tokenizer)[1] is tokenizer


def test_the_chat_template_is_what_transformers_makes_of_the_files(llama: Path) -> None:
    path = llama / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path.write_text(json.dumps(config | {"chat_template": named}))
    assert Chat(read_tokenizer(str(llama))).template == "d"
    (llama / "chat_template.jinja").write_text("j")
    assert Chat(read_tokenizer(str(llama))).template == "j"
