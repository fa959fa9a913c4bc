"""Texts that people wrote, read from where they are installed."""

from __future__ import annotations

import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from ..errors import SharpDraftError

_SHORTEST = 6000
"""Shorter documents are left out, characters."""
# Tests, tables and what later Pythons have no more.
_OTHERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "distutils"}
_OTHERS |= {"pydoc_data", "encodings", "entities.py"}
_DEBIAN = Path("/usr/share/common-licenses")


@dataclass(frozen=True)
class Document:
    """A text that is read when it is needed. size: about how long, in characters."""

    name: str
    size: int
    read: Callable[[], str]


@dataclass(frozen=True)
class Source:
    """Where documents come from. get: how to get them where they are missing."""

    name: str
    where: str
    licence: str
    get: str
    find: Callable[[], Iterator[Document]]

    def documents(self, held_out: bool) -> list[Document]:
        """The documents of one part, in an order of their own that is always the same. Raises
        SharpDraftError where there are none at all."""
        everything = [each for each in self.find() if each.size >= _SHORTEST]
        if not everything:
            raise SharpDraftError(f"{self.where}: not installed here; {self.get}")
        part = [each for each in everything if is_held_out(each.name) == held_out]
        return sorted(part, key=lambda each: _hash(each.name))


def is_held_out(name: str) -> bool:
    """Whether what is called so is kept out of training: half of everything is, told by its name
    alone."""
    return _hash(name) % 2 == 0


def _hash(name: str) -> int:
    return int.from_bytes(sha256(name.encode()).digest()[:8], "big")


def _library() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        inside = path.relative_to(root)
        if not _OTHERS & set(inside.parts):
            name = ".".join(inside.with_suffix("").parts)
            yield Document(name, path.stat().st_size, partial(_python, path))


def _python(path: Path) -> str:
    with tokenize.open(path) as file:
        return file.read()


def _manual() -> Iterator[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    whole: list[set[str]] = []
    for name, text in sorted(topics.items(), key=lambda item: len(item[1]), reverse=True):
        lines = set(text.splitlines())
        # Some chapters are a part of another one, which may be held out.
        if all(len(lines & others) < len(lines) / 2 for others in whole):
            whole.append(lines)
            yield Document(name, len(text), partial(str, text))


def _licences() -> Iterator[Document]:
    found = _DEBIAN.iterdir() if _DEBIAN.is_dir() else ()
    for path in found:
        # The names without a number are links to the latest version.
        if path.is_file() and not path.is_symlink():
            yield Document(path.name, path.stat().st_size, partial(path.read_text, "utf-8"))


def _readmes() -> Iterator[Document]:
    """Of the packages that this one needs, so that what else is installed changes nothing."""
    try:
        needs = metadata.requires("sharpdraft") or []
    except metadata.PackageNotFoundError:
        return
    for name in sorted({re.split(r"[^\w.-]", each)[0] for each in needs}):
        try:
            text = metadata.metadata(name).json.get("description")
        except metadata.PackageNotFoundError:
            continue
        if isinstance(text, str):
            yield Document(name, len(text), partial(str, text))


LIBRARY = Source(
    "library",
    "the source of the Python standard library",
    "PSF-2.0",
    "install Python with its library as .py files (Debian: apt-get install libpython3-stdlib)",
    _library,
)
MANUAL = Source(
    "manual",
    "the Python manual's chapters in pydoc_data",
    "PSF-2.0",
    "install Python with pydoc's topics (Debian: apt-get install python3 libpython3-stdlib)",
    _manual,
)
LICENCES = Source(
    "licences",
    f"the licences in {_DEBIAN}",
    "verbatim copies allowed",
    "Debian and Ubuntu have them in base-files",
    _licences,
)
READMES = Source(
    "readmes",
    "the READMEs of the packages that sharpdraft needs",
    "each package's own",
    'pip install "sharpdraft[lab]"',
    _readmes,
)
