"""Drafters' checkpoints in the layouts that are published, and what a loaded drafter says."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from sharpdraft.decode.batch import Batch
from sharpdraft.decode.session import Session
from sharpdraft.drafters.registry import load_drafter
from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.method.settings import DraftSettings
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.placement import Placement, Ragged, Static
from support.drafters import append
from support.tiny import PROMPT, VOCAB, Tiny

CONTEXT, DRAFTS = 41, 4
"""Tokens of a text that drafts stand behind, the anchor among them; and how many are drafted."""

_ROOM = 64

LAYOUTS = ("one file", "sharded", "pickled", "pickled shards", "under model.")

Result = TypeVar("Result")


def write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    layout: str = "one file",
) -> Path:
    """A checkpoint directory with config.json and weights in one of LAYOUTS."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if layout == "under model.":
        outside = ("lm_head.weight", "d2t", "t2d")
        tensors = {n if n in outside else f"model.{n}": t for n, t in tensors.items()}
    whole = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    if layout in ("one file", "under model."):
        save_file(whole, str(folder / "model.safetensors"), {"format": "pt"})
    elif layout == "pickled":
        torch.save(whole, folder / "pytorch_model.bin")
    else:
        stem, end = ("model", "safetensors") if layout == "sharded" else ("pytorch_model", "bin")
        names, places = sorted(whole), {}
        for number, part in enumerate((names[::2], names[1::2]), 1):
            file = f"{stem}-{number:05d}-of-00002.{end}"
            places |= dict.fromkeys(part, file)
            shard = {name: whole[name] for name in part}
            if end == "bin":
                torch.save(shard, folder / file)
            else:
                save_file(shard, str(folder / file), {"format": "pt"})
        index = {"metadata": {}, "weight_map": places}
        (folder / f"{stem}.{end}.index.json").write_text(json.dumps(index))
    return folder


def speculators(
    family: str, config: Mapping[str, Any], outer: Mapping[str, Any], **changes: Any
) -> dict[str, Any]:
    """config.json in the layout of speculators: the layers' keys of `config` are nested."""
    own = ("architectures", "block_size", "dflash_config", "draft_vocab_size", "num_target_layers")
    own += ("eagle_aux_hidden_state_layer_ids", "eagle_config", "fc_norm", "norm_output")
    method = {"proposal_type": "greedy", "speculative_tokens": DRAFTS, "accept_tolerance": 0.0}
    return {
        "architectures": ["DFlashSpeculator" if family == "dflash" else "Eagle3Speculator"],
        "speculators_model_type": family,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": family,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "verifier_accept_k": 1}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/target"},
        },
        "transformer_layer_config": {k: v for k, v in config.items() if k not in own},
        **outer,
        **changes,
    }


def noted(call: Callable[[], Result]) -> tuple[Result, list[str]]:
    """What a call gives, and the notes it makes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(w.message) for w in caught if issubclass(w.category, SharpDraftNote)]


def refusal(directory: Path, target: CausalLM, family: str | None = None) -> str:
    """What is said of a checkpoint that is not run, in one line; empty if it is run."""
    try:
        noted(lambda: load_drafter(directory, target, family))
    except SharpDraftError as error:
        said = str(error)
    else:
        return ""
    assert said and "\n" not in said
    return said


class Whole:
    """A greedy pick that keeps its logits, over the target's vocabulary: -inf where a token cannot
    be drafted."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []
        self.tokens: list[int] = []

    def __call__(self, logits: Tensor, token_of: Tensor | None) -> tuple[Tensor, None]:
        if token_of is None:
            token_of = torch.arange(logits.shape[-1])
        self.logits.append(over_target(logits.double(), token_of))
        chosen = token_of[logits.argmax(-1)]
        self.tokens += chosen.tolist()
        return chosen, None


def over_target(logits: Tensor, token_of: Tensor | None = None) -> Tensor:
    """Logits [rows, draft vocab] of the target's tokens `token_of` -> [rows, target vocab]."""
    if token_of is None:
        token_of = torch.arange(logits.shape[-1])
    whole = torch.full((len(logits), VOCAB), -torch.inf, dtype=torch.double)
    whole[:, token_of] = logits.double()
    return whole


def outputs(model: Any, ids: Sequence[int]) -> list[Tensor]:
    """What each layer of a transformers model gives, [tokens, hidden]."""
    found: list[Tensor] = []

    def keep(module: Any, args: Any, out: Any) -> None:
        found.append((out[0] if isinstance(out, tuple) else out).reshape(len(ids), -1))

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    with torch.inference_mode():
        model(torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return found


def said(
    drafter: Any,
    tiny: Tiny,
    text: Sequence[int] | None = None,
    count: int = DRAFTS,
    static: bool = False,
) -> tuple[Tensor, list[int]]:
    """Logits of drafts behind a text, [count, target vocab], and the drafts. static: of rows that
    stand at a slot that the device alone knows."""
    text = tiny.text[:CONTEXT] if text is None else text
    states = outputs(tiny.model, text[:-1])
    cache, plain = drafter.new_cache(_ROOM), DraftSettings()
    cache.blank()
    append(drafter, cache, text[:-1], [states[tap][None] for tap in drafter.taps])
    at: Placement = Ragged()
    if static:
        drafter.catch_up([cache], [plain])
        at = Static(torch.tensor([len(text) - 1]), _ROOM)
    pick = Whole()
    drafter.propose(at, [cache], torch.tensor([text[-1]]), count, [plain], [pick])
    return torch.cat(pick.logits), pick.tokens


def check_says(drafter: Any, tiny: Tiny, right: Tensor, text: Sequence[int] | None = None) -> None:
    """The drafter's logits are `right`, [count, target vocab], and so are its drafts, wherever its
    rows stand."""
    some = ~right.isinf()
    assert bool(some.any())
    near = 2e-4 * max(1.0, float(right[some].abs().max()))
    # What turns with the length of a text stands only where the host knows it.
    for static in (False, True) if drafter.new_cache(1).limit is None else (False,):
        logits, tokens = said(drafter, tiny, text, len(right), static)
        assert torch.equal(logits.isinf(), right.isinf()), "other tokens can be drafted"
        torch.testing.assert_close(logits[some], right[some], rtol=2e-4, atol=near)
        assert tokens == right.argmax(-1).tolist()


def loaded(directory: Path, target: CausalLM, family: str | None = None) -> Any:
    """A drafter that is read without a note."""
    drafter, notes = noted(lambda: load_drafter(directory, target, family))
    assert notes == []
    return drafter


def check_writes(drafter: Any, tiny: Tiny, count: int = 60) -> None:
    """It drafts in every round, alone and among others, and what is written is the target's own."""
    session = Session(tiny.target, drafter)
    rounds = list(session.generate(tiny.text[:PROMPT], count))
    assert session.tokens == tiny.text[: PROMPT + count]
    assert all(done.drafted for done in rounds[1:-1])
    batch, starts = Batch(tiny.target, drafter), (PROMPT, PROMPT + 9, PROMPT + 30)
    requests = [batch.add(tiny.text[:start], count - start) for start in starts]
    while batch.step():
        pass
    assert [r.tokens for r in requests] == [tiny.text[start:count] for start in starts]
