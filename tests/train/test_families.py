"""EAGLE 3.1 and PARD drafters as trained: the exported checkpoint drafts what training computed,
and both learn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sharpdraft.decode.session import Session
from sharpdraft.drafters.registry import load_drafter
from sharpdraft.errors import SharpDraftError
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.train import eagle3, pard, pipeline
from sharpdraft.train.corpus import Corpus
from sharpdraft.train.sessions import save_wave, write_wave
from sharpdraft.train.trainer import Recipe, Trainer
from support.checkpoints import Checkpoints
from support.command import Run, check_one_line
from support.drafters import propose
from support.tiny import VOCAB, Tiny, make_model

TAPS = (0, 1, 3)
SMALL: dict[str, Any] = {"steps": 12, "sequences": 4, "anchors": 12, "warmup": 4, "negatives": 20}
RECIPES: dict[str, Recipe] = {
    "eagle3": eagle3.Recipe(chain=4, taps=TAPS, start_layer=3, vocabulary=50, **SMALL),
    "pard": pard.Recipe(chain=4, start_layers=(0, 2), mask_token=3, plain_steps=4, **SMALL),
}
FAMILIES: dict[str, Any] = {"eagle3": eagle3.Trainer, "pard": pard.Trainer}


def corpora_of(target: CausalLM, folder: Path, prompts: int, length: int) -> tuple[Corpus, Corpus]:
    rng = torch.Generator().manual_seed(5)
    found = []
    for name, count in (("train", 24), ("held", 8)):
        turns = [
            torch.randint(0, VOCAB, (prompts, 2), generator=rng).tolist() for _ in range(count)
        ]
        save_wave(
            write_wave(target, turns, length, VOCAB - 1, taps=TAPS), folder / f"{name}.safetensors"
        )
        found.append(Corpus([folder / f"{name}.safetensors"], TAPS))
    return found[0], found[1]


@pytest.fixture(scope="module")
def corpora(llama: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Corpus]:
    return corpora_of(llama.target, tmp_path_factory.mktemp("text"), 4, 64)


def shaken(trainer: Trainer) -> None:
    """Weights far from where they start, so that a term left out somewhere is seen."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.1))


ANCHORS = (1, 7, 30, 55)


def proposals(llama: Tiny, drafter: Any, count: int) -> Iterator[tuple[int, list[int]]]:
    session = Session(llama.target, drafter)
    session.read(llama.text[:60])
    for at in reversed(ANCHORS):
        session.drafts.length = at
        yield at, propose(drafter, session.drafts, llama.text[at], count).tolist()


def test_exported_eagle3_drafts_what_was_trained(
    llama: Tiny, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    trainer = eagle3.Trainer(llama.target, RECIPES["eagle3"], *corpora, tmp_path)  # type: ignore[arg-type]
    shaken(trainer)
    trainer.export(tmp_path / "drafter")
    trainer.module.load(
        load_file(tmp_path / "drafter" / "model.safetensors")
    )  # as rounded to bfloat16
    drafter = load_drafter(tmp_path / "drafter", llama.target)
    assert drafter.taps == TAPS
    _, tapped, _ = llama.target.forward(
        torch.tensor([llama.text[:60]]), llama.target.new_cache(60), TAPS
    )
    head = llama.target.head.weight[trainer.module.drafted]
    different = set()
    for at, drafts in proposals(llama, drafter, 4):
        # A chain is trained on the text's tokens; here the text goes on as was drafted.
        text = torch.tensor([[*llama.text[: at + 1], *drafts]])
        taps = torch.stack(tapped, dim=2)[:, : text.shape[1]]
        taps = F.pad(taps, (0, 0, 0, 0, 0, text.shape[1] - taps.shape[1]), value=7.0)
        with torch.no_grad():
            hidden = trainer.module(
                taps, F.embedding(text, llama.target.embedding), torch.tensor([[at]]), 4
            )
        choice = trainer.module.drafted[(hidden[0, 0] @ head.T).argmax(-1)]
        assert choice.tolist() == drafts
        different |= set(drafts)
    assert len(different) > 4, "drafts that hardly differ would show nothing"


def test_exported_pard_drafts_what_was_trained(
    llama: Tiny, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    trainer = pard.Trainer(llama.target, RECIPES["pard"], *corpora, tmp_path)  # type: ignore[arg-type]
    shaken(trainer)
    trainer.export(tmp_path / "drafter")
    weights = {
        name: t.float() for name, t in load_file(tmp_path / "drafter" / "model.safetensors").items()
    }
    trainer.model.load_state_dict(weights, strict=False)
    drafter = load_drafter(tmp_path / "drafter", llama.target)
    assert (
        drafter.num_drafts,
        json.loads((tmp_path / "drafter/config.json").read_text())["pard_token"],
    ) == (4, 3)
    of, depths = pard.mask_rows(len(ANCHORS), 4, 1.0)
    with torch.no_grad():
        hidden = trainer._forward(
            torch.tensor([llama.text[:60]]), torch.tensor([ANCHORS]), of, depths
        )
    different = set()
    for at, drafts in proposals(llama, drafter, 4):
        rows = [at, *(60 + i for i in range(len(of)) if ANCHORS[of[i]] == at)]
        assert llama.target.head(hidden[0, rows]).argmax(-1).tolist() == drafts
        different |= set(drafts)
    assert len(different) > 4


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=5), st.integers(1, 5), st.floats(0.2, 1.0))
def test_pard_rows_see_the_text_to_their_anchor_and_their_own_masks(
    anchors: list[int], chain: int, kept: float
) -> None:
    length = 12
    of, depths = pard.mask_rows(len(anchors), chain, kept)
    seen = pard.visible(torch.tensor([anchors]), of, depths, length)[0]
    assert len(of) <= len(anchors) * (chain - 1) and (chain == 1) == (len(of) == 0)
    rows = list(zip(of.tolist(), depths.tolist(), strict=True))
    for i in range(length):
        assert seen[i].tolist() == [k <= i for k in range(length + len(rows))]
    for i, (mine, depth) in enumerate(rows):
        # Every mask before it in its chain is there, or it could not be drafted.
        assert all((mine, d) in rows for d in range(1, depth))
        context = [k <= anchors[mine] for k in range(length)]
        masks = [other == mine and d <= depth for other, d in rows]
        assert seen[length + i].tolist() == context + masks


def test_masks_are_dropped_along_the_chain() -> None:
    of, depths = pard.mask_rows(100, 5, 0.5)
    assert torch.bincount(depths).tolist() == [0, 100, 50, 25, 12]
    assert of[depths == 3].tolist() == list(range(25))


@pytest.mark.parametrize("family", RECIPES)
def test_chains_are_judged_by_the_targets_next_tokens(
    family: str, llama: Tiny, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    trainer = FAMILIES[family](llama.target, RECIPES[family], *corpora, tmp_path)
    for training in (True, False):
        with torch.no_grad():
            chains = trainer.chains(corpora[0], [3, 8], torch.Generator().manual_seed(1), training)
        valid = chains.valid
        assert len(chains.hidden) == len(chains.final) == int(valid.sum()) > 20
        said = llama.target.head(chains.final.float()).argmax(-1)
        assert torch.equal(said, chains.labels[valid])


@pytest.mark.parametrize("family", RECIPES)
def test_a_run_learns_and_goes_on(family: str, tmp_path: Path) -> None:
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
    corpora = corpora_of(target, tmp_path, 40, 96)
    recipe = replace(RECIPES[family], steps=60, anchors=24, rate=6e-3)  # type: ignore[call-arg]
    trainer = FAMILIES[family](target, recipe, *corpora, tmp_path / "run")
    before = trainer.evaluate()["held_mal"]
    trainer.run(every=20)
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["held_mal"] > max(2.0, before + 0.4)
    again = FAMILIES[family](target, recipe, *corpora, tmp_path / "run")
    assert again.resume() and again.step == 60
    again.run(lambda row: pytest.fail("a finished run trains no more"))
    again.export(tmp_path / "drafter")
    session = Session(target, load_drafter(tmp_path / "drafter", target))
    rounds = list(session.generate([1, 2, 3], 60))[1:]
    assert sum(r.accepted for r in rounds) / len(rounds) > 0.7
    # Going on from the drafter starts where it ended.
    further = type(recipe).of(tmp_path / "drafter")
    more = FAMILIES[family](
        target,
        replace(further, chain=4, anchors=24),
        *corpora,
        tmp_path / "more",
        tmp_path / "drafter",
    )
    assert more.evaluate()["held_mal"] == pytest.approx(again.evaluate()["held_mal"], abs=0.1)
    config = tmp_path / "drafter" / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 32', '"hidden_size": 48'))
    with pytest.raises(SharpDraftError, match=r"another target|do not belong"):
        FAMILIES[family](target, further, *corpora, tmp_path / "third", tmp_path / "drafter")
    config.write_text('{"architectures": ["X"]}')
    with pytest.raises(SharpDraftError, match="training can go on from"):
        type(recipe).of(tmp_path / "drafter")


def test_eagle3_drafts_the_tokens_that_the_target_writes_most(
    corpora: tuple[Corpus, Corpus],
) -> None:
    corpus, _ = corpora
    kept = eagle3.frequent_tokens(corpus, 10, VOCAB).tolist()
    often = [0] * VOCAB
    for text, own in zip(corpus.tokens.tolist(), corpus.written.tolist(), strict=True):
        for token, chosen in zip(text, own, strict=True):
            often[token] += chosen
    assert kept == sorted(kept) and len(set(kept)) == 10
    assert min(often[token] for token in kept) >= max(
        often[t] for t in range(VOCAB) if t not in kept
    )


def test_eagle3_drafts_no_token_for_a_chance_occurrence() -> None:
    """Twice is chance: then what the tokenizer numbers first is the likelier, read by the user or
    written."""
    tokens = torch.tensor([[7] * 5 + [3] * 4 + [9] * 2 + [11] + [8] * 6])
    corpus = SimpleNamespace(tokens=tokens, written=tokens != 8)
    assert eagle3.frequent_tokens(cast(Any, corpus), 4, VOCAB).tolist() == [0, 1, 3, 7]


def test_families_share_text(
    run: Run, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family, recipe in RECIPES.items():
        monkeypatch.setitem(
            pipeline.RECIPES, family, replace(recipe, steps=3, sequences=2, anchors=8)
        )  # type: ignore[call-arg]
    options = ("--target", saved.target, "--tokens", 256, "--context", 128, "--batch", 2)
    text = tmp_path / "eagle3" / "text"
    for family in RECIPES:
        out = tmp_path / family
        result = run("train", family, *options, "--out", out, "--text", text)
        assert (result.code, result.out) == (0, f"{out / 'drafter'}\n"), result.err
        said = run(
            "generate",
            "w9",
            "--target",
            saved.target,
            "--drafter",
            out / "drafter",
            "--json",
            "--arm",
            "sharpdraft@40",
        )
        assert said.code == 0, said.err
        assert json.loads(said.out)["mal"] >= 1
    assert sorted(p.name for p in text.iterdir()) == [
        "about.json",
        "held-000.safetensors",
        "wave-000.safetensors",
    ]
    other = replace(RECIPES["eagle3"], taps=(0, 2, 3))  # type: ignore[call-arg]
    monkeypatch.setitem(pipeline.RECIPES, "eagle3", other)
    result = run("train", "eagle3", *options, "--out", tmp_path / "other", "--text", text)
    check_one_line(result, "layers [0, 1, 3]", "not of [2]")
    (text / "about.json").write_text("[]")
    check_one_line(
        run("train", "pard", *options, "--out", tmp_path / "pard", "--text", text), "is broken"
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_cut_of_all_layers_is_the_target(family: str) -> None:
    target = CausalLM.of(make_model(family))
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    logits, _, _ = target.forward(tokens, target.new_cache(20, batch=2))
    with torch.no_grad():
        torch.testing.assert_close(
            pard.cut(target, range(4))(tokens).logits, logits, rtol=1e-4, atol=1e-4
        )
        assert not torch.allclose(pard.cut(target, (0, 2, 1, 3))(tokens).logits, logits, atol=1e-2)
