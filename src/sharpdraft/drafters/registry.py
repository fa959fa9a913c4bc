"""Which family a drafter's directory holds, and what it is best run with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SharpDraftError
from ..method.settings import FILE, REPORTED, DraftSettings, read_settings
from .checkpoint import read_json

if TYPE_CHECKING:
    from ..model.causal_lm import CausalLM
    from .base import Drafter

FAMILIES = ("dflash", "eagle3", "pard")

_EAGLE3 = {
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3DraftModel",
    "Eagle3Speculator",
}
_EAGLE_DRAFTS = 5  # What a chain's later tokens add does not pay for the passes they take.
_PARD_DRAFTS = 7
_DFLASH_BLOCK = 16


def family_of(config: Mapping[str, Any]) -> str:
    """The family of a drafter, by its config.json: one of FAMILIES."""
    named = set(config.get("architectures") or ())
    if named & _EAGLE3 or config.get("speculators_model_type") == "eagle3":
        return "eagle3"
    return "pard" if "pard_token" in config else "dflash"


def drafts_of(config: Mapping[str, Any]) -> int:
    """How many tokens a drafter was made to draft, by its config.json.

    Raises ValueError or TypeError for what is no number.
    """
    family = family_of(config)
    if family == "eagle3":
        methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        return int(methods[0].get("speculative_tokens", _EAGLE_DRAFTS))
    if family == "pard":
        return int(config.get("num_drafts", _PARD_DRAFTS))
    dflash = config.get("dflash_config") or {}
    return int(dflash.get("block_size", config.get("block_size", _DFLASH_BLOCK))) - 1


def num_drafts(directory: Path) -> int:
    """Tokens that are drafted where nobody says how many: what the drafter's sharpdraft.json says,
    or else its config.json. Raises SharpDraftError for a directory that holds no drafter."""
    settings, found = recommended(directory)
    if found and settings.drafts is not None:
        return settings.drafts
    try:
        return drafts_of(read_json(directory))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise SharpDraftError(
            f"{directory / 'config.json'} does not say how many tokens to draft: {error}"
        ) from error


def recommended(directory: Path) -> tuple[DraftSettings, bool]:
    """The settings that a drafter's directory recommends, and whether it does.

    Without a file they are those that arXiv 2610.05106 reports for PARD, or for DFlash. Raises
    SharpDraftError for a file that is broken, or a directory that holds no drafter.
    """
    path = directory / FILE
    if path.exists():
        return read_settings(path), True
    return REPORTED["pard" if family_of(read_json(directory)) == "pard" else "dflash"], False


def load_drafter(directory: Path, target: CausalLM) -> Drafter[Any]:
    """Read a drafter of any family, told apart by its config.json. It drafts as many tokens as its
    sharpdraft.json says, if that says so.

    Raises SharpDraftError for a directory that holds none, or one that is not for this target.
    """
    from .dflash import DFlash
    from .eagle3 import Eagle3
    from .pard import Pard

    families: dict[str, Any] = {"dflash": DFlash, "eagle3": Eagle3, "pard": Pard}
    drafter: Drafter[Any] = families[family_of(read_json(directory))].load(directory, target)
    settings, found = recommended(directory)
    if found and settings.drafts is not None:
        if settings.drafts > drafter.max_drafts:
            raise SharpDraftError(
                f"{directory / FILE}: length is {settings.drafts} drafts, and this drafter drafts "
                f"at most {drafter.max_drafts}"
            )
        drafter.num_drafts = settings.drafts
    return drafter
