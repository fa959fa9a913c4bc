"""What scaling costs a draft pass in vLLM: the same engine, scaled and stock passes taking turns.

    python benchmarks/vllm_overhead.py [TOKENS]

Run where vLLM is installed. Prints the ratio of a whole draft step (`propose`) with scaling to one
without, at batch 1 and 8 and some context lengths: median, and the range of the middle half.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from sharpdraft.drafters.registry import num_drafts, recommended
from sharpdraft.hub.smollm2 import SMOLLM2, built_in_drafter, smollm2_dir
from sharpdraft.lab.backends.vllm import speculative_config
from sharpdraft.workloads.tasks import recordings


def main() -> None:
    from vllm import LLM, SamplingParams

    new = int(sys.argv[1]) if len(sys.argv) > 1 else 96
    drafter = built_in_drafter(SMOLLM2)
    assert drafter is not None
    engine = LLM(
        str(smollm2_dir()),
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=8,
        enable_prefix_caching=True,
        distributed_executor_backend="uni",
        speculative_config=speculative_config(drafter, num_drafts(drafter)),
        additional_config={"sharpdraft": recommended(drafter)[0].to_dict()},
    )
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    proposer = worker.model_runner.drafter
    layers = [layer.self_attn.attn for layer in proposer.model.model.layers]
    scaled = [layer.impl.forward for layer in layers]
    stock = [forward.__wrapped__ for forward in scaled]
    propose = proposer.propose
    seconds: dict[bool, list[float]] = {True: [], False: []}

    def timed(*args: object, **kwargs: object) -> object:
        on = len(seconds[True]) <= len(seconds[False])
        for layer, forward in zip(layers, scaled if on else stock, strict=True):
            layer.impl.forward = forward
        began = time.perf_counter()
        result = propose(*args, **kwargs)
        seconds[on].append(time.perf_counter() - began)
        return result

    proposer.propose = timed
    for batch, length in ((1, 500), (1, 2000), (8, 500), (8, 1000)):
        prompts = [{"prompt_token_ids": list(r.tokens[:length])} for r in recordings()[:batch]]
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        for each in seconds.values():
            each.clear()
        engine.generate(prompts, params, use_tqdm=False)
        # The first passes take in what prefix caching left to read.
        pairs = list(zip(seconds[True][2:], seconds[False][2:], strict=False))
        ratios = [a / b for a, b in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        stock_seconds = statistics.median(b for _, b in pairs)
        print(
            f"batch {batch}, {length} tokens of context: draft step {1e3 * stock_seconds:.1f} ms, "
            f"scaled / stock {middle:.4f} [{low:.4f}, {high:.4f}] over {len(ratios)} pairs",
            flush=True,
        )


if __name__ == "__main__":
    main()
