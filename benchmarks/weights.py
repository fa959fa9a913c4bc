"""What `--weights bfloat16` changes: tokens and speed of the target with rounded weights, beside
the one as it is.

    python benchmarks/weights.py [--contexts 300,1000,2000,4000,7000] [--tokens 96] [--rounds 2]

Of recorded sessions: how many tokens of the text the rounded target would have chosen too, behind
the same tokens (teacher-forced), how long its own greedy answers are the same, and its speed over
the other's, the two taking turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from sharpdraft.decode.session import Session
from sharpdraft.hub.smollm2 import SMOLLM2
from sharpdraft.hub.targets import load_target
from sharpdraft.lab.machine import machine
from sharpdraft.workloads.tasks import recordings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="300,1000,2000,4000,7000")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    both = {
        rounded: Session(load_target(SMOLLM2, device="cpu", rounded=rounded)[0])
        for rounded in (False, True)
    }
    print(json.dumps(machine()))
    for context in map(int, options.contexts.split(",")):
        agreed = forced = whole = answers = 0
        same: list[int] = []
        ratios: list[float] = []
        for number, recording in enumerate(recordings()[: options.rounds]):
            prefix = list(recording.tokens[:context])
            written, seconds = {}, {}
            for rounded, session in sorted(both.items(), reverse=bool(number % 2)):
                session.rewind(0)
                session.extend(prefix)
                began = time.perf_counter()
                for _ in range(options.tokens):
                    session.round(options.tokens)
                seconds[rounded] = time.perf_counter() - began
                written[rounded] = session.tokens[context:]
            ratios.append(seconds[False] / seconds[True])
            pairs = list(zip(written[False], written[True], strict=True))
            same.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)))
            whole += same[-1] == len(pairs)
            answers += 1
            # The same tokens before every one that is compared: what each would choose behind the
            # other's text.
            other = both[True]
            other.rewind(context)
            ids = torch.tensor([[prefix[-1], *written[False][:-1]]])
            chosen = other.target.forward(ids, other.cache)[0][0].argmax(-1).tolist()
            agreed += sum(a == b for a, b in zip(chosen, written[False], strict=True))
            forced += len(chosen)
        row = {
            "context": context,
            "answers": answers,
            "same_choice": round(agreed / forced, 4),
            "tokens_until_they_differ": [min(same), statistics.median(same), max(same)],
            "same_answers": whole,
            "speed": [round(v, 3) for v in sorted(ratios)],
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
