"""The loop from outside: whatever is drafted, the text is the target's own greedy text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharpdraft.decode import session as loop
from sharpdraft.decode.session import Session
from sharpdraft.errors import SharpDraftError
from sharpdraft.method.policies import FixedSlope
from support.drafters import Oracle, make_drafter
from support.sessions import AR, ARMS, check_caches, set_arm, settings_of, use, written
from support.tiny import BLOCK, POSITIONS, PROMPT, Tiny, continuation

LOW = FixedSlope(33)  # Scales from 34 Keys on, as far as the tiny targets' contexts go.


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
    session = Session(llama.target, make_drafter(llama.target))
    use(session, ARMS[arm][1], block - 1)
    for count in (1, 2, 3, block, block + 1, 23):
        for start in (PROMPT, PROMPT + 60):
            session.rewind(0)
            rounds = list(session.generate(llama.text[:start], count))
            assert session.tokens == llama.text[: start + count]
            assert session.finish == "length"
            assert all(r.drafted <= block - 1 for r in rounds)
            check_caches(session)


def test_short_prompts(tiny: Tiny) -> None:
    session = Session(tiny.target, make_drafter(tiny.target), settings_of(LOW))
    for prompt in ([7], [50, 1], [12, 12, 3, 40, 9]):
        answer = continuation(tiny.model, prompt, 45)
        session.rewind(0)
        assert written(list(session.generate(prompt, 45))) == answer


def test_prompt_is_read_in_chunks(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_PREFILL_ROWS", 16)
    for prompt in (15, 16, 17, 32, 33, 70):
        session = Session(llama.target, make_drafter(llama.target), settings_of(LOW))
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
        use(session)
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
    late = Session(llama.target, make_drafter(llama.target))
    late.use(AR)
    for session in (seen, late):
        list(session.generate(llama.text[:PROMPT], 10))
        use(session)
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
    session = Session(llama.target, oracle, settings_of(drafts=block - 1), capacity=capacity)
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
    session = Session(llama.target, oracle, settings_of(LOW))
    rounds = list(session.generate(llama.text[:PROMPT], 1 + 5 * BLOCK))
    assert [(r.drafted, r.accepted, len(r.tokens)) for r in rounds[1:]] == [
        (BLOCK - 1, BLOCK - 1, BLOCK)
    ] * 5
    assert oracle.settings == [settings_of(LOW)] * 5
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
    session = Session(llama.target, make_drafter(llama.target), settings_of(LOW))
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
