"""Decoding speed against transformers, at several context lengths and batch sizes: everything takes turns.

    python benchmarks/speed.py [--contexts 512,2048,4096] [--batches 1,4,16] [--tokens 48] [--rounds 3] [--out FILE]

Each system reads the same prefixes and then writes the same number of tokens, greedily; prefill is not counted. What
is printed for every system is the ratio of its tokens per second to ours without a drafter (AR), median and quartiles
over the rounds, and how often it wrote the tokens that AR wrote. The built-in drafter of --drafter is used, and the
language model of the PARD one as the assistant in transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from sharpdraft.decode.loop import Session, round_together
from sharpdraft.drafters import load_drafter
from sharpdraft.lab.bench import catch_up, machine
from sharpdraft.lab.tasks import recordings
from sharpdraft.models import SMOLLM2, built_in_drafter, load_target, smollm2_dir
from sharpdraft.settings import recommended

Measured = tuple[list[list[int]], float]


class Clock(BaseStreamer):
    """When the first and the last token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        self.times.append(time.perf_counter())


def theirs(model: Any, prefixes: Sequence[list[int]], new: int, **options: Any) -> Measured:
    """Tokens and the seconds from the first new one to the last; the streamer is given the prompt first."""
    clock = Clock()
    # transformers streams one sequence only; a batch is timed as a whole, less a run that writes one token.
    streamed: dict[str, Any] = {"streamer": clock} if len(prefixes) == 1 else {}
    ids = torch.tensor(prefixes)
    common = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    began = time.perf_counter()
    out = model.generate(ids, max_new_tokens=new, min_new_tokens=new, **streamed, **common)
    seconds = time.perf_counter() - began
    if streamed:
        seconds = clock.times[-1] - clock.times[1]
    else:
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=1, min_new_tokens=1, **common)
        seconds -= time.perf_counter() - began
    return out[:, ids.shape[1] :].tolist(), seconds


def ours(sessions: Sequence[Session], prefixes: Sequence[list[int]], new: int, policy: Any, drafting: bool) -> Measured:
    for session, prefix in zip(sessions, prefixes, strict=True):
        session.drafting, session.policy = True, policy
        catch_up(session, prefix)
        session.drafting = drafting
    # The round that reads the prefix's last token also writes the first new one.
    ends = [len(prefix) + new for prefix in prefixes]
    began = time.perf_counter()
    while running := [(s, end - len(s.tokens)) for s, end in zip(sessions, ends, strict=True) if len(s.tokens) < end]:
        round_together([s for s, _ in running], [left for _, left in running], [()] * len(running))
    seconds = time.perf_counter() - began
    return [s.tokens[len(prefix) :] for s, prefix in zip(sessions, prefixes, strict=True)], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="512,2048,4096")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafter", default="dflash")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    new = options.tokens
    target, _ = load_target(SMOLLM2, device="cpu")
    directory = built_in_drafter(SMOLLM2, options.drafter)
    assert directory is not None
    drafter = load_drafter(directory, target)
    policy, _ = recommended(directory)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32)
    assistant = None
    if (pard := built_in_drafter(SMOLLM2, "pard")) is not None:
        assistant = AutoModelForCausalLM.from_pretrained(pard, dtype=torch.float32)
    texts = recordings()
    report: dict[str, Any] = {"machine": machine(), "transformers": transformers.__version__, "tokens": new, "rows": []}
    places = [(int(c), int(b)) for c in options.contexts.split(",") for b in options.batches.split(",")]
    for context, batch in track(places, description="places"):
        sessions = [Session(target, drafter, capacity=context + new + 1) for _ in range(batch)]
        systems: dict[str, Callable[[list[list[int]]], Measured]] = {
            "ar": lambda p, s=sessions: ours(s, p, new, None, False),  # type: ignore[misc]
            "frozen": lambda p, s=sessions: ours(s, p, new, None, True),  # type: ignore[misc]
            "sharpdraft": lambda p, s=sessions: ours(s, p, new, policy, True),  # type: ignore[misc]
            "transformers": lambda p: theirs(model, p, new),
        }
        if assistant is not None and batch == 1:
            systems["transformers, assisted"] = lambda p: theirs(model, p, new, assistant_model=assistant)
        rows: dict[str, list[tuple[float, bool]]] = {name: [] for name in systems}
        names = list(systems)
        for number in range(options.rounds):
            prefixes = [list(texts[(number + i) % len(texts)].tokens[i : context + i]) for i in range(batch)]
            found = {name: systems[name](prefixes) for name in names[number % 2 :] + names[: number % 2]}
            tokens, base = found["ar"]
            for name, (written, seconds) in found.items():
                rows[name].append((base / seconds, written == tokens))
            report.setdefault("ar_tokens_per_second", {}).setdefault(f"{context}, batch {batch}", []).append(
                round(batch * new / base, 2)
            )
        for name, values in rows.items():
            ratios = sorted(ratio for ratio, _ in values)
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            row = {
                "context": context,
                "batch": batch,
                "system": name,
                "speed_over_ar": [round(v, 3) for v in (low, middle, high)],
                "same_tokens": sum(same for _, same in values),
                "rounds": len(values),
            }
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in report.items() if k != "rows"}))


if __name__ == "__main__":
    main()
