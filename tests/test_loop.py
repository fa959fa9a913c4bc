"""The loop from outside: whatever is drafted, the text is the target's own greedy text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import (
    BLOCK,
    POSITIONS,
    PROMPT,
    VOCAB,
    Oracle,
    Tiny,
    continuation,
    make_drafter,
    make_model,
)
from sharpdraft.decode import session as loop
from sharpdraft.decode.session import Round, Session, replay
from sharpdraft.errors import SharpDraftError
from sharpdraft.method.policies import Constant, FixedSlope
from sharpdraft.model.cache import KVCache
from sharpdraft.model.causal_lm import CausalLM

LOW = FixedSlope(33)  # Scales from 34 Keys on, as far as the tiny targets' contexts go.
ARMS = {
    "ar": (False, None),
    "frozen": (True, None),
    "sharpdraft": (True, LOW),
    "fixed": (True, Constant(1.4)),
}


def set_arm(session: Session, name: str) -> None:
    session.drafting, session.policy = ARMS[name]


def written(rounds: list[Round]) -> list[int]:
    return [token for done in rounds for token in done.tokens]


def check_caches(session: Session) -> None:
    """Everything but the last token is cached, in target and drafter alike."""
    assert session.cache.length == len(session.tokens) - 1
    if session.drafter is not None and session.drafting:
        assert session.drafts.length == session.cache.length


# Losslessness


@pytest.mark.parametrize("arm", ARMS)
def test_text_is_the_targets_own(tiny: Tiny, arm: str) -> None:
    session = Session(tiny.target, make_drafter(tiny.target))
    set_arm(session, arm)
    rounds = list(session.generate(tiny.text[:PROMPT], 150))
    assert session.tokens == tiny.text[: PROMPT + 150]
    assert written(rounds) == session.tokens[PROMPT:]
    check_caches(session)
    if arm == "ar":
        assert all(r.drafted == r.accepted == 0 and len(r.tokens) == 1 for r in rounds)
    else:  # Otherwise the test would say nothing about accepted drafts.
        assert len({r.accepted for r in rounds}) >= 4


@pytest.mark.parametrize("arm", ["frozen", "sharpdraft"])
@pytest.mark.parametrize("block", range(2, BLOCK + 1))
def test_every_block_size_and_length(llama: Tiny, arm: str, block: int) -> None:
    session = Session(llama.target, make_drafter(llama.target), block=block)
    set_arm(session, arm)
    for count in (1, 2, 3, block, block + 1, 23):
        for start in (PROMPT, PROMPT + 60):
            session.rewind(0)
            rounds = list(session.generate(llama.text[:start], count))
            assert session.tokens == llama.text[: start + count]
            assert session.finish == "length"
            assert all(r.drafted <= block - 1 for r in rounds)
            check_caches(session)


def test_short_prompts(tiny: Tiny) -> None:
    session = Session(tiny.target, make_drafter(tiny.target), LOW)
    for prompt in ([7], [50, 1], [12, 12, 3, 40, 9]):
        answer = continuation(tiny.model, prompt, 45)
        session.rewind(0)
        assert written(list(session.generate(prompt, 45))) == answer


def test_prompt_is_read_in_chunks(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_PREFILL_ROWS", 16)
    for prompt in (15, 16, 17, 32, 33, 70):
        session = Session(llama.target, make_drafter(llama.target), LOW)
        whole = llama.text[:PROMPT] + llama.text[PROMPT : PROMPT + prompt]
        list(session.generate(whole, 30))
        assert session.tokens == llama.text[: len(whole) + 30]
        check_caches(session)


def test_turns_arms_and_rewinding_on_one_session(tiny: Tiny) -> None:
    """A conversation whose arm changes at every try: each answer is what transformers writes behind
    all before."""
    session = Session(tiny.target, make_drafter(tiny.target))
    said: list[int] = []
    for turn, prompt in enumerate(([5, 9, 33, 2], [41], [8, 60, 13, 13, 27])):
        answer = continuation(tiny.model, said + prompt, 16)
        names = list(ARMS)
        for name in names[turn:] + names[:turn]:
            session.rewind(len(said))
            set_arm(session, name)
            assert written(list(session.generate(prompt, 16))) == answer, name
            assert session.tokens == said + prompt + answer
            check_caches(session)
        # AR left the drafter without its context: drafting goes on from where it last had it.
        session.rewind(len(said))
        session.drafting = True
        list(session.generate(prompt, 16))
        said += prompt + answer


def test_drafting_after_an_answer_without_it(llama: Tiny) -> None:
    """The second answer is AR's; back where drafting was switched off, the drafter has seen all
    there is."""
    session = Session(llama.target, make_drafter(llama.target))
    list(session.generate(llama.text[:PROMPT], 10))
    prompt = [9, 30, 2]
    answer = continuation(llama.model, session.tokens + prompt, 20)
    for arm in ("ar", "frozen", "ar", "sharpdraft"):
        set_arm(session, arm)
        session.rewind(PROMPT + 10)
        assert written(list(session.generate(prompt, 20))) == answer


def test_rewinding_twice_before_an_answer_without_drafting(llama: Tiny) -> None:
    """Two tokens are then unread; AR reads both, and the drafter must not be left one behind."""
    session = Session(llama.target, make_drafter(llama.target))
    list(session.generate(llama.text[:PROMPT], 10))
    last = session.tokens[-1]
    session.rewind(PROMPT + 9)
    session.tokens.append(last)
    prompt = [9, 30, 2]
    answer = continuation(llama.model, session.tokens + prompt, 20)
    for arm in ("ar", "frozen", "sharpdraft", "ar"):
        set_arm(session, arm)
        session.rewind(PROMPT + 10)
        assert written(list(session.generate(prompt, 20))) == answer
    session.rewind(PROMPT + 13 + 8)
    assert session.round(BLOCK).tokens[0] == answer[8]


def test_round_behind_a_rewind_goes_on_from_the_last_token(llama: Tiny) -> None:
    session = Session(llama.target, make_drafter(llama.target))
    list(session.generate(llama.text[:PROMPT], 40))
    session.rewind(PROMPT + 15)
    check_caches(session)
    done = session.round(BLOCK)
    assert session.tokens == llama.text[: PROMPT + 15 + len(done.tokens)]
    session.rewind(0)
    assert session.cache.length == session.drafts.length == 0


def test_drafting_behind_text_written_without_it(llama: Tiny) -> None:
    """The drafter reads what it has not seen, and then drafts as if it had seen it at once."""
    seen = Session(llama.target, make_drafter(llama.target))
    late = Session(llama.target, make_drafter(llama.target), drafting=False)
    for session in (seen, late):
        list(session.generate(llama.text[:PROMPT], 10))
        session.drafting = True
    ahead = [session.round(BLOCK) for session in (seen, late)]
    assert (ahead[0].tokens, ahead[0].accepted) == (ahead[1].tokens, ahead[1].accepted)
    check_caches(late)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_oracle_with_planted_errors(llama: Tiny, data: st.DataObject) -> None:
    """Accept counts from none to all, and every end of an answer, against a count of what should
    happen."""
    block = data.draw(st.integers(2, BLOCK), label="block")
    prompt = data.draw(st.integers(PROMPT, PROMPT + 40), label="prompt")
    budget = data.draw(st.integers(1, 30), label="max_new_tokens")
    capacity = data.draw(
        st.sampled_from([POSITIONS, prompt + data.draw(st.integers(1, 30))]), label="capacity"
    )
    wrong = data.draw(st.sets(st.integers(prompt + 1, prompt + 31), max_size=12), label="wrong")
    stop_at = data.draw(st.none() | st.integers(prompt, prompt + 25), label="stop_at")
    stop = () if stop_at is None else (llama.text[stop_at], 63)

    room = capacity - prompt
    answer = llama.text[prompt : prompt + min(budget, room)]
    finish = "length" if budget <= room else "context"
    ends = next((i for i, token in enumerate(answer) if token in stop), None)
    if ends is not None:
        answer, finish = answer[: ends + 1], "stop"

    oracle: Any = Oracle(llama.text, wrong)
    session = Session(llama.target, oracle, block=block, capacity=capacity)
    rounds = list(session.generate(llama.text[:prompt], budget, stop))
    assert written(rounds) == answer
    assert session.tokens == llama.text[:prompt] + answer
    assert session.finish == finish
    check_caches(session)
    first, *rest = rounds
    assert (first.tokens, first.context, first.drafted, first.accepted) == (
        (answer[0],),
        prompt,
        0,
        0,
    )
    at, left = prompt, min(budget, room) - 1
    for number, done in enumerate(rest, 1):
        drafted = min(block, left) - 1
        guessed = next((i for i in range(drafted) if at + 1 + i in wrong), drafted)
        assert (done.context, done.drafted) == (at, drafted)
        if number < len(rest) or finish != "stop":
            assert (done.accepted, len(done.tokens)) == (guessed, guessed + 1)
        else:
            assert len(done.tokens) <= guessed + 1
            assert done.accepted == len(done.tokens) - 1
        at, left = at + len(done.tokens), left - len(done.tokens)


def test_perfect_oracle_writes_whole_blocks(llama: Tiny) -> None:
    oracle: Any = Oracle(llama.text)
    session = Session(llama.target, oracle, LOW)
    rounds = list(session.generate(llama.text[:PROMPT], 1 + 5 * BLOCK))
    assert [(r.drafted, r.accepted, len(r.tokens)) for r in rounds[1:]] == [
        (BLOCK - 1, BLOCK - 1, BLOCK)
    ] * 5
    assert oracle.policies == [LOW] * 5
    assert all(r.draft_seconds > 0 and r.verify_seconds > 0 for r in rounds[1:])


def test_context_fills_to_its_last_token(tiny: Tiny) -> None:
    for arm in ARMS:
        session = Session(tiny.target, make_drafter(tiny.target), capacity=PROMPT + 30)
        set_arm(session, arm)
        list(session.generate(tiny.text[:PROMPT], 1000))
        assert (session.tokens, session.finish, session.room) == (
            tiny.text[: PROMPT + 30],
            "context",
            0,
        )
        with pytest.raises(SharpDraftError, match="does not fit: 0 of 50 are left"):
            session.read([1])


def test_context_fills_to_the_targets_last_position(llama: Tiny) -> None:
    session = Session(llama.target, make_drafter(llama.target), LOW)
    list(session.generate(llama.text[:-1], 1000))
    assert (len(session.tokens), session.finish) == (POSITIONS, "context")
    assert session.tokens == llama.text[:-1] + continuation(
        llama.model, llama.text[:-1], POSITIONS - len(llama.text) + 1
    )


def test_session_ends_early_when_the_caller_stops_reading(llama: Tiny) -> None:
    session = Session(llama.target, make_drafter(llama.target))
    rounds = session.generate(llama.text[:PROMPT], 100)
    for _ in range(5):
        next(rounds)
    rounds.close()
    check_caches(session)
    assert session.tokens == llama.text[: len(session.tokens)]
    prompt = [3, 44]
    expected = continuation(llama.model, session.tokens + prompt, 20)
    assert written(list(session.generate(prompt, 20))) == expected


# Bad input


@pytest.fixture
def session(llama: Tiny) -> Session:
    return Session(llama.target, make_drafter(llama.target), LOW, capacity=100)


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


@pytest.mark.parametrize("block", [-1, 0, 1, BLOCK + 1])
def test_block_that_does_not_fit(llama: Tiny, block: int) -> None:
    with pytest.raises(
        SharpDraftError, match=f"block size {block}: this drafter drafts blocks of 2 to {BLOCK}"
    ):
        Session(llama.target, make_drafter(llama.target), block=block)


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
    session = Session(CausalLM(model))
    with pytest.raises(SharpDraftError, match="the target's logits are NaN or infinite"):
        list(session.generate([1, 2, 3], 5))


# Replay


def figures(rounds: Iterable[Round]) -> list[tuple[Any, ...]]:
    return [(r.tokens, r.context, r.drafted, r.accepted) for r in rounds]


@pytest.mark.parametrize("arm", ["frozen", "sharpdraft", "fixed"])
def test_replay_is_the_live_run_without_the_target(tiny: Tiny, arm: str) -> None:
    session = Session(tiny.target, make_drafter(tiny.target))
    set_arm(session, arm)
    live = figures(list(session.generate(tiny.text[:PROMPT], 100))[1:])
    keys, values, length = (
        session.drafts.keys.clone(),
        session.drafts.values.clone(),
        session.drafts.length,
    )
    calls: list[int] = []
    assert (
        figures(replay(session, PROMPT, ARMS[arm][1], lambda layer, mass: calls.append(layer)))
        == live
    )
    assert calls == [0, 1] * sum(r[2] > 0 for r in live)
    assert session.drafts.length == length
    # Every bit up to the end of the text is as it was; what lies beyond is nobody's.
    assert torch.equal(session.drafts.keys[..., :length, :], keys[..., :length, :])
    assert torch.equal(session.drafts.values[..., :length, :], values[..., :length, :])


def test_replay_on_a_read_text_equals_live_rounds(tiny: Tiny) -> None:
    """As the bench uses it: AR's text, read in one piece, under policies other than the one that
    wrote it."""
    count = 90
    drafter = make_drafter(tiny.target)
    reader = Session(tiny.target, drafter)
    reader.read(tiny.text[: PROMPT + count])
    reader.cache.length = reader.drafts.length = len(reader.tokens) - 1
    seen = []
    for arm in ("frozen", "sharpdraft", "fixed"):
        live = Session(tiny.target, drafter)
        set_arm(live, arm)
        rounds = figures(list(live.generate(tiny.text[:PROMPT], count))[1:])
        assert figures(replay(reader, PROMPT, ARMS[arm][1])) == rounds
        seen.append([r[3] for r in rounds])
    assert seen[0] != seen[1] and seen[0] != seen[2], (
        "the policies must differ for this to say anything"
    )


def test_replay_left_early_restores_the_cache(llama: Tiny) -> None:
    session = Session(llama.target, make_drafter(llama.target))
    list(session.generate(llama.text[:PROMPT], 60))
    keys, length = session.drafts.keys.clone(), session.drafts.length
    for start in (PROMPT, PROMPT + 30, len(session.tokens) - 3):
        rounds = replay(session, start, LOW)
        next(rounds)
        rounds.close()
        assert session.drafts.length == length
        assert torch.equal(session.drafts.keys[..., :length, :], keys[..., :length, :])
    list(session.generate([9], 20))
    before = [*llama.text[: PROMPT + 60], 9]
    assert session.tokens == before + continuation(llama.model, before, 20)


def test_replay_after_a_stop(llama: Tiny) -> None:
    """Where a stop token ended the text, the live round may have drafted beyond it: all rounds
    before agree."""
    stop = llama.text[PROMPT + 90]
    session = Session(llama.target, make_drafter(llama.target), LOW)
    live = figures(list(session.generate(llama.text[:PROMPT], 150, (stop,)))[1:])
    assert session.finish == "stop"
    again = figures(replay(session, PROMPT, LOW))
    assert again[: len(live) - 1] == live[:-1]
    assert [t for r in again for t in r[0]] == [t for r in live for t in r[0]]


# Cache


def test_cache_writes_where_it_is_told_and_rolls_back_by_length() -> None:
    cache = KVCache(2, 3, 4, 8, batch=2)
    keys = torch.randn(2, 3, 5, 4)
    cache.write(1, 0, keys, -keys)
    cache.length = 5
    more = torch.randn(2, 3, 2, 4)
    all_keys, all_values = cache.write(1, 3, more, -more)
    assert torch.equal(all_keys, torch.cat((keys[:, :, :3], more), dim=2))
    assert torch.equal(all_values, -all_keys)
    assert cache.capacity == 8 and cache.length == 5  # The caller says what is valid.
