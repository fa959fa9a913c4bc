"""`sharpdraft.json`: what a drafter is best run with, beside its checkpoint: the policy, which the
lab and every engine read, and the block, which is the lab's own loop's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..drafters.checkpoint import read_json
from ..drafters.pard import is_pard
from ..errors import SharpDraftError
from .scale import REPORTED_SETTINGS, FixedSlope, Policy, policy_from_settings

FILE = "sharpdraft.json"
FROZEN = "frozen"
"""What an engine is asked for that measures but does not scale."""


def read_policy(path: Path) -> Policy:
    """The policy of a settings file. Raises SharpDraftError for a file that is missing or
    broken."""
    with _reading(path) as settings:
        return policy_from_settings(settings["policy"])


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """The file's content; what is wrong with it, or with what is made of it, is one
    SharpDraftError."""
    try:
        yield json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SharpDraftError(
            f"{path} is not a settings file ({error}): mend or remove it"
        ) from error


def recommended(directory: Path) -> tuple[FixedSlope, bool]:
    """The policy a drafter's directory recommends, and whether it does: without a file it is the
    setting that arXiv 2610.05106 reports for PARD, or for DFlash. Raises SharpDraftError for a file
    that is broken."""
    path = directory / FILE
    if not path.exists():
        return REPORTED_SETTINGS["pard" if is_pard(read_json(directory)) else "dflash"], False
    policy = read_policy(path)
    if not isinstance(policy, FixedSlope):
        raise SharpDraftError(f'{path}: the policy must be of kind "fixed_slope"')
    return policy, True


def recommended_block(directory: Path, longest: int) -> int | None:
    """Tokens of a block, anchor included, that a drafter's directory says are best; None where it
    does not. Raises SharpDraftError for a file that is broken or asks for more than `longest`."""
    path = directory / FILE
    if not path.exists():
        return None
    with _reading(path) as settings:
        block = settings.get("block")
    if block is not None and not (type(block) is int and 2 <= block <= longest):
        raise SharpDraftError(
            f"{path}: block is {block!r}, it must be from 2 to {longest}: mend or remove it"
        )
    return block


def asked_policy(asked: object, drafter: str | None) -> Policy | None:
    """The policy that an engine's user asks for; None for Frozen, which is measured and not scaled.

    asked: "frozen"; True for the drafter's own `sharpdraft.json`; the path of such a file or of a
    directory with one; a mapping with the file's content, or with the policy alone, in which "kind"
    may be left out for a fixed slope. drafter: the drafter's directory or hub id, if there is one.

    Raises SharpDraftError for anything else.
    """
    if asked == FROZEN:
        return None
    if asked is True:
        path = Path(drafter or "") / FILE
        if drafter is None or not path.exists():
            raise SharpDraftError(
                f"sharpdraft was asked for the drafter's own settings, but {drafter or 'the drafter'} has no {FILE} "
                'in a local directory: give {"reference": N0}, N0 being about the length the drafter was trained at'
            )
        return read_policy(path)
    if isinstance(asked, str) and asked:
        path = Path(asked).expanduser()
        return read_policy(path / FILE if path.is_dir() else path)
    if isinstance(asked, Mapping) and asked:
        policy = asked.get("policy", asked)
        try:
            return policy_from_settings(
                {"kind": "fixed_slope", **policy}
                if isinstance(policy, Mapping) and policy
                else policy
            )
        except ValueError as error:
            raise SharpDraftError(f"sharpdraft's settings are wrong: {error}") from error
    raise SharpDraftError(
        f'sharpdraft was asked for {asked!r}: give true, "{FROZEN}", the path of a {FILE}, or {{"reference": N0}}'
    )
