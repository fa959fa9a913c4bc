"""LongRoPE, whose positions turn otherwise once a text is longer than those of pretraining: target
and sessions against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from sharpdraft import Session, SharpDraftError
from sharpdraft.decode import session as sessions
from sharpdraft.decode.batch import Batch
from sharpdraft.decode.graphs import StaticRounds
from sharpdraft.drafters import pard
from sharpdraft.model.cache import KVCache
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.rotary import Rotary
from sharpdraft.model.static_rows import StaticRows
from support.drafters import Oracle
from support.sessions import written
from support.tiny import VOCAB, make_model

LIMIT = 64
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": LIMIT,
}
CLOSE = {"rtol": 1e-4, "atol": 2e-4}


@pytest.fixture(params=["llama", "qwen3"], scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param, rope_parameters=dict(LONGROPE))


@pytest.fixture
def target(model: Any) -> CausalLM:
    return CausalLM.of(model)


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in several passes."""
    monkeypatch.setattr(sessions, "_PREFILL_ROWS", 16)


@pytest.fixture(params=[True, False], autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("compiled" if request.param else "without_kernels")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def text(count: int, seed: int = 0) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=rng).tolist()


def in_spans(model: Any, tokens: list[int], *ends: int) -> torch.Tensor:
    """transformers' logits behind the last token, when each span is read behind the one before."""
    cache, start = DynamicCache(), 0
    for end in ends:
        ids = torch.tensor([tokens[start:end]])
        logits, start = model(ids, cache=cache, use_cache=True).logits, end
    return logits[0, -1]


def last(session: Session, tokens: list[int]) -> torch.Tensor:
    return session.read(tokens)[0, 0]


@pytest.mark.parametrize("length", [1, 40, LIMIT, LIMIT + 1, 150])
def test_a_text_in_one_pass(model: Any, target: CausalLM, length: int) -> None:
    ids = torch.tensor([text(length)])
    found = target.forward(ids, target.new_cache(200))[0]
    torch.testing.assert_close(found, model(ids).logits, **CLOSE)


@pytest.mark.parametrize("length", [40, LIMIT, LIMIT + 1, 80, 150])
def test_a_prompt_in_chunks_is_that_in_one_pass(model: Any, target: CausalLM, length: int) -> None:
    found = last(Session(target), text(length))
    torch.testing.assert_close(found, in_spans(model, text(length), length), **CLOSE)


@pytest.mark.parametrize("spans", [(40, 60), (40, 90), (70, 100), (60, 64, 65, 90)])
def test_prompts_one_behind_the_other(model: Any, target: CausalLM, spans: tuple[int, ...]) -> None:
    """A cached text keeps its Keys when it becomes a long one."""
    session, start, tokens = Session(target), 0, text(spans[-1])
    for end in spans:
        found, start = last(session, tokens[start:end]), end
    torch.testing.assert_close(found, in_spans(model, tokens, *spans), **CLOSE)


def answer(target: CausalLM, prompt: list[int], count: int, drafter: Any = None) -> list[int]:
    return written(list(Session(target, drafter).generate(prompt, count)))


def test_decoding_across_the_limit(model: Any, target: CausalLM) -> None:
    prompt = text(50)
    tokens = prompt + answer(target, prompt, 40)
    for end in (LIMIT - 1, LIMIT, LIMIT + 1, 80, 90):
        logits = in_spans(model, tokens[: end - 1], *range(50, end))
        close = float(logits.max() - logits[tokens[end - 1]])
        assert close < 1e-3, end


@pytest.mark.parametrize("wrong", [(), (57, 63, 64, 65, 70), range(0, 200, 3)])
def test_drafting_across_the_limit_is_lossless(target: CausalLM, wrong: Any) -> None:
    """Though a pass over drafts reaches beyond the limit before the text does."""
    for start in (30, 50, 59, 80):
        known = text(start) + answer(target, text(start), 60)
        padded = known + [0] * 10
        assert answer(target, text(start), 60, Oracle(padded, wrong)) == known[start:]


def test_a_batch_is_each_by_itself(target: CausalLM) -> None:
    prompts = [text(count, seed=count) for count in (20, 55, 63, 90)]
    batch = Batch(target)
    requests = [batch.add(prompt, 30) for prompt in prompts]
    while batch.step():
        pass
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == answer(target, prompt, 30)


class TestRewinding:
    """What is read behind a rewind is what a session says that was never elsewhere."""

    def fresh(self, target: CausalLM, *prompts: list[int]) -> torch.Tensor:
        session = Session(target)
        for prompt in prompts:
            found = last(session, prompt)
        return found

    @pytest.mark.parametrize("length", [0, 10, 40, LIMIT, LIMIT + 1, 90])
    @pytest.mark.parametrize("more", [5, 70])
    def test_into_a_long_prompt(self, target: CausalLM, length: int, more: int) -> None:
        session = Session(target)
        last(session, text(100))
        session.rewind(length)
        found = last(session, text(more, seed=1))
        own = text(100)[:length] + text(more, seed=1)
        torch.testing.assert_close(found, self.fresh(target, own), **CLOSE)

    def test_to_before_a_long_prompt(self, target: CausalLM) -> None:
        session = Session(target)
        last(session, text(30))
        last(session, text(60, seed=1))
        session.rewind(30)
        found = last(session, text(8, seed=2))
        expected = self.fresh(target, text(30) + text(8, seed=2))
        torch.testing.assert_close(found, expected, **CLOSE)

    def test_between_answers(self, target: CausalLM) -> None:
        """Another arm on the same prefix says the same."""
        session, prompt = Session(target), text(40)
        first = written(list(session.generate(prompt, 50)))
        for length in (40, 30):
            session.rewind(length)
            again = written(list(session.generate(prompt[length:] or first[:1], 40)))
            assert again == (first[:40] if length < 40 else first[1:41])


def test_static_rows_are_refused_and_not_asked_for(target: CausalLM) -> None:
    session = Session(target)
    list(session.generate(text(20), 3))
    rounds = StaticRounds(session)
    assert not rounds.fits(40)
    with pytest.raises(SharpDraftError, match="'longrope' have no static rows"):
        StaticRows(session.cache, torch.tensor([3]), 2, 64, target.rotary)


def test_it_would_be_seen(model: Any, target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the table chosen once and for all, by the pass alone, or never reset."""

    def far(*prompts: list[int], rewind: int | None = None) -> float:
        session = Session(target)
        for i, prompt in enumerate(prompts):
            if i and rewind is not None:
                session.rewind(rewind)
            found = last(session, prompt)
        whole = [token for prompt in prompts for token in prompt]
        if rewind is not None:
            whole = prompts[0][:rewind] + prompts[1]
        return float((found - in_spans(model, whole, len(whole))).abs().max())

    assert far(text(40)) < 1e-3 > far(text(100)) and far(text(100), text(9), rewind=20) < 1e-3
    at = Rotary.at
    with monkeypatch.context() as patch:
        patch.setattr(Rotary, "at", lambda self, start, count, since: at(self, start, count, 0))
        assert far(text(40)) > 1e-2
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "reads", lambda self, start, end: None)
        assert far(text(100)) > 1e-2
    with monkeypatch.context() as patch:
        patch.setattr(
            KVCache, "rewind", lambda self, n: setattr(self, "length", min(self.length, n - 1))
        )
        assert far(text(100), text(9), rewind=20) > 1e-2


@pytest.mark.parametrize("length", [40, 100])
def test_a_draft_lm_reads_a_prompt_as_one(
    model: Any, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Keys are those of one pass, beside a target that turns the same at every length."""
    monkeypatch.setattr(pard, "_READ_ROWS", 16)
    draft_lm = CausalLM.of(model)
    other = CausalLM.of(make_model("llama"))
    session = Session(other, pard.Pard(draft_lm, 3, other))
    session.read(text(length))
    session.catch_up()
    cache = DynamicCache()
    model(torch.tensor([text(length)]), cache=cache, use_cache=True)
    for layer, expected in enumerate(cache.layers):
        found = session.drafts.keys.at(layer)[0][:, :, :length]
        torch.testing.assert_close(found, expected.keys, **CLOSE)
    session.rewind(30)
    assert session.drafts.keys.length == (29 if length <= LIMIT else 0)
