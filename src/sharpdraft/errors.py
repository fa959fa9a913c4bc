"""The one error a user meets: what is wrong and what to do about it, in one line."""


class SharpDraftError(Exception):
    """Bad input found before any long work. The message says what is wrong and what to do."""


def one_line(error: BaseException) -> str:
    """What an error of somebody else's says, for the middle of a message."""
    return " ".join(str(error).split())[:300] or type(error).__name__
