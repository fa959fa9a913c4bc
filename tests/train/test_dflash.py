"""What is trained is what is drafted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from sharpdraft.decode.session import Session
from sharpdraft.drafters.dflash import DFlash
from sharpdraft.errors import SharpDraftError
from sharpdraft.train import dflash as training
from sharpdraft.train.corpus import Corpus, draw_anchors, labels_behind, states_before
from sharpdraft.train.dflash import Recipe, TrainableDFlash, Trainer, block_mask
from sharpdraft.train.loss import head_loss
from support.drafters import propose
from support.tiny import BLOCK, Tiny
from support.train import RECIPE


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), st.integers(2, 5))
def test_block_mask(anchors: list[int], block: int) -> None:
    length = 21
    mask = block_mask(torch.tensor([anchors, anchors[::-1]]), block, length)
    assert mask.shape == (2, len(anchors) * block, length + len(anchors) * block)
    for sequence, places in enumerate((anchors, anchors[::-1])):
        for row in range(len(anchors) * block):
            owner = row // block
            context = [key < places[owner] for key in range(length)]
            own = [key // block == owner for key in range(len(anchors) * block)]
            assert mask[sequence, row].tolist() == context + own


def test_drawn_chains_are_the_targets_own_text(llama: Tiny, corpora: tuple[Corpus, Corpus]) -> None:
    corpus, _ = corpora
    rows = [5, 0, 11]
    tokens, written = corpus.tokens[rows], corpus.written[rows]
    anchors, usable = draw_anchors(written, 40, BLOCK, torch.Generator().manual_seed(0))
    labels, valid = labels_behind(tokens, written, anchors, BLOCK - 1)
    final = states_before(corpus.final(rows), anchors, BLOCK - 1)
    assert anchors.shape == usable.shape == (3, 40)
    assert labels.shape == valid.shape == final.shape[:3] == (3, 40, BLOCK - 1)
    checked = 0
    for i in range(3):
        text, own = tokens[i].tolist(), written[i].tolist()
        for j, anchor in enumerate(anchors[i].tolist()):
            assert usable[i, j] == (8 <= anchor < 64 - BLOCK and own[anchor + 1])
            for k in range(BLOCK - 1):
                at = anchor + 1 + k
                assert valid[i, j, k] == (at < 64 and all(own[anchor + 1 : at + 1]))
                if valid[i, j, k]:
                    assert labels[i, j, k] == text[at]
                    # What the target said at this position is its state one token earlier.
                    assert int(llama.target.head(final[i, j, k].float()).argmax()) == text[at]
                    checked += 1
    assert checked > 100 and not bool(valid.all())


def test_every_token_that_the_target_chose_can_be_drafted_first(
    corpora: tuple[Corpus, Corpus],
) -> None:
    """Among them the first of an answer, whose anchor is the prompt's last token."""
    written = corpora[0].written
    anchors, usable = draw_anchors(written, 60, BLOCK, torch.Generator().manual_seed(0))
    for row in range(24):
        own = written[row].tolist()
        assert sorted(anchors[row][usable[row]].tolist()) == [
            at for at in range(8, 64 - BLOCK) if own[at + 1]
        ]
    assert not bool(written[:, 8:50].all())


def test_head_loss_is_the_cross_entropy_and_its_gradient() -> None:
    torch.manual_seed(0)
    rows, size, vocab = 37, 16, 50
    hidden = torch.randn(rows, size, dtype=torch.float64, requires_grad=True)
    final, head = (
        torch.randn(rows, size, dtype=torch.float64),
        torch.randn(vocab, size, dtype=torch.float64),
    )
    labels, weight = torch.randint(vocab, (rows,)), torch.rand(rows)
    for hard in (0.0, 0.3, 1.0):
        aim = (1 - hard) * (final @ head.T).softmax(-1) + hard * F.one_hot(labels, vocab)
        loss = -(weight.double()[:, None] * aim * (hidden @ head.T).log_softmax(-1)).sum()
        (expected,) = torch.autograd.grad(loss, hidden)
        total, gradient, choice = head_loss(hidden, final, labels, weight, head, hard, chunk=10)
        assert total == pytest.approx(float(loss.detach()), rel=1e-4)
        torch.testing.assert_close(gradient, expected.float(), rtol=1e-4, atol=1e-5)
        assert torch.equal(choice, (hidden @ head.T).argmax(-1))


def test_exported_drafter_computes_what_was_trained(
    llama: Tiny, corpora: tuple[Corpus, Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of many blocks trained at once, against each block drafted alone from the
    exported checkpoint."""
    trainer = Trainer(llama.target, RECIPE, *corpora, tmp_path / "run")
    module = trainer.module
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.05))
    written: dict[str, Any] = {}
    real_save = training.save

    def keep(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        written.update(config=config, tensors=tensors)
        real_save(directory, config, tensors)

    monkeypatch.setattr(training, "save", keep)
    trainer.export(tmp_path / "drafter")
    exported = DFlash.load(tmp_path / "drafter", llama.target)
    assert (exported.taps, exported.num_drafts, exported.mask_token) == (RECIPE.taps, BLOCK - 1, 3)
    assert all(t.dtype == torch.bfloat16 for t in written["tensors"].values())
    whole = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    whole["fc.weight"] = whole["fc.weight"] / module.scale
    for name, tensor in whole.items():
        torch.testing.assert_close(written["tensors"][name], tensor.bfloat16())
    drafter = DFlash(written["config"], whole, llama.target)

    text = llama.text[:60]
    with torch.inference_mode():
        cache = llama.target.new_cache(60)
        _, tapped, _ = llama.target.forward(torch.tensor([text]), cache, RECIPE.taps)
    anchors = [0, 7, 31, 32, 59]
    ids = torch.full((1, len(anchors), BLOCK), 3)
    ids[0, :, 0] = torch.tensor([text[at] for at in anchors])
    with torch.no_grad():
        hidden = module(
            torch.cat(tapped, -1), F.embedding(ids, llama.target.embedding), torch.tensor([anchors])
        )
    states: list[Tensor] = []
    head = llama.target.head
    drafted = []
    session = Session(llama.target, drafter)
    session.read(text)
    with monkeypatch.context() as patch:
        shown: Any = lambda x: states.append(x) or head(x)  # noqa: E731
        patch.setattr(drafter, "vocabulary", replace(drafter.vocabulary, head=shown))
        for at in reversed(anchors):
            session.drafts.length = at
            drafted.append(propose(drafter, session.drafts, text[at], BLOCK - 1))
    for k, (state, drafts) in enumerate(zip(reversed(states), reversed(drafted), strict=True)):
        torch.testing.assert_close(state[0], hidden[0, k, 1:], rtol=1e-3, atol=1e-4)
        assert torch.equal(drafts, head(hidden[0, k, 1:]).argmax(-1))


def test_going_on_from_a_drafter_starts_where_it_ended(
    llama: Tiny, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    first = Trainer(llama.target, RECIPE, *corpora, tmp_path / "first")
    for _ in range(3):
        first.train_step()
    first.export(tmp_path / "drafter")
    recipe = Recipe.of(tmp_path / "drafter")
    assert (recipe.block, recipe.layers, recipe.taps, recipe.mask_token) == (
        BLOCK,
        RECIPE.layers,
        RECIPE.taps,
        3,
    )
    second = Trainer(
        llama.target, recipe, corpora[1], corpora[1], tmp_path / "second", tmp_path / "drafter"
    )
    assert not torch.equal(second.module.scale, first.module.scale), (
        "features are scaled by the new text"
    )
    second.export(tmp_path / "again")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("drafter", "again")
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-2, atol=0)
    config = tmp_path / "drafter" / "config.json"
    config.write_text(
        config.read_text().replace('"num_target_layers": 4', '"num_target_layers": 36')
    )
    with pytest.raises(SharpDraftError, match="another target"):
        Trainer(llama.target, recipe, *corpora, tmp_path / "third", tmp_path / "drafter")
    config.write_text('{"architectures": ["DFlashDraftModel"]}')
    with pytest.raises(SharpDraftError, match="training can go on from"):
        Recipe.of(tmp_path / "drafter")


def test_start_is_the_targets_layers(llama: Tiny) -> None:
    module = TrainableDFlash(llama.target, RECIPE, torch.ones(96))
    body = llama.model.model
    for block, source in zip(module.layers, RECIPE.start_layers, strict=True):
        theirs = dict(body.layers[source].named_parameters())
        for name, tensor in block.named_parameters():
            if not name.endswith(("q_norm.weight", "k_norm.weight")):
                assert torch.equal(tensor, theirs[name]), name
    assert torch.equal(module.norm.weight, body.norm.weight)
