"""The whole way from a target to a drafter: text, training, checkpoint; and the recording of
sessions."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..errors import SharpDraftError
from ..hub.targets import load_target, pick_device, read_tokenizer, stop_tokens
from ..model.causal_lm import CausalLM
from ..model.linear import fast_bfloat16
from ..model.rotary import head_order
from ..workloads.chat import Chat, ChatSettings
from ..workloads.registry import workloads_of
from ..workloads.tasks import built_in, turns_of
from ..workloads.workload import Reader
from . import dflash, eagle3, pard, prompts
from .corpus import Corpus
from .sessions import save_wave, session_turns, write_wave
from .trainer import Recipe, Trainer

ProgressBar = Callable[[int, str], AbstractContextManager[tuple[Any, Any]]]

_FAMILIES = {"dflash": dflash, "eagle3": eagle3, "pard": pard}
RECIPES: dict[str, Recipe] = {
    "dflash": dflash.Recipe(),
    "eagle3": eagle3.Recipe(),
    "pard": pard.Recipe(),
}

_HELD_OUT_WAVES = 1


def distil(
    family: str,
    target_name: str,
    out: Path,
    *,
    tokens: int,
    context: int,
    batch: int,
    steps: int | None,
    device: str | None,
    text: Path | None = None,
    start: Path | None = None,
    first_wave: int = 0,
    chat: ChatSettings | None = None,
    progress: ProgressBar,
) -> Path:
    """Write `tokens` tokens of text in waves, train a drafter of `family` on them, export; what is
    already there is kept.

    text: where the text is or goes; default `out`/text. It may be another family's, if it holds the
    layers that this one reads. start: a drafter's directory to go on from, instead of layers of the
    target. first_wave: number of the first wave of text, each number being another text, so that a
    drafter can go on with text it has not seen. chat: what the chat template is told.

    Returns the drafter's directory. Raises SharpDraftError when a file cannot be written or read.
    """
    target, template, stops = _load(target_name, device, chat)
    if target.rotary.limit is not None or head_order(target.config) is not None:
        raise SharpDraftError(
            "no drafter is trained for this target: its rotary positions turn a part of each head, "
            "or neighbours, or change with the length of the text"
        )
    module: Any = _FAMILIES[family]
    recipe = RECIPES[family] if start is None else module.Recipe.of(start)
    if steps is not None:
        recipe = replace(recipe, steps=steps)
    deepest = max((*recipe.reads, *(() if start else recipe.starts)), default=0)
    if deepest >= target.num_layers:
        raise SharpDraftError(
            f"the recipe needs a target's layer {deepest}; this one has {target.num_layers} layers"
        )
    if context > target.max_positions:
        raise SharpDraftError(
            f"--context {context}: this target takes at most {target.max_positions} tokens"
        )
    folder = text or out / "text"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        about = {"target": target_name, "batch": batch, "context": context}
        if told := template.settings.to_dict():
            about["template"] = told
        taps = _same_text(folder / "about.json", about, recipe.reads)
        waves = max(1, round(tokens / (batch * context)))

        def wave(number: int, held_out: bool) -> Path:
            return _wave(
                target, template, stops, folder, number, held_out, batch, context, taps, progress
            )

        held = Corpus([wave(i, True) for i in range(_HELD_OUT_WAVES)], taps)
        train = Corpus([wave(i, False) for i in range(first_wave, first_wave + waves)], taps)
        trainer: Trainer = module.Trainer(target, recipe, train, held, out, start)
        trainer.resume()
        with progress(recipe.steps, "training") as (bar, task):
            held_text = ""

            def on_step(row: dict[str, Any]) -> None:
                nonlocal held_text
                if "held_mal" in row:
                    held_text = f", held out {row['held_mal']:.2f}"
                bar.update(
                    task,
                    completed=row["step"],
                    description=f"training: MAL {row['mal']:.2f}{held_text}",
                )

            trainer.run(on_step)
        trainer.export(out / "drafter")
    except SafetensorError as error:
        raise SharpDraftError(
            f"a wave in {folder} is corrupt ({error}): remove it and run again"
        ) from error
    except OSError as error:
        raise SharpDraftError(
            f"cannot write to {out} ({error}): make room and run the same command again"
        ) from error
    return out / "drafter"


def record_sessions(
    target_name: str,
    out: Path,
    *,
    workload: str = "greedy",
    sessions: int | None,
    length: int,
    temperature: float | None = None,
    device: str | None,
    chat: ChatSettings | None = None,
    progress: ProgressBar,
) -> None:
    """Write the texts of a workload's sessions, at its temperature or the one given: tokens uint16
    (int32 for a vocabulary beyond it) and turns int32 [turns, 3] (see workloads.tasks.Turn) of
    each. chat: what the chat template is told. Raises SharpDraftError for a workload of single
    turns, and when the file cannot be written."""
    (chosen,) = workloads_of([workload])
    tasks = list(chosen.tasks(Reader(read_tokenizer(target_name), length, sessions)))
    if any(len(task.turns) == 1 for task in tasks):
        raise SharpDraftError(
            f"{workload} asks one question a text: a bench reads the texts, nothing is recorded"
        )
    target, template, stops = _load(target_name, device, chat)
    if length > target.max_positions:
        raise SharpDraftError(
            f"--length {length}: this target takes at most {target.max_positions} tokens"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SharpDraftError(f"cannot write to {out} ({error}): give another --out") from error
    turns = [list(template.prompts(task)) for task in tasks]
    with progress(length, "recording") as (bar, task_id):
        wave = write_wave(
            target,
            turns,
            length,
            template.end_of_turn,
            stops=stops,
            temperature=chosen.temperature if temperature is None else temperature,
            on_step=lambda step: bar.update(task_id, completed=step + 1),
        )
    ids = torch.uint16 if target.vocab_size <= 2**16 else torch.int32
    tensors = {}
    for task, tokens, written in zip(tasks, wave["tokens"], wave["written"], strict=True):
        tensors[f"{task.name}.tokens"] = tokens.to(ids)
        spans = [(t.start, t.answer, t.end) for t in turns_of(written)]
        if spans:
            spans[0] = (template.lead(task), *spans[0][1:])
        tensors[f"{task.name}.turns"] = torch.tensor(spans, dtype=torch.int32)
    try:
        save_file(tensors, str(out), {"target": target_name, "workload": workload})
    except (SafetensorError, OSError) as error:
        raise SharpDraftError(
            f"cannot write to {out} ({error}): make room and run the same command again"
        ) from error


def _same_text(path: Path, about: dict[str, Any], reads: Sequence[int]) -> tuple[int, ...]:
    """The layers whose states the text of a directory holds, `reads` for a new one. Refuses to mix
    texts of different making, and one that lacks a layer of `reads`."""
    if not path.exists():
        path.write_text(json.dumps({**about, "taps": list(reads)}) + "\n", encoding="utf-8")
        return tuple(reads)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        taps = tuple(found.pop("taps"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SharpDraftError(f"{path} is broken: give another --out or --text") from error
    if found != about:
        raise SharpDraftError(
            f"{path.parent} holds text made otherwise (see {path.name}): give another --out or "
            "--text"
        )
    if lacking := sorted(set(reads) - set(taps)):
        raise SharpDraftError(
            f"the text in {path.parent} holds the states of layers {list(taps)}, not of {lacking}: "
            "write other text"
        )
    return taps


def _wave(
    target: CausalLM,
    chat: Chat,
    stops: Collection[int],
    folder: Path,
    index: int,
    held_out: bool,
    batch: int,
    context: int,
    taps: Sequence[int],
    progress: ProgressBar,
) -> Path:
    path = folder / f"{'held' if held_out else 'wave'}-{index:03d}.safetensors"
    if path.exists():
        return path
    turns = session_turns(prompts.sessions(index, held_out=held_out), chat, batch)
    with progress(context, f"writing text, {path.stem}") as (bar, task):
        wave = write_wave(
            target,
            turns,
            context,
            chat.end_of_turn,
            stops=stops,
            taps=taps,
            seed=index,
            on_step=lambda step: bar.update(task, completed=step + 1),
        )
    save_wave(wave, path)
    return path


def _load(
    name: str, device: str | None, settings: ChatSettings | None
) -> tuple[CausalLM, Chat, tuple[int, ...]]:
    """The target, its chat template, which is met before the weights are read, and the tokens that
    end an answer."""
    chat = Chat(read_tokenizer(name), settings)
    chat.check(built_in()[:1])
    target, _ = load_target(
        name, device=device, weight_dtype=_writing_dtype(device), tokenizer=chat.tokenizer
    )
    return target, chat, chat.stops(stop_tokens(target.config.eos_token_id))


def _writing_dtype(device: str | None) -> torch.dtype | None:
    """bfloat16 weights where the machine multiplies them fast; text for training need not be exact
    to the bit."""
    return torch.bfloat16 if fast_bfloat16(pick_device(device)) else None
