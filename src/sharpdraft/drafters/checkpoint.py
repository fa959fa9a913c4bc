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

from ..errors import SharpDraftError, one_line
from ..model.tensors import refuse_pointer, unwrapped

_WHOLE, _PICKLED = "model.safetensors", "pytorch_model.bin"
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BROKEN = (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError)


def read_json(directory: Path) -> dict[str, Any]:
    """config.json of a drafter. Raises SharpDraftError where it cannot be read."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise SharpDraftError(f"cannot read the drafter's {path}: {error}") from error
    if not isinstance(config, dict):
        raise SharpDraftError(f"cannot read the drafter's {path}: it holds no JSON object")
    return config


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Weights of a drafter: safetensors or else PyTorch's, in one file or in the shards that an
    index names. Raises SharpDraftError where they are not whole."""
    tensors: dict[str, Tensor] = {}
    files = weight_files(directory)
    for file in files:
        refuse_pointer(file)
        tensors |= _tensors_of(file)
    if not files:
        raise SharpDraftError(
            f"{directory} has no .safetensors file and no {_PICKLED}: download the checkpoint again"
        )
    return unwrapped(tensors)


def tensor_names(directory: Path) -> tuple[str, ...]:
    """What the weights of a drafter are called, without reading them; nothing where they cannot be
    read, which `read_tensors` says."""
    names: list[str] = []
    for file in weight_files(directory):
        try:
            if file.suffix == ".safetensors":
                with safe_open(str(file), framework="pt") as opened:
                    names += opened.keys()
            else:
                names += torch.load(file, map_location="meta", weights_only=True, mmap=True)
        except _BROKEN:
            return ()
    return tuple(unwrapped(dict.fromkeys(names)))


def weight_files(directory: Path) -> list[Path]:
    """The files of a drafter's weights, of safetensors where there are any. Raises SharpDraftError
    for an index that is broken, or names a file that is not there."""
    for whole, pattern in ((_WHOLE, "*.safetensors"), (_PICKLED, "pytorch_model*.bin")):
        index = directory / f"{whole}.index.json"
        if (directory / whole).exists() or not index.exists():
            if files := sorted(directory.glob(pattern)):
                return [directory / whole] if (directory / whole) in files else files
            continue
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = [directory / name for name in sorted(set(named))]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise SharpDraftError(f"{index} cannot be read: download it again") from error
        if missing := [file.name for file in files if not file.exists()]:
            raise SharpDraftError(
                f"{directory} lacks {missing[0]}, which {index.name} names: download it again"
            )
        return files
    return []


def _tensors_of(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(str(file), framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise SharpDraftError(
            f"{file} is corrupt, or holds more than tensors and is not loaded as it could run "
            "code: download it again, or convert it to safetensors where you trust it"
        ) from error
    except _BROKEN as error:
        raise SharpDraftError(
            f"{file} is truncated or corrupt ({one_line(error)}): download it again"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise SharpDraftError(f"{file} holds more than named tensors: it is no checkpoint")
    return found


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
    used: those of `expected`, and `known` ones, which are looked at elsewhere."""
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
    if odd := sorted(name for name in expected if tensors[name].dtype not in _FLOATING):
        dtype = str(tensors[odd[0]].dtype).removeprefix("torch.")
        raise SharpDraftError(
            f"the drafter's {odd[0]} is of dtype {dtype}: quantised weights are not supported, use "
            "the full-precision drafter"
        )
    # A sum is a number only where all that is summed are.
    if broken := sorted(n for n in expected if not tensors[n].sum(dtype=torch.float64).isfinite()):
        raise SharpDraftError(
            f"the drafter's {broken[0]} holds NaN or infinite numbers: its conversion is broken; "
            "download it again, or take it in another dtype"
        )
