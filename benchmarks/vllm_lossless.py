"""Does vLLM with the plugin write the built-in target's tokens, and accept what our loop accepts?
To 7K of context.

    python benchmarks/vllm_lossless.py [--drafter dflash] [--drafts 5] [--frozen | --reference N0]
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
from sharpdraft.drafters import load_drafter
from sharpdraft.hub.smollm2 import SMOLLM2, built_in_drafter, smollm2_dir
from sharpdraft.hub.targets import load_target
from sharpdraft.lab.backends.vllm import Engine
from sharpdraft.method.scale import policy_to_settings
from sharpdraft.method.settings import FROZEN, recommended
from sharpdraft.workloads.tasks import recordings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", default="dflash")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--reference", type=int, help="N0, instead of the drafter's own")
    options = parser.parse_args()
    drafter = built_in_drafter(SMOLLM2, options.drafter)
    assert drafter is not None
    policy = None if options.frozen else recommended(drafter)[0]
    if policy is not None and options.reference:
        policy = policy.with_reference(options.reference)
    asked: Any = FROZEN if policy is None else policy_to_settings(policy)
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
        for ranks, used, wanted in ((1, None, None), (options.ranks, drafter, asked)):
            extra: dict[str, Any] = {}
            if ranks > 1:
                os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
                extra = {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
            log = Path(scratch) / f"{ranks}.log"
            with closing(
                Engine(
                    smollm2_dir(), used, options.drafts, wanted, {**engine_options, **extra}, log
                )
            ) as engine:
                answers.append(engine.answer(prompts, options.tokens))
            scaled = [
                line
                for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
                if "scal" in line
            ]
            if wanted is not None:
                print(
                    f"{len([line for line in scaled if 'sharpdraft' in line])} lines of the log "
                    "say what is scaled"
                )
    plain, drafted = answers
    target, _ = load_target(SMOLLM2, device="cpu")
    session = Session(target, load_drafter(drafter, target), policy, block=options.drafts + 1)
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
        pairs = [(a, tuple(b)) for a, b in zip(own, rounds, strict=False) if a[1] == options.drafts]
        equal += sum(a == b for a, b in pairs)
        total += len(pairs)
    rounds = [r for each in drafted["rounds"] for r in each]
    print(
        json.dumps(
            {
                "drafter": options.drafter,
                "arm": "frozen" if policy is None else f"N0 = {policy.reference}",
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
