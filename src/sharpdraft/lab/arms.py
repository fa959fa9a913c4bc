"""The arms of a comparison, from what a command line calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..decode.session import Arm
from ..errors import SharpDraftError
from ..method.settings import DraftSettings, FixedLength

AR = Arm("ar")
"""The target alone."""


def arms_of(
    names: Sequence[str], recommended: Mapping[str, DraftSettings], drafts: int | None = None
) -> tuple[Arm, ...]:
    """The arms called `names`: `ar`, and settings as `DraftSettings.parse` reads them.

    recommended: what each drafter recommends, which is what `sharpdraft` alone stands for; a single
    drafter may be called "". drafts: how many tokens an arm drafts that does not say so itself,
    whatever its drafter recommends; None leaves that to the drafter.

    `ar` comes once; the others for every drafter in turn, called DRAFTER:ARM where there are
    several.

    Raises SharpDraftError for a name that is no arm's, and one that is given twice.
    """
    for number, name in enumerate(names):
        if name in names[:number]:
            raise SharpDraftError(f"arm '{name}' is named twice")
    if len(recommended) < 2:
        drafter, own = next(iter(recommended.items()), ("", None))
        return tuple(_arm(name, name, drafter, own, drafts) for name in names)
    found = [AR] * ("ar" in names)
    for drafter, own in recommended.items():
        drafting = (name for name in names if name != AR.name)
        found += [_arm(name, f"{drafter}:{name}", drafter, own, drafts) for name in drafting]
    return tuple(found)


def _arm(
    text: str, name: str, drafter: str, recommended: DraftSettings | None, drafts: int | None
) -> Arm:
    if text == AR.name:
        return AR
    try:
        if recommended is not None and drafts is not None:
            recommended = replace(recommended, length=None)
        settings = DraftSettings.parse(text, recommended)
    except SharpDraftError as error:
        # What is wrong begins with the words that are. An arm may also be none of the settings.
        said = str(error).replace("unknown; known are ", f"unknown; known are {AR.name}, ")
        raise SharpDraftError(f"arm {said}") from error
    if drafts is not None and settings.length is None:
        settings = replace(settings, length=FixedLength(drafts))
    return Arm(name, drafter, settings)
