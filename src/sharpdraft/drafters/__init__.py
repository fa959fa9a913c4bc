"""Drafter families: one file each, behind the calls of `family.Drafter`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..model.causal_lm import CausalLM
    from .base import Drafter


def load_drafter(directory: Path, target: CausalLM) -> Drafter[Any]:
    """Read a drafter of any family, told apart by its config.json, with the block that its
    sharpdraft.json names.

    Raises SharpDraftError for a directory that holds none, or one that is not for this target.
    """
    from ..method.settings import recommended_block
    from .checkpoint import read_json
    from .dflash import DFlash
    from .eagle3 import Eagle3, is_eagle3
    from .pard import Pard, is_pard

    config = read_json(directory)
    family = Eagle3 if is_eagle3(config) else Pard if is_pard(config) else DFlash
    drafter: Drafter[Any] = family.load(directory, target)
    drafter.block_size = recommended_block(directory, drafter.longest_block) or drafter.block_size
    return drafter
