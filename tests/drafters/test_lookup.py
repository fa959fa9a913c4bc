"""Prompt lookup from outside: what it finds is what a search finds, at a cost that does not grow;
what it drafts changes no text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from sharpdraft import Constant, DraftSettings, Lookup, Session, SharpDraftError
from sharpdraft.decode.batch import Batch
from sharpdraft.decode.graphs import StaticRounds
from sharpdraft.decode.replay import replay
from sharpdraft.decode.session import Arm
from sharpdraft.drafters.lookup import LookupCache
from sharpdraft.drafters.suffixes import LONGEST, Suffixes
from sharpdraft.method.settings import FixedLength, Window
from support.drafters import append, make_drafter, propose
from support.families import drafter_of
from support.sessions import check_caches, settings_of
from support.tiny import PROMPT, Tiny, continuation


def searched(text: list[int]) -> tuple[int, int]:
    """How many of a text's last tokens have stood before, at most LONGEST, and where they last
    ended."""
    best, last = (0, -1), len(text) - 1
    for end in range(last - 1, -1, -1):
        length = 0
        while length <= end and length < LONGEST and text[end - length] == text[last - length]:
            length += 1
        best = max(best, (length, end), key=lambda found: found[0])
    return best


class Index(RuleBasedStateMachine):
    """Text comes and is taken away; all that the index says of what is left is what a search says
    of it."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.text = Suffixes(), list[int]()

    @rule(tokens=st.lists(st.integers(0, 2), max_size=20))
    def put(self, tokens: list[int]) -> None:
        self.index.put(len(self.text), tokens)
        self.text += tokens

    @rule(data=st.data(), times=st.integers(1, 3))
    def again(self, data: st.DataObject, times: int) -> None:
        """Long matches: what stood there comes again."""
        start = data.draw(st.integers(0, len(self.text)))
        self.put(self.text[start : start + 20] * times)

    @rule(data=st.data(), others=st.lists(st.integers(0, 3), max_size=5))
    def go_on_otherwise(self, data: st.DataObject, others: list[int]) -> None:
        at = data.draw(st.integers(0, len(self.text)))
        self.index.put(at, others)
        kept = self.text[at : at + len(others)] == others
        self.text = self.text if kept else self.text[:at] + others

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.text)))
        self.index.cut(length)
        del self.text[length:]

    @invariant()
    def is_what_a_search_finds(self) -> None:
        assert self.index.tokens.tolist() == self.text
        found = list(zip(self.index.lengths, self.index.ends, strict=True))
        assert found == [searched(self.text[: i + 1]) for i in range(len(self.text))]

    def teardown(self) -> None:
        self.index.cut(0)
        assert not self.index.nodes and not self.index.before and len(self.index.last) == 1


def test_what_is_found_is_what_a_search_finds() -> None:
    run_state_machine_as_test(
        Index, settings=settings(max_examples=60, stateful_step_count=12, deadline=None)
    )


class Counting(dict[int, int]):
    """How often nodes were looked for, made or removed."""

    steps = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.steps += 1
        return super().get(key, default)

    def __setitem__(self, key: int, value: int) -> None:
        self.steps += 1
        super().__setitem__(key, value)

    def __delitem__(self, key: int) -> None:
        self.steps += 1
        super().__delitem__(key)


def echoed(length: int) -> list[int]:
    own = torch.randint(0, 50_000, (length // 2,), generator=torch.Generator().manual_seed(1))
    return own.tolist() * 2


@pytest.mark.parametrize(
    "text_of",
    [lambda n: [5] * n, lambda n: [5, 6] * (n // 2), lambda n: list(range(n)), echoed],
    ids=["one token", "two tokens", "all new", "said twice"],
)
def test_a_token_costs_the_same_however_long_the_text(text_of: Any) -> None:
    for length in (1_000, 8_000):
        index = Suffixes()
        index.nodes = nodes = Counting()
        index.put(0, text_of(length))
        assert nodes.steps <= 3 * LONGEST * length
        assert len(nodes) <= 7 * length and len(index.before) <= LONGEST * length
        before = nodes.steps
        # To forget costs no more than to learn; to learn the same again is to see that it is known.
        index.put(0, text_of(length))
        assert nodes.steps == before
        index.cut(0)
        assert nodes.steps - before <= 2 * LONGEST * length and not nodes


def drafted(text: list[int], count: int = 7) -> list[int]:
    """What is drafted behind a text, whose last token is the anchor."""
    drafter = Lookup(target=type("Target", (), {"device": torch.device("cpu")})())
    cache = drafter.new_cache(100)
    append(drafter, cache, text[:-1])
    return propose(drafter, cache, text[-1], count).tolist()


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([], []),
        ([1, 2, 3, 4], []),
        ([9, 2, 3, 2], []),  # One token is no match.
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], [4, 5, 6, 7, 8]),
        ([1, 2, 7, 9, 1, 2, 8, 9, 5, 1, 2], [8, 9, 5]),  # The last of equal ones.
        ([3, 1, 2, 7, 9, 1, 2, 8, 9, 3, 1, 2], [7, 9, 1, 2, 8]),  # The longest of all.
        ([4, 4, 4], [4, 4, 4]),
        ([1, 2] * 6, [1, 2, 1, 2, 1, 2, 1]),
        ([1, 2, 3] * 4, [1, 2, 3, 1, 2, 3, 1]),
    ],
)
def test_what_is_drafted(text: list[int], drafts: list[int]) -> None:
    assert (drafted([0, *text]) if text else []) == drafts


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 32), st.integers(0, 3))
def test_drafts_are_what_followed_and_go_on_in_a_loop(
    text: list[int], count: int, repeats: int
) -> None:
    text = text * (1 + repeats)
    found = drafted(text, count)
    length, end = searched(text)
    assert (len(found) > 0) == (length >= 2) and len(found) <= count
    whole = text + found
    assert found == [whole[end + 1 + k] for k in range(len(found))]
    if length >= 8:
        assert len(found) == count


# Rolling back


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_cache_that_was_rolled_back_drafts_as_a_new_one(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=15)
    drafter = Lookup(target=type("Target", (), {"device": torch.device("cpu")})())
    cache, text = drafter.new_cache(500), list[int]()
    for _ in range(6):
        kind = data.draw(st.sampled_from(["go on", "length", "rewind", "borrow"]))
        at = data.draw(st.integers(0, len(text)))
        anchor = data.draw(st.integers(0, 2))
        if kind == "go on":
            text += (more := data.draw(tokens))
            append(drafter, cache, more)
        elif kind == "length":
            cache.length = at
            del text[at:]
        elif kind == "rewind":
            cache.rewind(at)
            del text[max(at - 1, 0) :]
        else:
            with cache.borrowed(at, 8):
                assert propose(drafter, cache, anchor, 7).tolist() == drafted([*text[:at], anchor])
        assert cache.length == len(text)
        assert propose(drafter, cache, anchor, 7).tolist() == drafted([*text, anchor])


def test_nothing_is_drafted_from_what_was_rolled_back() -> None:
    drafter = Lookup(target=type("Target", (), {"device": torch.device("cpu")})())
    cache = drafter.new_cache(100)
    append(drafter, cache, [1, 2, 3, 4, 5, 9, 9, 1, 2, 3])
    cache.length = 3
    assert propose(drafter, cache, 4, 7).tolist() == []
    append(drafter, cache, [4, 7, 1, 2])
    assert propose(drafter, cache, 3, 7).tolist() == [4, 7, 1, 2, 3]


# In a session


def test_text_is_the_targets_own(tiny: Tiny) -> None:
    session = Session(tiny.target, Lookup(tiny.target))
    for prompt in (tiny.text[:PROMPT], [7, 8, 7, 8, 7], [3] * 30, list(range(9))):
        session.rewind(0)
        rounds = list(session.generate(prompt, 120))
        answer = continuation(tiny.model, prompt, 120)
        assert session.tokens == [*prompt, *answer]
        check_caches(session)
        # Every round was asked to draft, and none drafted what a search does not find.
        for done in rounds[1:]:
            matched = searched(session.tokens[: done.context + 1])[0] >= 2
            assert (done.drafted > 0) == (matched and done.asked > 0)
    assert any(r.accepted > 2 for r in rounds) and any(r.asked and not r.drafted for r in rounds)


def test_turns_and_arms_on_one_session(llama: Tiny) -> None:
    session = Session(
        llama.target, {"lookup": Lookup(llama.target), "dflash": make_drafter(llama.target)}
    )
    arms = [Arm("a", "lookup"), Arm("b", "dflash"), Arm("c", "lookup", settings_of(drafts=3))]
    said: list[int] = []
    for prompt in ([5, 9, 33, 2], [41], [5, 9, 33, 2]):
        answer = continuation(llama.model, said + prompt, 30)
        for arm in arms:
            session.rewind(len(said))
            session.use(arm)
            session.catch_up()
            rounds = list(session.generate(prompt, 30))
            assert session.tokens == [*said, *prompt, *answer]
            assert all(r.drafted <= 3 for r in rounds) or arm.name != "c"
        said = list(session.tokens)
        session.read_along()


def test_replay_is_what_a_live_run_does(tiny: Tiny) -> None:
    def shown(rounds: Any) -> list[tuple[Any, ...]]:
        return [(r.tokens, r.context, r.drafted, r.accepted, r.asked) for r in rounds]

    session = Session(tiny.target, Lookup(tiny.target))
    live = shown(list(session.generate(tiny.text[:PROMPT], 150))[1:])
    assert shown(replay(session, PROMPT)) == live == shown(replay(session, PROMPT))
    reader = Session(tiny.target, Lookup(tiny.target))
    reader.extend(tiny.text[: PROMPT + 150])
    assert shown(replay(reader, PROMPT)) == live
    # What was borrowed is given back: the answer goes on as if nothing had been replayed.
    again = list(session.generate([9], 20))
    assert again and session.tokens[-20:] == continuation(tiny.model, session.tokens[:-20], 20)
    check_caches(session)


def test_batches(llama: Tiny) -> None:
    """Requests with and without a match share a pass."""
    batch = Batch(llama.target, Lookup(llama.target))
    prompts = [llama.text[:PROMPT], [7, 8] * 6, list(range(20)), [3]]
    requests = [batch.add(prompt, 60) for prompt in prompts]
    mixed = False
    while written := batch.step():
        rounds = [done for _, done in written if done.asked]
        mixed |= len({done.drafted for done in rounds}) > 1 and any(not d.drafted for d in rounds)
    assert mixed
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.tokens == continuation(llama.model, prompt, 60)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (DraftSettings(Constant(1.4)), r"^scale \(fixed@1.4\): .* no attention"),
        (DraftSettings(view=Window(64)), r"^view \(window@64\): .* no attention"),
        (DraftSettings(length=FixedLength(33)), "drafts 1 to 32"),
    ],
)
def test_settings_without_a_meaning_are_refused(own: Any, said: str, llama: Tiny) -> None:
    with pytest.raises(SharpDraftError, match=said):
        Session(llama.target, Lookup(llama.target), own)


def test_rounds_of_fixed_shape_are_left_to_the_loop(llama: Tiny) -> None:
    for drafter, fits in ((Lookup(llama.target), False), (drafter_of("eagle3", llama), True)):
        session = Session(llama.target, drafter)
        session.prefill(llama.text[:40])
        assert StaticRounds(session).fits(50) == fits


def test_memory_is_the_texts() -> None:
    cache = LookupCache(100)
    for _ in range(5):
        cache.take(list(range(50)))
        cache.length = 0
    assert len(cache.index) == 50
