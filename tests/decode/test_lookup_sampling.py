"""Lookup, alone and beside a drafter, under sampling: the target's own distribution."""

from __future__ import annotations

from collections import Counter
from itertools import count, product
from typing import Any

import pytest
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from sharpdraft import Lookup, Mixed, Sampling, Session
from sharpdraft.decode.batch import Batch
from sharpdraft.decode.sampling import Sampler
from sharpdraft.drafters.mixed import Estimates
from support.distribution import pairs, reference, surprise
from support.families import drafter_of
from support.sessions import settings_of
from support.tiny import PROMPT, Tiny

FILTERS = LogitsProcessorList([TemperatureLogitsWarper(1.3), TopKLogitsWarper(8)])
KINDS = ["lookup", "dflash+lookup", "eagle3+lookup", "pard+lookup"]


def make(kind: str, llama: Tiny) -> Any:
    own = kind.removesuffix("+lookup")
    return Lookup(llama.target) if kind == own else Mixed(drafter_of(own, llama), llama.target)


def repeating(llama: Tiny) -> list[int]:
    """Ends as it begins; what followed there is likely, and not certain."""
    found = []
    for one, two in product(range(10, 15), repeat=2):
        prompt = [1, 2, one, two, 9, *llama.text[:PROMPT], 1, 2]
        first = float(reference(llama.model, prompt, FILTERS)[one])
        second = float(reference(llama.model, [*prompt, one], FILTERS)[two])
        found.append((first * (0.5 + second), prompt))
    return max(found)[1]


@pytest.mark.parametrize("drafts", ["sampled", "likeliest"])
@pytest.mark.parametrize("kind", KINDS)
def test_sessions_write_the_targets_distribution(
    kind: str, drafts: Any, llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = count()
    monkeypatch.setattr(Estimates, "looks_up", lambda *_: next(turns) % 2 == 0)
    prompt = repeating(llama)
    expected = pairs(llama.model, prompt, FILTERS)
    session = Session(llama.target, make(kind, llama), settings_of(drafts=3))
    session.read(prompt)
    session.sampler = Sampler(Sampling(1.3, 8, seed=5, drafts=drafts))
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(600):
        session.rewind(len(prompt))
        while len(session.tokens) < len(prompt) + 2:
            accepted += session.round(4).accepted
        counts[tuple(session.tokens[len(prompt) : len(prompt) + 2])] += 1
    assert surprise(counts, expected) < 5
    assert accepted > 40, "drafts must be accepted for this to say anything"
    flatter = {pair: p**0.6 for pair, p in expected.items()}
    total = sum(flatter.values())
    assert surprise(counts, {pair: p / total for pair, p in flatter.items()}) > 5
    if kind != "lookup":
        tried = session.drafts.drawn.tried
        assert sum(tried[True]) > 10 and sum(tried[False]) > 10, "both must have drafted"


@pytest.mark.parametrize("kind", KINDS)
def test_batches_write_the_targets_distribution(kind: str, llama: Tiny) -> None:
    """Requests with a match and without one share every pass, each drawing for itself."""
    prompts = [repeating(llama), [*llama.text[:PROMPT]]]
    batch = Batch(llama.target, make(kind, llama), settings_of(drafts=3), max_requests=8)
    requests = [
        (prompt, batch.add(prompt, 3, sampling=Sampling(1.3, 8, seed=number)))
        for number in range(300)
        for prompt in map(tuple, prompts)
    ]
    while batch.step():
        pass
    for prompt in map(tuple, prompts):
        counts = Counter(tuple(own.tokens[:2]) for given, own in requests if given == prompt)
        assert surprise(counts, pairs(llama.model, list(prompt), FILTERS)) < 5
