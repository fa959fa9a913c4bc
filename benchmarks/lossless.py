"""Is every drafter lossless, scaled or not, at every context length, in a batch? Many tokens,
compared with AR's.

    python benchmarks/lossless.py [--drafters dflash,eagle3,pard,lookup,eagle3+lookup]
                                  [--arms frozen,sharpdraft@512] [--places 14] [--tokens 160]
                                  [--rows FILE.jsonl]

At --places context lengths of each recorded session the next tokens are written by the target alone
and then by every drafter, as released and scaled; all sessions share each pass. A difference is
noted with the gap between the target's two logits. With --rows a run that was broken off goes on
behind the last place in the file.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.progress import track

from sharpdraft.cli.loading import Source
from sharpdraft.decode.session import Arm, Session
from sharpdraft.decode.step import step
from sharpdraft.drafters.registry import recommended
from sharpdraft.hub.smollm2 import SMOLLM2
from sharpdraft.hub.targets import load_target
from sharpdraft.lab.arms import AR, arms_of
from sharpdraft.lab.machine import machine
from sharpdraft.method.settings import DraftSettings
from sharpdraft.workloads.tasks import recordings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafters", default="dflash,eagle3,pard")
    parser.add_argument("--places", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--arms", default="frozen,sharpdraft@512")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args()
    target, _ = load_target(SMOLLM2, device="cpu")
    drafters, arms = {}, [AR]
    for name in options.drafters.split(","):
        source = Source.find(SMOLLM2, name)
        drafters[name] = source.load(target, None)
        # With one drafter, too, its arms carry its name; lookup has nothing to scale.
        settings = DraftSettings() if source.directory is None else recommended(source.directory)[0]
        own = arms_of(options.arms.split(","), {name: settings})
        scaled = source.directory is not None
        arms += [
            Arm(f"{name}:{arm.name}", name, arm.settings)
            for arm in own
            if scaled or not arm.settings.acts
        ]
    texts = recordings()[: options.sessions]
    sessions = [Session(target, drafters) for _ in texts]
    last = min(len(text.tokens) for text in texts)
    lengths = [
        300 + round(i * (last - 300) / max(options.places - 1, 1)) for i in range(options.places)
    ]
    rows = (
        [json.loads(line) for line in options.rows.open()]
        if options.rows and options.rows.exists()
        else []
    )
    known_places = {row["context"] for row in rows}
    began = time.perf_counter()
    for length in track(
        [each for each in lengths if each not in known_places], description="places"
    ):
        prefixes = [list(text.tokens[:length]) for text in texts]
        for session, prefix in zip(sessions, prefixes, strict=True):
            session.read_along()
            session.read(prefix[len(session.tokens) :])
        row: dict[str, Any] = {
            "context": length,
            "tokens": {},
            "rounds": {},
            "accepted": {},
            "differences": [],
        }
        base: list[list[int]] = []
        for arm in arms:
            for session in sessions:
                session.rewind(length)
                session.use(arm)
            ends = length + options.tokens
            accepted: list[int] = []
            while running := [s for s in sessions if len(s.tokens) < ends]:
                left = [ends - len(s.tokens) for s in running]
                rounds = step(running, left, [()] * len(running))
                accepted += [done.accepted for done in rounds if done.asked]
            answers = [session.tokens[length:] for session in sessions]
            row["tokens"][arm.name] = sum(map(len, answers))
            row["rounds"][arm.name], row["accepted"][arm.name] = len(accepted), sum(accepted)
            base = base or answers
            for text, prefix, one, other in zip(texts, prefixes, base, answers, strict=True):
                if one != other:
                    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
                    logits = Session(target).read([*prefix, *one[:at]])[0, -1]
                    gap = float(logits[one[at]] - logits[other[at]])
                    row["differences"].append(
                        {"arm": arm.name, "session": text.name, "token": at, "gap": gap}
                    )
        for session in sessions:
            session.rewind(length)
        rows.append(row)
        if options.rows:
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def total(key: str) -> dict[str, int]:
        return {arm.name: sum(row[key][arm.name] for row in rows) for arm in arms}

    rounds_of, accepted_of = total("rounds"), total("accepted")
    summary = {
        "machine": machine(),
        "contexts": sorted(row["context"] for row in rows),
        "tokens": total("tokens"),
        "differences": [
            found | {"context": row["context"]} for row in rows for found in row["differences"]
        ],
        "mal": {
            name: round(1 + accepted_of[name] / count, 3)
            for name, count in rounds_of.items()
            if count
        },
        "seconds": round(time.perf_counter() - began),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
