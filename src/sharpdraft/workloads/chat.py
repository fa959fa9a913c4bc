"""A conversation's turns as tokens, by the target's chat template and what it is told."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import SharpDraftError, note, one_line

if TYPE_CHECKING:
    from .tasks import Task

# Stands where an answer does, to be found again in what a template makes of it.
_ANSWER = "HERETHEANSWERSTANDS"
_QUESTION = "HERETHEQUESTIONSTANDS"
# What apply_chat_template takes that is a template's own to read.
_READ_BY_TEMPLATES = ("tools", "documents")
_THINKING = "enable_thinking"


@dataclass(frozen=True)
class ChatSettings:
    """What a chat template is told besides the turns.

    system: the system message of conversations that have none of their own. arguments: variables of
    the template. raw: texts are taken as they are, without the template.
    """

    system: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False

    def __post_init__(self) -> None:
        if self.raw and (self.system is not None or self.arguments):
            raise SharpDraftError(
                "--raw leaves the chat template out, which --system and --template-arg are for: "
                "leave out the one or the other"
            )
        if self.system is not None:
            _check_text("--system", self.system)
        arguments = json.dumps(dict(self.arguments), ensure_ascii=False, default=str)
        _check_text("--template-arg", arguments)

    @classmethod
    def parse(
        cls, system: str | None = None, arguments: Iterable[str] = (), raw: bool = False
    ) -> ChatSettings:
        """arguments: each NAME=VALUE, the value as JSON, or a text where it is none. Raises
        SharpDraftError for what is no such pair, or named twice."""
        found: dict[str, Any] = {}
        for each in arguments:
            name, given, value = each.partition("=")
            name = name.strip()
            if not given or not name.isidentifier():
                raise SharpDraftError(
                    f"--template-arg {each}: write NAME=VALUE, as {_THINKING}=false"
                )
            if name in found:
                raise SharpDraftError(f"--template-arg {name} is given twice")
            try:
                found[name] = json.loads(value)
            except (ValueError, RecursionError):
                found[name] = value
        return cls(system, found, raw)

    def to_dict(self) -> dict[str, Any]:
        """What differs from a template as it is: {} where nothing does."""
        said = {"system": self.system, "arguments": dict(self.arguments), "raw": self.raw}
        return {name: value for name, value in said.items() if value not in (None, {}, False)}


def describe(told: Mapping[str, Any]) -> str:
    """One line of what `ChatSettings.to_dict` says."""
    parts = ["none, texts as they are"] if told.get("raw") else []
    if "system" in told:
        parts.append(f"system {json.dumps(told['system'], ensure_ascii=False)}")
    for name, value in told.get("arguments", {}).items():
        parts.append(f"{name}={json.dumps(value, ensure_ascii=False)}")
    return ", ".join(parts)


class Chat:
    """Turns as tokens.

    tokenizer: the target's. Raises SharpDraftError for arguments that no template can be given, and
    for named templates of which none is the default; notes those that this one does not mention.
    """

    def __init__(self, tokenizer: Any, settings: ChatSettings | None = None) -> None:
        self.tokenizer = tokenizer
        self.settings = settings or ChatSettings()
        self.template = None if self.settings.raw else _template(tokenizer)
        if self.template is not None:
            self._check_arguments(self.template)
        self._in_parts: bool | None = None
        """Whether messages are given as lists of parts; None before the template was asked."""

    def prompt(self, turn: str, *, first: bool = True, system: str | None = None) -> list[int]:
        """Tokens of one user turn up to where its answer starts; `first` includes what a
        conversation begins with, and a later one starts behind `end_of_turn`.

        system: the conversation's own system message. Raises SharpDraftError without a template, or
        for what it refuses.
        """
        if self.settings.raw:
            if first and system is None:
                _check_text("the prompt", turn)
                return list(self.tokenizer(turn)["input_ids"])
            raise SharpDraftError(
                "--raw is for single prompts: several turns and system messages need the chat "
                "template"
            )
        if first:
            return self._tokens(self._text([_said("user", turn)], system))
        # Behind the token that it starts with, as white space there may belong to that token.
        return self._tokens(self._behind(turn, system))[1:]

    def prompts(self, task: Task) -> Iterator[list[int]]:
        """Tokens of every turn of a session; see `prompt`."""
        for number, turn in enumerate(task.turns):
            yield self.prompt(turn, first=number == 0, system=task.system)

    def lead(self, task: Task) -> int:
        """How many tokens of a session's first prompt are the text before its question."""
        if not task.lead:
            return 0
        whole, lead = (
            self.prompt(text, system=task.system)
            for text in (task.turns[0], task.turns[0][: task.lead])
        )
        pairs = enumerate(zip(whole, lead, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(whole) - 1, len(lead)))

    def messages(self, task: Task) -> list[dict[str, str]]:
        """A session's first turn as messages, for who renders them elsewhere."""
        return self._messages([_said("user", task.turns[0])], task.system)

    def check(self, tasks: Iterable[Task]) -> None:
        """Meet what the template refuses before anything is measured. Raises SharpDraftError."""
        seen = set()
        for task in tasks:
            several = len(task.turns) > 1
            kind = (several, task.system is not None)
            if kind not in seen:
                seen.add(kind)
                self._check(task, several)

    @cached_property
    def end_of_turn(self) -> int:
        """The token that the template puts behind an answer, which the target writes itself unless
        it is cut. Raises SharpDraftError for a template that puts none."""
        return int(self.tokenizer.convert_tokens_to_ids(self._end(self._behind("?", None))))

    def stops(self, ends: Sequence[int]) -> tuple[int, ...]:
        """`ends`, the tokens that a configuration names as ends of a turn, and the template's own,
        which is noted where it is not among them."""
        if self.template is None:
            return tuple(ends)
        try:
            end = self.end_of_turn
        except SharpDraftError:
            # Single prompts go on without; sessions meet this in `check`.
            return tuple(ends)
        if end in ends:
            return tuple(ends)
        name = self.tokenizer.convert_ids_to_tokens(end)
        note(
            f"the target's chat template ends a turn with {name} ({end}), which is not among its "
            f"configuration's end tokens {list(ends)}: answers end there too"
        )
        return (*ends, end)

    def _check(self, task: Task, several: bool) -> None:
        if self.settings.raw:
            self.prompt(task.turns[-1], first=not several, system=task.system)
            return
        self._text([_said("user", task.turns[0])], task.system)
        asked = [_said("user", "?")]
        begun = self._text(asked, task.system)
        if any(
            each["role"] == "system" and each["content"].strip() not in begun
            for each in self.messages(task)
        ):
            note("the target's chat template leaves the system message out")
        if not several:
            return
        self._behind(task.turns[1], task.system)
        asked += [_said("assistant", _ANSWER), _said("user", "?")]
        whole = self._text(asked, task.system)
        if not whole.startswith(begun) or not whole[len(begun) :].lstrip().startswith(_ANSWER):
            note(
                "the target's chat template renders earlier turns otherwise than it asks for them; "
                "a session keeps them as they were asked"
            )

    def _check_arguments(self, template: str) -> None:
        named = self.settings.arguments
        taken = inspect.signature(self.tokenizer.apply_chat_template).parameters
        for name in named:
            if name == "messages" or (name in taken and name not in _READ_BY_TEMPLATES):
                raise SharpDraftError(f"--template-arg {name}: that is no variable of templates")
            if not _mentions(template, name):
                note(f"the target's chat template does not mention {name}: it has no effect")
        if _mentions(template, _THINKING) and _THINKING not in named:
            note(
                f"the target's chat template knows {_THINKING}, and nothing sets it; z-lab's Qwen3 "
                f"drafters are made for --template-arg {_THINKING}=false"
            )

    def _behind(self, turn: str, system: str | None) -> str:
        """What stands behind an answer up to where the next one starts, from its end of turn on."""
        asked = [_said("user", "?"), _said("assistant", _ANSWER), _said("user", turn)]
        _, found, behind = self._text(asked, system).partition(_ANSWER)
        if not found:
            raise SharpDraftError(
                "the target's chat template does not show earlier answers: give single prompts"
            )
        # Some templates put a space before the end of a turn, which an answer ends without.
        behind = behind.lstrip()
        self._end(behind)
        return behind

    def _end(self, behind: str) -> str:
        """The token that `behind` starts with."""
        token = next((each for each in self._whole_tokens if behind.startswith(each)), None)
        if token is None:
            raise SharpDraftError(
                "the target's chat template ends an answer with no token of its own (behind it "
                f"comes {behind[:20]!r}): give single prompts"
            )
        return token

    @cached_property
    def _whole_tokens(self) -> list[str]:
        """What is one token wherever it stands, longest first."""
        known = {*self.tokenizer.get_added_vocab(), *self.tokenizer.all_special_tokens} - {""}
        return sorted(known, key=len, reverse=True)

    def _messages(self, turns: list[dict[str, str]], system: str | None) -> list[dict[str, str]]:
        system = self.settings.system if system is None else system
        return turns if system is None else [_said("system", system), *turns]

    def _text(self, turns: list[dict[str, str]], system: str | None) -> str:
        """The turns rendered, behind the system message, up to where an answer starts."""
        if self.template is None:
            raise SharpDraftError(
                "the target has no chat template: use its chat or instruct version, or give single "
                "prompts with --raw"
            )
        messages = self._messages(turns, system)
        try:
            if self._in_parts is None:
                self._in_parts = self._wants_parts(system)
            return self._rendered(messages, self._in_parts)
        except SharpDraftError:
            raise
        # A template is a program of somebody else's.
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise SharpDraftError(
                f"the target's chat template refuses a conversation of {roles}: {one_line(error)}"
            ) from error

    def _wants_parts(self, system: str | None) -> bool:
        """Whether the template shows a user's text only as a list of parts."""
        asked = self._messages([_said("user", _QUESTION)], system)
        refused: Exception | None = None
        for in_parts in (False, True):
            try:
                if _QUESTION in self._rendered(asked, in_parts):
                    return in_parts
            # What it says about texts counts, if anything.
            except Exception as error:
                refused = refused or (None if in_parts else error)
        if refused is not None:
            raise refused
        raise SharpDraftError(
            "the target's chat template does not show the user's text: mend its chat_template, or "
            "give single prompts with --raw"
        )

    def _rendered(self, messages: list[dict[str, str]], in_parts: bool) -> str:
        given: list[dict[str, Any]] = [{**each} for each in messages]
        if in_parts:
            for each in given:
                each["content"] = [{"type": "text", "text": each["content"]}]
        return str(
            self.tokenizer.apply_chat_template(
                given, add_generation_prompt=True, tokenize=False, **self.settings.arguments
            )
        )

    def _tokens(self, text: str) -> list[int]:
        _check_text("the prompt", text)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SharpDraftError(
            f"{name} is no UTF-8, or holds half a character (a lone surrogate): give it as UTF-8"
        ) from error


def _mentions(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _template(tokenizer: Any) -> str | None:
    """The template's source, as transformers chooses among several; None without one."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise SharpDraftError(
            f"the target's chat template cannot be told: {one_line(error)}"
        ) from error
