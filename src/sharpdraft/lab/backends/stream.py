"""An answer as a server streams it: server-sent events in, text and counts out."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from httpx_sse import ServerSentEvent

_BROKEN_OFF = ("abort", "cancelled", "content_filter", "error")
_MISREAD = (ValueError, AttributeError, TypeError, LookupError, OverflowError, RecursionError)
"""What reading JSON of any shape raises where it is not of the shape that is read."""
_THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details", "thinking")
"""Where servers put what is thought; those that use several say the same in each."""
_MOST_TOKENS = 10**9


class StreamError(Exception):
    """What a server sent is no answer; the text says why."""


@dataclass
class Streamed:
    """What a stream of completions, or of chat completions, has said so far.

    began, first, ended: seconds of one clock, when it was asked, when its first text came and when
    its last event did. text, reasoning: the answer, and what a chat server thought before it.
    tokens: how many were written, as the server says; None where it does not. pieces: events that
    brought text. finished: whether the server said that the answer has ended.
    """

    began: float
    ended: float = 0.0
    first: float | None = None
    text: str = ""
    reasoning: str = ""
    tokens: int | None = None
    pieces: int = 0
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
            if _is_error(said):
                raise StreamError(f"it sent an error: {message_of(said)}")
            self._add(said, now)
        except _MISREAD as error:
            raise StreamError(f"it sent what is no completion: {shortened(data)}") from error
        return True

    def end(self) -> None:
        """The stream has ended. Raises StreamError if that was before its answer did, or if there
        is no text in it."""
        if not self.finished:
            raise StreamError(
                f"the stream was cut off after {self.pieces} pieces of text: neither [DONE], nor a "
                "finish_reason, nor the usage came"
            )
        if not self.pieces:
            counted = f", though its usage counts {self.tokens} tokens" if self.tokens else ""
            raise StreamError(f"it wrote nothing: the stream ended without text in it{counted}")
        self.text, self.reasoning = _mended(self.text), _mended(self.reasoning)

    def count(self, tokens_of: Callable[[str], int] | None) -> tuple[int, str]:
        """How many tokens were written, and who counted: the server's "usage", a "tokenizer", or
        "events" with text."""
        # 0 beside text: the server does not count.
        if self.tokens:
            return self.tokens, "usage"
        if tokens_of is not None:
            return tokens_of(self.reasoning) + tokens_of(self.text), "tokenizer"
        return self.pieces, "events"

    def _add(self, said: dict[str, Any], now: float) -> None:
        choices = said.get("choices") or ()
        if (written := (said.get("usage") or {}).get("completion_tokens")) is not None:
            self.tokens = max(_number(written), self.tokens or 0)
            # Usage beside a choice may be that of the text so far.
            self.finished = self.finished or (self.tokens > 0 and not choices)
        if len(choices) > 1 or any(choice.get("index") for choice in choices):
            raise StreamError("it sent several answers (choices) where one was asked for")
        for choice in choices:
            if choice.get("error"):
                raise StreamError(f"it sent an error: {message_of(choice)}")
            text, thought = _read(choice)
            self.text, self.reasoning = self.text + text, self.reasoning + thought
            if text or thought:
                # What was counted, or had ended, before this was not all.
                self.tokens = None if written is None else self.tokens
                self.finished = False
                self.pieces += 1
                self.first = self.first or now
            reason = choice.get("finish_reason")
            if reason in _BROKEN_OFF:
                raise StreamError(f"the server broke the answer off (finish_reason {reason})")
            self.finished = self.finished or bool(reason)


def _is_error(said: dict[str, Any]) -> bool:
    """Whether an event tells an error, in one of the usual shapes."""
    if said.get("error") or "error" in (said.get("object"), said.get("type")):
        return True
    return "choices" not in said and any(
        said.get(key) and not isinstance(said[key], dict) for key in ("detail", "message")
    )


def _number(written: Any) -> int:
    """How many tokens a usage says. Raises StreamError for what is no such number."""
    with suppress(ValueError, TypeError, OverflowError):
        if 0 <= (number := int(written)) <= _MOST_TOKENS and number == float(written):
            return number
    said = shortened(json.dumps(written))
    raise StreamError(f"its usage says {said}, which is no number of tokens")


def _read(choice: dict[str, Any]) -> tuple[str, str]:
    """What a choice brought: text of the answer, and of what was thought before it."""
    part = next((choice[key] or {} for key in ("delta", "message") if key in choice), choice)
    if part.get("tool_calls") or part.get("function_call"):
        raise StreamError("it calls a tool (tool_calls), which is no text to measure")
    said = part.get("content") or part.get("text") or part.get("refusal") or ""
    thought = next((part[key] for key in _THOUGHTS if part.get(key)), "")
    if isinstance(said, list):
        thought = thought or [each["thinking"] for each in said if "thinking" in each]
        said = "".join(each["text"] for each in said if "thinking" not in each)
    if not isinstance(said, str):
        raise TypeError("text that is none")
    return said, _flat(thought)


def _flat(thought: Any) -> str:
    """A thought as one text, which may come in parts, of which some are hidden."""
    if isinstance(thought, dict):
        thought = thought.get("text") or thought.get("summary") or ""
    return thought if isinstance(thought, str) else "".join(map(_flat, thought))


def _mended(text: str) -> str:
    """Text whose characters may have been cut in halves (surrogates) between two events."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def message_of(said: Any) -> str:
    """What an error says, on one short line: its message where it has one of the usual shapes, or
    else all of it."""
    if isinstance(said, str):
        with suppress(ValueError, RecursionError):
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
    line = " ".join(_mended(text).split())
    return line if len(line) <= 300 else f"{line[:300]}..."
