"""A conversation with a target: its tokens, its caches, and the drafters that help it on."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..drafters.base import Drafter, MassProbe
from ..errors import SharpDraftError
from ..method.scale import Scale
from ..method.settings import DraftSettings, Host, as_settings
from ..model.causal_lm import CausalLM
from .graphs import StaticRounds
from .rounds import Round
from .sampling import GREEDY, Sampler, Sampling
from .step import RAGGED, step

_PREFILL_ROWS = 512

HOST = Host(
    "the lab",
    provides=("keys", "layer", "window", "sinks", "length"),
    lacks={"scores": "the lab's kernels show a policy no scores, only counts of visible Keys"},
)


@dataclass(frozen=True)
class Arm:
    """One way to decode: a name, a drafter and its settings. No drafter: the target alone (AR)."""

    name: str
    drafter: str | None = None
    settings: DraftSettings = field(default_factory=DraftSettings)


class Session:
    """A conversation whose caches stay across turns, and across arms.

    Target-only decoding (AR) is a verification of no drafts, by the same forward. What is used may
    change between answers, so that arms are compared on one prefix: rewind, `use` another arm,
    generate again. `sampling` may change between answers too, each of which starts from its seed.
    """

    def __init__(
        self,
        target: CausalLM,
        drafters: Drafter[Any] | Mapping[str, Drafter[Any]] | None = None,
        settings: DraftSettings | Scale | None = None,
        *,
        capacity: int | None = None,
        sampling: Sampling = GREEDY,
    ) -> None:
        """drafters: one, which is called "" and used with `settings` at once, or several by name,
        of which none is used until `use` says so. capacity: context length in tokens; default the
        target's.

        Raises SharpDraftError for a capacity that the target does not have, and as `use` does.
        """
        limit = target.max_positions
        capacity = limit if capacity is None else capacity
        if not 2 <= capacity <= limit:
            raise SharpDraftError(
                f"context of {capacity} tokens asked for: this target takes 2 to {limit}"
            )
        self.target, self.capacity, self.sampling = target, capacity, sampling
        several = isinstance(drafters, Mapping)
        self.drafters: dict[str, Drafter[Any]] = (
            dict(drafters) if isinstance(drafters, Mapping) else {"": drafters} if drafters else {}
        )
        self.cache = target.new_cache(capacity)
        self._caches = {name: each.new_cache(capacity) for name, each in self.drafters.items()}
        self._reading: tuple[str, ...] = ()
        self._static: StaticRounds | None = None
        self.tokens: list[int] = []
        self.sampler = Sampler(sampling)
        self.prefill_seconds = 0.0
        self.finish = ""
        if several:
            self.read_along()
        else:
            self.use(Arm("", "" if drafters else None, as_settings(settings)))

    def use(self, arm: Arm) -> None:
        """Decode this way from now on; tokens and caches stay.

        Raises SharpDraftError for a drafter that is not there, and for settings that the lab or the
        drafter cannot do.
        """
        if arm.drafter is None:
            self.drafter, self._reading = None, ()
        else:
            if arm.drafter not in self.drafters:
                raise SharpDraftError(f"there is no drafter '{arm.drafter}' in this session")
            drafter = self.drafters[arm.drafter]
            drafts = drafter.num_drafts
            arm.settings.check(HOST, layers=len(drafter.views), drafts=drafts)
            if not 1 <= (count := arm.settings.drafts or drafts) <= drafter.max_drafts:
                raise SharpDraftError(
                    f"length: {count} drafts a round, and this drafter drafts 1 to "
                    f"{drafter.max_drafts}"
                )
            self.drafter, self._reading = drafter, (arm.drafter,)
        self.arm = arm

    def read_along(self) -> None:
        """From now on every drafter takes in what is read, and none drafts."""
        self.arm, self.drafter, self._reading = None, None, tuple(self.drafters)

    drafter: Drafter[Any] | None
    arm: Arm | None

    @property
    def settings(self) -> DraftSettings:
        """Those of the arm in use."""
        return DraftSettings() if self.arm is None else self.arm.settings

    @property
    def num_drafts(self) -> int:
        """Tokens that are drafted in a round; 0 for AR."""
        return 0 if self.drafter is None else self.settings.drafts or self.drafter.num_drafts

    def drafts_behind(self, length: int) -> int:
        """Tokens that are drafted behind the first `length` ones: fewer than `num_drafts` where the
        drafter has fewer positions left, and none behind its last."""
        if self.drafter is None:
            return 0
        return max(min(self.num_drafts, self.drafts.capacity - (length - 1)), 0)

    @property
    def in_use(self) -> Drafter[Any]:
        """The drafter that is used, for who knows that there is one."""
        assert self.drafter is not None
        return self.drafter

    @property
    def drafts(self) -> Any:
        """The cache of the drafter in use."""
        return self._caches[self._reading[0]]

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose outputs are read by drafters that take in tokens."""
        return _taps([self.drafters[name] for name in self._reading])

    @property
    def room(self) -> int:
        """Tokens that still fit into the context."""
        return self.capacity - len(self.tokens)

    def rewind(self, length: int) -> None:
        """Forget everything behind the first `length` tokens, the last of which is then unread, as
        behind an answer."""
        del self.tokens[length:]
        for cache in (self.cache, *self._caches.values()):
            cache.rewind(length)

    def read(self, prompt: Sequence[int]) -> Tensor:
        """Take in tokens behind everything so far; returns the logits behind the last one, [1, 1,
        vocab].

        Raises SharpDraftError for an empty prompt, a token outside the vocabulary, or one that does
        not fit.
        """
        if not prompt:
            raise SharpDraftError("the prompt is empty: give at least one token")
        if min(prompt) < 0 or max(prompt) >= self.target.vocab_size:
            raise SharpDraftError(
                "the prompt has token ids outside the target's vocabulary of "
                f"{self.target.vocab_size}"
            )
        if len(prompt) >= self.room:
            raise SharpDraftError(
                f"the prompt of {len(prompt)} tokens does not fit: {max(self.room - 1, 0)} of "
                f"{self.capacity} are left"
            )
        start = min(self.cache.length, len(self.tokens))
        self.tokens.extend(prompt)
        for cache in (self.cache, *self._caches.values()):
            cache.reads(start, len(self.tokens))
        return self._read_to(len(self.tokens))

    def extend(self, tokens: Sequence[int]) -> None:
        """Put a known text behind everything so far; its last token stays unread, as behind an
        answer."""
        if len(tokens) > 1:
            self.read(tokens[:-1])
        self.tokens.extend(tokens[-1:])

    def catch_up(self) -> None:
        """Do now what the next draft would have to do for the tokens so far."""
        self.read_up()
        if self.drafter is not None:
            self.drafter.catch_up([self.drafts], [self.settings])

    def read_up(self) -> None:
        """Read what the target or the drafter in use has not read, up to the last token."""
        start = len(self.tokens) - 1
        lengths = [self._caches[name].length for name in self._reading]
        if min(self.cache.length, *lengths, start) < start:
            self._read_to(start)

    @torch.inference_mode()
    def _read_to(self, end: int) -> Tensor:
        """Run the tokens up to `end` that are not cached yet; returns the logits behind the last,
        [1, 1, vocab].

        What a drafter has missed is read again once it is to read: it needs the target's features.
        """
        caches = [self._caches[name] for name in self._reading]
        past = min(self.cache.length, *(cache.length for cache in caches), end)
        for cache in (self.cache, *caches):
            cache.length = past
        while past < end:
            # A multi-row forward over the rest of the context is cheap in chunks and needs one
            # chunk's memory.
            chunk = self.tokens[past : min(past + _PREFILL_ROWS, end)]
            ids, taps = torch.tensor([chunk], device=self.target.device), self.taps
            logits, features, _ = self.target.forward(ids, self.cache, taps, logits_from=-1)
            states = dict(zip(taps, features, strict=True))
            for name in self._reading:
                drafter, own = self.drafters[name], [self._caches[name]]
                mine = [states[tap] for tap in drafter.taps]
                drafter.append(RAGGED, own, ids[0], [len(chunk)], mine)
                drafter.commit(RAGGED, own, [chunk])
            past += len(chunk)
        return logits

    def write(self, tokens: Sequence[int], stop: Collection[int]) -> list[int]:
        """Write a round's tokens, none behind a stop token; all but the last have been read."""
        ends = (i + 1 for i, token in enumerate(tokens) if token in stop)
        written = list(tokens[: next(ends, None)])
        self.cache.length = len(self.tokens) - 1 + len(written)
        self.tokens.extend(written)
        return written

    def prefill(self, prompt: Sequence[int]) -> int:
        """Read a prompt and write the first token of its answer."""
        began = time.perf_counter()
        self.sampler = Sampler(self.sampling)
        logits = self.read(prompt)[0]
        (first,) = self.sampler.verify(logits, self.tokens)
        self.tokens.append(first)
        self.prefill_seconds = time.perf_counter() - began
        return first

    def round(
        self, limit: int, stop: Collection[int] = (), probe: MassProbe | None = None
    ) -> Round:
        """Draft, verify, accept and commit once, writing at most `limit` tokens and none behind a
        stop token."""
        # Launch-bound: replay CUDA graphs.
        if self.target.device.type == "cuda" and probe is None:
            self._static = self._static or StaticRounds(self)
            if self._static.fits(limit):
                return self._static.round(stop)
        return step([self], [limit], [stop], probe)[0]

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop: Collection[int] = (),
        probe: MassProbe | None = None,
    ) -> Iterator[Round]:
        """Answer a prompt round by round; the first round is the prefill's one token, with nothing
        drafted.

        Ends at a stop token, after `max_new_tokens`, or when the context is full; `finish` then
        says which: "stop", "length" or "context".
        """
        if max_new_tokens < 1:
            raise SharpDraftError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
        last = self.prefill(prompt)
        left = max_new_tokens - 1
        self.finish = ""
        yield Round((last,), self.cache.length, 0, 0, 0.0, self.prefill_seconds)
        while not self.finish:
            if last in stop:
                self.finish = "stop"
            elif left == 0:
                self.finish = "length"
            elif self.room == 0:
                self.finish = "context"
            else:
                done = self.round(min(left, self.room), stop, probe)
                last, left = done.tokens[-1], left - len(done.tokens)
                yield done


def _taps(drafters: Sequence[Drafter[Any]]) -> tuple[int, ...]:
    if len(drafters) == 1:
        return drafters[0].taps
    return tuple(sorted({tap for each in drafters for tap in each.taps}))
