"""Reading a drafter's directory: what can be wrong with one ends here as one SharpDraftError."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import SharpDraftError


def read_json(directory: Path) -> dict[str, Any]:
    """config.json of a drafter. Raises SharpDraftError where it cannot be read."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SharpDraftError(f"cannot read the drafter's {path}: {error}") from error
    if not isinstance(config, dict):
        raise SharpDraftError(f"cannot read the drafter's {path}: it holds no JSON object")
    return config


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Weights of a drafter, safetensors or else pytorch_model.bin. Raises SharpDraftError where they are not whole."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise SharpDraftError(f"{file} is truncated or corrupt ({error}): download it again") from error
    pickled = directory / "pytorch_model.bin"
    if not tensors and pickled.exists():
        try:
            tensors = torch.load(pickled, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0]
            raise SharpDraftError(f"{pickled} is truncated or corrupt ({reason}): download it again") from error
    if not tensors:
        raise SharpDraftError(f"{directory} has no .safetensors file: download the checkpoint again")
    return tensors


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], known: Collection[str] = ()
) -> None:
    """Refuse a checkpoint that lacks tensors, has others than config.json says, or more than is understood."""
    if missing := sorted(set(expected) - set(tensors)):
        raise SharpDraftError(
            f"the drafter's checkpoint lacks {len(missing)} tensors, first {missing[0]}: download it again"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise SharpDraftError(
                f"the drafter's {name} has shape {tuple(tensors[name].shape)}, its config says {shape}: "
                "config.json and weights belong to different checkpoints"
            )
    # A mask embedding or attention sinks would change the drafts: better refused than silently left out.
    if extra := sorted(set(tensors) - set(expected) - set(known)):
        raise SharpDraftError(f"the drafter has tensors this version does not know, first {extra[0]}")
