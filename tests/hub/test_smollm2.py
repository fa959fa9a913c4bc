"""The real target and the drafter that comes with it: lossless, above N0 too, and worth its
while."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sharpdraft import DraftSettings, FixedSlope
from sharpdraft.decode.batch import Batch
from sharpdraft.decode.replay import replay
from sharpdraft.decode.session import Arm, Session
from sharpdraft.drafters.registry import load_drafter, recommended
from sharpdraft.hub.smollm2 import DRAFTER_FAMILIES, SMOLLM2, built_in_drafter
from sharpdraft.hub.targets import load_target
from sharpdraft.lab.backends.vllm import drafts_of
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.workloads.tasks import Recording, built_in, recordings

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def target(smollm2: Path) -> CausalLM:
    return load_target(SMOLLM2, device="cpu")[0]


@pytest.fixture(scope="module", params=DRAFTER_FAMILIES)
def session(request: pytest.FixtureRequest, target: CausalLM) -> Session:
    directory = built_in_drafter(SMOLLM2, request.param)
    assert directory is not None
    return Session(target, {request.param: load_drafter(directory, target)})


@pytest.fixture(scope="module")
def written(smollm2: Path, recording: Recording) -> tuple[list[int], list[int]]:
    """A prompt beyond every drafter's N0, and what transformers writes behind it."""
    turn = next(t for t in recording.turns if t.answer > 520)
    prompt, count = list(recording.tokens[: turn.answer]), 48
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
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


def arm(session: Session, settings: str) -> Arm:
    """One that uses the session's drafter; "ar": the target alone."""
    if settings == "ar":
        return Arm("ar")
    (drafter,) = session.drafters
    return Arm(settings, drafter, DraftSettings.parse(settings))


def answer(session: Session, prompt: list[int], tokens: int, settings: str) -> list[int]:
    """Going on from what of the prompt has been read already."""
    pairs = zip(session.tokens, prompt[:-1], strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    session.rewind(shared)
    session.use(arm(session, settings))
    list(session.generate(prompt[shared:], tokens))
    return session.tokens[len(prompt) :]


def test_every_arm_writes_what_transformers_writes(
    session: Session, written: tuple[list[int], list[int]]
) -> None:
    prompt, tokens = written
    session.rewind(0)
    for settings in ("frozen", "sharpdraft@512", "sinks@4+window@200+sharpdraft@100", "ar"):
        assert answer(session, prompt, len(tokens), settings) == tokens, settings


@pytest.fixture(scope="module")
def alone(target: CausalLM, recording: Recording) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what the target writes behind each."""
    spans, session, found = ((0, 300), (40, 30), (200, 150)), Session(target), []
    for start, length in spans:
        prompt = list(recording.tokens[start : start + length])
        found.append((prompt, answer(session, prompt, 24, "ar")))
        session.rewind(0)
    return found


def test_a_batch_writes_what_each_writes_alone(
    session: Session, alone: list[tuple[list[int], list[int]]]
) -> None:
    (drafter,) = session.drafters.values()
    batch = Batch(session.target, drafter, DraftSettings(FixedSlope(100)))
    requests = [batch.add(prompt, 24) for prompt, _ in alone]
    while batch.step():
        pass
    for (_, tokens), request in zip(alone, requests, strict=True):
        assert request.tokens == tokens


def test_drafts_are_accepted_within_the_training_length(
    session: Session, recording: Recording
) -> None:
    lengths = []
    session.rewind(0)
    session.use(arm(session, "frozen"))
    for turn in recording.turns:
        if turn.end > 512:
            break
        session.read(recording.tokens[len(session.tokens) : turn.end])
        lengths += [done.accepted + 1 for done in replay(session, turn.answer)]
    assert len(lengths) > 50
    assert sum(lengths) / len(lengths) > 1.6


def test_vllm_is_told_to_draft_as_many_as_the_labs_loop_does(session: Session) -> None:
    (drafter,) = session.drafters
    directory = built_in_drafter(SMOLLM2, drafter)
    assert directory is not None
    for settings in (DraftSettings(), recommended(directory)[0]):
        own = Arm("", drafter, settings)
        session.use(own)
        expected = {"dflash": 5, "eagle3": 5, "pard": 3}[drafter]
        assert drafts_of(own, directory) == session.num_drafts == expected


def test_recordings_are_whole_sessions(recording: Recording) -> None:
    names = [task.name for task in built_in()]
    for found in recordings():
        assert found.name in names
        assert len(found.tokens) == 7168
        for turn, following in zip(found.turns, found.turns[1:], strict=False):
            assert turn.start < turn.answer < turn.end == following.start
        assert len(found.turns) > 30
