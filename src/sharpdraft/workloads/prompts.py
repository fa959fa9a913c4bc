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

from ..errors import SharpDraftError, note, one_line

ANSWERS = "recorded answers"

_TEXT = (".txt", ".text", ".md")
_JSON = (".jsonl", ".ndjson", ".json")
_CELLS = {".csv": ",", ".tsv": "\t"}
_PARQUET = (".parquet", ".pq")
_GZIP = b"\x1f\x8b"
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
# What stands before the question, in this order.
_BEFORE = ("context", "passage", "document", "article", "input", "choices")
_SYSTEMS = ("system", "system_prompt", "system_message", "system_instruction")
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
        raw = gzip.decompress(raw) if packed or raw.startswith(_GZIP) else raw
        if suffix in _PARQUET:
            yield from _numbered(_parquet(raw, path))
            return
        text = raw.decode(next((_MARKS[m] for m in _MARKS if raw.startswith(m)), "utf-8"))
        if "\0" in text:
            raise ValueError("it has zero bytes: save it as UTF-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise SharpDraftError(
            f"cannot read the prompt file {path}: line {line} is no {error.encoding.upper()}: save "
            "the file as UTF-8"
        ) from error
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
    key = known[0]
    value, used = row[key], {key, "name"}
    if key == "content" and "role" in row:
        value = [row]
        used.add("role")
    elif key in _LISTS and isinstance(value, str):
        # How a cell of a table holds a list.
        value = _parsed(value, key)
    if isinstance(value, list) and value and _has_roles(value):
        found = _turns(value, "the row" if "role" in used else f'"{key}"')
    else:
        found = _turns(value, f'"{key}"') if key in _LISTS else _single(row, key, used)
        found = _behind_context(found, row, used)
    system = found.system
    said = next((name for name in _SYSTEMS if row.get(name)), None)
    if said is not None and (own := _text(row[said], f'"{said}"')) and system in (None, own):
        system = own
        used.add(said)
    return Conversation(found.turns, system, found.left_out | _others(row, used))


def _single(row: Mapping[str, Any], key: str, used: set[str]) -> Conversation:
    value = row[key]
    plain = isinstance(value, list) and all(isinstance(item, (str, int)) for item in value)
    if plain and value and key != "content":
        kind = "texts" if isinstance(value[0], str) else "token ids"
        wanted = 'give each prompt a row as a text, or call texts that follow each other "turns"'
        raise ValueError(f'"{key}" is a list of {kind}: {wanted}')
    text = _text(value, f'"{key}"')
    if key == "instruction" and (more := row.get("input")):
        text += "\n\n" + _text(more, '"input"')
        used.add("input")
    return Conversation((text,))


def _behind_context(found: Conversation, row: Mapping[str, Any], used: set[str]) -> Conversation:
    """The first turn behind what is to be read for it, unless it has that already."""
    before: list[str] = []
    for key in _BEFORE:
        value = row.get(key)
        if key in used or not value:
            continue
        if isinstance(value, Mapping):
            # Choices with their labels.
            value = value.get("text")
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = "\n".join(value)
        if isinstance(value, str) and value.strip():
            used.add(key)
            if value not in found.turns[0]:
                before.append(_text(value, f'"{key}"'))
    first = "\n\n".join([*before, found.turns[0]])
    return Conversation((first, *found.turns[1:]), found.system, found.left_out)


def _others(row: Mapping[str, Any], used: set[str]) -> frozenset[str]:
    """What a row has besides."""
    return frozenset(
        " ".join(str(key).split())
        for key, value in row.items()
        if key not in used and value is not None and value != ""
    )


_NEEDS = (
    'a row needs "prompt" (text) or "turns" (a list of texts), or another shape that '
    "docs/benchmark.md names"
)


def _request(row: Mapping[str, Any]) -> Conversation:
    """A request to a server, as batch files and logs have them."""
    key = next((key for key in _REQUESTS if row.get(key) is not None), None)
    if key is None:
        keys = ", ".join(map(str, row)) or "none"
        raise ValueError(f"{_NEEDS}; its keys are {keys[:200]}")
    inner = row[key]
    if isinstance(inner, str) and inner.lstrip().startswith(("{", "[")):
        # How logs and cells of tables hold a request.
        try:
            inner = json.loads(inner)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'"{key}" is not JSON ({one_line(error)})') from None
    found = conversation_of(inner)
    left = found.left_out | _others(row, {key, "name"})
    return Conversation(found.turns, found.system, left)


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
        raise ValueError(f"{name} has no message of a user, and others are not asked")
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
    if isinstance(part, str):
        return part
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
    texts = suffix not in _JSON
    if not texts or text.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            if suffix == ".json" and text.strip() and not _goes_on(error):
                raise SharpDraftError(f"{path} is not JSON ({one_line(error)})") from error
        else:
            if isinstance(document, dict) and not (_is_list_of_rows(document.get("data"))):
                first = text[: len(text) - len(text.lstrip())].count("\n") + 1
                yield f"line {first}", document
                return
            rows = document["data"] if isinstance(document, dict) else document
            if isinstance(rows, list):
                return (yield from _numbered(rows))
    no_json: list[int] = []
    for number, line in enumerate(text.split("\n"), 1):
        row: Any = line.removesuffix("\r")
        if not row.strip():
            continue
        if not texts or row.lstrip().startswith("{"):
            try:
                row = json.loads(row)
            except (ValueError, RecursionError) as error:
                if not texts:
                    raise SharpDraftError(
                        f"{path}, line {number}: not JSON ({one_line(error)}): write one object or "
                        "text a line with nothing behind it, or name a file of texts .txt"
                    ) from error
                no_json.append(number)
        yield f"line {number}", row
    if no_json:
        note(
            f"{path}: lines that begin with {{ and are no JSON are asked as texts: {len(no_json)}, "
            f"first line {no_json[0]}"
        )


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
    begins = 1
    try:
        names = reader.fieldnames or ()
        if twice := {each for each in names if names.count(each) > 1}:
            raise SharpDraftError(
                f"{path}, line 1: {', '.join(sorted(twice))} is named twice: name each column once"
            )
        begins = reader.line_num + 1
        for row in reader:
            begins = reader.line_num + 1
            if None in row:
                raise SharpDraftError(
                    f"{path}, line {reader.line_num}: more cells than the first line names"
                )
            yield {key: value for key, value in row.items() if value}
    except csv.Error as error:
        raise SharpDraftError(
            f"{path}, the row from line {begins} on: {one_line(error)}: a cell that begins with a "
            "quote ends with one, and quotes in it are doubled"
        ) from error


def _parquet(raw: bytes, path: Path) -> list[Any]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise SharpDraftError(f"{path}: Parquet files need pyarrow: pip install pyarrow") from error
    return list(parquet.read_table(BytesIO(raw)).to_pylist())
