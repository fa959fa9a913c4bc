"""Text to train on is the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.train.corpus import Corpus
from sharpdraft.train.sessions import save_wave
from support.tiny import Tiny
from support.train import end_of, turns_for, wave_of


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


def test_a_wave_at_a_temperature_is_drawn_token_by_token(llama: Tiny) -> None:
    cold, plain = wave_of(llama, temperature=1e-6), wave_of(llama)
    assert torch.equal(cold["tokens"], plain["tokens"])
    hot, again = wave_of(llama, temperature=1.0), wave_of(llama, temperature=1.0)
    assert torch.equal(hot["tokens"], again["tokens"])
    likeliest = drawn = 0
    for tokens, written in zip(hot["tokens"], hot["written"], strict=True):
        greedy = choices(llama.target, tokens)
        for at in written.nonzero()[:, 0].tolist():
            likeliest += int(tokens[at]) == greedy[at - 1]
            drawn += 1
    assert 0.05 < likeliest / drawn < 0.95


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
