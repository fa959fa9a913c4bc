"""One round of speculative decoding: draft, verify, accept, commit.

Names and the paper's: an anchor is the last known token, `context` its position, which is the
number of Keys the target holds; accepted drafts and one token of the target's own make a round's
output, so that MAL is the mean of accepted + 1. Many requests share the passes of a round. A
session's own loop, batches, CUDA graphs (`graphs`) and replays (`replay`) all run these four steps;
they differ in where rows stand (`Placement`) and in who says what is right.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..drafters.base import Draft, MassProbe
from ..method.settings import Window
from ..model.causal_lm import CausalLM
from ..model.placement import Placement, Ragged, Static
from .rounds import Round, Stopwatch
from .sampling import Sampler, broken_logits

if TYPE_CHECKING:
    from .session import Session

RAGGED = Ragged()


@torch.inference_mode()
def step(
    sessions: Sequence[Session],
    limits: Sequence[int],
    stops: Sequence[Collection[int]],
    probe: MassProbe | None = None,
) -> list[Round]:
    """One round of several sessions in the same passes, each at its own length.

    They share a target, and a drafter as far as they draft; each has its own settings, sampling and
    number of drafts, fewer where its limit (tokens to write) is near. stops: tokens that end each
    answer. The seconds in a Round are those of the whole pass.
    """
    for session in sessions:
        session.read_up()
    clock = Stopwatch(sessions[0].target.device)
    each = zip(sessions, limits, strict=True)
    counts = [min(s.drafts_behind(len(s.tokens)), limit - 1) for s, limit in each]
    anchors = torch.tensor([s.tokens[-1] for s in sessions], device=sessions[0].target.device)
    drafts = draft(RAGGED, sessions, anchors, counts, probe)
    clock.mark()
    verified = verify(RAGGED, sessions, anchors, drafts)
    accepted = accept([s.sampler for s in sessions], [s.tokens for s in sessions], drafts, verified)
    rounds = commit(RAGGED, sessions, verified, accepted, counts, stops)
    return clock.times_of(rounds)


def draft(
    at: Placement,
    sessions: Sequence[Session],
    anchors: Tensor,
    counts: Sequence[int],
    probe: MassProbe | None = None,
) -> list[Draft]:
    """Each session's drafter proposes tokens behind the anchor, int64 [sessions]; sessions that
    draft equally many under one view share a pass."""
    groups: dict[tuple[int, Window | None], list[int]] = {}
    for i, (session, count) in enumerate(zip(sessions, counts, strict=True)):
        if count > 0:
            groups.setdefault((count, session.settings.view), []).append(i)
    drafts = [Draft.chain(anchors[:0])] * len(sessions)
    for (count, _), group in groups.items():
        own = [sessions[i] for i in group]
        proposed = own[0].in_use.propose(
            at,
            [s.drafts for s in own],
            anchors if len(own) == len(sessions) else anchors[group],
            count,
            [s.settings for s in own],
            [s.sampler.pick(s.tokens, s.target.vocab_size) for s in own],
            probe,
        )
        for i, each in zip(group, proposed, strict=True):
            drafts[i] = each
    return drafts


@dataclass(frozen=True)
class Verified:
    """What the target says of anchors and drafts, row by row of all requests: their ids int64
    [rows], logits [rows, vocab], the likeliest token of each, int64 [rows], and whether all logits
    are numbers, bool []; the drafter's features, each [1, rows, hidden]; rows of each request."""

    ids: Tensor
    logits: Tensor
    best: Tensor
    numbers: Tensor
    features: Sequence[Tensor]
    counts: Sequence[int]


def verify(
    at: Placement, sessions: Sequence[Session], anchors: Tensor, drafts: Sequence[Draft]
) -> Verified:
    """One pass of the target over anchors and drafts: row i of a request says which token follows
    its anchor and the first i drafts."""
    target: CausalLM = sessions[0].target
    counts = [1 + len(each.tokens) for each in drafts]
    pairs = zip(anchors.split(1), drafts, strict=True)
    ids = torch.cat([part for anchor, each in pairs for part in (anchor, each.tokens)])
    taps = next((s.taps for s in sessions if s.taps), ())
    rows = at.rows([s.cache for s in sessions], counts, target.rotary)
    logits, features, _ = target.run(ids[None], rows, taps)
    values, best = logits[0].max(-1)
    return Verified(ids, logits[0], best, values.isfinite().all(), features, counts)


def accept(
    samplers: Sequence[Sampler],
    texts: Sequence[Sequence[int]],
    drafts: Sequence[Draft],
    verified: Verified,
) -> list[list[int]]:
    """Of each request the drafts that hold, then one token of the target's own. texts: its tokens
    so far, the anchor last. Raises SharpDraftError for logits that are not numbers."""
    # All that the host waits for; only sampling asks for more.
    words = torch.cat((verified.ids, verified.best, verified.numbers[None].long())).tolist()
    if not words[-1]:
        raise broken_logits()
    accepted, first, rows = [], 0, len(verified.ids)
    requests = zip(samplers, texts, drafts, verified.counts, strict=True)
    for sampler, text, own, count in requests:
        end = first + count
        proposed, best = words[first + 1 : end], words[rows + first : rows + end]
        logits = verified.logits[first:end]
        accepted.append(sampler.verify(logits, text, proposed, own.probabilities, best))
        first = end
    return accepted


def commit(
    at: Placement,
    sessions: Sequence[Session],
    verified: Verified,
    accepted: Sequence[Sequence[int]],
    asked: Sequence[int],
    stops: Sequence[Collection[int]],
) -> list[Round]:
    """Write what was accepted, none behind a stop token, and let the drafter take it in; Keys of
    refused drafts lie behind the caches' ends and are written over. asked: tokens that each drafter
    was asked for."""
    rounds, first = [], 0
    drafting: list[Session] = []
    read: list[list[int]] = []
    kept: list[Tensor] = []
    for session, tokens, wanted, stop, count in zip(
        sessions, accepted, asked, stops, verified.counts, strict=True
    ):
        context, anchor = len(session.tokens) - 1, session.tokens[-1]
        written = session.write(tokens, stop)
        if session.drafter is not None:
            drafting.append(session)
            read.append([anchor, *written[:-1]])
            kept.append(torch.arange(first, first + len(written)))
        done = Round(tuple(written), context, count - 1, len(written) - 1, 0.0, 0.0, wanted)
        rounds.append(done)
        first += count
    if drafting:
        drafter, caches = drafting[0].in_use, [s.drafts for s in drafting]
        if not isinstance(at, Static):
            ids, features = _kept(verified, kept)
            drafter.append(at, caches, ids, [len(each) for each in read], features)
        drafter.commit(at, caches, read)
    return rounds


def _kept(verified: Verified, kept: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Ids and features of some rows of each request."""
    if len(verified.counts) == 1:
        count = len(kept[0])
        return verified.ids[:count], [each[:, :count] for each in verified.features]
    index = torch.cat(list(kept)).to(verified.ids.device)
    return verified.ids[index], [each[:, index] for each in verified.features]
