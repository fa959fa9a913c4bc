"""What the loop asks of a drafter, whatever its family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from torch import Tensor

from ..method.scale import Policy

# Called with the layer's index and the top-k attention mass of its proposal rows, [heads, rows].
MassProbe = Callable[[int, Tensor], None]


# Chooses tokens int64 [rows] from logits [rows, draft vocab] and the tokens these stand for, int64
# [draft vocab]; None for those of the target in order.
Pick = Callable[[Tensor, Tensor | None], Tensor]


def likeliest(logits: Tensor, token_of: Tensor | None) -> Tensor:
    """The greedy Pick."""
    choice = logits.argmax(-1)
    return choice if token_of is None else token_of[choice]


class DraftCache(Protocol):
    """What a drafter keeps of the verified tokens.

    `length` is how many; a smaller one rolls back. `capacity`: positions that can be read or
    drafted at. `blank` and `borrowed` are as in KVCache.
    """

    length: int

    @property
    def capacity(self) -> int: ...

    def blank(self) -> None: ...

    def borrowed(self, start: int, rows: int) -> AbstractContextManager[None]: ...


Cache = TypeVar("Cache", bound=DraftCache)


class Drafter(Protocol[Cache]):
    """A drafter bound to its target.

    taps: layers of the target whose output hidden states it reads. block_size: tokens of a block,
    anchor included, that it drafts by default; longest_block: at most.
    """

    taps: tuple[int, ...]
    block_size: int
    longest_block: int

    def new_cache(self, capacity: int) -> Cache:
        """A cache for contexts of `capacity` tokens."""
        ...

    def observe(
        self, caches: Sequence[Cache], tokens: Sequence[Sequence[int]], features: Sequence[Tensor]
    ) -> None:
        """Append each request's verified tokens: their ids, and the tapped hidden states of all of
        them, one request behind the other, each [1, rows, hidden]."""
        ...

    def catch_up(self, caches: Sequence[Cache], policies: Sequence[Policy | None]) -> None:
        """Do now what the next draft would have to do for the tokens that were observed."""
        ...

    def propose(
        self,
        caches: Sequence[Cache],
        anchors: Sequence[int],
        count: int,
        policies: Sequence[Policy | None],
        picks: Sequence[Pick],
        probe: MassProbe | None = None,
    ) -> Tensor:
        """Draft `count` tokens behind each request's anchor, which stands behind what was observed.
        int64 [requests, count].

        policies: each scales its request's Queries by the Keys that each row sees; None is the
        drafter as released. Cached Keys and Values are never touched. picks: each chooses its
        request's tokens, of all rows at once or one by one along a chain. probe: called with the
        top-k attention mass of the proposal rows of a single request.
        """
        ...

    def propose_fixed(
        self,
        cache: Cache,
        start: Tensor,
        anchor: Tensor,
        count: int,
        policy: Policy | None,
        keys: int,
    ) -> Tensor:
        """Draft greedily as `propose` does, int64 [count], with nothing but operations on the
        device.

        start: the anchor's position, int64 [1], at least `count + 1`; anchor: int64 [1]; keys: see
        `FixedRows`.
        """
        ...

    def observe_fixed(
        self, cache: Cache, start: Tensor, tokens: Tensor, features: Sequence[Tensor], keys: int
    ) -> None:
        """Take in a block, int64 [rows], whose first token stands at `start` [1], and its features,
        as `observe` does but for the length: of the block some tokens may turn out refused, and the
        next block is written over them."""
        ...

    def accept_fixed(self, cache: Cache, tokens: Sequence[int]) -> None:
        """Count what `observe_fixed` took in, once the host knows which tokens were accepted."""
        ...
