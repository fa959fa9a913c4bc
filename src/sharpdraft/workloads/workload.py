"""What a workload is: a kind of text with a name, and how its sessions are made for a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .tasks import Task


@dataclass(frozen=True)
class Reader:
    """Who is to read the sessions.

    tokenizer: the target's. limit: its longest context, tokens. sessions: how many sessions are
    wanted; None for the workload's own number. held_out: the part that is kept out of training, or
    the other one.
    """

    tokenizer: Any
    limit: int
    sessions: int | None = None
    held_out: bool = True

    def text(self, text: str) -> Text:
        """A text with its lines' tokens counted."""
        lines = text.splitlines(keepends=True)
        ids = self.tokenizer(lines, add_special_tokens=False)["input_ids"] if lines else []
        return Text(tuple(lines), tuple(map(len, ids)))


@dataclass(frozen=True)
class Text:
    """Lines, and how many tokens each has by itself, which is about what it has in the text."""

    lines: tuple[str, ...]
    counts: tuple[int, ...]

    @cached_property
    def _sums(self) -> Any:
        return np.cumsum(self.counts)

    @property
    def tokens(self) -> int:
        """About how many there are."""
        return sum(self.counts)

    def cut(self, tokens: int) -> str:
        """Its first whole lines that have at most so many tokens."""
        lines = int(np.searchsorted(self._sums, tokens, side="right"))
        return "".join(self.lines[:lines])


@dataclass(frozen=True)
class Workload:
    """A kind of text to measure on.

    about: one line on what it is. source, licence: where its text comes from. tasks: its sessions
    for a reader; it raises SharpDraftError where their source is not installed. temperature: what
    it is measured at, unless a bench says otherwise.
    """

    name: str
    about: str
    source: str
    licence: str
    tasks: Callable[[Reader], Sequence[Task] | Iterator[Task]]
    temperature: float = 0.0
