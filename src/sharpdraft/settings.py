"""`sharpdraft.json`: what a drafter is best run with, beside its checkpoint. Read by the lab and every engine."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from .errors import SharpDraftError
from .models import SMOLLM2
from .scale import REPORTED_SETTINGS, FixedSlope, policy_from_settings

FILE = "sharpdraft.json"


def recommended(directory: Path) -> tuple[FixedSlope, bool]:
    """The policy a drafter's directory recommends, and whether it does: without a file it is the setting that
    arXiv 2610.05106 reports for DFlash. Raises SharpDraftError for a file that is broken."""
    path = directory / FILE
    if not path.exists():
        return REPORTED_SETTINGS["dflash"], False
    try:
        policy = policy_from_settings(json.loads(path.read_text(encoding="utf-8"))["policy"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SharpDraftError(f"{path} is not a settings file ({error}): mend or remove it") from error
    if not isinstance(policy, FixedSlope):
        raise SharpDraftError(f'{path}: the policy must be of kind "fixed_slope"')
    return policy, True


def built_in_drafter(target: str) -> Path | None:
    """Directory of the drafter that comes with this package for a target, if one does."""
    if target != SMOLLM2:
        return None
    path = Path(str(resources.files(__package__).joinpath("checkpoints", "dflash-smollm2-135m")))
    return path if (path / "model.safetensors").exists() else None
