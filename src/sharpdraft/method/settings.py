"""`DraftSettings`, which is `sharpdraft.json`: how a drafter is run, the same in every host.

    {"scale": {"kind": "fixed_slope", "reference": 512},
     "view": {"kind": "window", "keys": 1024, "sinks": 4},
     "length": {"kind": "fixed", "drafts": 5}}

On a command line the same is `sharpdraft@512+sinks@4+window@1024+drafts@5`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import SharpDraftError
from . import policies, registry
from .registry import Part, register
from .scale import Scale, needs_of
from .visible import View

FILE = "sharpdraft.json"
FROZEN = "frozen"
"""On a command line: settings that do nothing. An engine that is asked for it measures only."""
_RECOMMENDED = "sharpdraft"
_SINKS = "sinks"
_PARTS: tuple[Part, ...] = ("scale", "view", "length")


@register("view", "window", "window")
@dataclass(frozen=True)
class Window:
    """Each row sees the last `keys` Keys up to its own alone, and the first `sinks` of all
    (StreamingLLM, arXiv 2309.17453). What a policy counts is what is left visible.

    A layer whose checkpoint gives it a window of its own keeps the narrower of both, without sinks.

    Raises ValueError for fewer than one Key, or a negative number of sinks.
    """

    keys: int
    sinks: int = 0

    def __post_init__(self) -> None:
        for name, least in (("keys", 1), ("sinks", 0)):
            if type(value := getattr(self, name)) is not int or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")

    def on(self, own: View) -> View:
        """What is left of a layer's own view."""
        if own.window is not None:
            return replace(own, window=min(own.window, self.keys))
        return replace(own, window=self.keys, sinks=self.sinks)

    def describe(self) -> str:
        """The view in one line."""
        first = f", and the first {self.sinks}" if self.sinks else ""
        return f"only the last {self.keys} Keys are seen{first}"


@register("length", "fixed", "drafts")
@dataclass(frozen=True)
class FixedLength:
    """So many tokens are drafted in every round. Raises ValueError for fewer than one."""

    drafts: int

    def __post_init__(self) -> None:
        if type(self.drafts) is not int or self.drafts < 1:
            raise ValueError(f"drafts must be an integer of at least 1, got {self.drafts!r}")

    def describe(self) -> str:
        """The length in one line."""
        return f"{self.drafts} drafts a round"


@dataclass(frozen=True)
class Host:
    """Where settings are put on, and what it can do of them.

    provides: of "keys", "layer", "scores", "window", "sinks", "length". lacks: what to say of those
    that it does not provide.
    """

    name: str
    provides: Collection[str]
    lacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DraftSettings:
    """How a drafter is run. As it is: as released.

    scale: the policy that scales Queries. view: which Keys they see. length: how many tokens are
    drafted; None leaves that to the drafter's own default.
    """

    scale: Scale | None = None
    view: Window | None = None
    length: FixedLength | None = None

    @property
    def drafts(self) -> int | None:
        """Tokens to draft in a round; None where the drafter's default holds."""
        return None if self.length is None else self.length.drafts

    @property
    def acts(self) -> bool:
        """Whether drafts differ from those of the drafter as released."""
        return self.scale is not None or self.view is not None

    def views(self, own: Collection[View]) -> tuple[View, ...]:
        """What rows of each layer see; own: what the checkpoint lets them see."""
        return tuple(own) if self.view is None else tuple(self.view.on(each) for each in own)

    def check(self, host: Host, *, layers: int | None = None, drafts: int | None = None) -> None:
        """Refuse what a host cannot do, and what makes no sense for a drafter.

        layers: how many attention layers the drafter has, 0 for lookup. drafts: how many tokens it
        drafts where the settings do not say. None: not known yet.

        Raises SharpDraftError that names the part of the settings.
        """
        needs = dict.fromkeys(needs_of(self.scale), "scale")
        if self.view is not None:
            needs |= {"window": "view"} | ({_SINKS: "view"} if self.view.sinks else {})
        if self.length is not None:
            needs["length"] = "length"
        for need, part in needs.items():
            if need not in host.provides:
                said = host.lacks.get(need, f"{host.name} has no {need} to give")
                own = DraftSettings(**{part: getattr(self, part)})
                raise SharpDraftError(f"{part} ({own.text()}): {said}")
        if layers == 0 and self.acts:
            part = "view" if self.scale is None else "scale"
            own = DraftSettings(**{part: getattr(self, part)})
            raise SharpDraftError(
                f"{part} ({own.text()}): the drafter looks text up and has no attention; use "
                f"{FROZEN}"
            )
        known = getattr(self.scale, "layers", None)
        if layers is not None and known is not None and known != layers:
            raise SharpDraftError(
                f"scale ({registry.to_text(self.scale)}): it is for {known} layers, and the "
                f"drafter has {layers}"
            )
        block = None if (count := self.drafts or drafts) is None else count + 1
        if self.view is not None and block is not None and self.view.keys < block:
            raise SharpDraftError(
                f"view (window@{self.view.keys}): a row would not see all of its own block of "
                f"{block} tokens; give it at least that many Keys, or draft fewer tokens"
            )

    def describe(self) -> str:
        """All of it in one line for people."""
        parts = [getattr(self, part) for part in _PARTS]
        return "; ".join(map(registry.describe, filter(None, parts))) or "the drafter as released"

    def text(self) -> str:
        """As a command line has it; `parse` reads it back."""
        pieces = [] if self.scale is None else [registry.to_text(self.scale)]
        if self.view is not None:
            pieces += [f"{_SINKS}@{self.view.sinks}"] * bool(self.view.sinks)
            pieces.append(f"window@{self.view.keys}")
        pieces += [] if self.length is None else [registry.to_text(self.length)]
        return "+".join(pieces) or FROZEN

    def to_dict(self) -> dict[str, Any]:
        """As it stands in `sharpdraft.json`. Raises SharpDraftError for a part of no registered
        kind."""
        parts = {part: getattr(self, part) for part in _PARTS}
        return {part: registry.to_dict(value) for part, value in parts.items() if value is not None}

    @classmethod
    def from_dict(cls, values: object) -> DraftSettings:
        """What a mapping from `sharpdraft.json` stands for, of this version or an older one
        ("policy" and "block", the latter counting the anchor).

        Raises SharpDraftError that names the part that is wrong.
        """
        if not isinstance(values, Mapping):
            raise SharpDraftError(f"settings are a mapping of {', '.join(_PARTS)}; got {values!r}")
        given = dict(values)
        if "policy" in given or "block" in given:
            given = _from_old(given)
        if unknown := sorted(str(key) for key in given if key not in _PARTS):
            raise SharpDraftError(
                f"settings have no part {unknown[0]!r}; known are {', '.join(_PARTS)}"
            )
        made = {part: registry.from_dict(part, given[part]) for part in _PARTS if part in given}
        return cls(**made)

    @classmethod
    def parse(cls, text: str, recommended: DraftSettings | None = None) -> DraftSettings:
        """What a command line says: words with `+` between them, such as
        `window@1024+sharpdraft@512`.

        `frozen` is nothing; `sharpdraft` alone is all that the drafter recommends, if that is
        known. A view or a length beside it takes the place of the recommended one.

        Raises SharpDraftError for an unknown word, a wrong value, and a part that is named twice.
        """
        found: dict[str, Any] = {}
        beside: dict[str, Any] | None = None
        sinks: int | None = None
        for piece in (piece.strip() for piece in text.split("+")):
            word, at, value = piece.partition("@")
            where = f"'{piece}'" if piece == text else f"'{piece}' in '{text}'"
            if word == FROZEN and not at:
                own: dict[str, Any] = {}
            elif word == _RECOMMENDED and not at:
                if beside is not None:
                    raise SharpDraftError(f"{where}: named twice")
                own, beside = {}, _own_of(recommended, where)
            elif word == _SINKS:
                if sinks is not None:
                    raise SharpDraftError(f"{where}: sinks are named twice")
                sinks = _whole(value, where)
                continue
            else:
                part = next((p for p in _PARTS for k in registry.kinds(p) if k.word == word), None)
                if part is None:
                    raise SharpDraftError(f"{where}: unknown; known are {', '.join(known_words())}")
                own = {part: registry.from_text(part, word, value, where)}
            if twice := sorted(set(own) & set(found)):
                raise SharpDraftError(f"{where}: {twice[0]} is named twice")
            found |= own
        beside = beside or {}
        if "scale" in found and "scale" in beside:
            raise SharpDraftError(f"'{text}': scale is named twice")
        found = beside | found
        if sinks is not None:
            if found.get("view") is None:
                raise SharpDraftError(
                    f"'{text}': sinks need a window, or every Key is seen anyway: add window@KEYS"
                )
            if found["view"].sinks:
                raise SharpDraftError(f"'{text}': sinks are named twice")
            found["view"] = replace(found["view"], sinks=sinks)
        return cls(**found)


def as_settings(value: DraftSettings | Scale | None) -> DraftSettings:
    """Settings as they are, or of a policy alone; None is the drafter as released.

    Raises SharpDraftError for anything else.
    """
    if isinstance(value, DraftSettings):
        return value
    if value is None or isinstance(value, Scale):
        return DraftSettings(value)
    raise SharpDraftError(f"{value!r} is neither DraftSettings nor a policy")


def known_words() -> list[str]:
    """What a command line may compose."""
    words = [word for part in _PARTS for word in registry.words(part)]
    return [FROZEN, _RECOMMENDED, *words, f"{_SINKS}@KEYS"]


def read_settings(path: Path) -> DraftSettings:
    """A settings file. Raises SharpDraftError for one that is missing or broken."""
    try:
        return DraftSettings.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, SharpDraftError) as error:
        raise SharpDraftError(f"{path} is no settings file ({error}): mend or remove it") from error


def write_settings(path: Path, settings: DraftSettings) -> None:
    """Write a settings file. Raises OSError."""
    path.write_text(json.dumps(settings.to_dict(), indent=2) + "\n", encoding="utf-8")


def asked_settings(asked: object, drafter: str | None) -> DraftSettings:
    """What an engine's user asks for; Frozen is measured and does nothing.

    asked: True for the drafter's own `sharpdraft.json`; the path of such a file or of a directory
    with one; text as on a command line ("frozen", "window@512"); a mapping with a file's content,
    or with a policy alone, in which "kind" may be left out for a fixed slope. drafter: the
    drafter's directory or hub id, if there is one.

    Raises SharpDraftError for anything else.
    """
    if asked is True:
        path = Path(drafter or "") / FILE
        if drafter is None or not path.exists():
            raise SharpDraftError(
                "sharpdraft was asked for the drafter's own settings, but "
                f"{drafter or 'the drafter'} has no {FILE} in a local directory: give "
                '{"reference": N0}, N0 being about the length the drafter was trained at'
            )
        return read_settings(path)
    if isinstance(asked, str) and asked:
        word = asked.partition("@")[0].partition("+")[0]
        path = Path(asked).expanduser()
        if not path.exists() and any(word == each.partition("@")[0] for each in known_words()):
            return DraftSettings.parse(asked)
        return read_settings(path / FILE if path.is_dir() else path)
    if isinstance(asked, Mapping) and asked:
        # A policy may have a field that is called as a part is.
        if "kind" in asked or not set(asked) & {*_PARTS, "policy", "block"}:
            asked = {"scale": {"kind": "fixed_slope", **asked}}
        try:
            return DraftSettings.from_dict(asked)
        except SharpDraftError as error:
            raise SharpDraftError(f"sharpdraft's settings are wrong: {error}") from error
    raise SharpDraftError(
        f'sharpdraft was asked for {asked!r}: give true, "{FROZEN}", the path of a {FILE}, or '
        '{"reference": N0}'
    )


def _from_old(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a file as version 0.1 first wrote it."""
    rest = {key: value for key, value in values.items() if key not in ("policy", "block")}
    for old, new in (("policy", "scale"), ("block", "length")):
        if old in values and new in values:
            raise SharpDraftError(f"{old} is what {new} was once called: give {new} alone")
    if "policy" in values:
        policy = values["policy"]
        named = isinstance(policy, Mapping) and policy and "kind" not in policy
        rest["scale"] = {"kind": "fixed_slope", **policy} if named else policy
    if "block" in values:
        if type(block := values["block"]) is not int or block < 2:
            raise SharpDraftError(f"block is {block!r}: it must be an integer of at least 2")
        rest["length"] = {"kind": "fixed", "drafts": block - 1}
    return rest


def _own_of(recommended: DraftSettings | None, where: str) -> dict[str, Any]:
    if recommended is None:
        raise SharpDraftError(
            f"{where}: which N0 is not known here; give one, as {_RECOMMENDED}@512"
        )
    parts = {part: getattr(recommended, part) for part in _PARTS}
    return {part: value for part, value in parts.items() if value is not None}


def _whole(text: str, where: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise SharpDraftError(f"{where}: give a number of Keys, at least 1")
    return int(text)


REPORTED: Mapping[str, DraftSettings] = {
    name: DraftSettings(policy) for name, policy in policies.REPORTED_SETTINGS.items()
}
"""What arXiv 2610.05106 reports, as settings."""
