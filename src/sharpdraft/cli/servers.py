"""Running servers as arms: `--base-url` and what goes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SharpDraftError
from .options import BenchOptions, names_of

if TYPE_CHECKING:
    from ..decode.session import Arm
    from ..lab.backends.groups import Backend, Prompt
    from ..lab.backends.server import Messages
    from ..workloads.chat import Chat
    from ..workloads.tasks import Task

_ALONE = "server"
"""What the only server is called that is given no name."""


@dataclass(frozen=True)
class Servers:
    """Running servers, by what they are called. models: what they call the model, where that is
    said. count, messages: as `Server` takes them."""

    name: str
    urls: dict[str, str]
    models: dict[str, str]
    key: str | None = field(repr=False)
    chat: bool
    count: Callable[[str], int] | None = None
    messages: dict[tuple[int, ...], Messages] | None = None
    arms: tuple[Arm, ...] = ()

    @classmethod
    def of(cls, options: BenchOptions) -> Servers:
        """What the options name. Raises SharpDraftError for what is named twice, or not at all."""
        from ..lab.backends.server import shown

        urls = _named("--base-url", options.base_url or "")
        models = _named("--served-model", options.served_model or "")
        if not urls:
            raise SharpDraftError("--base-url gives no address")
        if unknown := [name for name in models if name not in ("", *urls)]:
            raise SharpDraftError(
                f"--served-model names {unknown[0]}, which --base-url does not: it has "
                f"{', '.join(name or 'one without a name' for name in urls)}"
            )
        name = ",".join(f"{name}={shown(url)}".removeprefix("=") for name, url in urls.items())
        name += f" as {options.served_model}" if models else ""
        return cls(
            f"{name} by chat" if options.chat else name,
            {name or _ALONE: url for name, url in urls.items()},
            {name or _ALONE: models.get(name, models.get("", "")) for name in urls},
            options.api_key,
            options.chat,
        )

    def reading(self, chat: Chat, tasks: Sequence[Task], prompts: Sequence[Prompt]) -> Servers:
        """The same, with the target's tokenizer and what the prompts are as messages."""
        tokenizer = chat.tokenizer

        def count(text: str) -> int:
            return len(tokenizer(text, add_special_tokens=False)["input_ids"])

        if not self.chat:
            return replace(self, count=count)
        messages: dict[tuple[int, ...], Messages] = {
            prompt.tokens: chat.messages(task) for task, prompt in zip(tasks, prompts, strict=True)
        }
        return replace(self, count=count, messages=messages)

    def start(
        self, target: Path, out_dir: Path, say: Callable[[str], None]
    ) -> Iterator[tuple[str, Backend]]:
        """A connection to each. Raises SharpDraftError where there is none."""
        from ..lab.backends.server import Server

        about: dict[str, Any] = {
            "key": self.key,
            "chat": self.messages,
            "count": self.count,
            "say": say,
        }
        for name, url in self.urls.items():
            yield name, Server(url, self.models[name] or None, **about)


def _named(option: str, text: str) -> dict[str, str]:
    """NAME=VALUE,NAME=VALUE as a dictionary; a VALUE alone is under no name."""
    found: dict[str, str] = {}
    for each in names_of(text):
        name, given, value = each.partition("=")
        if not given or "/" in name:
            # An address, or a model's name, that has a = in it.
            name, value = "", each
        if name in found:
            named = f"names {name} twice" if name else "gives two without a name"
            raise SharpDraftError(f"{option} {named}: write ARM=..., each ARM once")
        if not value:
            raise SharpDraftError(f"{option} gives nothing for {name}: write {name}=...")
        found[name] = value
    return found
