"""All that only a GPU can show of the loop, in one go: is it right there, and what do graphs and
scaling cost?

    python benchmarks/cuda.py [--seconds 330] [--small] [--out FILE.json]

Needs PyTorch and transformers and nothing from a network: target and drafters have random weights,
and prefer a few tokens, so that some drafts are right. In float32 the tokens of every drafter,
scaled, windowed or as released, by graphs and without, one request and many at once, must be those
of the target alone; a graph's rounds must be the loop's. In bfloat16 it then times rounds with and
without graphs and settings, and counts how often a round waits for the device. Ends early, with
what it has, when the seconds are over. Exit code 1 if anything was wrong. --small and a machine
without CUDA: the same checks on small models, to try the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sharpdraft import Batch, DraftSettings, Session
from sharpdraft.decode.graphs import StaticRounds
from sharpdraft.decode.step import step
from sharpdraft.drafters.dflash import DFlash
from sharpdraft.drafters.eagle3 import Eagle3
from sharpdraft.drafters.pard import Pard
from sharpdraft.lab.machine import machine
from sharpdraft.model.causal_lm import CausalLM

SETTINGS = {
    name: DraftSettings.parse(name)
    for name in ("frozen", "sharpdraft@64", "window@256+sinks@4+sharpdraft@64")
}
REPORT: dict[str, Any] = {"checks": [], "times": []}


def note(kind: str, **row: Any) -> None:
    REPORT[kind].append(row)
    print(json.dumps(row), flush=True)


def models(
    device: torch.device, dtype: torch.dtype, small: bool
) -> tuple[CausalLM, dict[str, Any]]:
    """A random target and its drafters, whose head prefers five tokens."""
    size, layers, heads, kv, vocab = (64, 4, 8, 2, 96) if small else (1024, 16, 16, 4, 32_000)
    shape: dict[str, Any] = {
        "hidden_size": size,
        "intermediate_size": 3 * size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": size // heads,
        "vocab_size": vocab,
        "max_position_embeddings": 16_384,
    }
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape, num_hidden_layers=layers, initializer_range=0.4 / (size / 64) ** 0.5
    )
    model: Any = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[:10] *= 0.1
        model.lm_head.weight[15:] *= 0.1
    target = CausalLM.of(model.to(device, dtype))

    def weights(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
        scale = 0.4 / (size / 64) ** 0.5
        return {
            name.replace("__", "."): torch.ones(s) if len(s) == 1 else scale * torch.randn(s)
            for name, s in shapes.items()
        }

    q, own_kv, inner = size, kv * size // heads, 3 * size
    attention = {
        "q_proj": (q, size),
        "k_proj": (own_kv, size),
        "v_proj": (own_kv, size),
        "o_proj": (size, q),
    }
    mlp = {"gate_proj": (inner, size), "up_proj": (inner, size), "down_proj": (size, inner)}

    def layer(name: str, wide: int) -> dict[str, tuple[int, ...]]:
        found = {
            f"{name}__self_attn__{n}__weight": (o, i * (wide if n != "o_proj" else 1))
            for n, (o, i) in attention.items()
        }
        return found | {f"{name}__mlp__{n}__weight": s for n, s in mlp.items()}

    norms = ("input_layernorm", "post_attention_layernorm")
    dflash = {
        "fc__weight": (size, 2 * size),
        "hidden_norm__weight": (size,),
        "norm__weight": (size,),
    }
    for i in range(2):
        dflash |= layer(f"layers__{i}", 1)
        dflash |= {
            f"layers__{i}__self_attn__{n}__weight": (size // heads,) for n in ("q_norm", "k_norm")
        }
        dflash |= {f"layers__{i}__{n}__weight": (size,) for n in norms}
    eagle = {"fc__weight": (size, 3 * size), "norm__weight": (size,)} | layer("midlayer", 2)
    eagle |= {f"midlayer__{n}__weight": (size,) for n in (*norms, "hidden_norm")}
    eagle |= {f"fc_norm__{i}__weight": (size,) for i in range(3)}
    eagle_config = {
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    dflash_config = {"target_layer_ids": [0, 2], "mask_token_id": 3}
    pard = LlamaForCausalLM(
        LlamaConfig(**shape, num_hidden_layers=2, initializer_range=0.05)
    ).eval()
    pard.lm_head.weight = model.lm_head.weight
    return target, {
        "dflash": DFlash(
            {
                **shape,
                "num_hidden_layers": 2,
                "num_target_layers": layers,
                "block_size": 6,
                "dflash_config": dflash_config,
            },
            weights(**dflash),
            target,
        ),
        "eagle3": Eagle3(
            {**shape, "num_hidden_layers": 1, **eagle_config}, weights(**eagle), target
        ),
        "pard": Pard(CausalLM.of(pard.to(device, dtype)), 3, target, 4),
    }


def write(
    session: Session, prompt: list[int], new: int, graphs: bool
) -> tuple[list[int], list[int]]:
    """Tokens behind a prompt and the accepted drafts of each round."""
    session.rewind(0)
    session.prefill(prompt)
    rounds, end, accepted = StaticRounds(session), len(prompt) + new, []
    while (left := end - len(session.tokens)) > 0:
        by_graphs = graphs and rounds.fits(left)
        done = rounds.round(()) if by_graphs else step([session], [left], [()])[0]
        accepted.append(done.accepted)
    return session.tokens[len(prompt) :], accepted


def check(device: torch.device, small: bool, over: float) -> None:
    target, drafters = models(device, torch.float32, small)
    vocab = target.vocab_size
    prompts = [
        torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in (40, 700, 3000)
    ]
    alone = [write(Session(target), prompt, 96, False)[0] for prompt in prompts]
    by_graphs = [write(Session(target), prompt, 96, True)[0] for prompt in prompts]
    note("checks", check="target alone, graphs", right=alone == by_graphs)
    for name, drafter in drafters.items():
        for kind, settings in SETTINGS.items():
            if time.monotonic() > over:
                return note("checks", check="out of time", right=True)
            session = Session(target, drafter, settings)
            loop = [write(session, prompt, 96, False) for prompt in prompts]
            graph = [write(session, prompt, 96, True) for prompt in prompts]
            batch = Batch(target, drafter, settings)
            requests = [batch.add(prompt, 96) for prompt in prompts * 2]
            while batch.step():
                pass
            right = {
                "tokens of the loop": [tokens for tokens, _ in loop] == alone,
                "tokens of graphs": [tokens for tokens, _ in graph] == alone,
                "tokens of a batch": [request.tokens[:96] for request in requests] == alone * 2,
                "rounds of graphs": [rounds for _, rounds in graph]
                == [rounds for _, rounds in loop],
            }
            accepted = sum(sum(rounds) for _, rounds in loop)
            note(
                "checks",
                check=f"{name}, {kind}",
                right=all(right.values()),
                accepted=accepted,
                **right,
            )
    return None


def waits(session: Session, graphs: StaticRounds | None) -> int:
    """How often a round waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graphs.round(()) if graphs else step([session], [99], [()])
    torch.cuda.set_sync_debug_mode("default")
    return len(caught)


def times(device: torch.device, small: bool, over: float) -> None:
    """Rounds in bfloat16 by graphs and without, scaled and not, taking turns."""
    target, drafters = models(
        device, torch.bfloat16 if device.type == "cuda" else torch.float32, small
    )
    rng = torch.Generator().manual_seed(0)
    for context in (500, 4000, 12_000) if not small else (200, 400):
        prompt = torch.randint(0, target.vocab_size, (context,), generator=rng).tolist()
        for name, drafter in {"target alone": None, **drafters}.items():
            ways: dict[str, tuple[Session, StaticRounds | None]] = {}
            for graphs in (False, True):
                for kind, settings in SETTINGS.items() if drafter else [("", DraftSettings())]:
                    session = Session(target, drafter, settings)
                    session.prefill(prompt)
                    ways[f"{kind} {'graphs' if graphs else 'loop'}".strip()] = (
                        session,
                        StaticRounds(session) if graphs else None,
                    )
            seconds: dict[str, list[tuple[float, float, int]]] = {way: [] for way in ways}
            for number in range(25):
                if time.monotonic() > over:
                    return
                for way, (session, static) in ways.items():
                    done = static.round(()) if static else step([session], [99], [()])[0]
                    if number > 4:
                        seconds[way].append(
                            (done.draft_seconds, done.verify_seconds, len(done.tokens))
                        )
            for way, rows in seconds.items():
                draft, verify = (1e3 * statistics.median(row[i] for row in rows) for i in (0, 1))
                session, static = ways[way]
                note(
                    "times",
                    context=context,
                    drafter=name,
                    way=way,
                    draft_ms=round(draft, 3),
                    verify_ms=round(verify, 3),
                    waits=waits(session, static) if device.type == "cuda" else None,
                )
            del ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    began = time.monotonic()
    REPORT["machine"] = machine()
    print(json.dumps(REPORT["machine"]))
    check(device, options.small, began + options.seconds / 2)
    times(device, options.small, began + options.seconds)
    if device.type == "cuda":
        REPORT["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    wrong = [row for row in REPORT["checks"] if not row["right"]]
    print(
        json.dumps(
            {
                "wrong": len(wrong),
                "checks": len(REPORT["checks"]),
                "seconds": round(time.monotonic() - began),
            }
        )
    )
    if options.out:
        options.out.write_text(json.dumps(REPORT, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
