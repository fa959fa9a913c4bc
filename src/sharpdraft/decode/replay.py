"""The rounds that an arm would have had on a text that is known."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..drafters.base import MassProbe
from .rounds import Round, Stopwatch
from .sampling import GREEDY, Sampler
from .session import Session
from .step import RAGGED, Verified, accept, draft


@torch.inference_mode()
def replay(session: Session, start: int, probe: MassProbe | None = None) -> Iterator[Round]:
    """The rounds of the arm in use from the anchor at `start` to the end of a session's text.

    Decoding is lossless, so the target's text is known and only drafting runs: arms are compared on
    the same features in a fraction of the time. The session must hold the target's own text, read
    while its drafter read along.
    """
    tokens, sampler, device = session.tokens, Sampler(GREEDY), session.target.device
    ids = torch.tensor(tokens, device=device)
    numbers = torch.ones((), dtype=torch.bool, device=device)
    while (left := len(tokens) - 1 - start) > 0:
        clock, anchor = Stopwatch(device), ids[start : start + 1]
        count = min(session.drafts_behind(start + 1), left - 1)
        # The drafts' Keys are written where the known text's are, and those are needed again.
        with session.drafts.borrowed(start, count + 1):
            drafts = draft(RAGGED, [session], anchor, [count], probe)
        clock.mark()
        # The text's own tokens stand for what the target would say.
        drafted = len(drafts[0].tokens)
        said = ids[start + 1 : start + drafted + 2]
        verified = Verified(
            torch.cat((anchor, drafts[0].tokens)), said, said, numbers, (), [drafted + 1]
        )
        (written,) = accept([sampler], [tokens[: start + 1]], drafts, verified)
        done = Round(tuple(written), start, drafted, len(written) - 1, 0.0, 0.0, count)
        yield from clock.times_of([done])
        start += len(written)
