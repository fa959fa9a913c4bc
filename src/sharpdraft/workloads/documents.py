"""Documents that people wrote, cut at several lengths, each with a request behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest

from ..errors import SharpDraftError, note
from .sources import LIBRARY, LICENCES, MANUAL, READMES, Document, Source
from .tasks import Task
from .workload import Reader, Text, Workload

_SOURCES = (LIBRARY, MANUAL, LICENCES, READMES)
_SESSIONS = 12
_ANSWER = 96
_FIRST = 512
# What the template and the request take, and what lines counted one by one miss, tokens.
_ROOM = 128
_PROSE = (
    "Carry this text on from the very place where it stops, in its own manner.",
    "Sum up the text above in five sentences of your own.",
    "Which three points of the text above matter most to somebody who is new to it, and why?",
    "Rewrite the last paragraph above in plain words for a reader of twelve.",
)
_CODE = (
    "Carry this file on from the very place where it stops.",
    "Explain in five sentences what the code above is for and how it is organised.",
    "Which function above would break first on unexpected input, and what would happen then?",
    "Write the last complete function above once more, with clearer names and a comment on each "
    "step.",
)


def _tasks(reader: Reader) -> Iterator[Task]:
    """Of each document one task a length, short ones first, so that what was read is kept."""
    lengths = _lengths(reader.limit)
    short = []
    found = islice(_documents(reader), reader.sessions or _SESSIONS)
    for number, (source, document) in enumerate(found):
        requests = _CODE if source is LIBRARY else _PROSE
        text = reader.text(document.read())
        name = f"{source.name}-{document.name}"
        reached = [n for n in lengths if text.tokens >= n and text.cut(n).strip()]
        if len(reached) < len(lengths):
            short.append(f"{name} ({text.tokens:,} tokens)")
        for turn, length in enumerate(reached):
            request = requests[(number + turn) % len(requests)]
            yield _task(f"{name}@{length}", text, length, request)
    if short:
        note(
            f"documents: {len(short)} are shorter than {lengths[-1]:,} tokens and are cut at what "
            f"they reach: {', '.join(short)}"
        )


def _task(name: str, text: Text, length: int, request: str) -> Task:
    lead = text.cut(length).rstrip() + "\n\n"
    return Task(name, (lead + request,), _ANSWER, lead=len(lead))


def _lengths(limit: int) -> list[int]:
    """Where documents are cut, tokens: below the end of every context bucket, and at the limit."""
    ends = []
    end = _FIRST
    while end < limit:
        ends.append(end - _ROOM)
        end *= 2
    last = limit - _ROOM - _ANSWER
    return [*(each for each in ends if each < last), *([last] if last > 0 else [])]


def _documents(reader: Reader) -> Iterator[tuple[Source, Document]]:
    """The sources' documents in turn, of each those first that reach the longest length. Notes a
    source that is not there, and raises SharpDraftError where all are missing."""
    missing: list[str] = []
    each: list[Sequence[tuple[Source, Document]]] = []
    # A token has about four characters.
    enough = 5 * reader.limit
    for source in _SOURCES:
        try:
            own = source.documents(reader.held_out)
        except SharpDraftError as error:
            missing.append(str(error))
            continue
        own.sort(key=lambda document: document.size < enough)
        each.append([(source, document) for document in own])
    if not each:
        raise SharpDraftError(f"documents: {'; '.join(missing)}")
    for said in missing:
        note(f"documents: {said}; the others are read")
    for row in zip_longest(*each):
        yield from (pair for pair in row if pair is not None)


DOCUMENTS = Workload(
    "documents",
    "long texts that people wrote, cut at every context length, then one request: carry on, sum "
    "up, answer, rewrite",
    "; ".join(source.where for source in _SOURCES),
    "; ".join(f"{source.name}: {source.licence}" for source in _SOURCES),
    _tasks,
)
