"""Weights of old checkpoints, biases that nobody speaks of, and pickled files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.model.checkpoint import read_causal_lm
from support.layouts import CPU, FAMILIES, check_equal, edit, make

PLAIN = 1 / 10_000 ** (torch.arange(0, 8, 2) / 8)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", [False, True])
def test_frequencies_among_the_weights(stored: torch.dtype, scaled: bool, tmp_path: Path) -> None:
    """Old checkpoints have them for every layer. They are those of config.json, or refused."""
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0} if scaled else None
    make("llama", rope_parameters=rope).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    for found in (PLAIN, PLAIN / 4) if scaled else (PLAIN,):
        save_file(tensors | {name: found.to(stored)}, path, {"format": "pt"})
        check_equal(tmp_path)
    for found in (PLAIN / 8, PLAIN[:3], 1 / 500_000 ** (torch.arange(0, 8, 2) / 8)):
        save_file(tensors | {name: found.to(stored)}, path, {"format": "pt"})
        with pytest.raises(SharpDraftError, match=f"{name} with other rotary positions"):
            read_causal_lm(tmp_path, device=CPU)


class TestBiases:
    """Where the weights have them, whatever config.json says."""

    @pytest.mark.parametrize("kernels", [True, False])
    def test_unsaid(self, kernels: bool, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        if not kernels:
            request.getfixturevalue("without_kernels")
        make("llama", attention_bias=True, mlp_bias=True).save_pretrained(tmp_path)
        expected = check_equal(tmp_path)
        edit(tmp_path, attention_bias=False, mlp_bias=None)
        with pytest.warns(SharpDraftNote, match="biases that its config.json does not speak of"):
            found = read_causal_lm(tmp_path, device=CPU)
        ids = torch.arange(40)[None]
        assert torch.equal(
            found.forward(ids, found.new_cache(48))[0],
            expected.forward(ids, expected.new_cache(48))[0],
        )

    def test_of_a_part_of_a_product(self, tmp_path: Path) -> None:
        make("llama", attention_bias=True).save_pretrained(tmp_path)
        edit(tmp_path, attention_bias=False)
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        del tensors["model.layers.0.self_attn.k_proj.bias"]
        save_file(tensors, path, {"format": "pt"})
        with pytest.raises(SharpDraftError, match=r"see model.layers.0.self_attn.q_proj.bias and"):
            read_causal_lm(tmp_path, device=CPU)

    def test_said_and_not_there(self, tmp_path: Path) -> None:
        make("llama").save_pretrained(tmp_path)
        edit(tmp_path, attention_bias=True)
        with pytest.raises(SharpDraftError, match=r"lack model.layers.0.self_attn.k_proj.bias and"):
            read_causal_lm(tmp_path, device=CPU)


class TestPickled:
    """pytorch_model.bin, in one file or in shards."""

    @staticmethod
    def save(model: Any, directory: Path, shards: int = 1, **how: Any) -> None:
        model.config.save_pretrained(directory)
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if shards == 1:
            torch.save(tensors, directory / "pytorch_model.bin", **how)
            return
        files = [f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" for i in range(shards)]
        names = list(tensors)
        where = {name: files[i * shards // len(names)] for i, name in enumerate(names)}
        for file in files:
            own = {name: tensor for name, tensor in tensors.items() if where[name] == file}
            torch.save(own, directory / file, **how)
        index = json.dumps({"metadata": {}, "weight_map": where})
        (directory / "pytorch_model.bin.index.json").write_text(index)

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("shards", [1, 3])
    def test_is_read(self, family: str, shards: int, tmp_path: Path) -> None:
        self.save(make(family), tmp_path, shards)
        check_equal(tmp_path)

    @pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
    def test_dtypes(self, stored: torch.dtype, tmp_path: Path) -> None:
        self.save(make("llama").to(stored), tmp_path)
        assert check_equal(tmp_path).dtype == stored
        check_equal(tmp_path, dtype=torch.float32)

    def test_of_before_zip_archives(self, tmp_path: Path) -> None:
        self.save(make("llama"), tmp_path, _use_new_zipfile_serialization=False)
        check_equal(tmp_path)

    def test_a_view_of_a_larger_tensor(self, tmp_path: Path) -> None:
        model = make("llama")
        whole = torch.randn(32, 96)
        model.config.save_pretrained(tmp_path)
        tensors = dict(model.state_dict()) | {"lm_head.weight": whole.T}
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        found = check_equal(tmp_path)
        assert torch.equal(found.head.weight, whole.T)

    def test_safetensors_come_first(self, tmp_path: Path) -> None:
        model = make("llama")
        model.save_pretrained(tmp_path)
        torch.save({"model.norm.weight": torch.zeros(32)}, tmp_path / "pytorch_model.bin")
        check_equal(tmp_path)

    def test_code_in_it_is_not_run(self, tmp_path: Path) -> None:
        self.save(make("llama"), tmp_path)
        mark = tmp_path / "run"

        class Touch:
            def __reduce__(self) -> Any:
                return Path.touch, (mark,)

        torch.save({"model.norm.weight": Touch()}, tmp_path / "pytorch_model.bin")
        with pytest.raises(SharpDraftError, match="could run code: convert it to safetensors"):
            read_causal_lm(tmp_path, device=CPU)
        assert not mark.exists()

    @pytest.mark.parametrize(
        ("break_it", "said"),
        [
            (lambda path: path.write_bytes(path.read_bytes()[:5000]), "incomplete or damaged"),
            (lambda path: path.write_bytes(b""), "incomplete or damaged|more than tensors"),
            (lambda path: torch.save([torch.ones(3)], path), "holds more than named tensors"),
            (lambda path: torch.save({"a": {"b": torch.ones(3)}}, path), "more than named tensors"),
            (
                lambda path: torch.save({"model.norm.weight": torch.ones(32)}, path),
                "lack lm_head.weight and",
            ),
            (lambda path: path.unlink(), "no model.safetensors, no pytorch_model.bin and no"),
        ],
    )
    def test_broken(self, break_it: Any, said: str, tmp_path: Path) -> None:
        self.save(make("llama"), tmp_path)
        break_it(tmp_path / "pytorch_model.bin")
        with pytest.raises(SharpDraftError, match=said):
            read_causal_lm(tmp_path, device=CPU)

    def test_a_shard_that_is_not_there(self, tmp_path: Path) -> None:
        self.save(make("llama"), tmp_path, 2)
        (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
        with pytest.raises(SharpDraftError, match=r"pytorch_model-00002-of-00002.bin is not there"):
            read_causal_lm(tmp_path, device=CPU)
