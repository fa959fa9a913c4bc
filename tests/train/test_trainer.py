"""Training runs that go on, end and say what they are."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpdraft.decode.session import Session
from sharpdraft.drafters.dflash import DFlash
from sharpdraft.errors import SharpDraftError
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.train.corpus import Corpus
from sharpdraft.train.dflash import Trainer
from sharpdraft.train.sessions import save_wave, write_wave
from support.disk import full_disk
from support.tiny import BLOCK, VOCAB, Tiny, make_model
from support.train import RECIPE, wave_of


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_broken_off_run_goes_on_as_if_it_had_not_been(
    llama: Tiny, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = []
    whole = Trainer(llama.target, RECIPE, *corpora, tmp_path / "whole")
    assert not whole.resume()
    whole.run(rows.append, every=4)

    class BreakError(Exception):
        pass

    seen: list[dict[str, Any]] = []

    def on_step(row: dict[str, Any]) -> None:
        seen.append(row)
        if row["step"] == 6:
            raise BreakError

    broken = Trainer(llama.target, RECIPE, *corpora, tmp_path / "broken")
    with pytest.raises(BreakError):
        broken.run(on_step, every=4)
    assert sorted(p.name for p in (tmp_path / "broken").iterdir()) == ["log.jsonl", "state.pt"]
    torch.manual_seed(99)  # Whatever else drew from the global generator must not matter.
    second = Trainer(llama.target, RECIPE, *corpora, tmp_path / "broken")
    assert second.resume() and second.step == 4
    seen.clear()
    second.run(seen.append, every=4)
    losses = {row["step"]: (row["loss"], row["mal"]) for row in rows}
    assert {row["step"]: (row["loss"], row["mal"]) for row in seen} == {
        k: v for k, v in losses.items() if k > 4
    }
    assert len({loss for loss, _ in losses.values()}) == RECIPE.steps
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, second.module.state_dict()[name]), name
    one, two = log_of(tmp_path / "whole"), log_of(tmp_path / "broken")
    for row in one + two:
        row.pop("seconds")
    assert one == two
    assert [row["step"] for row in one] == [4, 8, 12]
    assert all(len(row["held_accepted"]) == BLOCK - 1 for row in one)
    # A finished run has nothing left to do.
    third = Trainer(llama.target, RECIPE, *corpora, tmp_path / "broken")
    third.resume()
    third.run(lambda row: pytest.fail("a finished run trains no more"))


def test_interrupt_ends_the_run_after_the_step_under_way(
    llama: Tiny, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    def on_step(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    trainer = Trainer(llama.target, RECIPE, *corpora, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(on_step, every=4)
    assert signal.getsignal(signal.SIGINT) is before
    again = Trainer(llama.target, RECIPE, *corpora, tmp_path)
    assert again.resume() and again.step == 2
    assert again.train_step() == trainer.train_step()
    with pytest.raises(SharpDraftError, match="was trained by another recipe"):
        Trainer(llama.target, replace(RECIPE, rate=1.0), *corpora, tmp_path).resume()
    assert Trainer(llama.target, replace(RECIPE, steps=50), *corpora, tmp_path).resume()


def test_full_disk_keeps_what_was_saved(
    llama: Tiny, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    trainer = Trainer(llama.target, RECIPE, *corpora, tmp_path)
    trainer.train_step()
    trainer.save()
    kept = (tmp_path / "state.pt").read_bytes()
    wave = wave_of(llama, taps=(0, 1, 3))
    for write in (trainer.save, lambda: save_wave(wave, tmp_path / "state.pt")):
        with full_disk(20_000), pytest.raises(OSError, match=r"state\.partial"):
            write()
        assert (tmp_path / "state.pt").read_bytes() == kept
        assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_text_of_two_lengths_is_refused(llama: Tiny, tmp_path: Path) -> None:
    for length in (10, 12):
        save_wave(wave_of(llama, length=length, taps=(0, 1, 3)), tmp_path / f"{length}.safetensors")
    with pytest.raises(SharpDraftError, match="holds sessions of different lengths"):
        Corpus([tmp_path / "10.safetensors", tmp_path / "12.safetensors"], (0, 1, 3))


def test_recipe_says_all_about_a_run(
    llama: Tiny, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    """The same seed trains the same drafter, whatever else drew random numbers before; another seed
    another."""
    rows = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(40 + number)
        trainer = Trainer(
            llama.target, replace(RECIPE, seed=seed), *corpora, tmp_path / str(number)
        )
        rows.append([trainer.train_step() for _ in range(2)])
    assert rows[0] == rows[1] != rows[2]


def test_rate_warms_up_and_falls(
    llama: Tiny, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    trainer = Trainer(
        llama.target, replace(RECIPE, steps=100, warmup=10, rate=1.0), *corpora, tmp_path
    )
    rates = []
    for trainer.step in range(101):
        rates.append(trainer.rate())
    assert rates[0] == pytest.approx(0.1) and max(rates) > 0.95
    assert rates.index(max(rates)) in (9, 10)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.02)


def test_text_with_every_token_of_the_vocabulary(
    llama: Tiny, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    train, held = corpora
    full = Corpus.__new__(Corpus)
    full.__dict__.update(train.__dict__)
    full.tokens = train.tokens.clone()
    forced = (~train.written[0]).nonzero()[:, 0]
    full.tokens[:, forced[0]] = torch.arange(len(full.tokens)) % VOCAB
    full.tokens[:, forced[1]] = (torch.arange(len(full.tokens)) + 24) % VOCAB
    full.tokens[:, forced[2]] = (torch.arange(len(full.tokens)) + 48) % VOCAB
    assert len(full.tokens.unique()) == VOCAB
    assert Trainer(llama.target, RECIPE, full, held, tmp_path).train_step()["loss"] > 0


def test_training_learns(tmp_path: Path) -> None:
    """A target that looks at the last token only: what it says next can be learnt from little
    text."""
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight[24:] *= 0.1
        model.lm_head.weight[:24] = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target = CausalLM.of(model)
    rng = torch.Generator().manual_seed(5)
    corpora = []
    for name, count in (("train", 24), ("held", 8)):
        turns = [torch.randint(0, VOCAB, (40, 1), generator=rng).tolist() for _ in range(count)]
        save_wave(
            write_wave(target, turns, 96, VOCAB - 1, taps=RECIPE.taps),
            tmp_path / f"{name}.safetensors",
        )
        corpora.append(Corpus([tmp_path / f"{name}.safetensors"], RECIPE.taps))
    trainer = Trainer(
        target, replace(RECIPE, steps=40, sequences=4, anchors=24, rate=6e-3), *corpora, tmp_path
    )
    before = trainer.evaluate()["held_mal"]
    trainer.run(every=40)
    (row,) = log_of(tmp_path)
    assert row["held_mal"] > max(2.0, before + 0.5)
    trainer.export(tmp_path / "drafter")
    session = Session(target, DFlash.load(tmp_path / "drafter", target))
    rounds = list(session.generate([1, 2, 3], 60))[1:]
    assert sum(r.accepted for r in rounds) / len(rounds) > 0.7
