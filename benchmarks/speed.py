"""Decoding speed against transformers, the DFlash authors' package and vLLM: everything takes
turns.

    pip install --no-deps dflash==0.1.0        # for `dflash_generate`
    python benchmarks/speed.py [--places 512x1,512x4,512x16,2048x1,2048x4,4096x1,7000x1]
        [--tokens 48] [--rounds 3] [--drafters eagle3,dflash,pard] [--drafts N]
        [--vllm .venv-vllm/bin/python] [--memory] [--out FILE.json]

A place is a context length and a batch. Each system reads the same prefixes and then writes the
same number of tokens, greedily; prefill is not counted. What is printed for every system is the
ratio of its tokens per second to ours without a drafter (AR), quartiles over the rounds, how often
it wrote the tokens that AR wrote, and for ours the milliseconds of a draft and of a verify pass.
Drafters are those built in, each as released and with its recommended settings, drafting N tokens
or as many as it recommends, the DFlash one as many in every system; transformers' assistant is the
language model of the PARD one. --vllm: the Python of an environment with vLLM, which then joins in
alone and with the DFlash drafter. --memory: also what a fresh process that decodes this way needs
at its peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track
from transformers import AutoModelForCausalLM
from transformers.generation.stopping_criteria import StoppingCriteria

from sharpdraft.decode.session import Arm, Session
from sharpdraft.decode.step import step
from sharpdraft.drafters.base import Drafter
from sharpdraft.drafters.registry import load_drafter, recommended
from sharpdraft.hub.smollm2 import SMOLLM2, built_in_drafter, smollm2_dir
from sharpdraft.hub.targets import load_target
from sharpdraft.lab.arms import AR, arms_of
from sharpdraft.lab.backends.vllm import Engine, drafts_of
from sharpdraft.lab.machine import machine
from sharpdraft.lab.measure import bring_to
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.workloads.tasks import Recording, recordings

Prefixes = Sequence[list[int]]


@dataclass
class Measured:
    tokens: list[list[int]]
    per_second: float
    draft_ms: list[float] = field(default_factory=list)
    verify_ms: list[float] = field(default_factory=list)


class Clock(StoppingCriteria):
    """When how many tokens were there; it stops nothing."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **rest: Any) -> torch.BoolTensor:
        self.marks.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(len(input_ids), dtype=torch.bool)  # type: ignore[return-value]


def by_transformers(model: Any, prefixes: Prefixes, new: int, **options: Any) -> Measured:
    """From the first new token (with an assistant: those of the first round) to the last."""
    ids, clock = torch.tensor(prefixes), Clock()
    common = {
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "max_new_tokens": new,
        "min_new_tokens": new,
    }
    out = model.generate(ids, stopping_criteria=[clock], **common, **options)
    (began, first), (ended, last) = clock.marks[0], clock.marks[-1]
    return Measured(
        out[:, ids.shape[1] :].tolist(), len(prefixes) * (last - first) / (ended - began)
    )


def by_dflash(model: Any, peer: Any, drafts: int, prefixes: Prefixes, new: int) -> Measured:
    from dflash.model import dflash_generate

    ids, block = torch.tensor(list(prefixes)), drafts + 1
    done = dflash_generate(peer, model, ids, new, None, block_size=block, return_stats=True)
    return Measured(
        [done.output_ids[0, len(prefixes[0]) :].tolist()], 1 / done.time_per_output_token
    )


def by_vllm(engine: Engine, prefixes: Prefixes, new: int) -> Measured:
    done = engine.answer(prefixes, new)
    return Measured(done["tokens"], done["decoded"] / done["seconds"])


def by_us(sessions: Sequence[Session], arm: Arm, prefixes: Prefixes, new: int) -> Measured:
    # All drafters read all prefixes, before any is used for any request: what one had not read, it
    # would read later.
    for session, prefix in zip(sessions, prefixes, strict=True):
        session.read_along()
        bring_to(session, prefix)
    for session in sessions:
        session.use(arm)
        session.catch_up()
    # The round that reads the prefix's last token also writes the first new one.
    ends = [len(prefix) + new for prefix in prefixes]
    draft, verify = [], []
    began = time.perf_counter()
    while running := [
        (s, end - len(s.tokens))
        for s, end in zip(sessions, ends, strict=True)
        if len(s.tokens) < end
    ]:
        done = step([s for s, _ in running], [left for _, left in running], [()] * len(running))
        draft.append(1e3 * max(each.draft_seconds for each in done))
        verify.append(1e3 * done[0].verify_seconds)
    seconds = time.perf_counter() - began
    written = [s.tokens[len(prefix) :] for s, prefix in zip(sessions, prefixes, strict=True)]
    for session in sessions:
        session.rewind(min(len(p) for p in prefixes))
    return Measured(written, len(prefixes) * new / seconds, draft, verify)


def prefixes_of(texts: Sequence[Recording], context: int, batch: int, number: int = 0) -> Prefixes:
    """A different text, or place in it, for each request; others in each round."""
    return [list(texts[(number + i) % len(texts)].tokens[i : context + i]) for i in range(batch)]


def quartiles(values: Sequence[float]) -> list[float]:
    return [
        round(v, 3)
        for v in (statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--places", default="512x1,512x4,512x16,2048x1,2048x4,4096x1,7000x1")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafters", default="eagle3,dflash,pard")
    parser.add_argument("--drafts", type=int)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    new = options.tokens
    places = [tuple(map(int, place.split("x"))) for place in options.places.split(",")]
    texts = recordings()
    if options.only == "transformers":
        context, batch = places[0]
        model = AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32)
        by_transformers(model, prefixes_of(texts, context, batch), new)
        return print(peak_of_this_process())
    target, _ = load_target(SMOLLM2, device="cpu")
    folders = {
        name: built_in_drafter(SMOLLM2, name) for name in options.drafters.split(",") if name
    }
    drafters = {
        name: load_drafter(folder, target) for name, folder in folders.items() if folder is not None
    }
    arms = {"ar": AR}
    for name, folder in folders.items():
        assert folder is not None, f"there is no built-in {name} drafter"
        own = {name: recommended(folder)[0]}
        both = arms_of(("frozen", "sharpdraft"), own, options.drafts)
        arms |= {f"{name}, {arm.name}": arm for arm in both}
    if options.only:
        return alone(arms[options.only], target, drafters, texts, places[0], new)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32)
    assistant = peer = None
    if (folder := built_in_drafter(SMOLLM2, "pard")) is not None:
        assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    dflash_folder = built_in_drafter(SMOLLM2, "dflash")
    assert dflash_folder is not None
    (frozen,) = arms_of(("frozen",), {"dflash": recommended(dflash_folder)[0]}, options.drafts)
    try:
        import dflash.model

        dflash.model._cuda_time = time.perf_counter
        peer = dflash.model.DFlashDraftModel.from_pretrained(dflash_folder, dtype=torch.float32)
    except ImportError:
        print("dflash is not installed: `dflash_generate` does not take part", file=sys.stderr)
    engines: dict[str, Engine] = {}
    if options.vllm:
        settings = {
            "dtype": "float32",
            "max_num_seqs": 16,
            "enable_prefix_caching": True,
            "max_model_len": 8192,
        }
        for name, arm in {"vllm": AR, "vllm, dflash": frozen}.items():
            log = Path(f"speed-{name.replace(', ', '-')}.log")
            python = str(options.vllm)
            engines[name] = Engine.of(arm, smollm2_dir(), dflash_folder, settings, log, python)
    report: dict[str, Any] = {
        "machine": machine(),
        "transformers": transformers.__version__,
        "tokens": new,
        "rows": [],
    }
    report["drafts"] = options.drafts
    for context, batch in track(places, description="places"):
        sessions = [Session(target, drafters, capacity=context + new + 1) for _ in range(batch)]
        systems: dict[str, Callable[[Prefixes], Measured]] = {
            name: partial(by_us, sessions, arm, new=new) for name, arm in arms.items()
        }
        systems["transformers"] = partial(by_transformers, model, new=new)
        if batch == 1 and assistant is not None:
            systems["transformers, assisted"] = partial(
                by_transformers, model, new=new, assistant_model=assistant
            )
        if batch == 1 and peer is not None:
            drafts = drafts_of(frozen, dflash_folder)
            systems["dflash_generate"] = partial(by_dflash, model, peer, drafts, new=new)
        systems |= {name: partial(by_vllm, engine, new=new) for name, engine in engines.items()}
        found: dict[str, list[tuple[float, bool, Measured]]] = {name: [] for name in systems}
        names = list(systems)
        for number in range(options.rounds):
            prefixes = prefixes_of(texts, context, batch, number)
            turn = {
                name: systems[name](prefixes) for name in names[number % 2 :] + names[: number % 2]
            }
            base = turn["ar"]
            for name, done in turn.items():
                found[name].append(
                    (done.per_second / base.per_second, done.tokens == base.tokens, done)
                )
        for name, rounds in found.items():
            row: dict[str, Any] = {
                "context": context,
                "batch": batch,
                "system": name,
                "speed_over_ar": quartiles([ratio for ratio, _, _ in rounds]),
                "tokens_per_second": quartiles([done.per_second for _, _, done in rounds]),
                "same_tokens": sum(same for _, same, _ in rounds),
                "rounds": len(rounds),
            }
            for key in ("draft_ms", "verify_ms"):
                if values := [value for _, _, done in rounds for value in getattr(done, key)]:
                    row[key] = round(statistics.median(values), 2)
            if options.memory:
                row["peak_mib"] = peak(name, arms, options, context, batch)
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for engine in engines.values():
        engine.close()
    print(json.dumps({k: v for k, v in report.items() if k != "rows"}))
    return None


def peak(name: str, arms: dict[str, Arm], options: Any, context: int, batch: int) -> int | None:
    """Peak of a fresh process that loads what this system needs, and no more, and decodes once, in
    MiB."""
    if name not in (*arms, "transformers"):
        return None
    drafter = arms[name].drafter if name in arms else None
    line = [
        sys.executable,
        __file__,
        "--only",
        name,
        "--places",
        f"{context}x{batch}",
        "--drafters",
        drafter or "",
    ]
    return int(subprocess.run(line, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_of_this_process() -> int:
    """In MiB, by Linux's count: getrusage would answer with the parent's where that is larger."""
    (line,) = (
        each
        for each in Path("/proc/self/status").read_text().splitlines()
        if each.startswith("VmHWM")
    )
    return int(line.split()[1]) // 1024


def alone(
    arm: Arm,
    target: CausalLM,
    drafters: Mapping[str, Drafter[Any]],
    texts: Sequence[Recording],
    place: tuple[int, ...],
    new: int,
) -> None:
    """Decode once and print the peak of this process."""
    context, batch = place
    used = {name: each for name, each in drafters.items() if name == arm.drafter}
    sessions = [Session(target, used, capacity=context + new + 1) for _ in range(batch)]
    by_us(sessions, arm, prefixes_of(texts, context, batch), new)
    print(peak_of_this_process())


if __name__ == "__main__":
    main()
