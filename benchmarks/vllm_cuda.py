"""What only a CUDA machine can show of the vLLM plugin: CUDA graphs, torch.compile and the V2
runner, against eager.

    python benchmarks/vllm_cuda.py [TARGET DRAFTER]

Needs vLLM for CUDA and sharpdraft in one environment; without arguments it takes the built-in
target and drafter. Each way of running is started once, asked for the same answers, and must accept
what eager mode accepts, Frozen, scaled and windowed, and write what the target alone writes;
bfloat16 ties are the one exception, so it runs in float32.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from sharpdraft.drafters.registry import recommended
from sharpdraft.hub.smollm2 import SMOLLM2, built_in_drafter, smollm2_dir
from sharpdraft.lab.arms import arms_of
from sharpdraft.lab.backends.vllm import Engine
from sharpdraft.workloads.tasks import recordings

ARMS = ("ar", "frozen", "sharpdraft", "window@1024+sharpdraft")
WAYS = {
    "eager": ({"enforce_eager": True}, {}),
    "graphs": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "graphs, V2 runner": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
}


def main() -> None:
    target, drafter = (
        (Path(p) for p in sys.argv[1:3])
        if len(sys.argv) > 2
        else (smollm2_dir(), built_in_drafter(SMOLLM2))
    )
    assert drafter is not None
    arms = arms_of(ARMS, {"": recommended(drafter)[0]})
    prompts = [
        list(r.tokens[:n])
        for r, n in zip(recordings(), (60, 400, 900, 1800, 3000, 4500, 6000, 7000), strict=True)
    ]
    failed = False
    texts: list[list[int]] = []
    seen: dict[str, list[int]] = {}
    for arm in arms:
        for way, (options, environment) in WAYS.items():
            if arm.drafter is None and way != "eager":
                continue
            os.environ.update(environment)
            began = time.perf_counter()
            log = Path(f"vllm-cuda-{way.replace(', ', '-').replace(' ', '-')}.log")
            engine = Engine.of(arm, target, drafter, {"dtype": "float32", **options}, log)
            started = time.perf_counter() - began
            answer = engine.answer(prompts, 128)
            again = engine.answer(prompts, 128)
            engine.close()
            for name in environment:
                del os.environ[name]
            texts = texts or answer["tokens"]
            accepted = [sum(r[2] for r in rounds) for rounds in answer["rounds"]]
            first = seen.setdefault(arm.name, accepted)
            same = answer["tokens"] == texts and again["tokens"] == texts
            close = all(abs(a - b) <= 2 for a, b in zip(accepted, first, strict=True))
            failed |= not (same and close)
            speed = again["decoded"] / again["seconds"]
            print(
                f"{arm.name:12} {way:18} start {started:5.0f} s, {speed:7.1f} tokens/s, "
                f"tokens {'equal' if same else 'DIFFER'}, accepted {accepted} "
                f"{'as eager' if close else 'UNLIKE eager'}",
                flush=True,
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
