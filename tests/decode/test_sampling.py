"""Sampling from outside: the target's own distribution, whatever drafts; transformers' own filters;
seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sharpdraft.decode.sampling import Sampler, Sampling, TopP, draw
from sharpdraft.decode.session import Session
from sharpdraft.drafters.eagle3 import Eagle3
from sharpdraft.drafters.pard import Pard
from sharpdraft.errors import SharpDraftError
from support.distribution import pairs, surprise
from support.drafters import make_drafter
from support.families import eagle_config, eagle_tensors, make_pard
from support.sessions import settings_of
from support.tiny import PROMPT, VOCAB, Tiny

DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda target: None,
    "dflash": make_drafter,
    "eagle3": lambda target: Eagle3(eagle_config(), eagle_tensors(eagle_config(), target), target),
    "eagle3 of 40 tokens": lambda target: Eagle3(
        config := eagle_config(draft_vocab_size=40), eagle_tensors(config, target), target
    ),
    "pard": lambda target: Pard(type(target).of(make_pard()), VOCAB - 1, target),
}


def written_pairs(
    sampler: Sampler, logits: Tensor, q: Tensor | None, times: int
) -> Counter[tuple[int, ...]]:
    """First two tokens behind a prefix when each of two drafts comes from q, or is token 2 where
    there is none."""
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(times):
        proposed, drawn = [2, 2], None
        if q is not None:
            proposed, drawn = [draw(q, sampler.generator) for _ in range(2)], torch.stack((q, q))
        written = sampler.verify(logits, [0], proposed, drawn)
        while len(written) < 2:
            written.append(draw(logits[len(written)].softmax(-1), sampler.generator))
        counts[tuple(written[:2])] += 1
    return counts


class Biased(Sampler):
    """Accepts one draft in a hundred unseen."""

    def _sampled(self, target: Tensor, draft: int | None, drawn: Tensor | None) -> int:
        token = super()._sampled(target, draft, drawn)
        unseen = draft is not None and float(torch.rand((), generator=self.generator)) < 0.01
        return draft if unseen and draft is not None else token


# A row in which the token that is mostly drafted is rare: accepted unseen, it shows soonest. And a
# row that it mostly passes.
RARE, USUAL = (0.5, 0.3, 0.02, 0.18), (0.04, 0.03, 0.9, 0.03)


@pytest.mark.parametrize("drafts", ["sampled", "likeliest"])
@pytest.mark.parametrize(
    ("rows", "times"), [((RARE, USUAL), 6_000), ((USUAL, RARE), 8_000)], ids=["first", "second"]
)
def test_two_tokens_have_the_targets_distribution_and_a_bias_of_one_percent_is_seen(
    rows: tuple[tuple[float, ...], ...], times: int, drafts: str
) -> None:
    expected = {(i, j): rows[0][i] * rows[1][j] for i in range(4) for j in range(4)}
    logits = torch.tensor([*rows, (0.25,) * 4]).log()
    q = torch.tensor([0.02, 0.03, 0.93, 0.02]) if drafts == "sampled" else None
    found = []
    for kind in (Sampler, Biased):
        counts = written_pairs(kind(Sampling(temperature=1.0, seed=1)), logits, q, times)
        # Most drafts are token 2: whether it was written is where a bias must show.
        coarse: Counter[Any] = Counter()
        for pair, count in counts.items():
            coarse[tuple(token == 2 for token in pair)] += count
        due: dict[Any, float] = {}
        for pair, chance in expected.items():
            due[tuple(token == 2 for token in pair)] = (
                due.get(tuple(token == 2 for token in pair), 0) + chance
            )
        found.append((surprise(counts, expected), surprise(coarse, due)))
    (fine, coarsely), (_, biased) = found
    assert max(fine, coarsely) < 3 and biased > 5, found


def test_a_draft_from_the_targets_own_distribution_is_always_accepted() -> None:
    sampler = Sampler(Sampling(temperature=1.0, seed=3))
    logits = torch.tensor([[0.3, 0.1, 0.0, -0.2], [-0.1, 0.2, 0.0, 0.1]])
    for _ in range(300):
        own = logits[0].softmax(-1)
        draft = draw(own, sampler.generator)
        assert sampler.verify(logits, [0], [draft], own[None])[0] == draft


def test_draws_are_in_proportion() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([0.0, 2.0, 0.0, 5.0, 1.0, 0.0])
    counts = Counter(draw(weights, generator) for _ in range(20_000))
    assert surprise(counts, {1: 2 / 8, 3: 5 / 8, 4: 1 / 8}) < 5


@pytest.mark.parametrize(
    ("family", "drafts"),
    [*((family, "sampled") for family in DRAFTERS), ("dflash", "likeliest"), ("pard", "likeliest")],
)
def test_sessions_write_the_targets_distribution(family: str, drafts: Any, llama: Tiny) -> None:
    filters = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(1.3),
            TopKLogitsWarper(8),
            TopPLogitsWarper(0.95),
        ]
    )
    prompt = llama.text[:PROMPT]
    expected = pairs(llama.model, prompt, filters)
    assert len(expected) > 8
    session = Session(llama.target, DRAFTERS[family](llama.target), settings_of(drafts=3))
    session.read(prompt)
    session.sampler = Sampler(Sampling(1.3, 8, 0.95, repetition_penalty=1.2, seed=5, drafts=drafts))
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(500):
        session.rewind(PROMPT)
        while len(session.tokens) < PROMPT + 2:
            accepted += session.round(4).accepted
        counts[tuple(session.tokens[PROMPT : PROMPT + 2])] += 1
    assert surprise(counts, expected) < 5
    assert (accepted > 20) == (family != "none"), "drafts must be accepted for this to say anything"
    # The same with another temperature is found out.
    flatter = {pair: p**0.6 for pair, p in expected.items()}
    total = sum(flatter.values())
    assert surprise(counts, {pair: p / total for pair, p in flatter.items()}) > 5


def test_a_drafter_that_is_the_target_is_always_right(llama: Tiny) -> None:
    """Its own distribution, sampled as the target's is: the first draft cannot be refused."""
    session = Session(
        llama.target,
        Pard(llama.target, VOCAB - 1, llama.target),
        settings_of(drafts=1),
        sampling=Sampling(1.0, min_p=0.05, seed=2),
    )
    rounds = [r for r in session.generate(llama.text[:PROMPT], 120) if r.drafted]
    assert sum(r.accepted for r in rounds) >= len(rounds) - 1


class Favour(LogitsProcessor):
    """A processor that looks at the text: the last token may not come again, token 7 comes
    easily."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[0, input_ids[0, -1]] = -torch.inf
        scores[0, 7] += 1.0
        return scores


@pytest.mark.parametrize("family", DRAFTERS)
@pytest.mark.parametrize(
    "processors", [(), (SuppressTokensLogitsProcessor([3, 12]), Favour())], ids=["", "processors"]
)
def test_greedy_with_penalty_and_processors_is_transformers(
    family: str, processors: Any, llama: Tiny
) -> None:
    prompt = llama.text[:PROMPT]
    expected = llama.model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        repetition_penalty=1.3,
        logits_processor=LogitsProcessorList(processors),
        max_new_tokens=60,
        eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()
    sampling = Sampling(repetition_penalty=1.3, processors=processors)
    session = Session(llama.target, DRAFTERS[family](llama.target), sampling=sampling)
    rounds = list(session.generate(prompt, 60))
    assert session.tokens == expected
    assert expected != llama.text[: PROMPT + 60]
    if family != "none":
        assert sum(r.drafted for r in rounds) > 0


@pytest.mark.parametrize(
    ("options", "filters"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.0, "top_k": 5}, [TopKLogitsWarper(5)]),
        ({"temperature": 1.0, "top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"temperature": 2.0, "min_p": 0.3}, [TemperatureLogitsWarper(2.0), MinPLogitsWarper(0.3)]),
    ],
)
def test_filters_are_transformers(options: dict[str, Any], filters: list[Any]) -> None:
    logits = 2 * torch.randn(30, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[3, 4]])
    expected = LogitsProcessorList(filters)(ids, logits[None].clone())[0].softmax(-1)
    sampler = Sampler(Sampling(seed=0, **options))
    counts = Counter(sampler.verify(logits[None], [3, 4], [])[0] for _ in range(4000))
    assert surprise(counts, {i: float(p) for i, p in enumerate(expected) if p > 0}) < 5


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 100, 255, 256, 257, 5000, 30000]),
    st.floats(0.01, 0.999),
    st.sampled_from([0.0, 0.1, 1.0, 3.0, 30.0]),
    st.integers(0, 99),
)
@example(1, 30000, 0.7222207319869012, 0.1, 1)  # Two logits have one share at the edge.
def test_top_p_is_transformers(
    rows: int, vocab: int, top_p: float, spread: float, seed: int
) -> None:
    """Flat or steep, however many tokens it takes; equal logits are one as good as the other."""
    logits = spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    if vocab > 2:
        logits[:, 1] = -torch.inf
    ids = torch.zeros(rows, 0, dtype=torch.long)
    expected, found = (each(ids, logits.clone()) for each in (TopPLogitsWarper(top_p), TopP(top_p)))
    kept = found > -torch.inf
    assert torch.equal(found[kept], logits[kept])
    for row, own in enumerate(kept.sum(-1).tolist()):
        shares = logits[row].double().softmax(-1).sort(descending=True).values
        # float32 sums of the whole vocabulary round: one token more or less where they are that
        # close.
        least, most = ((shares.cumsum(0) < top_p + slack).sum() + 1 for slack in (-1e-4, 1e-4))
        assert min(int(least), vocab) <= own <= int(most)
        assert set(logits[row, kept[row]].tolist()) == set(logits[row].topk(own).values.tolist())
        theirs = int((expected[row] > -torch.inf).sum())
        assert own == theirs or least < most


def test_a_seed_repeats_an_answer_whatever_else_was_drawn(llama: Tiny) -> None:
    def answer(seed: int | None) -> list[int]:
        sampling = Sampling(1.3, seed=seed)
        session = Session(llama.target, make_drafter(llama.target), sampling=sampling)
        list(session.generate(llama.text[:PROMPT], 40))
        return session.tokens[PROMPT:]

    first = answer(7)
    torch.manual_seed(1)
    torch.rand(3)
    assert answer(7) == first
    assert len({tuple(answer(seed)) for seed in (8, 9, None, None)} | {tuple(first)}) == 5
    # An answer of a used session starts from its seed as well.
    session = Session(llama.target, make_drafter(llama.target), sampling=Sampling(1.3, seed=7))
    for _ in range(2):
        session.rewind(0)
        list(session.generate(llama.text[:PROMPT], 40))
        assert session.tokens[PROMPT:] == first


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 1.2}, "top_p is 1.2"),
        ({"top_p": 0.0}, "set temperature to 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0.0}, "must be above 0"),
    ],
)
def test_settings_out_of_range(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SharpDraftError, match=said):
        Sampling(**options)


def test_logits_that_are_not_numbers_are_refused() -> None:
    for sampling in (Sampling(), Sampling(1.0)):
        with pytest.raises(SharpDraftError, match="NaN or infinite"):
            Sampler(sampling).verify(torch.tensor([[0.0, math.nan, 1.0]]), [0], [])
