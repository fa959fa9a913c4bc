"""What scaling costs: the same draft pass with and without a policy, taking turns.

    python benchmarks/scaling_cost.py [--drafters dflash,eagle3,pard] [--contexts 1024,4096]
    [--passes 60]

Prints for each drafter and context the median ratio of a scaled to a plain pass and its quartiles,
and beside it what two plain passes differ by; the same of the fastest pass of each kind, which
other work on the machine does not reach; and the bytes that each holds at its peak. All contexts
are above N0, so that scaling acts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from sharpdraft import FixedSlope
from sharpdraft.decode.session import Session
from sharpdraft.decode.step import RAGGED
from sharpdraft.drafters.base import likeliest
from sharpdraft.drafters.registry import load_drafter
from sharpdraft.hub.smollm2 import SMOLLM2, built_in_drafter
from sharpdraft.hub.targets import load_target
from sharpdraft.lab.machine import machine
from sharpdraft.method.settings import DraftSettings
from sharpdraft.workloads.tasks import recordings


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafters", default="dflash,eagle3,pard")
    parser.add_argument("--contexts", default="1024,4096")
    parser.add_argument("--passes", type=int, default=60)
    options = parser.parse_args()
    print(json.dumps(machine()))
    target, _ = load_target(SMOLLM2)
    tokens = recordings()[0].tokens
    for name in options.drafters.split(","):
        directory = built_in_drafter(SMOLLM2, name)
        assert directory is not None, f"there is no built-in {name} drafter"
        session = Session(target, load_drafter(directory, target))
        for length in map(int, options.contexts.split(",")):
            session.rewind(0)
            session.read(tokens[:length])
            count, anchor = session.num_drafts, torch.tensor(tokens[length : length + 1])
            draft = partial(session.in_use.propose, RAGGED, [session.drafts], anchor, count)
            plain, scaled = DraftSettings(), DraftSettings(FixedSlope(512))
            passes = {
                kind: partial(draft, [settings], [likeliest])
                for kind, settings in (("plain", plain), ("scaled", scaled), ("plain again", plain))
            }
            seconds: dict[str, list[float]] = {kind: [] for kind in passes}
            for _ in range(options.passes):
                for kind, run in passes.items():
                    # A PARD drafter reads its context anew under another policy: that is not part
                    # of a pass.
                    run()
                    began = time.perf_counter()
                    run()
                    seconds[kind].append(time.perf_counter() - began)
            ratios = {
                kind: [b / a for a, b in zip(seconds["plain"], seconds[kind], strict=True)]
                for kind in ("scaled", "plain again")
            }
            row: dict[str, object] = {"drafter": name, "context": length, "drafts": count}
            row["plain_ms"] = round(1e3 * statistics.median(seconds["plain"]), 2)
            row |= {
                kind: [round(v, 4) for v in statistics.quantiles(r, n=4)]
                for kind, r in ratios.items()
            }
            fastest = {kind: min(values) for kind, values in seconds.items()}
            row["fastest"] = [
                round(fastest[kind] / fastest["plain"], 4) for kind in ("scaled", "plain again")
            ]
            row["peak_bytes"] = {kind: peak(run) for kind, run in passes.items()}
            print(json.dumps(row), flush=True)


def peak(run: Callable[[], object]) -> int:
    """The most that is allocated at once while something runs."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


if __name__ == "__main__":
    main()
