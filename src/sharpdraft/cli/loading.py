"""From options to a session: the drafters and their settings first, which is quick, then all
weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SharpDraftError, note
from .console import err
from .options import ModelOptions, RecordOptions, TrainOptions

if TYPE_CHECKING:
    from ..decode.session import Arm, Session
    from ..method.settings import DraftSettings, Host
    from ..model.causal_lm import CausalLM
    from ..workloads.chat import Chat, ChatSettings

RECORDED_AS_IT_IS = (
    "the recorded sessions were written with the chat template as it is: give --prompts, or leave "
    "--system, --template-arg and --raw out"
)


def names_of(text: str) -> list[str]:
    """What is named between commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def check_arms(names: Sequence[str]) -> None:
    """Refuse what is no arm with any drafter, before one is looked for. Raises SharpDraftError."""
    from ..lab.arms import arms_of
    from ..method.settings import REPORTED

    arms_of(names, {"": REPORTED["dflash"]})


@dataclass(frozen=True)
class Drafters:
    """Drafters under the names that their arms have; a single one has none, ""."""

    directories: dict[str, Path]
    recommended: dict[str, DraftSettings]
    drafts: int | None
    family: str | None = None

    @classmethod
    def find(cls, options: ModelOptions, names: Sequence[str], several: bool = False) -> Drafters:
        """Those that `options` name, and what their settings files say.

        names: the arms they are for; several: whether --drafter is a list. Raises SharpDraftError
        where a drafter is needed and there is none, or a settings file is broken.
        """
        if all(name == "ar" for name in names):
            return cls({}, {}, None)
        from ..drafters.family import FAMILIES
        from ..hub.checkpoints import drafter_dir

        asked, family = options.drafter, options.family
        each: list[str | None] = [*names_of(asked)] if asked and several else [asked]
        if family is not None and (len(each) > 1 or family not in FAMILIES):
            raise SharpDraftError(
                f"--family {family}: it is one of {', '.join(FAMILIES)}, for a single --drafter"
            )
        directories = {}
        for name in each:
            found = drafter_dir(options.target, name)
            if found is None:
                raise SharpDraftError(
                    f"no drafter comes with {options.target}: give one with --drafter, or train one"
                )
            label = name.rstrip("/").rpartition("/")[2] if name and len(each) > 1 else ""
            if label in directories:
                raise SharpDraftError(
                    f"--drafter {asked}: their names must differ, to tell their arms apart"
                )
            directories[label] = found
        settings = {}
        for label, directory in directories.items():
            own = _recommended(directory, family, any("sharpdraft" in n.split("+") for n in names))
            settings[label] = own if options.drafts is None else replace(own, length=None)
        return cls(directories, settings, options.drafts, family)

    def arms(self, names: Sequence[str], host: Host) -> tuple[Arm, ...]:
        """The arms called `names`, drafting as many tokens as --drafts says where they do not say
        it themselves. Raises SharpDraftError for what makes no sense with these drafters, or cannot
        be done by `host`."""
        from ..drafters.registry import num_drafts
        from ..lab.arms import arms_of

        arms = arms_of(names, self.recommended, self.drafts)
        for arm in arms:
            if arm.drafter is not None:
                drafts = num_drafts(self.directories[arm.drafter], self.family)
                try:
                    arm.settings.check(host, drafts=drafts)
                except SharpDraftError as error:
                    raise SharpDraftError(f"arm '{arm.name}': {error}") from error
        return arms


def _recommended(directory: Path, family: str | None, asked: bool) -> DraftSettings:
    """What a drafter's settings file recommends, or else a guess, which is said where it is asked
    for."""
    from ..drafters.registry import family_in, recommended

    own, known = recommended(directory, family)
    if asked and not known:
        eagle = family_in(directory, family) == "eagle3"
        whose = "using the paper's"
        if eagle:
            whose = "the paper names no N0 for EAGLE-3, using DFlash's"
        note(
            f"{directory} has no sharpdraft.json; {whose} setting ({own.describe()}), which needs "
            "validation for this drafter"
        )
    return own


def chat_settings(options: ModelOptions | TrainOptions | RecordOptions) -> ChatSettings:
    """What the chat template is told. Raises SharpDraftError for what makes no sense."""
    from ..workloads.chat import ChatSettings

    raw = getattr(options, "raw", False)
    return ChatSettings.parse(options.system, options.template_arg or (), raw)


def read_chat(options: ModelOptions) -> Chat:
    """The target's chat template, read before its weights. Raises SharpDraftError for what is wrong
    with it, or with the tokenizer."""
    from ..hub.targets import read_tokenizer
    from ..workloads.chat import Chat

    return Chat(read_tokenizer(options.target), chat_settings(options))


@dataclass(frozen=True)
class Loaded:
    """A target, its tokenizer and chat template, and a session of it with its drafters."""

    target: CausalLM
    tokenizer: Any
    session: Session
    stop: tuple[int, ...]
    chat: Chat

    @classmethod
    def load(cls, options: ModelOptions, drafters: Drafters, chat: Chat | None = None) -> Loaded:
        """Read all weights. chat: as `read_chat` has read it. Raises SharpDraftError for what is
        wrong with a checkpoint."""
        chat = chat or read_chat(options)
        if options.weights not in (None, "bfloat16"):
            raise SharpDraftError(
                f"--weights {options.weights}: the only choice is bfloat16; leave it out for "
                "weights as they are"
            )
        with err.status(f"loading {options.target}"):
            from ..decode.session import Session
            from ..drafters.registry import load_drafter
            from ..hub.targets import load_target, stop_tokens

            target, _ = load_target(
                options.target,
                device=options.device,
                rounded=options.weights is not None,
                tokenizer=chat.tokenizer,
            )
            loaded = {
                label: load_drafter(directory, target, drafters.family)
                for label, directory in drafters.directories.items()
            }
            session = Session(target, loaded)
        stop = chat.stops(stop_tokens(target.config.eos_token_id))
        return cls(target, chat.tokenizer, session, stop, chat)
