"""The kinds that settings are made of, each under the name that files use and the word that command
lines use. A new kind is known everywhere once it is registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, TypeVar

from ..errors import SharpDraftError

Part = Literal["scale", "view", "length"]
_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Kind:
    """A frozen dataclass that may stand in one part of `DraftSettings`.

    name: its "kind" in `sharpdraft.json`. word: what it is called on a command line, where
    `word@1:b=2` sets its first field to 1 and the field b to 2.
    """

    part: Part
    name: str
    word: str
    cls: type[Any]


_KINDS: dict[str, Kind] = {}


def register(part: Part, name: str, word: str) -> Callable[[_Class], _Class]:
    """Class decorator: make a frozen dataclass known as a kind of `part`.

    A kind raises ValueError for values out of range. A scale has `gain`, as in `scale.Policy`.
    `describe()`, one line for people, is optional.

    Raises ValueError where the name or the word is taken.
    """

    def decorate(cls: _Class) -> _Class:
        if name in _KINDS or any(word == kind.word for kind in _KINDS.values()):
            raise ValueError(
                f"a kind called {name!r}, or with the word {word!r}, is registered already"
            )
        _KINDS[name] = Kind(part, name, word, cls)
        return cls

    return decorate


def forget(name: str) -> None:
    """Take a kind out again."""
    del _KINDS[name]


def kinds(part: Part) -> list[Kind]:
    """The kinds of a part, in the order in which they were registered."""
    return [kind for kind in _KINDS.values() if kind.part == part]


def kind_of(value: object) -> Kind:
    """The kind that a value is of. Raises SharpDraftError for one that is not registered."""
    for kind in _KINDS.values():
        if type(value) is kind.cls:
            return kind
    raise SharpDraftError(
        f"{value!r} is of no registered kind: register its class to write it down"
    )


def from_dict(part: Part, values: object) -> Any:
    """The value that a mapping from `sharpdraft.json` stands for.

    Raises SharpDraftError, naming the part: the kind is missing, unknown or another part's, a key
    is missing or unknown, or a value is wrong.
    """
    known = {kind.name: kind for kind in kinds(part)}
    name = values.get("kind") if isinstance(values, Mapping) else None
    if not isinstance(values, Mapping) or not isinstance(name, str) or name not in known:
        raise SharpDraftError(
            f'{part}: give a mapping with "kind", one of {", ".join(known)}; got {values!r}'
        )
    given = {str(key): value for key, value in values.items() if key != "kind"}
    # JSON has lists where a frozen value has tuples.
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}
    return _made(known[name], given, f"{part}, kind {name}")


def to_dict(value: Any) -> dict[str, Any]:
    """A value as it stands in `sharpdraft.json`: its kind and its fields."""
    kind = kind_of(value)
    own = {field.name: getattr(value, field.name) for field in fields(kind.cls)}
    return {
        "kind": kind.name,
        **{k: list(v) if isinstance(v, tuple) else v for k, v in own.items()},
    }


def from_text(part: Part, word: str, text: str, where: str) -> Any:
    """The value that `word@text` stands for on a command line, such as 512 or 512:slope=3.

    Raises SharpDraftError, beginning with `where`, as from_dict does.
    """
    kind = next(kind for kind in kinds(part) if kind.word == word)
    names = [field.name for field in fields(kind.cls)]
    given: dict[str, Any] = {}
    for number, piece in enumerate(text.split(":") if text else []):
        name, equals, value = piece.rpartition("=")
        if not equals and number >= len(names):
            raise SharpDraftError(f"{where}: {word} has {len(names)} fields: {', '.join(names)}")
        name = name if equals else names[number]
        if name in given:
            raise SharpDraftError(f"{where}: {name} is given twice")
        given[name] = _value(value, where)
    return _made(kind, given, where)


def to_text(value: Any) -> str:
    """A value as a command line has it; fields that have their default are left out."""
    kind = kind_of(value)
    parts = []
    for number, field in enumerate(fields(kind.cls)):
        own = getattr(value, field.name)
        if own != field.default or field.default is MISSING:
            parts.append(_text(own) if not number else f"{field.name}={_text(own)}")
    return kind.word + ("@" + ":".join(parts) if parts else "")


def describe(value: Any) -> str:
    """A value in one line for people."""
    own = getattr(value, "describe", None)
    return str(own()) if own is not None else to_text(value)


def words(part: Part) -> list[str]:
    """How the kinds of a part are written on a command line."""
    found = []
    for kind in kinds(part):
        needed = [field.name.upper() for field in fields(kind.cls) if field.default is MISSING]
        found.append(kind.word + (f"@{':'.join(needed)}" if needed else ""))
    return found


def _made(kind: Kind, given: Mapping[str, Any], where: str) -> Any:
    known = {field.name: field for field in fields(kind.cls)}
    if unknown := sorted(set(given) - set(known)):
        raise SharpDraftError(f"{where}: no field {unknown[0]!r}; known are {', '.join(known)}")
    for name, field in known.items():
        if name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise SharpDraftError(f"{where}: {name} is missing")
    try:
        return kind.cls(**given)
    except (ValueError, TypeError) as error:
        raise SharpDraftError(f"{where}: {error}") from error


def _value(text: str, where: str) -> Any:
    if "/" in text:
        return tuple(_value(each, where) for each in text.split("/") if each)
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    raise SharpDraftError(f"{where}: {text!r} is no number")


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(_text, value)) + ("/" if len(value) < 2 else "")
    # A plus would end the value where settings are composed.
    return repr(value).replace("e+", "e")
