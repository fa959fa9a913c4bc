"""What sessions wrote."""

from __future__ import annotations

from sharpdraft.decode.rounds import Round
from sharpdraft.decode.session import Arm, Session
from sharpdraft.method.policies import Constant, FixedSlope
from sharpdraft.method.scale import Scale
from sharpdraft.method.settings import DraftSettings, FixedLength, Window

LOW = FixedSlope(33)  # Scales from 34 Keys on, as far as the tiny targets' contexts go.
ARMS = {
    "ar": (False, None),
    "frozen": (True, None),
    "sharpdraft": (True, LOW),
    "fixed": (True, Constant(1.4)),
}


AR = Arm("ar")


def settings_of(
    scale: Scale | None = None, drafts: int | None = None, view: Window | None = None
) -> DraftSettings:
    """Settings of a policy, a view and a number of drafts; without one the drafter's own."""
    return DraftSettings(scale, view, FixedLength(drafts) if drafts else None)


def use(
    session: Session,
    scale: Scale | None = None,
    drafts: int | None = None,
    view: Window | None = None,
) -> None:
    """Draft with the session's only drafter; with none there is nothing to draft with."""
    drafter = "" if session.drafters else None
    session.use(Arm("", drafter, settings_of(scale, drafts, view)))


def set_arm(session: Session, name: str) -> None:
    drafting, scale = ARMS[name]
    if drafting:
        use(session, scale)
    else:
        session.use(AR)


def written(rounds: list[Round]) -> list[int]:
    return [token for done in rounds for token in done.tokens]


def check_caches(session: Session) -> None:
    """Everything but the last token is cached, in target and drafter alike."""
    assert session.cache.length == len(session.tokens) - 1
    if session.drafter is not None:
        assert session.drafts.length == session.cache.length
