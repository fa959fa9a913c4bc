"""`sharpdraft generate`: one answer, streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from ..errors import SharpDraftError, note
from .console import err, out
from .options import GenerateOptions, taking

if TYPE_CHECKING:
    from ..decode.rounds import Round
    from ..decode.sampling import Sampling
    from ..workloads.chat import Chat


@taking(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Stream an answer; accepted drafts are green, the target's own tokens plain."""
    from ..decode.session import HOST
    from ..workloads.tasks import Task
    from .loading import Drafters, Loaded, check_arms, read_chat

    name = options.arm_by_default if options.arm is None else options.arm
    names = [name]
    check_arms(names)
    sampling = _sampling(options)
    text = _piped() if options.prompt is None else options.prompt
    if not text.strip():
        raise SharpDraftError("the prompt is empty: give a text")
    drafters = Drafters.find(options, names)
    (arm,) = drafters.arms(names, HOST)
    chat = _chat(read_chat(options))
    chat.check([Task("prompt", (text,))])
    ids = chat.prompt(text)
    loaded = Loaded.load(options, drafters, chat)
    session = loaded.session
    session.sampling = sampling
    session.use(arm)
    screen = _Screen(loaded.tokenizer)
    rounds = []
    for done in session.generate(ids, options.max_new_tokens, loaded.stop):
        rounds.append(done)
        if not options.as_json:
            screen.show(session.tokens[len(ids) :], done.accepted > 0)
    written = session.tokens[len(ids) :]
    figures = {
        "arm": name,
        "template": chat.settings.to_dict(),
        "text": loaded.tokenizer.decode(written, skip_special_tokens=True),
        "token_ids": written,
        "prompt_tokens": len(ids),
        "finish": session.finish,
        "prefill_seconds": session.prefill_seconds,
        **_speed(rounds, len(written)),
    }
    if options.as_json:
        typer.echo(json.dumps(figures))
    else:
        out.print()
        err.print(f"[dim]{_summary(figures)}[/]", highlight=False, soft_wrap=True)


def _piped() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise SharpDraftError("the prompt is no UTF-8: give it as UTF-8") from error


def _sampling(options: GenerateOptions) -> Sampling:
    from ..decode.sampling import Sampling

    return Sampling(
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        options.repetition_penalty,
        seed=options.seed,
    )


def _chat(chat: Chat) -> Chat:
    """The same, or --raw, which is said, for a target without a chat template."""
    from ..workloads.chat import Chat, ChatSettings

    if chat.template is not None or chat.settings.to_dict():
        return chat
    note("the target has no chat template: the text is continued as it is, as with --raw")
    return Chat(chat.tokenizer, ChatSettings(raw=True))


def _speed(rounds: Sequence[Round], tokens: int) -> dict[str, float | None]:
    drafted = [each for each in rounds if each.asked]
    seconds = sum(each.draft_seconds + each.verify_seconds for each in rounds[1:])
    accepted = sum(each.accepted + 1 for each in drafted)
    return {
        "decode_seconds": seconds,
        "tokens_per_second": (tokens - 1) / seconds if seconds else None,
        "mal": accepted / len(drafted) if drafted else None,
    }


def _summary(figures: dict[str, Any]) -> str:
    from ..workloads.chat import describe

    parts = [f"{figures['arm']}: {len(figures['token_ids'])} tokens"]
    if speed := figures["tokens_per_second"]:
        parts.append(f"{speed:.1f} tokens/s")
    if mal := figures["mal"]:
        parts.append(f"{mal:.2f} tokens a verification")
    parts.append(f"prefill of {figures['prompt_tokens']} tokens {figures['prefill_seconds']:.2f} s")
    parts.append(f"ended by {figures['finish']}")
    if told := figures["template"]:
        parts.append(f"chat template: {describe(told)}")
    return ", ".join(parts)


class _Screen:
    """Prints an answer as it grows, drafts in green."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.shown = ""

    def show(self, written: Sequence[int], accepted: bool) -> None:
        """Print what is new in `written`, of which all but the last token of the newest round are
        drafts if it accepted any."""
        whole: str = self.tokenizer.decode(written, skip_special_tokens=True)
        # A token can be part of a character: what is not yet whole is shown with the next one.
        if whole.endswith("\ufffd"):
            return
        before = self.tokenizer.decode(written[:-1], skip_special_tokens=True) if accepted else ""
        middle = max(len(self.shown), min(len(before), len(whole)))
        drafts, own = whole[len(self.shown) : middle], whole[middle:]
        out.print(
            f"[green]{escape(drafts)}[/]{escape(own)}", end="", highlight=False, soft_wrap=True
        )
        self.shown = whole
