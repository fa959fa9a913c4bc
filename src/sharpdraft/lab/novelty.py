"""How much a text repeats itself: which positions are new, and what plain lookup would accept.

Lookup drafts without a model: the seven tokens that stand behind the latest earlier occurrence of
the longest suffix, of 2 to 12 tokens, of the text so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

GRAM = 4
"""A position is new where its last so many tokens stand together for the first time."""
_SHORTEST, _LONGEST, _DRAFTS = 2, 12, 7

_Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Repetition:
    """Sums over the positions of answers that have a token behind them.

    positions: how many; seen: those of them that are not new; accepted: drafts that lookup has
    right, summed over all positions. rounds, walked: rounds in which lookup alone would have
    written the answers, and the drafts accepted in them.
    """

    positions: int = 0
    seen: int = 0
    accepted: int = 0
    rounds: int = 0
    walked: int = 0

    @classmethod
    def of(cls, tokens: Sequence[int], first: int) -> Repetition:
        """Of the answer that starts at `first` and ends with the text."""
        end = len(tokens)
        inside = slice(first, max(end - 1, first))
        drafts = lookup(tokens)
        rounds = walked = 0
        at = first
        # A round that has one token left to write drafts nothing.
        while (left := end - 1 - at) > 1:
            right = min(int(drafts[at]), left - 1)
            rounds, walked, at = rounds + 1, walked + right, at + right + 1
        return cls(
            inside.stop - first,
            int((~new(tokens)[inside]).sum()),
            int(drafts[inside].sum()),
            rounds,
            walked,
        )

    @classmethod
    def total(cls, parts: Iterable[Mapping[str, int]]) -> Repetition:
        """The sum of what `asdict` made of several."""
        sums = dict.fromkeys(asdict(cls()), 0)
        for part in parts:
            sums = {name: value + part[name] for name, value in sums.items()}
        return cls(**sums)

    @property
    def share(self) -> float | None:
        """Share of positions whose last four tokens were seen before; None without positions."""
        return self.seen / self.positions if self.positions else None

    @property
    def mal(self) -> float | None:
        """Mean accepted length of lookup over its rounds, as in the tables; None without rounds."""
        return 1 + self.walked / self.rounds if self.rounds else None

    @property
    def mal_everywhere(self) -> float | None:
        """The same with every position as an anchor, so that passages which lookup passes in a few
        rounds count in full."""
        return 1 + self.accepted / self.positions if self.positions else None

    @property
    def figures(self) -> dict[str, float | None]:
        """What the sums say."""
        return {"share": self.share, "mal": self.mal, "mal_everywhere": self.mal_everywhere}


def new(tokens: Sequence[int]) -> NDArray[np.bool_]:
    """Whether the last four tokens, the position's own among them, stand together for the first
    time: bool [tokens]. The first three positions are new."""
    found = np.ones(len(tokens), dtype=bool)
    if len(tokens) >= GRAM:
        found[GRAM - 1 :] = _earlier(_grams(tokens)[GRAM]) < 0
    return found


def marks(tokens: Sequence[int], rounds: Sequence[Sequence[Any]]) -> str:
    """For each round (context, drafted, accepted) of a text, 1 where its anchor is new, else 0."""
    if not rounds:
        return ""
    at = new(tokens)
    return "".join("1" if at[context] else "0" for context, *_ in rounds)


def lookup(tokens: Sequence[int]) -> _Ids:
    """Drafts that lookup has right behind each position: int64 [tokens]. A match that reaches the
    position goes on with what it drafted itself, as a loop does."""
    text = np.asarray(tokens, dtype=np.int64)
    count = len(text)
    match = np.full(count, -1)
    for length, ids in _grams(tokens).items():
        if length >= _SHORTEST:
            earlier = _earlier(ids)
            ends = np.arange(length - 1, count)[earlier >= 0]
            match[ends] = earlier[earlier >= 0] + length - 1
    right = np.zeros(count, dtype=np.int64)
    # Those of which every draft so far was right.
    going = np.flatnonzero(match >= 0)
    for step in range(1, _DRAFTS + 1):
        going = going[going + step < count]
        going = going[text[match[going] + step] == text[going + step]]
        right[going] += 1
    return right


def _grams(tokens: Sequence[int]) -> dict[int, _Ids]:
    """By length from 1 to 12: a number for each run of so many tokens, the same for the same ones,
    [tokens - length + 1]."""
    single = np.unique(np.asarray(tokens, dtype=np.int64), return_inverse=True)[1]
    grams = {1: single}
    for length in range(2, min(_LONGEST, len(tokens)) + 1):
        both = grams[length - 1][:-1] * (len(tokens) + 1) + single[length - 1 :]
        grams[length] = np.unique(both, return_inverse=True)[1]
    return grams


def _earlier(ids: _Ids) -> _Ids:
    """The latest earlier place of each number, -1 where it stands for the first time."""
    order = np.argsort(ids, kind="stable")
    same = ids[order][1:] == ids[order][:-1]
    found = np.full(len(ids), -1)
    found[order[1:][same]] = order[:-1][same]
    return found
