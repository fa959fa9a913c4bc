"""What a session takes and refuses."""

from __future__ import annotations

import pytest
import torch

from sharpdraft.decode.batch import Batch
from sharpdraft.decode.session import Arm, Session
from sharpdraft.errors import SharpDraftError
from sharpdraft.method.policies import FixedSlope, LayerSlopes
from sharpdraft.method.settings import DraftSettings, Window
from sharpdraft.model.causal_lm import CausalLM
from support.drafters import make_drafter
from support.sessions import settings_of
from support.tiny import BLOCK, POSITIONS, PROMPT, VOCAB, Tiny, continuation, make_model

LOW = FixedSlope(33)  # Scales from 34 Keys on, as far as the tiny targets' contexts go.


@pytest.fixture
def session(llama: Tiny) -> Session:
    return Session(llama.target, make_drafter(llama.target), settings_of(LOW), capacity=100)


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 5, "prompt is empty"),
        ([VOCAB], 5, f"outside the target's vocabulary of {VOCAB}"),
        ([1, -1], 5, f"outside the target's vocabulary of {VOCAB}"),
        ([1] * 100, 5, "100 tokens does not fit: 99 of 100 are left"),
        ([1] * 1000, 5, "1000 tokens does not fit: 99 of 100 are left"),
        ([1], 0, "max_new_tokens is 0: it must be at least 1"),
    ],
)
def test_refused_prompts_leave_the_session_usable(
    session: Session, llama: Tiny, prompt: list[int], count: int, message: str
) -> None:
    for said in (0, PROMPT + 5):
        if said:
            list(session.generate(llama.text[:PROMPT], 5))
        with pytest.raises(SharpDraftError) as caught:
            list(session.generate(prompt, count))
        assert (message if not said else message.split(":")[0].split(" tokens")[0]) in str(
            caught.value
        )
        assert "\n" not in str(caught.value)
        assert len(session.tokens) == said
    list(session.generate([9, 4], 20))
    before = [*llama.text[: PROMPT + 5], 9, 4]
    assert session.tokens == before + continuation(llama.model, before, 20)


def test_longest_prompt_is_taken(session: Session, llama: Tiny) -> None:
    list(session.generate(llama.text[:99], 5))
    assert (session.tokens, session.finish) == (llama.text[:100], "context")


def test_more_drafts_than_the_drafter_has(llama: Tiny) -> None:
    said = f"length: {BLOCK} drafts a round, and this drafter drafts 1 to {BLOCK - 1}"
    with pytest.raises(SharpDraftError, match=said):
        Session(llama.target, make_drafter(llama.target), settings_of(drafts=BLOCK))
    with pytest.raises(SharpDraftError, match=said):
        Batch(llama.target, make_drafter(llama.target), settings_of(drafts=BLOCK))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (DraftSettings(view=Window(BLOCK - 1)), r"view \(window@5\): .* block of 6 tokens"),
        (
            DraftSettings(LayerSlopes(40, (5.0, 4.0, 3.0))),
            "scale .*3 layers, and the drafter has 2",
        ),
    ],
)
def test_settings_that_make_no_sense_for_the_drafter(
    llama: Tiny, settings: DraftSettings, said: str
) -> None:
    session = Session(llama.target, make_drafter(llama.target))
    with pytest.raises(SharpDraftError, match=said):
        session.use(Arm("", "", settings))
    with pytest.raises(SharpDraftError, match="no drafter 'other'"):
        session.use(Arm("", "other"))
    list(session.generate(llama.text[:PROMPT], 30))
    assert session.tokens == llama.text[: PROMPT + 30], "what was in use before still is"


@pytest.mark.parametrize("capacity", [-5, 0, 1, POSITIONS + 1])
def test_capacity_that_does_not_fit(llama: Tiny, capacity: int) -> None:
    with pytest.raises(
        SharpDraftError, match=f"context of {capacity} tokens asked for: this target takes 2 to"
    ):
        Session(llama.target, capacity=capacity)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_told(value: float) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = value
    session = Session(CausalLM.of(model))
    with pytest.raises(SharpDraftError, match="the target's logits are NaN or infinite"):
        list(session.generate([1, 2, 3], 5))
