"""Which family a drafter's directory holds, and what it is best run with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SharpDraftError, note
from ..method.settings import FILE, REPORTED, DraftSettings, read_settings
from .checkpoint import read_json, tensor_names
from .configs import count
from .family import CALLED, family_of, unknown_name

if TYPE_CHECKING:
    from ..model.causal_lm import CausalLM
    from .base import Drafter

_EAGLE_DRAFTS = 5  # What a chain's later tokens add does not pay for the passes they take.
_PARD_DRAFTS = 7
MOST_DRAFTS = 32
"""As many tokens as EAGLE and PARD draft in a round, whatever their config.json says."""
_DFLASH_BLOCK = 16
_MOST_DRAFTED = 1024


def family_in(directory: Path, asked: str | None = None) -> str:
    """The family of the drafter in a directory, by its config.json and the names of its weights;
    `asked` is what a user says it is. Raises SharpDraftError as `family_of` does, and for a
    directory that holds no drafter."""
    return family_of(read_json(directory), tensor_names(directory), asked)


def drafts_of(config: Mapping[str, Any], family: str) -> int:
    """How many tokens a drafter of a family was made to draft, by its config.json. Raises
    SharpDraftError where that is no number of tokens."""
    speculators = config.get("speculators_config") or {}
    methods = list(speculators.get("proposal_methods") or ({},))
    default = speculators.get("default_proposal_method")
    # The first one holds where none is the default.
    chosen = next((m for m in methods if default and m.get("proposal_type") == default), methods[0])
    said = None
    if chosen.get("speculative_tokens") is not None:
        said = count(chosen, "speculative_tokens", _MOST_DRAFTED)
    if family == "eagle3":
        return _EAGLE_DRAFTS if said is None else min(said, MOST_DRAFTS)
    if family == "pard":
        own = config.get("num_drafts") is not None
        drafts = count(config, "num_drafts", _MOST_DRAFTED) if own else _PARD_DRAFTS
        return min(drafts, MOST_DRAFTS)
    most = block_of({**config, **(config.get("dflash_config") or {})}, said) - 1
    return most if said is None else min(said, most)


def block_of(values: Mapping[str, Any], drafts: int | None = None) -> int:
    """Tokens of a DFlash's block, the anchor included. values: all that its config.json says;
    drafts: how many tokens it recommends to draft, if it does. Raises SharpDraftError where that is
    no number of tokens."""
    if values.get("block_size") is None:
        return _DFLASH_BLOCK if drafts is None else drafts + 1
    return count(values, "block_size", _MOST_DRAFTED)


def num_drafts(directory: Path, family: str | None = None) -> int:
    """Tokens that are drafted where nobody says how many: what the drafter's sharpdraft.json says,
    or else its config.json. Raises SharpDraftError for a directory that holds no drafter."""
    settings, found = recommended(directory, family)
    if found and settings.drafts is not None:
        return settings.drafts
    try:
        return drafts_of(read_json(directory), family_in(directory, family))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise SharpDraftError(
            f"{directory / 'config.json'} does not say how many tokens to draft: {error}"
        ) from error


def recommended(directory: Path, family: str | None = None) -> tuple[DraftSettings, bool]:
    """The settings that a drafter's directory recommends, and whether it does.

    family: as a user says it is. Without a file they are those that arXiv 2610.05106 reports for
    PARD, or for DFlash. Raises SharpDraftError for a file that is broken, or a directory that holds
    no drafter.
    """
    path = directory / FILE
    if path.exists():
        return read_settings(path), True
    return REPORTED["pard" if family_in(directory, family) == "pard" else "dflash"], False


def load_drafter(directory: Path, target: CausalLM, family: str | None = None) -> Drafter[Any]:
    """Read a drafter of any family, told by its config.json and weights, or as `family` says. It
    drafts as many tokens as its sharpdraft.json says, if that says so.

    Raises SharpDraftError for a directory that holds none, or one that is not for this target.
    """
    from .dflash import DFlash
    from .eagle3 import Eagle3
    from .pard import Pard

    families: dict[str, Any] = {"dflash": DFlash, "eagle3": Eagle3, "pard": Pard}
    found_family = family_in(directory, family)
    if (name := unknown_name(read_json(directory))) is not None:
        note(
            f"{directory}: config.json names {name}, which is not known here; read as "
            f"{CALLED[found_family]}"
        )
    drafter: Drafter[Any] = families[found_family].load(directory, target)
    settings, found = recommended(directory, family)
    if found and settings.drafts is not None:
        if settings.drafts > drafter.max_drafts:
            raise SharpDraftError(
                f"{directory / FILE}: length is {settings.drafts} drafts, and this drafter drafts "
                f"at most {drafter.max_drafts}"
            )
        drafter.num_drafts = settings.drafts
    return drafter
