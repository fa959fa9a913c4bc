"""Are the tokens of a bench run those of transformers? Reads the run's rows and asks transformers'
own forward.

    python benchmarks/check_lossless.py sharpdraft-bench/rows.jsonl [--generate 32]

Every answer of a recorded session is given to transformers behind the same prefix, and each token
compared with the argmax there, which is what greedy `generate` would have written. With --generate
N, `generate` itself writes the first N tokens of every answer. A difference is printed with the gap
between the two logits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, DynamicCache

from sharpdraft.hub.smollm2 import smollm2_dir
from sharpdraft.workloads.tasks import recordings


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--generate", type=int, default=0)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text(encoding="utf-8").splitlines()][1:]
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32)
    by_name = {recording.name: recording for recording in recordings()}
    checked = generated = arms = 0
    differences: list[str] = []
    for name in track(sorted({row["session"] for row in rows}), description="sessions"):
        cache = DynamicCache(config=model.config)
        tokens = torch.tensor([by_name[name].tokens])
        for row in sorted((r for r in rows if r["session"] == name), key=lambda r: r["turn"]):
            start, answer = row["context"], torch.tensor([row["tokens"]])
            for at in range(cache.get_seq_length(), start - 1, 512):
                model(tokens[:, at : min(at + 512, start - 1)], past_key_values=cache)
            logits = model(
                torch.cat((tokens[:, start - 1 : start], answer[:, :-1]), 1), past_key_values=cache
            ).logits[0]
            top = logits.max(-1)
            for i in (top.indices != answer[0]).nonzero()[:, 0].tolist():
                gap = float(top.values[i] - logits[i, answer[0, i]])
                differences.append(f"{name}, turn {row['turn']}, token {i}: logits {gap:.1e} apart")
            checked += answer.shape[1]
            arms += sum(arm["tokens"] for arm in row["arms"].values()) - answer.shape[1]
            cache.crop(-(cache.get_seq_length() - (start - 1)))
            if options.generate:
                count = min(options.generate, answer.shape[1])
                prompt = tokens[:, :start]
                written = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    past_key_values=cache,
                    max_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                )[0, start:]
                generated += len(written)
                if written.tolist() != row["tokens"][: len(written)]:
                    differences.append(f"{name}, turn {row['turn']}: generate wrote other tokens")
                cache.crop(-(cache.get_seq_length() - (start - 1)))
    against = sum(len(row["differences"]) for row in rows)
    print(
        f"{checked} tokens against transformers' forward, {generated} against its generate; {arms} "
        "tokens of the other"
    )
    print(
        f"arms against the first one's, {against} answers differing. Differences from "
        f"transformers: {len(differences)}"
    )
    print("\n".join(differences))


if __name__ == "__main__":
    main()
