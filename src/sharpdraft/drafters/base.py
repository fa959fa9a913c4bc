"""What decoding asks of a drafter, whatever its family, and what it gets: a `Draft`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from ..method.settings import DraftSettings
from ..method.visible import View
from ..model.placement import Placement

# Called with the layer's index and the top-k attention mass of its proposal rows, [heads, rows].
MassProbe = Callable[[int, Tensor], None]

# Chooses tokens, int64 [rows], from logits [rows, draft vocab] and the tokens that these stand for,
# int64 [draft vocab] (None: the target's, in order). Beside them the probabilities that they were
# drawn with, float32 [rows, target vocab]; None for the likeliest token of each row.
Pick = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def likeliest(logits: Tensor, token_of: Tensor | None) -> tuple[Tensor, None]:
    """The greedy Pick; any other is of tokens that are drawn, at the latest when verified."""
    choice = logits.argmax(-1)
    return choice if token_of is None else token_of[choice], None


@dataclass(frozen=True)
class Draft:
    """What is drafted behind an anchor, the last token that is known.

    tokens: int64 [n], on the target's device. parents: which token each one follows, -1 being the
    anchor. probabilities: the distribution q that each was drawn from, float32 [n, vocab]; None
    where each is the drafter's likeliest.
    """

    tokens: Tensor
    parents: tuple[int, ...]
    probabilities: Tensor | None = None

    @classmethod
    def chain(cls, tokens: Tensor, probabilities: Tensor | None = None) -> Draft:
        """Tokens that follow each other."""
        return cls(tokens, tuple(range(-1, len(tokens) - 1)), probabilities)


class DraftCache(Protocol):
    """What a drafter keeps of the verified tokens.

    `length` is how many; a smaller one rolls back. `capacity`: positions that can be read or
    drafted at. `limit`, `reads`, `rewind`, `blank` and `borrowed` are as in KVCache.
    """

    length: int

    @property
    def capacity(self) -> int: ...

    @property
    def limit(self) -> int | None: ...

    def reads(self, start: int, end: int) -> None: ...

    def rewind(self, length: int) -> None: ...

    def blank(self) -> None: ...

    def borrowed(self, start: int, rows: int) -> AbstractContextManager[None]: ...


Cache = TypeVar("Cache", bound=DraftCache)


class Drafter(Protocol[Cache]):
    """A drafter bound to its target.

    taps: layers of the target whose output hidden states it reads. num_drafts: tokens that it
    drafts by default; max_drafts: at most. views: what the rows of each of its attention layers
    see, as its checkpoint has it; none for a drafter without attention. static: whether it drafts
    where the device alone knows how long the text is.

    `at` says where rows stand: behind what the caches hold, which the host knows, or at a slot that
    the device alone knows; then nothing is asked of the device.
    """

    taps: tuple[int, ...]
    num_drafts: int
    max_drafts: int
    views: tuple[View, ...]
    static: bool

    def new_cache(self, capacity: int) -> Cache:
        """A cache for contexts of `capacity` tokens."""
        ...

    def append(
        self,
        at: Placement,
        caches: Sequence[Cache],
        tokens: Tensor,
        counts: Sequence[int],
        features: Sequence[Tensor],
    ) -> None:
        """Take in tokens behind those of each cache; `commit` then says how many of them count.

        tokens: int64, `counts` of each request, one request behind the other. features: their
        tapped hidden states, each [1, rows, hidden].
        """
        ...

    def commit(
        self, at: Placement, caches: Sequence[Cache], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Count those of the appended tokens that are verified: the first ones."""
        ...

    def catch_up(self, caches: Sequence[Cache], settings: Sequence[DraftSettings]) -> None:
        """Do now what the next draft would have to do for the tokens that were appended."""
        ...

    def propose(
        self,
        at: Placement,
        caches: Sequence[Cache],
        anchors: Tensor,
        count: int,
        settings: Sequence[DraftSettings],
        picks: Sequence[Pick],
        probe: MassProbe | None = None,
    ) -> list[Draft]:
        """Draft `count` tokens, or fewer, behind each request's anchor, int64 [requests], which
        stands behind what its cache holds.

        settings: each request's own, of one view; its policy scales the request's Queries by the
        Keys that each row sees. Cached Keys and Values are never touched. picks: each chooses its
        request's tokens, of all rows at once or one by one along a chain. probe: called with the
        top-k attention mass of the proposal rows of a single request.
        """
        ...
