"""An answer as a server streams it: server-sent events in, text and counts out."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from httpx_sse import ServerSentEvent

_BROKEN_OFF = ("abort", "error")


class StreamError(Exception):
    """What a server sent is no answer; the text says why."""


@dataclass
class Streamed:
    """What a stream of completions, or of chat completions, has said so far.

    began, first, ended: seconds of one clock, when it was asked, when its first text came and when
    its last event did. text, reasoning: the answer, and what a chat server thought before it.
    tokens: how many were written, as the server says; None where it does not. pieces: events that
    brought text. answered: whether there was a choice. finished: whether the server said that the
    answer has ended.
    """

    began: float
    ended: float = 0.0
    first: float | None = None
    text: str = ""
    reasoning: str = ""
    tokens: int | None = None
    pieces: int = 0
    answered: bool = False
    finished: bool = False

    def take(self, event: ServerSentEvent, now: float) -> bool:
        """Read an event that came at `now`, and return whether the stream goes on. Raises
        StreamError for one that tells an error, or is no completion."""
        data = event.data.strip()
        if event.event == "error":
            raise StreamError(f"it sent an error: {message_of(data)}")
        if not data:
            return True
        self.ended = now
        if data == "[DONE]":
            self.finished = True
            return False
        try:
            said = json.loads(data)
            if said.get("error") or said.get("object") == "error":
                raise StreamError(f"it sent an error: {message_of(said)}")
            self._add(said, now)
        except (ValueError, AttributeError, TypeError) as error:
            raise StreamError(f"it sent what is no completion: {shortened(data)}") from error
        return True

    def check(self) -> None:
        """Raises StreamError for a stream that ended before its answer did."""
        if not self.finished:
            raise StreamError(
                f"the stream was cut off after {self.pieces} pieces of text: neither [DONE], nor a "
                "finish_reason, nor the usage came"
            )
        if not self.answered:
            raise StreamError("the stream ended without an answer in it")

    def count(self, tokens_of: Callable[[str], int] | None) -> tuple[int, str]:
        """How many tokens were written, and who counted: the server's "usage", a "tokenizer", or
        "events" with text."""
        if self.tokens is not None:
            return self.tokens, "usage"
        if tokens_of is not None:
            return tokens_of(self.reasoning) + tokens_of(self.text), "tokenizer"
        return self.pieces, "events"

    def _add(self, said: dict[str, Any], now: float) -> None:
        choices = said.get("choices") or ()
        # None, or 0 beside text: the server does not count.
        if written := (said.get("usage") or {}).get("completion_tokens"):
            self.tokens = int(written)
            # Usage beside a choice may be that of the text so far.
            self.finished = self.finished or not choices
        for choice in choices:
            self.answered = True
            part = (choice["delta"] or {}) if "delta" in choice else choice
            text = part.get("content") or part.get("text") or ""
            thought = part.get("reasoning_content") or part.get("reasoning") or ""
            self.text, self.reasoning = self.text + text, self.reasoning + thought
            if text or thought:
                self.pieces += 1
                self.first = self.first or now
            reason = choice.get("finish_reason")
            if reason in _BROKEN_OFF:
                raise StreamError(f"the server broke the answer off (finish_reason {reason})")
            self.finished = self.finished or bool(reason)


def message_of(said: Any) -> str:
    """What an error says, on one short line: its message where it has one of the usual shapes, or
    else all of it."""
    if isinstance(said, str):
        with suppress(ValueError):
            parsed = json.loads(said)
            if isinstance(parsed, dict):
                return message_of(parsed)
        return shortened(said)
    if isinstance(said, dict):
        for key in ("error", "message", "detail"):
            if said.get(key):
                return message_of(said[key])
    return shortened(json.dumps(said))


def shortened(text: str) -> str:
    """Text for the middle of a message: on one line, and not too long."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]}..."
