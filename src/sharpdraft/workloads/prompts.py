"""Prompt files: rows from a file of any of the usual formats, and what a row of any of the usual
shapes asks."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from ..errors import SharpDraftError, one_line

ANSWERS = "recorded answers"

_TEXT = (".txt", ".text", ".md")
_JSON = (".jsonl", ".ndjson", ".json")
_CELLS = {".csv": ",", ".tsv": "\t"}
_PARQUET = (".parquet", ".pq")
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

# The first of these that a row has is what is asked.
_LISTS = ("turns", "messages", "conversations", "conversation", "data")
_TEXTS = ("prompt", "problem", "question", "instruction", "text", "content")
_SHAPES = ("turns", "prompt", *_LISTS[1:4], *_TEXTS[1:], "data")
_REQUESTS = ("body", "request")
_USER, _SYSTEM = ("user", "human"), ("system", "developer")
_TARGET = ("assistant", "gpt", "model", "bot", "chatgpt")


@dataclass(frozen=True)
class Conversation:
    """What a row asks. left_out: what else it has that is not asked or kept to, by name."""

    turns: tuple[str, ...]
    system: str | None = None
    left_out: frozenset[str] = frozenset()


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each row of a prompt file stands ("line 3", "row 3"), and what it holds: a text, or
    what JSON, CSV or Parquet say. Raises SharpDraftError for a file that cannot be read so."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    suffix = "".join(suffixes[: -1 if packed else None][-1:])
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if packed else raw
        if suffix in _PARQUET:
            yield from _numbered(_parquet(raw, path))
            return
        text = raw.decode(next((_MARKS[m] for m in _MARKS if raw.startswith(m)), "utf-8"))
        if "\0" in text:
            raise ValueError("it has zero bytes: save it as UTF-8")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise SharpDraftError(f"cannot read the prompt file {path}: {one_line(error)}") from error
    if suffix in _CELLS:
        yield from _numbered(_cells(text, _CELLS[suffix], path))
    elif suffix in (*_TEXT, *_JSON, ""):
        yield from _json_or_lines(text, suffix, path)
    else:
        known = ", ".join((*_TEXT, *_JSON, *_CELLS, *_PARQUET[:1]))
        raise SharpDraftError(
            f"{path}: prompt files end with {known}, each also with .gz behind; {suffix} is not "
            "known"
        )


def conversation_of(row: Any) -> Conversation:
    """What a row asks: its user turns in order, and its system message. Raises ValueError, which
    says what is wrong with it."""
    if isinstance(row, str):
        return Conversation((_text(row, "the prompt"),))
    if isinstance(row, list):
        return _turns(row, "the list")
    if not isinstance(row, dict):
        raise ValueError(f"holds {_kind(row)}: {_NEEDS}")
    known = [key for key in _SHAPES if row.get(key) is not None]
    if not known:
        return _request(row)
    key, others = known[0], frozenset(known[1:])
    value = row[key]
    if key == "content" and "role" in row:
        value = [row]
    elif key in _LISTS and isinstance(value, str):
        # How a cell of a table holds a list.
        value = _parsed(value, key)
    if key in _LISTS or (isinstance(value, list) and _has_roles(value)):
        found = _turns(value, f'"{key}"')
    else:
        text = _text(value, f'"{key}"')
        if key == "instruction" and (more := row.get("input")):
            text += "\n\n" + _text(more, '"input"')
        found = Conversation((text,))
    system = found.system
    if row.get("system") is not None:
        if system is None:
            system = _text(row["system"], '"system"')
        else:
            others |= {"system"}
    return Conversation(found.turns, system, found.left_out | others)


_NEEDS = (
    'a row needs "prompt" (text) or "turns" (a list of texts), or another shape that '
    "docs/benchmark.md names"
)


def _request(row: Mapping[str, Any]) -> Conversation:
    """A request to a server, as batch files and logs have them."""
    inner = next((row[key] for key in _REQUESTS if row.get(key) is not None), None)
    if inner is None:
        keys = ", ".join(map(str, row)) or "none"
        raise ValueError(f"{_NEEDS}; its keys are {keys[:200]}")
    found = conversation_of(inner)
    known = {*_SHAPES, *_REQUESTS, "system"}
    settings = inner.keys() - known if isinstance(inner, dict) else ()
    return Conversation(found.turns, found.system, found.left_out | set(settings))


def _turns(items: Any, name: str) -> Conversation:
    """A list of texts or of messages."""
    if not isinstance(items, list) or not items:
        empty = "is empty" if items == [] else f"is {_kind(items)}, not a list"
        raise ValueError(f"{name} {empty}: {_NEEDS}")
    if all(isinstance(item, str) for item in items):
        # Lists called data hold questions and answers in turn.
        asked = items[::2] if name == '"data"' else items
        left = frozenset({ANSWERS} if len(asked) < len(items) else ())
        return Conversation(tuple(_text(item, f"a text of {name}") for item in asked), None, left)
    if not _has_roles(items):
        raise ValueError(f"{name} holds neither texts nor messages with role and content")
    turns: list[str] = []
    system, answers = None, False
    for item in items:
        role = str(item.get("role", item.get("from"))).lower()
        if role in _TARGET:
            answers = True
            continue
        content = item.get("content", item.get("value"))
        if role in _USER:
            turns.append(_text(content, f"a {role}'s text"))
        elif role not in _SYSTEM:
            raise ValueError(
                f"{name} has a message of role {role}: known are user, assistant, system"
            )
        elif turns or answers or system is not None:
            raise ValueError(f"{name} has a {role} message that is not the first: put it there")
        else:
            system = _text(content, f"the {role} message")
    if not turns:
        raise ValueError(f"{name} has no message of a user")
    return Conversation(tuple(turns), system, frozenset({ANSWERS} if answers else ()))


def _has_roles(items: Sequence[Any]) -> bool:
    return all(isinstance(item, dict) and ("role" in item or "from" in item) for item in items)


def _text(value: Any, name: str) -> str:
    """A text, or the texts of a list of parts."""
    if isinstance(value, list):
        value = "".join(_part(part, name) for part in value)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_kind(value)}, not a text: {_NEEDS}")
    if not value.strip():
        raise ValueError(f"{name} is empty: {_NEEDS}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half a character (a lone surrogate)") from error
    return value


def _part(part: Any, name: str) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type", "no type") if isinstance(part, dict) else _kind(part)
    raise ValueError(f"{name} has a part that is no text ({kind}): only text is read")


def _parsed(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f'"{key}" is a text, not a list: {_NEEDS}') from None


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{str(value)[:40]} ({type(value).__name__})"


def _json_or_lines(text: str, suffix: str, path: Path) -> Iterator[tuple[str, Any]]:
    """One JSON document, or a row a line. In a text file only a { starts JSON."""
    marks = ("{",) if suffix in _TEXT or not suffix else ("{", "[", '"')
    if text.lstrip().startswith(marks):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            if suffix == ".json" and not _goes_on(error):
                raise SharpDraftError(f"{path} is not JSON ({one_line(error)})") from error
        else:
            if isinstance(document, dict) and not (_is_list_of_rows(document.get("data"))):
                first = text[: len(text) - len(text.lstrip())].count("\n") + 1
                yield f"line {first}", document
                return
            rows = document["data"] if isinstance(document, dict) else document
            if isinstance(rows, list):
                yield from _numbered(rows)
                return
    for number, line in enumerate(text.split("\n"), 1):
        row: Any = line.removesuffix("\r")
        if not row.strip():
            continue
        if row.lstrip().startswith(marks):
            try:
                row = json.loads(row)
            except (ValueError, RecursionError) as error:
                raise SharpDraftError(
                    f"{path}, line {number}: not JSON ({one_line(error)})"
                ) from error
        yield f"line {number}", row


def _goes_on(error: Exception) -> bool:
    """Whether a document is whole and something stands behind it, as in JSON lines."""
    return isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"


def _is_list_of_rows(data: Any) -> bool:
    return (
        isinstance(data, list)
        and all(isinstance(row, dict) for row in data)
        and not _has_roles(data)
    )


def _numbered(rows: Any) -> Iterator[tuple[str, Any]]:
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _cells(text: str, delimiter: str, path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if None in row:
                raise SharpDraftError(
                    f"{path}, line {reader.line_num}: more cells than the first line names"
                )
            yield {key: value for key, value in row.items() if value}
    except csv.Error as error:
        raise SharpDraftError(f"{path}, line {reader.line_num}: {one_line(error)}") from error


def _parquet(raw: bytes, path: Path) -> list[Any]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise SharpDraftError(f"{path}: Parquet files need pyarrow: pip install pyarrow") from error
    return list(parquet.read_table(BytesIO(raw)).to_pylist())
