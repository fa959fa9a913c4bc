"""Does vLLM with the plugin write the built-in target's tokens, and accept what our loop accepts?
To 7K of context.

    python benchmarks/vllm_lossless.py [--drafter dflash] [--arm sharpdraft] [--drafts N]
                                       [--batch 8] [--tokens 48] [--ranks 1]

Run where vLLM is installed. One engine without speculation, then one with the plugin, answer the
same prefixes of the recorded sessions, --batch at once, of lengths spread from 300 to 6,900 tokens;
with --ranks the second is split over that many tensor-parallel processes. A difference in tokens is
printed with the gap between the target's two logits.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from sharpdraft.decode.session import Session
from sharpdraft.drafters.registry import load_drafter, recommended
from sharpdraft.hub.smollm2 import SMOLLM2, built_in_drafter, smollm2_dir
from sharpdraft.hub.targets import load_target
from sharpdraft.lab.arms import AR, arms_of
from sharpdraft.lab.backends.vllm import Engine, drafts_of
from sharpdraft.workloads.tasks import recordings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", default="dflash")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--arm", default="sharpdraft")
    parser.add_argument("--drafts", type=int, help="instead of the drafter's own number")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    drafter = built_in_drafter(SMOLLM2, options.drafter)
    assert drafter is not None
    (arm,) = arms_of([options.arm], {"": recommended(drafter)[0]}, options.drafts)
    drafts = drafts_of(arm, drafter)
    texts, count = recordings(), options.batch
    lengths = [300 + round(i * 6600 / max(count - 1, 1)) for i in range(count)]
    prompts = [list(texts[i % len(texts)].tokens[:length]) for i, length in enumerate(lengths)]
    engine_options: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": count,
    }
    answers = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks, used in ((1, AR), (options.ranks, arm)):
            extra: dict[str, Any] = {}
            if ranks > 1:
                os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
                extra = {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
            log = Path(scratch) / f"{ranks}.log"
            settings = {**engine_options, **extra}
            with closing(Engine.of(used, smollm2_dir(), drafter, settings, log)) as engine:
                answers.append(engine.answer(prompts, options.tokens))
            if used is arm:
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                said = sum("sharpdraft" in line and "scal" in line for line in lines)
                print(f"{said} lines of the log say what is scaled")
    plain, drafted = answers
    target, _ = load_target(SMOLLM2, device="cpu")
    session = Session(target, load_drafter(drafter, target), arm.settings)
    same = equal = total = 0
    for prompt, one, other, rounds in zip(
        prompts, plain["tokens"], drafted["tokens"], drafted["rounds"], strict=True
    ):
        same += one == other
        if one != other:
            at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            logits, _, _ = target.forward(
                torch.tensor([[*prompt, *one[:at]]]),
                target.new_cache(len(prompt) + at),
                logits_from=-1,
            )
            gap = float(logits[0, 0, one[at]] - logits[0, 0, other[at]])
            print(
                f"prefix of {len(prompt)}: token {at} differs, where the target's logits are "
                f"{gap:.1e} apart"
            )
        session.rewind(0)
        own = [
            (r.context, r.drafted, r.accepted)
            for r in session.generate(prompt, options.tokens)
            if r.drafted
        ]
        # vLLM drafts whole blocks to the end, our loop no more than is left to write.
        pairs = [(a, tuple(b)) for a, b in zip(own, rounds, strict=False) if a[1] == drafts]
        equal += sum(a == b for a, b in pairs)
        total += len(pairs)
    rounds = [r for each in drafted["rounds"] for r in each]
    print(
        json.dumps(
            {
                "drafter": options.drafter,
                "arm": arm.settings.text(),
                "batch": count,
                "ranks": options.ranks,
                "contexts": lengths,
                "prefixes_with_the_same_tokens": f"{same} of {count}",
                "tokens": count * options.tokens,
                "rounds_as_in_our_loop": f"{equal} of {total}",
                "mal": round(1 + sum(r[2] for r in rounds) / len(rounds), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
