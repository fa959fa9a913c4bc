"""Drafter families: one file each, behind the calls of `family.Drafter`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..target import Target
    from .family import Drafter


def load_drafter(directory: Path, target: Target) -> Drafter[Any]:
    """Read a drafter of any family, told apart by its config.json.

    Raises SharpDraftError for a directory that holds none, or one that is not for this target.
    """
    from .checkpoint import read_json
    from .dflash import DFlash
    from .eagle3 import Eagle3, is_eagle3
    from .pard import Pard, is_pard

    config = read_json(directory)
    if is_eagle3(config):
        return Eagle3.load(directory, target)
    if is_pard(config):
        return Pard.load(directory, target)
    return DFlash.load(directory, target)
