"""Source files, functions of which are edited again and again."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator

from ..errors import SharpDraftError
from .sources import LIBRARY, Document
from .tasks import Task
from .workload import Reader, Text, Workload

_SESSIONS = 8
_TURNS = 40
_ANSWER = 192
# The part of a file that is shown, tokens; a function has to fit into an answer.
_SHOWN = 1024
_FUNCTION_TOKENS = (40, 150)
_EDITS = (
    "Write `{name}` from the file above with type hints on every parameter and on what it returns.",
    "Add a docstring to `{name}` that says what its parameters are and what it returns.",
    "Rename the local variables of `{name}` so that their names say what they hold.",
    "Put a check of its arguments at the top of `{name}` that raises ValueError with a clear text.",
    "Take every check of arguments out of `{name}` and write the function without them.",
    "Write `{name}` with early returns where it nests.",
    "Make `{name}` log its arguments with the logging module before it does anything.",
    "Show `{name}` as it stands after all changes so far.",
    "Split `{name}` into two functions and write both.",
    "Put `{name}` back to how it was in the file and add one comment on its first line.",
    "Write one test for `{name}` with assert, and then the function again.",
    "Add a keyword parameter `strict=False` to `{name}` and use it.",
)

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _tasks(reader: Reader) -> Iterator[Task]:
    try:
        files = LIBRARY.documents(reader.held_out)
    except SharpDraftError as error:
        raise SharpDraftError(f"code: {error}") from error
    left = reader.sessions or _SESSIONS
    for document in files:
        if left and (task := _task(document, reader)):
            left -= 1
            yield task


def _task(document: Document, reader: Reader) -> Task | None:
    """None for a file in whose first part there are no functions to edit."""
    text = reader.text(document.read())
    shown = text.cut(min(_SHOWN, reader.limit // 4))
    names = _functions(text, shown.count("\n"))
    if len(names) < 2:
        return None
    rng = random.Random(f"code-{document.name}")
    lead = f"This is the start of {document.name}:\n\n```python\n{shown}```\n\n"
    turns: list[str] = []
    # Several edits of one function before the next.
    while len(turns) < _TURNS:
        name = names[len(turns) // 4 % len(names)]
        chosen = sorted(rng.sample(range(len(_EDITS)), 4))
        turns += [_EDITS[number].format(name=name) for number in chosen]
    return Task(document.name, (lead + turns[0], *turns[1:]), _ANSWER, lead=len(lead))


def _functions(text: Text, lines: int) -> list[str]:
    """Functions within the first lines of a file that an answer has room for."""
    tree = ast.parse("".join(text.lines))
    least, most = _FUNCTION_TOKENS
    found: dict[str, list[_Function]] = {}
    for node in ast.walk(tree):
        if isinstance(node, _Function) and node.lineno <= lines:
            found.setdefault(node.name, []).append(node)
    # A name that several classes have would not say which is meant.
    single = [nodes[0] for nodes in found.values() if len(nodes) == 1]
    return [
        node.name
        for node in sorted(single, key=lambda node: node.lineno)
        if (node.end_lineno or 0) <= lines
        and least <= sum(text.counts[node.lineno - 1 : node.end_lineno]) <= most
    ]


CODE = Workload(
    "code",
    "source files, functions of which are edited again and again",
    LIBRARY.where,
    LIBRARY.licence,
    _tasks,
)
