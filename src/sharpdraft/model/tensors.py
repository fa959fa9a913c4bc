"""The tensors of a checkpoint on disk: where each is, and reading each once."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import SharpDraftError, one_line

FLOATING = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""Dtypes of weights that are run, as safetensors names them."""

_Value = TypeVar("_Value")
_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"


@dataclass(frozen=True)
class Place:
    """A tensor on disk. dtype: as safetensors names it. fill: puts its bytes into memory of that
    size."""

    shape: tuple[int, ...]
    dtype: str
    fill: Callable[[memoryview], None]

    def read(self) -> Tensor:
        """The tensor by itself, of a dtype in FLOATING."""
        stored = FLOATING[self.dtype]
        found = torch.empty(math.prod(self.shape) * stored.itemsize, dtype=torch.uint8)
        self.fill(found.numpy().data)
        return found.view(stored).view(self.shape)


def places_in(directory: Path, opened: ExitStack) -> dict[str, Place]:
    """All tensors of a checkpoint, in one file or in the shards that an index names: safetensors,
    or else PyTorch's. Files stay open in `opened`.

    Raises SharpDraftError where there are none, and for a pickle that is broken or holds more than
    tensors; whatever safetensors and json raise for files of theirs.
    """
    for whole in (_SAFE, _PICKLED):
        index = directory / f"{whole}.index.json"
        if (directory / whole).exists():
            names = [whole]
        elif index.exists():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        else:
            continue
        found: dict[str, Place] = {}
        for path in (directory / name for name in names):
            refuse_pointer(path)
            found |= _safe(path, opened) if path.suffix == ".safetensors" else _pickled(path)
        return unwrapped(found)
    raise SharpDraftError(
        f"{directory} holds no {_SAFE}, no {_PICKLED} and no index of shards: convert the model, "
        "or finish its download"
    )


def unwrapped(tensors: Mapping[str, _Value]) -> dict[str, _Value]:
    """Tensors without the prefix that all their names have of what a model was wrapped in while it
    was trained."""
    found = dict(tensors)
    for prefix in ("module.", "_orig_mod.", "module."):
        if found and all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): each for name, each in found.items()}
    return found


def refuse_pointer(path: Path) -> None:
    """Raise SharpDraftError for a file of which Git LFS has only brought the name."""
    try:
        with path.open("rb") as file:
            pointer = file.read(24) == b"version https://git-lfs."
    except OSError:
        return
    if pointer:
        raise SharpDraftError(
            f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its repository"
        )


def _safe(path: Path, opened: ExitStack) -> dict[str, Place]:
    with safe_open(str(path), framework="pt"):
        pass  # It is whole, or this raises.
    # Read without a map of the file: where memory is paged in slowly, a map takes four times as
    # long.
    file = opened.enter_context(path.open("rb", buffering=0))
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: Place(
            tuple(entry["shape"]),
            entry["dtype"],
            partial(_fill, file, 8 + size + entry["data_offsets"][0]),
        )
        for name, entry in header.items()
    }


def _fill(file: IO[bytes], start: int, room: memoryview) -> None:
    file.seek(start)
    while room:
        count = file.readinto(room)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{file.name} ends early")
        room = room[count:]


def _pickled(path: Path) -> dict[str, Place]:
    if not path.exists():
        raise FileNotFoundError(f"{path.name} is not there")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=_mapped(path))
    except pickle.UnpicklingError as error:
        raise SharpDraftError(
            f"{path} holds more than tensors, and is not loaded as it could run code: convert it "
            f"to safetensors ({one_line(error)})"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise SharpDraftError(
            f"{path} cannot be read ({one_line(error)}): it is incomplete or damaged; remove it, "
            "then copy or download it again"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise SharpDraftError(f"{path} holds more than named tensors: it is no checkpoint")
    called = {dtype: name for name, dtype in FLOATING.items()}
    return {
        str(name): Place(
            tuple(tensor.shape),
            called.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
            partial(_copy, tensor),
        )
        for name, tensor in found.items()
    }


def _mapped(path: Path) -> bool:
    """Whether a file of PyTorch's can be mapped; before PyTorch 1.6 they were no zip archives."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _copy(tensor: Tensor, room: memoryview) -> None:
    if room:
        bits = tensor.detach().contiguous().flatten().view(torch.uint8)
        torch.frombuffer(room, dtype=torch.uint8).copy_(bits)


@dataclass
class Reader:
    """Reads tensors for CausalLM, each once."""

    places: Mapping[str, Place]
    dtype: torch.dtype
    device: torch.device
    rounded: bool

    def __call__(self, *names: str) -> Tensor | None:
        places = [self.places[name] for name in names if name in self.places]
        if not places:
            return None
        if len({place.dtype for place in places}) > 1:
            return torch.cat([found for name in names if (found := self(name)) is not None])
        stored = FLOATING[places[0].dtype]
        sizes = [math.prod(place.shape) * stored.itemsize for place in places]
        found = torch.empty(sum(sizes), dtype=torch.uint8)
        room = found.numpy().data
        for place, size in zip(places, sizes, strict=True):
            place.fill(room[:size])
            room = room[size:]
        found = found.view(stored).view(-1, *places[0].shape[1:])
        if self.rounded and found.dim() > 1:
            found = found.bfloat16()
        return found.to(self.device, self.dtype)
