"""The rounds that an arm would have had on a sampled text, in expectation.

A text that was sampled from the target is given; what is left to chance is which drafts were
accepted on the way. Draft i is accepted with the output token x with probability min(p(x), q(x)),
and x comes out with probability p(x) (arXiv 2211.17192), so that given the text it was accepted
with probability min(1, q(x) / p(x)), whatever came before. Rounds along the text are then a Markov
chain, whose expectation is a sum: arms compare without the noise of sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .sampling import Sampler
from .session import Session
from .step import RAGGED

_ROWS = 64


@dataclass(frozen=True)
class ExpectedRound:
    """A round that may begin at an anchor. weight: how likely one does; asked: how many tokens the
    drafter is asked for; drafted: how many it gives; accepted: how many of them are accepted if it
    does, in expectation."""

    context: int
    weight: float
    asked: int
    drafted: int
    accepted: float


@torch.inference_mode()
def expected(session: Session, start: int) -> Iterator[ExpectedRound]:
    """The rounds of the arm in use from the anchor at `start` to the end of a session's text.

    The session must hold a text that its target wrote with its `sampling`, read while its drafter
    read along.
    """
    sampler, tokens = Sampler(session.sampling), session.tokens
    ids = torch.tensor(tokens, device=session.target.device)
    own = _target_chances(session, sampler, start)
    weights = [0.0] * (len(tokens) - start)
    weights[0] = 1.0
    for at in range(len(weights) - 1):
        if not weights[at]:
            continue
        left = len(weights) - 1 - at
        anchor = start + at
        count = min(session.drafts_behind(anchor + 1), left - 1)
        drafted = _draft_chances(session, sampler, ids, anchor, count) if count > 0 else ids[:0]
        shares = (drafted / own[at : at + len(drafted)]).clamp(max=1.0).tolist()
        reached, accepted = 1.0, 0.0
        for number, share in enumerate((*shares, 0.0)):
            weights[at + number + 1] += weights[at] * reached * (1 - share)
            reached *= share
            accepted += reached
        yield ExpectedRound(anchor, weights[at], count, len(drafted), accepted)


def _target_chances(session: Session, sampler: Sampler, start: int) -> Tensor:
    """How likely the target was to choose each token behind the anchor at `start`, float64."""
    tokens, cache, device = session.tokens, session.cache, session.target.device
    whole, found = cache.length, []
    cache.length = start
    try:
        for first in range(start, len(tokens) - 1, _ROWS):
            rows = tokens[first : min(first + _ROWS, len(tokens) - 1)]
            logits, _, _ = session.target.forward(torch.tensor([rows], device=device), cache)
            before = (tokens[: first + row + 1] for row in range(len(rows)))
            chances = (sampler.shares(row, own) for row, own in zip(logits[0], before, strict=True))
            said = tokens[first + 1 : first + len(rows) + 1]
            found += [float(each[token]) for each, token in zip(chances, said, strict=True)]
    finally:
        cache.length = whole
    return torch.tensor(found, dtype=torch.double)


def _draft_chances(
    session: Session, sampler: Sampler, ids: Tensor, anchor: int, count: int
) -> Tensor:
    """How likely each of the next tokens of the text was to be drafted behind an anchor, those
    before it having been, float64 [at most count]."""
    pick = _Along(
        sampler, session.tokens[: anchor + 1], ids[anchor + 1 :], session.target.vocab_size
    )
    with session.drafts.borrowed(anchor, count + 1):
        (draft,) = session.in_use.propose(
            RAGGED,
            [session.drafts],
            ids[anchor : anchor + 1],
            count,
            [session.settings],
            [pick],
        )
    if not pick.chances:
        # Nothing was chosen by logits: each draft is certain.
        return (draft.tokens == ids[anchor + 1 :][: len(draft.tokens)]).double().cpu()
    return torch.cat(pick.chances)[: len(draft.tokens)]


class _Along:
    """A Pick that chooses what the text says, and notes how likely it was."""

    def __init__(self, sampler: Sampler, before: Sequence[int], text: Tensor, vocab: int) -> None:
        self.choose = sampler.pick(before, vocab)
        self.text = text
        self.chances: list[Tensor] = []
        self.at = 0

    def __call__(self, logits: Tensor, token_of: Tensor | None) -> tuple[Tensor, None]:
        chosen, shares = self.choose(logits, token_of)
        said = self.text[self.at : self.at + len(logits)]
        self.at += len(logits)
        if shares is None:
            chances = (chosen == said).double()
        else:
            chances = shares.gather(1, said[:, None].to(shares.device))[:, 0].double()
        self.chances.append(chances.cpu())
        return said, None
