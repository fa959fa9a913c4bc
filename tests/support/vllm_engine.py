"""vLLM itself, and our own loop beside it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from sharpdraft.decode.session import Session
from sharpdraft.drafters.registry import load_drafter
from sharpdraft.lab.backends.vllm import Engine
from sharpdraft.method.policies import FixedSlope
from sharpdraft.method.settings import FROZEN, DraftSettings, FixedLength
from sharpdraft.model.causal_lm import CausalLM
from support.vllm_models import POSITIONS, Models

DRAFTS, NEW = 5, 60
RELEASED = DraftSettings()
STEEP = DraftSettings(FixedSlope(3, slope=0.5, top_k=2, max_scale=50.0))
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": POSITIONS,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
}
LENGTHS = (5, 17, 40, 64, 130, 300, 511, 900)


Start = Callable[..., AbstractContextManager[Engine]]


def asked(settings: DraftSettings) -> object:
    return settings.to_dict() or FROZEN


def ours(
    models: Models,
    prompts: Sequence[Sequence[int]],
    settings: DraftSettings,
    drafter: Path | None = None,
) -> list[list[tuple[int, int, int]]]:
    """Rounds of our own loop."""
    target = CausalLM.of(models.model)
    settings = replace(settings, length=FixedLength(DRAFTS))
    session = Session(target, load_drafter(drafter or models.drafter, target), settings)
    found = []
    for prompt in prompts:
        session.rewind(0)
        found.append(
            [(r.context, r.drafted, r.accepted) for r in session.generate(prompt, NEW)][1:]
        )
    return found


def different_rounds(
    theirs: Sequence[Sequence[Sequence[int]]], own: Sequence[Sequence[tuple[int, int, int]]]
) -> int:
    """Rounds that differ, of those in which we draft a whole block: at the end of an answer vLLM
    drafts on, while we draft what is still wanted."""
    differ = total = 0
    for engine, loop in zip(theirs, own, strict=True):
        whole = [r for r in loop if r[1] == DRAFTS]
        total += len(whole)
        differ += sum(tuple(a) != b for a, b in zip(engine, whole, strict=False))
    assert total > 100
    return differ


def complete(url: str, prompt: Sequence[int], count: int, abort_after: int | None = None) -> None:
    body = {
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for number, _ in enumerate(response):
            if abort_after is not None and number >= abort_after:
                return


def by_context(url: str) -> dict[tuple[str, str], float]:
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    found = {}
    for line in text.splitlines():
        if line.startswith("vllm:spec_decode_num_") and "_by_context_total{" in line:
            name = line.split("num_")[1].split("_by_context")[0]
            context = line.split('context="')[1].split('"')[0]
            found[name, context] = float(line.rsplit(" ", 1)[1])
    return found


def _edges() -> list[tuple[int, str]]:
    return [(0, "0-512"), (512, "512-1024")]
