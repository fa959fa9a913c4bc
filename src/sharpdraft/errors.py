"""The one error a user meets: what is wrong and what to do about it, in one line."""


class SharpDraftError(Exception):
    """Bad input found before any long work. The message says what is wrong and what to do."""
