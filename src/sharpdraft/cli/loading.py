"""From options to a session: the drafters and their settings first, which is quick, then all
weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SharpDraftError
from .console import err
from .options import ModelOptions

if TYPE_CHECKING:
    from ..decode.session import Arm, Session
    from ..method.settings import DraftSettings, Host
    from ..model.causal_lm import CausalLM

_RECOMMENDED = "sharpdraft"


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

    @classmethod
    def find(cls, options: ModelOptions, names: Sequence[str], several: bool = False) -> Drafters:
        """Those that `options` name, and what their settings files say.

        names: the arms they are for; several: whether --drafter is a list. Raises SharpDraftError
        where a drafter is needed and there is none, or a settings file is broken.
        """
        if all(name == "ar" for name in names):
            return cls({}, {}, None)
        from ..drafters.registry import recommended
        from ..hub.checkpoints import drafter_dir

        asked = options.drafter
        each: list[str | None] = [*names_of(asked)] if asked and several else [asked]
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
            own, known = recommended(directory)
            if not known and any(_RECOMMENDED in name.split("+") for name in names):
                err.print(
                    f"note: {directory} has no sharpdraft.json; using the paper's setting "
                    f"({own.describe()}), which needs validation for this drafter",
                    soft_wrap=True,
                    highlight=False,
                )
            settings[label] = own if options.drafts is None else replace(own, length=None)
        return cls(directories, settings, options.drafts)

    def arms(self, names: Sequence[str], host: Host) -> tuple[Arm, ...]:
        """The arms called `names`, drafting as many tokens as --drafts says where they do not say
        it themselves. Raises SharpDraftError for what makes no sense with these drafters, or cannot
        be done by `host`."""
        from ..drafters.registry import num_drafts
        from ..lab.arms import arms_of

        arms = arms_of(names, self.recommended, self.drafts)
        for arm in arms:
            if arm.drafter is not None:
                drafts = num_drafts(self.directories[arm.drafter])
                try:
                    arm.settings.check(host, drafts=drafts)
                except SharpDraftError as error:
                    raise SharpDraftError(f"arm '{arm.name}': {error}") from error
        return arms


@dataclass(frozen=True)
class Loaded:
    """A target, its tokenizer and a session of it with its drafters."""

    target: CausalLM
    tokenizer: Any
    session: Session
    stop: tuple[int, ...]

    @classmethod
    def load(cls, options: ModelOptions, drafters: Drafters) -> Loaded:
        """Read all weights. Raises SharpDraftError for what is wrong with a checkpoint."""
        if options.weights not in (None, "bfloat16"):
            raise SharpDraftError(
                f"--weights {options.weights}: the only choice is bfloat16; leave it out for "
                "weights as they are"
            )
        with err.status(f"loading {options.target}"):
            from ..decode.session import Session
            from ..drafters.registry import load_drafter
            from ..hub.targets import load_target, stop_tokens

            target, tokenizer = load_target(
                options.target, device=options.device, rounded=options.weights is not None
            )
            loaded = {
                label: load_drafter(directory, target)
                for label, directory in drafters.directories.items()
            }
            session = Session(target, loaded)
        return cls(target, tokenizer, session, stop_tokens(target.config.eos_token_id))

    def prompt(self, turn: str, *, first: bool = True) -> list[int]:
        """Tokens of a user's turn, up to where the answer starts."""
        from ..workloads.chat import chat_tokens

        return chat_tokens(self.tokenizer, turn, first=first)
