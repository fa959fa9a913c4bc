"""Does vLLM load our drafter, and accept of it what our loop accepts? Run where vLLM is installed (0.32 was tried):

    python benchmarks/load_in_vllm.py TARGET_DIRECTORY DRAFTER_DIRECTORY PROMPTS.json

PROMPTS.json: a list of {"prompt": [token ids], "tokens": [token ids our loop wrote], "rounds": how many it took}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    target, drafter, prompts = sys.argv[1:4]
    cases = json.loads(Path(prompts).read_text(encoding="utf-8"))
    block = json.loads(Path(drafter, "config.json").read_text(encoding="utf-8"))["block_size"]
    llm = LLM(
        target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        disable_log_stats=False,
        speculative_config={"method": "dflash", "model": drafter, "num_speculative_tokens": block - 1},
    )
    same = 0
    for case in cases:
        options = SamplingParams(temperature=0.0, max_tokens=len(case["tokens"]), ignore_eos=True)
        written = llm.generate({"prompt_token_ids": case["prompt"]}, options, use_tqdm=False)[0].outputs[0].token_ids
        same += list(written) == case["tokens"]
    counted = {m.name: getattr(m, "value", None) for m in llm.get_metrics() if "spec_decode" in m.name}
    drafts, accepted = counted["vllm:spec_decode_num_drafts"], counted["vllm:spec_decode_num_accepted_tokens"]
    print(f"{same} of {len(cases)} outputs equal ours; MAL in vLLM {1 + accepted / drafts:.3f}", end=", ")
    ours = sum(len(case["tokens"]) - 1 for case in cases) / sum(case["rounds"] for case in cases)
    print(f"in our loop {ours:.3f}")


if __name__ == "__main__":
    main()
