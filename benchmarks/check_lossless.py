"""Are the tokens of a bench run those of transformers? Reads the run's rows and asks transformers'
own forward.

    python benchmarks/check_lossless.py sharpdraft-bench/rows.jsonl [--prompts FILE] [--generate 32]

Every answer is given to transformers behind the same prefix, and each token compared with the
argmax there, which is what greedy `generate` would have written. With --generate N, `generate`
itself writes the first N tokens of every answer. A difference is printed with the gap between the
two logits. Rows do not hold what was asked: a run of --prompts needs the same file here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, DynamicCache

from sharpdraft.cli.loading import context_of
from sharpdraft.errors import SharpDraftError
from sharpdraft.hub.smollm2 import SMOLLM2
from sharpdraft.hub.targets import load_tokenizer
from sharpdraft.lab.plan import Row, measured, row_of
from sharpdraft.workloads.chat import Chat, ChatSettings
from sharpdraft.workloads.registry import WORKLOADS, tasks_of
from sharpdraft.workloads.tasks import Task, built_in, from_file, recordings
from sharpdraft.workloads.workload import Reader

Prefixed = list[tuple[Row, list[int]]]
"""Rows of a session in order, and what stands before each answer."""


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--generate", type=int, default=0)
    options = parser.parse_args()
    header, *lines = map(json.loads, options.rows.read_text(encoding="utf-8").splitlines())
    rows = measured(lines)
    _check(header["plan"], rows)
    directory, tokenizer, _, ends = load_tokenizer(header["plan"]["target"])
    chat = Chat(tokenizer, ChatSettings(**header["plan"].get("template", {})))
    sessions = _sessions(header["plan"], rows, options.prompts, chat, chat.stops(ends))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    checked = generated = arms = 0
    differences: list[str] = []
    for name in track(sorted(sessions), description="sessions"):
        cache = DynamicCache(config=model.config)
        for row, prefix in sessions[name]:
            start, answer = row["context"], torch.tensor([row["tokens"]])
            tokens = torch.tensor([prefix])
            for at in range(cache.get_seq_length(), start - 1, 512):
                model(tokens[:, at : min(at + 512, start - 1)], past_key_values=cache)
            logits = model(
                torch.cat((tokens[:, start - 1 :], answer[:, :-1]), 1), past_key_values=cache
            ).logits[0]
            top = logits.max(-1)
            for i in (top.indices != answer[0]).nonzero()[:, 0].tolist():
                gap = float(top.values[i] - logits[i, answer[0, i]])
                differences.append(f"{name}, turn {row['turn']}, token {i}: logits {gap:.1e} apart")
            checked += answer.shape[1]
            arms += sum(arm["tokens"] for arm in row["arms"].values()) - answer.shape[1]
            cache.crop(-(cache.get_seq_length() - (start - 1)))
            if options.generate:
                written = model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    past_key_values=cache,
                    max_new_tokens=min(options.generate, answer.shape[1]),
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


def _check(plan: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Raises SharpDraftError for rows that are not to be compared with greedy decoding here."""
    if plan["sampling"]["temperature"]:
        raise SharpDraftError("this run was sampled: only greedy answers can be checked")
    if "weights in" in plan["target"]:
        raise SharpDraftError(
            "this run rounded the target's weights (--weights), which makes it another model"
        )
    if any("requests" in row for row in rows):
        raise SharpDraftError("this run was an engine's or a server's: only the lab's are checked")


def _sessions(
    plan: Mapping[str, Any],
    rows: Sequence[Row],
    prompts: Path | None,
    chat: Chat,
    stop: Sequence[int],
) -> dict[str, Prefixed]:
    """All rows, session by session. Raises SharpDraftError where their texts are not known."""
    tasks, texts = _known(plan, rows, prompts, chat)
    found: dict[str, Prefixed] = {}
    for name in {row["session"] for row in rows}:
        own = sorted((row for row in rows if row["session"] == name), key=lambda row: row["turn"])
        if name in texts:
            found[name] = [(row, list(texts[name][: row["context"]])) for row in own]
        elif name in tasks:
            found[name] = list(_written(tasks[name], own, chat, stop))
        else:
            asked = "is not in that file" if prompts else "is of a prompt file"
            raise SharpDraftError(f"session {name} {asked}: give the run's own with --prompts FILE")
    return found


def _known(
    plan: Mapping[str, Any], rows: Sequence[Row], prompts: Path | None, chat: Chat
) -> tuple[dict[str, Task], dict[str, Sequence[int]]]:
    """The tasks that a run may have had, and the recorded texts, by the names of their sessions."""
    ours = prompts is None and plan["target"] == SMOLLM2
    if prompts is not None or "workloads" not in plan:
        texts = {each.name: each.tokens for each in recordings()} if ours else {}
        tasks = from_file(prompts, 2) if prompts else built_in()
        return {task.name: task for task in tasks}, texts
    reader = Reader(chat.tokenizer, context_of(plan["target"]))
    found: dict[str, Task] = {}
    texts = {}
    for name in {row["workload"] for row in rows}:
        for each in recordings(name) if ours else ():
            texts[f"{name}/{each.name}"] = each.tokens
        found |= {task.name: task for task in tasks_of(WORKLOADS[name], reader)}
    return found, texts


def _written(
    task: Task, rows: Sequence[Row], chat: Chat, stop: Sequence[int]
) -> Iterator[tuple[Row, list[int]]]:
    """The measured turns of a session that was written live, which are its first ones. Raises
    SharpDraftError for a task that is another one than the run's."""
    tokens: list[int] = []
    for number, prompt in enumerate(chat.prompts(task)):
        row = row_of(rows, task.name, number)
        if row is None:
            return
        # An answer that was cut off got the end of turn that it lacked.
        lacks = number and tokens[-1] not in stop
        tokens = [*tokens, *([chat.end_of_turn] if lacks else []), *prompt]
        if len(tokens) != row["context"]:
            raise SharpDraftError(
                f"session {task.name}, turn {number}: the prompt has {len(tokens)} tokens, and the "
                f"run's had {row['context']}: give the run's own file with --prompts"
            )
        yield row, tokens
        tokens = tokens + row["tokens"]


if __name__ == "__main__":
    try:
        main()
    except SharpDraftError as error:
        sys.exit(f"error: {error}")
