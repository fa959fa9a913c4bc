"""Distilling from outside: the text is the target's, the trained drafter is the one that is run,
runs go on."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from conftest import BLOCK, PROMPT, VOCAB, Tiny, full_disk, make_model, propose
from sharpdraft.decode.session import Session
from sharpdraft.drafters.dflash import DFlash
from sharpdraft.errors import SharpDraftError
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.train import dflash as training
from sharpdraft.train.corpus import Corpus, draw_anchors, labels_behind, states_before
from sharpdraft.train.dflash import Recipe, TrainableDFlash, Trainer, block_mask
from sharpdraft.train.prompts import sessions
from sharpdraft.train.sessions import save_wave, write_wave
from sharpdraft.train.trainer import head_loss

RECIPE = Recipe(
    block=BLOCK,
    layers=2,
    taps=(0, 1, 3),
    start_layers=(1, 3),
    mask_token=3,
    steps=12,
    sequences=4,
    anchors=10,
    warmup=4,
    negatives=20,
)


# Prompts


def test_held_out_values_never_occur_in_training() -> None:
    """Each turn is taken apart again with its template; a slot's value must be of the right half of
    the list."""
    data = json.loads(
        resources.files("sharpdraft.train").joinpath("prompts.json").read_text(encoding="utf-8")
    )
    held = {slot: set(values[::7]) for slot, values in data["slots"].items()}
    patterns = []
    for turn in {turn for session in data["sessions"] for turn in session}:
        parts = re.split(r"\{(\w+)\}", turn)
        slots = parts[1::2]
        texts = [re.escape(text) for text in parts[::2]]
        values = ["(" + "|".join(map(re.escape, data["slots"][slot])) + ")" for slot in slots] + [
            ""
        ]
        pattern = "".join(text + value for text, value in zip(texts, values, strict=True))
        patterns.append((re.compile(pattern), slots))
    seen: dict[bool, set[tuple[str, str]]] = {True: set(), False: set()}
    for held_out in (True, False):
        for seed in range(3):
            for session in islice(sessions(seed, held_out=held_out), 60):
                for turn in session:
                    found = [
                        (slots, match.groups())
                        for p, slots in patterns
                        if (match := p.fullmatch(turn))
                    ]
                    assert found, turn
                    for slots, values in found:
                        for slot, value in zip(slots, values, strict=True):
                            assert (value in held[slot]) == held_out, (slot, value)
                            seen[held_out].add((slot, value))
    assert len(seen[True]) > 20 and len(seen[False]) > 150


def test_sessions_repeat_with_their_seed_and_keep_their_name() -> None:
    first, again, other = (list(islice(sessions(seed), 20)) for seed in (4, 4, 5))
    assert first == again != other
    names = json.loads(resources.files("sharpdraft.train").joinpath("prompts.json").read_text())[
        "slots"
    ]["name"]
    for session in first:
        assert (
            len({name for turn in session for name in names if re.search(rf"\b{name}\b", turn)})
            <= 1
        )


# Text


def turns_for(target: CausalLM, count: int) -> list[list[list[int]]]:
    rng = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 7, (count, 3), generator=rng).tolist()
    return [
        [torch.randint(13, VOCAB, (n,), generator=rng).tolist() for n in row] for row in lengths
    ]


def end_of(tiny: Tiny) -> int:
    """What is taken for the end of a turn: a token that the target does write, but not all the
    time."""
    return Counter(tiny.text[PROMPT:]).most_common(2)[1][0]


def wave_of(tiny: Tiny, count: int = 4, length: int = 90, **options: Any) -> dict[str, Tensor]:
    return write_wave(tiny.target, turns_for(tiny.target, count), length, end_of(tiny), **options)


@torch.inference_mode()
def choices(target: CausalLM, tokens: Tensor) -> list[int]:
    """The target's greedy token behind every prefix of a session, read in one piece."""
    logits, _, _ = target.forward(tokens[None].long(), target.new_cache(len(tokens)))
    return logits[0].argmax(-1).tolist()


def check_wave(
    tiny: Tiny, turns: Sequence[list[list[int]]], wave: dict[str, Tensor], limit: int
) -> int:
    """Follow every session: forced prompt, greedy answer, end of turn, next prompt. Returns answers
    that ended."""
    ended, end = 0, end_of(tiny)
    for session, tokens, written in zip(
        turns, wave["tokens"], wave["written"].tolist(), strict=True
    ):
        greedy, text = choices(tiny.target, tokens), tokens.tolist()
        at, turn = 0, 0
        while at < len(text):
            prompt = session[turn % len(session)]
            for token in prompt[: len(text) - at]:
                assert (text[at], written[at]) == (token, False)
                at += 1
            answer = 0
            while at < len(text):
                assert (text[at], written[at]) == (greedy[at - 1], True)
                at, answer = at + 1, answer + 1
                if text[at - 1] == end:
                    ended += 1
                    break
                if answer == limit:
                    if at < len(text):
                        assert (text[at], written[at]) == (end, False)
                    at += 1
                    break
            turn += 1
    return ended


def test_wave_is_the_targets_greedy_text(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from sharpdraft.train import sessions as writing

    monkeypatch.setattr(writing, "_ANSWER_LIMIT", 17)
    monkeypatch.setattr(writing, "_loops", lambda answer: False)
    steps: list[int] = []
    wave = wave_of(tiny, taps=(0, 2), on_step=steps.append)
    assert wave["tokens"].dtype == torch.int32 and wave["written"].dtype == torch.bool
    assert steps == list(range(90))
    ended = check_wave(tiny, turns_for(tiny.target, 4), wave, 17)
    assert ended > 0, "some answers must end by themselves for this to say anything"
    cache = tiny.target.new_cache(90, batch=4)
    _, tapped, final = tiny.target.forward(wave["tokens"].long(), cache, (0, 2))
    expected = torch.cat((*tapped, final), dim=-1)
    assert wave["features"].dtype == torch.float16
    torch.testing.assert_close(wave["features"].float(), expected, rtol=2e-3, atol=2e-3)


def test_answers_end_when_they_loop(tiny: Tiny) -> None:
    """Random targets soon repeat themselves; what comes for the third time is the end of the
    answer."""
    wave = wave_of(tiny, length=200)
    looped = 0
    for tokens, written in zip(wave["tokens"].tolist(), wave["written"].tolist(), strict=True):
        answer: list[int] = []
        for i, (token, own) in enumerate(zip(tokens, written, strict=True)):
            answer = [*answer, token] if own else []
            seen = [answer[k : k + 8] for k in range(len(answer) - 7)]
            if (
                answer
                and len(answer) >= 24
                and seen.count(answer[-8:]) >= 3
                and i + 1 < len(tokens)
            ):
                assert not written[i + 1]
                looped += 1
    assert looped > 0


def test_sampled_starts_are_not_marked_as_written(llama: Tiny) -> None:
    plain, sampled, again = (wave_of(llama, count=6, seed=seed) for seed in (None, 7, 7))
    assert torch.equal(sampled["tokens"], again["tokens"])
    for row in range(6):
        first = len(turns_for(llama.target, 6)[row][0])
        start = (0, 0, 4, 12)[row % 4]
        own = sampled["written"][row, first : first + start + 1].tolist()
        if end_of(llama) not in sampled["tokens"][row, first : first + start].tolist():
            assert own == [False] * start + [True]
        greedy = choices(llama.target, sampled["tokens"][row])
        for at in sampled["written"][row].nonzero()[:, 0].tolist():
            assert sampled["tokens"][row, at] == greedy[at - 1]
    assert not torch.equal(plain["tokens"], sampled["tokens"])


def test_wave_is_saved_whole(llama: Tiny, tmp_path: Path) -> None:
    wave = wave_of(llama, taps=(0, 1, 3))
    save_wave(wave, tmp_path / "wave-000.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["wave-000.safetensors"]
    corpus = Corpus([tmp_path / "wave-000.safetensors"] * 2, (0, 1, 3))
    assert len(corpus) == 8
    assert torch.equal(corpus.tokens, wave["tokens"].long().repeat(2, 1))
    assert torch.equal(corpus.features([6, 1], (0, 1, 3)), wave["features"][[2, 1], :, :96])
    assert torch.equal(
        corpus.features([6], (3, 0)), wave["features"][[2]][..., [*range(64, 96), *range(32)]]
    )
    assert torch.equal(corpus.final([6, 1]), wave["features"][[2, 1], :, 96:])


# Blocks


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


@pytest.fixture(scope="module")
def corpora(llama: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Corpus]:
    """Text to train on and to hold out, of the same kind: greedy answers to random prompts, some of
    them short."""
    folder = tmp_path_factory.mktemp("text")
    rng = torch.Generator().manual_seed(5)
    for name, count in (("train", 24), ("held", 8)):
        turns = [[torch.randint(0, VOCAB, (4,), generator=rng).tolist()] * 2 for _ in range(count)]
        wave = write_wave(llama.target, turns, 64, end_of(llama), taps=RECIPE.taps)
        save_wave(wave, folder / f"{name}.safetensors")
    return Corpus([folder / "train.safetensors"], RECIPE.taps), Corpus(
        [folder / "held.safetensors"], RECIPE.taps
    )


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


# The trained drafter is the one that is run


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
    assert (exported.taps, exported.block_size, exported.mask_token) == (RECIPE.taps, BLOCK, 3)
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
        patch.setattr(llama.target, "head", lambda x: states.append(x) or head(x))
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


# Runs


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
    target = CausalLM(model)
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
