"""The speculative loop: prefill, draft, verify, accept, roll back. One sequence, any drafter
family.

Names and the paper's: `start` is the anchor's position, which is the number of Keys the target has
cached; `accepted` drafts and one bonus token make a round's output, so that MAL is the mean of
accepted + 1.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..drafters.base import Drafter, MassProbe, likeliest
from ..errors import SharpDraftError
from ..method.scale import Policy
from ..model.causal_lm import CausalLM
from .graphs import FixedRounds
from .rounds import Round, Stopwatch
from .sampling import GREEDY, Sampler, Sampling, broken_logits

_PREFILL_ROWS = 512


@dataclass
class Session:
    """A conversation whose caches stay across turns.

    Without a drafter, or with `drafting` off, it is target-only decoding (AR): a verification of no
    drafts, by the same forward. `policy` (None is Frozen) and `drafting` may change between
    answers, so that arms are compared on one prefix: rewind, change, generate again.

    sampling: how tokens are chosen; greedily by default. It may change between answers too, each of
    which starts from its seed.

    block: tokens of a block, anchor included; default the drafter's. capacity: context length in
    tokens; default the target's. Raises SharpDraftError for one that does not fit.
    """

    target: CausalLM
    drafter: Drafter[Any] | None = None
    policy: Policy | None = None
    block: int | None = None
    capacity: int | None = None
    drafting: bool = True
    sampling: Sampling = GREEDY

    def __post_init__(self) -> None:
        limit = self.target.max_positions
        self.capacity = limit if self.capacity is None else self.capacity
        if not 2 <= self.capacity <= limit:
            raise SharpDraftError(
                f"context of {self.capacity} tokens asked for: this target takes 2 to {limit}"
            )
        self.size = 1
        self.taps: tuple[int, ...] = ()
        if self.drafter is not None:
            self.size = self.drafter.block_size if self.block is None else self.block
            if not 2 <= self.size <= self.drafter.longest_block:
                raise SharpDraftError(
                    f"block size {self.size}: this drafter drafts blocks of 2 to "
                    f"{self.drafter.longest_block} tokens (anchor included)"
                )
            self.taps = self.drafter.taps
            self.drafts = self.drafter.new_cache(self.capacity)
        self.cache = self.target.new_cache(self.capacity)
        self.tokens: list[int] = []
        self.sampler = Sampler(self.sampling)
        self.prefill_seconds = 0.0
        self.finish = ""
        self.fixed: FixedRounds | None = None

    @property
    def room(self) -> int:
        """Tokens that still fit into the context."""
        assert self.capacity is not None
        return self.capacity - len(self.tokens)

    def rewind(self, length: int) -> None:
        """Forget everything behind the first `length` tokens, the last of which is then unread, as
        behind an answer."""
        del self.tokens[length:]
        read = max(length - 1, 0)
        self.cache.length = min(self.cache.length, read)
        if self.drafter is not None:
            self.drafts.length = min(self.drafts.length, read)

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
        self.tokens.extend(prompt)
        return self._feed(len(self.tokens))

    def _feed(self, end: int) -> Tensor:
        """Run the tokens up to `end` that are not cached yet; returns the logits behind the last,
        [1, 1, vocab].

        What was written with `drafting` off is read again once it is on: the drafter needs its
        features.
        """
        drafter = self.drafter if self.drafting else None
        if drafter is not None:
            self.cache.length = self.drafts.length = min(self.cache.length, self.drafts.length)
        taps = () if drafter is None else self.taps
        while (past := self.cache.length) < end:
            # A multi-row forward over the rest of the context is cheap in chunks and needs one
            # chunk's memory.
            chunk = self.tokens[past : min(past + _PREFILL_ROWS, end)]
            logits, features, _ = self.target.forward(
                self._ids(chunk), self.cache, taps, logits_from=-1
            )
            if drafter is not None:
                drafter.observe([self.drafts], [chunk], features)
        return logits

    def _catch_up(self) -> None:
        """Read what was written with `drafting` or all reading off, up to the last token, which
        stays unread."""
        start = len(self.tokens) - 1
        drafting = self.drafting and self.drafter is not None
        if self.cache.length < start or (drafting and self.drafts.length < start):
            self._feed(start)

    def _take(self, written: list[int], stop: Collection[int]) -> list[int]:
        """Write a round's tokens, none behind a stop token; Keys of refused drafts lie beyond the
        cache's length then and are overwritten."""
        ends = (i + 1 for i, token in enumerate(written) if token in stop)
        written = written[: next(ends, None)]
        self.cache.length = len(self.tokens) - 1 + len(written)
        self.tokens.extend(written)
        return written

    def prefill(self, prompt: Sequence[int]) -> int:
        """Read a prompt and write the first token of its answer."""
        began = time.perf_counter()
        self.sampler = Sampler(self.sampling)
        logits = self.read(prompt)[0]
        (first,) = self.sampler.verify(logits, self.tokens, ())
        self.tokens.append(first)
        self.prefill_seconds = time.perf_counter() - began
        return first

    def round(
        self, limit: int, stop: Collection[int] = (), probe: MassProbe | None = None
    ) -> Round:
        """Draft, verify and accept once, writing at most `limit` tokens and none behind a stop
        token."""
        # A GPU is slower to be told what to do than to do it.
        if self.target.device.type == "cuda" and probe is None:
            self.fixed = self.fixed or FixedRounds(self)
            if self.fixed.fits(limit):
                return self.fixed.round(stop)
        return round_together([self], [limit], [stop], probe)[0]

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

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([tokens], dtype=torch.long, device=self.target.device)


def round_together(
    sessions: Sequence[Session],
    limits: Sequence[int],
    stops: Sequence[Collection[int]],
    probe: MassProbe | None = None,
) -> list[Round]:
    """One round of several sessions in the same passes, each at its own length; see
    `Session.round`.

    They share target and drafter; each has its own policy, sampling, drafting and block. The
    seconds in a Round are those of the whole pass.
    """
    target, drafter = sessions[0].target, sessions[0].drafter
    for session in sessions:
        session._catch_up()
    began = time.perf_counter()
    clock = Stopwatch(target.device)
    # draft: the block's tail may be shorter where little is left to write
    drafting = [s for s in sessions if s.drafting and drafter is not None]
    counts = [
        min(s.size, limit) - 1 if s.drafting and drafter else 0
        for s, limit in zip(sessions, limits, strict=True)
    ]
    proposed: dict[int, Tensor] = {}
    for count in sorted(set(counts) - {0}):
        assert drafter is not None
        group = [i for i, own in enumerate(counts) if own == count]
        drafts = drafter.propose(
            [sessions[i].drafts for i in group],
            [sessions[i].tokens[-1] for i in group],
            count,
            [sessions[i].policy for i in group],
            [sessions[i].sampler.drafts(sessions[i].tokens, target.vocab_size) for i in group],
            probe,
        )
        proposed |= dict(zip(group, drafts, strict=True))
    clock.mark()
    # verify: a session's row i says which token follows its block's first i + 1
    anchors = torch.tensor([[s.tokens[-1]] for s in sessions], device=target.device)
    ids = torch.cat(
        [
            part
            for i, anchor in enumerate(anchors)
            for part in (anchor, proposed.get(i))
            if part is not None
        ]
    )
    rows = [1 + count for count in counts]
    taps = sessions[0].taps if drafting else ()
    logits, features, _ = target.forward(ids[None], [s.cache for s in sessions], taps, rows=rows)
    values, best = logits[0].max(-1)
    # The one word that the host waits for; only sampling asks for more.
    *said, numbers = torch.cat((ids, best, values.isfinite().all()[None])).tolist()
    if not numbers:
        for session in sessions:
            session.cache.length = len(session.tokens) - 1
        raise broken_logits()
    rounds, first = [], 0
    read: list[list[int]] = []
    kept: list[Tensor] = []
    for session, own, count, stop in zip(sessions, logits[0].split(rows), rows, stops, strict=True):
        start = len(session.tokens) - 1
        anchor, *block = said[first : first + count]
        own_best = said[len(ids) + first :][:count]
        # accept: drafts while they hold, then the target's own token; roll back the rest
        written = session._take(session.sampler.verify(own, session.tokens, block, own_best), stop)
        if session.drafting and drafter is not None:
            read.append([anchor, *written[:-1]])
            kept.append(torch.arange(first, first + len(written)))
        first += count
        rounds.append(Round(tuple(written), start, count - 1, len(written) - 1, 0.0, 0.0))
    if drafter is not None and drafting:
        if len(sessions) > 1:
            index = torch.cat(kept).to(target.device)
            features = [f[:, index] for f in features]
        else:
            features = [f[:, : len(read[0])] for f in features]
        drafter.observe([s.drafts for s in drafting], read, features)
    drafted = clock.seconds()
    rest = time.perf_counter() - began - drafted
    return [
        replace(done, draft_seconds=drafted if done.drafted else 0.0, verify_seconds=rest)
        for done in rounds
    ]


def replay(
    session: Session, start: int, policy: Policy | None, probe: MassProbe | None = None
) -> Iterator[Round]:
    """The rounds that a policy would have had from the anchor at `start` to the end of a session's
    text.

    Decoding is lossless, so the target's text is known and only drafting runs: policies are
    compared on the same features in a fraction of the time. The session must hold the target's own
    text, read with drafting on.
    """
    drafter, cache, tokens = session.drafter, session.drafts, session.tokens
    assert drafter is not None
    while (left := len(tokens) - 1 - start) > 0:
        count = min(session.size, left) - 1
        accepted = 0
        began = time.perf_counter()
        if count > 0:
            # The block's Keys are written where the known text's are, and those are needed again.
            with cache.borrowed(start, count + 1):
                drafts = drafter.propose(
                    [cache], [tokens[start]], count, [policy], [likeliest], probe
                )[0].tolist()
            while accepted < count and drafts[accepted] == tokens[start + 1 + accepted]:
                accepted += 1
        written = tuple(tokens[start + 1 : start + 2 + accepted])
        yield Round(written, start, count, accepted, time.perf_counter() - began, 0.0)
        start += accepted + 1
