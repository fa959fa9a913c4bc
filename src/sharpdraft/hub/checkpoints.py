"""Where checkpoints are: local directories, hub ids, and the names that come with the package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import SharpDraftError, note, one_line
from .smollm2 import DRAFTER_FAMILIES, SMOLLM2, built_in_drafter, smollm2_dir

_FILES = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer*",
    "*.model",
    "merges.txt",
    "mask_embedding.pt",
)
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_PICKLED = ("pytorch_model*.bin",)
_NOT_FILES = ("*/*", "consolidated*")


def target_dir(name: str, *, files: Sequence[str] = _FILES) -> Path:
    """The local directory of the target `name`: SMOLLM2, which is made on first use, or as
    checkpoint_dir. Raises SharpDraftError."""
    return smollm2_dir() if name == SMOLLM2 else checkpoint_dir(name, files=files)


def drafter_dir(target: str, name: str | None) -> Path | None:
    """The directory of a drafter: `name` is a family that comes with the target, a local directory
    or a hub id; None for the target's own DFlash drafter, which it may not have. Raises
    SharpDraftError as checkpoint_dir does, for the target too where it has no such drafter."""
    if name is not None and name not in DRAFTER_FAMILIES:
        return checkpoint_dir(name)
    own = built_in_drafter(target, name or "dflash")
    hidden = name is not None and Path(name).is_dir()
    if own is not None:
        if hidden:
            note(f"{name} is the drafter that comes with {target}; for the directory say ./{name}")
        return own
    if name is not None and hidden:
        return checkpoint_dir(name)
    if not _HUB_ID.fullmatch(target):
        # A target that is not there is the first thing to say.
        target_dir(target, files=("config.json",))
    if name is not None:
        raise SharpDraftError(
            f"no {name} drafter comes with {target}: give the directory of one, or train one"
        )
    return None


def checkpoint_dir(name_or_path: str, *, files: Sequence[str] = _FILES) -> Path:
    """The local directory of a checkpoint, target or drafter; a hub id is downloaded first.

    files: patterns of the files that a download brings; subdirectories never come.

    Raises SharpDraftError: neither a directory nor a hub id, a hub that cannot be reached, or a
    gated model.
    """
    if not name_or_path.strip():
        raise SharpDraftError(
            "a checkpoint is asked for and none is named: give a directory or a hub id"
        )
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise SharpDraftError(
            f"'{name_or_path}' is a file: give the directory that holds config.json and the weights"
        )
    # Imported here, as what is on disk needs none of it.
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    def download(patterns: Sequence[str]) -> Path:
        found = huggingface_hub.snapshot_download(
            name_or_path, allow_patterns=list(patterns), ignore_patterns=list(_NOT_FILES)
        )
        return Path(found)

    try:
        found = download(files)
        # Where weights are published both ways, one is enough.
        if files == _FILES and not any(found.glob("*.safetensors")):
            found = download(_PICKLED)
        return found
    except HFValidationError as error:
        raise SharpDraftError(
            f"'{name_or_path}' does not exist, and cannot be a Hugging Face hub id either"
        ) from error
    except GatedRepoError as error:
        raise SharpDraftError(
            f"'{name_or_path}' is gated: accept its terms at "
            f"https://huggingface.co/{name_or_path}, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise SharpDraftError(
            f"'{name_or_path}' is neither a local directory nor a model on the Hugging Face hub: "
            "check the spelling; if it is a private model, log in with `hf auth login`"
        ) from error
    except LocalEntryNotFoundError as error:
        raise SharpDraftError(
            f"'{name_or_path}' is not a local directory, and the Hugging Face hub cannot be "
            "reached: go online, or give the path of a directory that holds the checkpoint"
        ) from error
    except Exception as error:
        raise SharpDraftError(
            f"'{name_or_path}' could not be downloaded: {one_line(error)}"
        ) from error
