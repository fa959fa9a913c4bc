"""From options to a session: the drafters and their settings first, which is quick, then all
weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SharpDraftError, note
from .console import err
from .options import LOOKUP, ModelOptions, RecordOptions, TrainOptions, names_of

if TYPE_CHECKING:
    from ..decode.session import Arm, Session
    from ..drafters.base import Drafter
    from ..method.settings import DraftSettings, Host
    from ..model.causal_lm import CausalLM
    from ..workloads.chat import Chat, ChatSettings

RECORDED_AS_IT_IS = (
    "the recorded sessions were written with the chat template as it is: give --prompts, or leave "
    "--system, --template-arg and --raw out"
)


def check_arms(names: Sequence[str]) -> None:
    """Refuse what is no arm with any drafter, before one is looked for. Raises SharpDraftError."""
    from ..lab.arms import arms_of
    from ..method.settings import REPORTED

    arms_of(names, {"": REPORTED["dflash"]})


@dataclass(frozen=True)
class Source:
    """What drafts: a checkpoint, lookup (directory: None), or both."""

    directory: Path | None
    lookup: bool = False

    @classmethod
    def find(cls, target: str, name: str | None) -> Source:
        """What `name` stands for: `lookup`, a drafter as `drafter_dir` finds it, or that with
        `+lookup`. Raises SharpDraftError where there is none."""
        from ..hub.checkpoints import drafter_dir

        if name == LOOKUP:
            if Path(name).is_dir():
                note(f"{name} looks the text up; for the directory say ./{name}")
            return cls(None, lookup=True)
        own = None if name is None else name.removesuffix(f"+{LOOKUP}")
        if own == "":
            raise SharpDraftError(f"--drafter {name}: name the drafter, as dflash+{LOOKUP}")
        directory = drafter_dir(target, own)
        if directory is None:
            raise SharpDraftError(
                f"no drafter comes with {target}: give one with --drafter, or train one; "
                f"--drafter {LOOKUP} needs none"
            )
        return cls(directory, lookup=own != name)

    def load(self, target: CausalLM, family: str | None) -> Drafter[Any]:
        """Read its weights. Raises SharpDraftError as load_drafter does."""
        from ..drafters.lookup import Lookup
        from ..drafters.mixed import Mixed
        from ..drafters.registry import load_drafter

        if self.directory is None:
            return Lookup(target)
        drafter = load_drafter(self.directory, target, family)
        return Mixed(drafter, target) if self.lookup else drafter

    def check(self, settings: DraftSettings, host: Host, family: str | None) -> None:
        """Refuse settings that make no sense with it. Raises SharpDraftError."""
        from ..drafters.registry import num_drafts

        if self.directory is None:
            settings.check(host, layers=0)
        else:
            settings.check(host, drafts=num_drafts(self.directory, family))


@dataclass(frozen=True)
class Drafters:
    """Drafters under the names that their arms have; a single one has none, ""."""

    sources: dict[str, Source]
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
        from ..method.settings import REPORTED

        asked, family = options.drafter, options.family
        each: list[str | None] = [*names_of(asked)] if asked and several else [asked]
        if family is not None and (len(each) > 1 or family not in FAMILIES):
            raise SharpDraftError(
                f"--family {family}: it is one of {', '.join(FAMILIES)}, for a single --drafter"
            )
        if family is not None and asked == LOOKUP:
            raise SharpDraftError(f"--family {family}: {LOOKUP} is of no family; leave it out")
        sources = {}
        for name in each:
            label = name.rstrip("/").rpartition("/")[2] if name and len(each) > 1 else ""
            if label in sources:
                raise SharpDraftError(
                    f"--drafter {asked}: their names must differ, to tell their arms apart"
                )
            sources[label] = Source.find(options.target, name)
        settings = {}
        named = any("sharpdraft" in name.split("+") for name in names)
        for label, source in sources.items():
            # What lookup is asked for by this name is told from what does nothing, and refused.
            own = REPORTED["dflash"]
            if source.directory is not None:
                own = _recommended(source.directory, family, named)
            settings[label] = own if options.drafts is None else replace(own, length=None)
        return cls(sources, settings, options.drafts, family)

    def arms(self, names: Sequence[str], host: Host) -> tuple[Arm, ...]:
        """The arms called `names`, drafting as many tokens as --drafts says where they do not say
        it themselves. Beside other drafters, lookup has those alone that it can do, which is noted.
        Raises SharpDraftError for what makes no sense with these drafters, or cannot be done by
        `host`."""
        from ..lab.arms import arms_of

        found, left_out = [], []
        for arm in arms_of(names, self.recommended, self.drafts):
            if arm.drafter is not None:
                source = self.sources[arm.drafter]
                if len(self.sources) > 1 and source.directory is None and arm.settings.acts:
                    left_out.append(arm.name)
                    continue
                try:
                    source.check(arm.settings, host, self.family)
                except SharpDraftError as error:
                    raise SharpDraftError(f"arm '{arm.name}': {error}") from error
            found.append(arm)
        if left_out:
            note(f"not measured, as {LOOKUP} has no attention: {', '.join(left_out)}")
        return tuple(found)


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


def context_of(target: str) -> int:
    """The longest context of a target, tokens. Raises SharpDraftError as load_target does."""
    from ..hub.checkpoints import target_dir
    from ..model.checkpoint import read_config

    return read_config(target_dir(target, files=("config.json",))).max_position_embeddings


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
            from ..hub.targets import load_target, stop_tokens

            target, _ = load_target(
                options.target,
                device=options.device,
                rounded=options.weights is not None,
                tokenizer=chat.tokenizer,
            )
            loaded = {
                label: source.load(target, drafters.family)
                for label, source in drafters.sources.items()
            }
            session = Session(target, loaded)
        stop = chat.stops(stop_tokens(target.config.eos_token_id))
        return cls(target, chat.tokenizer, session, stop, chat)
