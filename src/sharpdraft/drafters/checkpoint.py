"""A drafter's directory, read and written: what can be wrong with one ends here as one
SharpDraftError."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
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
    """Weights of a drafter, safetensors or else pytorch_model.bin. Raises SharpDraftError where
    they are not whole."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise SharpDraftError(
                f"{file} is truncated or corrupt ({error}): download it again"
            ) from error
    pickled = directory / "pytorch_model.bin"
    if not tensors and pickled.exists():
        try:
            tensors = torch.load(pickled, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0]
            raise SharpDraftError(
                f"{pickled} is truncated or corrupt ({reason}): download it again"
            ) from error
    if not tensors:
        raise SharpDraftError(
            f"{directory} has no .safetensors file: download the checkpoint again"
        )
    return tensors


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, str(directory / "model.safetensors"), {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def parsing(family: str) -> Iterator[None]:
    """Whatever a config.json of `family` makes its reader raise is one SharpDraftError."""
    try:
        yield
    except SharpDraftError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise SharpDraftError(
            f"the drafter's config.json is not one of {family} checkpoint: {reason}"
        ) from error


def other_target(what: str, ours: object, theirs: object) -> SharpDraftError:
    """The error for a drafter whose `what` is not the target's."""
    return SharpDraftError(
        f"this drafter belongs to another target: its {what} is {ours}, the target's {theirs}; "
        "use the drafter that was trained for this target"
    )


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    known: Collection[str] = (),
) -> None:
    """Refuse a checkpoint that lacks tensors, has others than config.json says, or more than is
    understood."""
    if missing := sorted(set(expected) - set(tensors)):
        raise SharpDraftError(
            f"the drafter's checkpoint lacks {len(missing)} tensors, first {missing[0]}: download "
            "it again"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise SharpDraftError(
                f"the drafter's {name} has shape {tuple(tensors[name].shape)}, its config says "
                f"{shape}: config.json and weights belong to different checkpoints"
            )
    # A mask embedding or attention sinks would change the drafts: better refused than silently left
    # out.
    if extra := sorted(set(tensors) - set(expected) - set(known)):
        raise SharpDraftError(
            f"the drafter has tensors this version does not know, first {extra[0]}"
        )
