"""Our loop against `dflash_generate` of the DFlash authors' package: same checkpoint, prompts, and
machine.

    pip install --no-deps dflash==0.1.0
    python benchmarks/against_dflash.py [--contexts 256,1024,4096] [--sessions 4] [--tokens 128]

The two take turns on every prefix. Tokens and accepted lengths must be equal; times are a ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import dflash.model
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from rich.progress import track
from transformers import AutoModelForCausalLM

from sharpdraft.decode.session import Session
from sharpdraft.drafters.dflash import DFlash
from sharpdraft.hub.smollm2 import SMOLLM2, built_in_drafter, smollm2_dir
from sharpdraft.hub.targets import load_target
from sharpdraft.lab.machine import machine
from sharpdraft.workloads.tasks import recordings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="256,1024,4096")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        dflash.model._cuda_time = time.perf_counter
    directory = built_in_drafter(SMOLLM2)
    assert directory is not None
    target, _ = load_target(SMOLLM2, device="cpu")
    session = Session(target, DFlash.load(directory, target))
    peer_target = AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32)
    peer = DFlashDraftModel.from_pretrained(directory, dtype=torch.float32)
    rows = []
    places = [
        (r, int(c)) for c in options.contexts.split(",") for r in recordings()[: options.sessions]
    ]
    for number, (recording, context) in enumerate(track(places, description="prefixes")):
        turn = next(t for t in recording.turns if t.answer >= context)
        prompt = list(recording.tokens[: turn.answer])
        measured = {}
        for who in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            if who == "ours":
                session.rewind(0)
                rounds = list(session.generate(prompt, options.tokens))[1:]
                seconds = sum(r.draft_seconds + r.verify_seconds for r in rounds)
                measured[who] = (
                    session.tokens[len(prompt) :],
                    [len(r.tokens) for r in rounds],
                    seconds,
                    session.prefill_seconds,
                )
            else:
                done = dflash_generate(
                    peer,
                    peer_target,
                    torch.tensor([prompt]),
                    options.tokens,
                    None,
                    return_stats=True,
                )
                ids = done.output_ids[0, len(prompt) :].tolist()
                seconds = done.time_per_output_token * done.num_output_tokens
                measured[who] = (ids, done.acceptance_lengths, seconds, done.time_to_first_token)
        ours, theirs = measured["ours"], measured["theirs"]
        rows.append(
            {
                "session": recording.name,
                "context": len(prompt),
                "same_tokens": ours[0] == theirs[0],
                "same_accepted": ours[1] == theirs[1],
                "decode_ratio": theirs[2] / ours[2],
                "prefill_ratio": theirs[3] / ours[3],
                "mal": sum(ours[1]) / len(ours[1]),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    summary = {
        "machine": machine(),
        "prefixes": len(rows),
        "same_tokens": sum(r["same_tokens"] for r in rows),
        "same_accepted": sum(r["same_accepted"] for r in rows),
        "decode_ratio": quartiles([r["decode_ratio"] for r in rows]),
        "prefill_ratio": quartiles([r["prefill_ratio"] for r in rows]),
    }
    print(json.dumps(summary))


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [round(v, 3) for v in statistics.quantiles(values, n=4)]


if __name__ == "__main__":
    main()
