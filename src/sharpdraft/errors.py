"""The one error a user meets: what is wrong and what to do about it, in one line. And notes: what
goes on, but not as one might think."""

import warnings


class SharpDraftError(Exception):
    """Bad input found before any long work. The message says what is wrong and what to do."""


def one_line(error: BaseException) -> str:
    """What an error of somebody else's says, for the middle of a message."""
    return " ".join(str(error).split())[:300] or type(error).__name__


class SharpDraftNote(UserWarning):
    """Something that a user should know, though it goes on."""


def note(text: str) -> None:
    """Say it, as a warning in Python and a line on stderr in a command."""
    warnings.warn(text, SharpDraftNote, stacklevel=3)
