"""What training a drafter is, whatever its family: steps on random chains, a held-out curve,
checkpoints, a log.

A chain is an anchor in the target's text and the tokens drafted behind it. A family says what its
drafter's hidden states for a batch of chains are; loss, optimizers and the rest are here.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SharpDraftError
from ..model.causal_lm import CausalLM
from ..model.linear import fast_bfloat16
from .corpus import Corpus
from .loss import Chains, accepted, head_loss


@dataclass(frozen=True)
class Recipe:
    """How to train, whatever the family."""

    steps: int = 3600
    sequences: int = 8
    rate: float = 1.5e-3
    warmup: int = 100
    # The i-th token of a chain is worth exp(-i / decay): a later one counts only if all before it
    # hold.
    decay: float = 3.0
    # Weight of the token the target chose; the rest of the loss is its whole distribution.
    hard: float = 0.5
    negatives: int = 2048
    seed: int = 0

    @property
    def reads(self) -> tuple[int, ...]:
        """The target's layers whose states the drafter takes."""
        raise NotImplementedError

    @property
    def starts(self) -> tuple[int, ...]:
        """The target's layers that it starts from."""
        raise NotImplementedError


@contextmanager
def going_on(directory: Path) -> Iterator[None]:
    """What a recipe looks for in a drafter's config.json and does not find is one
    SharpDraftError."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise SharpDraftError(
            f"{directory / 'config.json'} is not one that training can go on from: {error}"
        ) from error


class Trainer(ABC):
    """Training with a held-out curve, checkpoints that a later run goes on from, and a log as JSON
    lines."""

    chain: int
    """Tokens drafted behind an anchor."""

    def __init__(
        self,
        target: CausalLM,
        recipe: Recipe,
        train: Corpus,
        held: Corpus,
        out: Path,
        module: nn.Module,
    ) -> None:
        self.target, self.recipe, self.train_set, self.held, self.out = (
            target,
            recipe,
            train,
            held,
            out,
        )
        out.mkdir(parents=True, exist_ok=True)
        self.device = target.device
        self.module = module.to(self.device)
        occurring = torch.zeros(target.vocab_size, dtype=torch.bool)
        occurring[train.tokens.unique()] = True
        self.common = occurring.nonzero()[:, 0]
        self.rare = (~occurring).nonzero()[:, 0]
        self.embedding = target.embedding.float()
        self.dtype = torch.bfloat16 if fast_bfloat16(self.device) else torch.float32
        self.head = target.head.weight.to(self.dtype)
        layers = self.module.layers
        assert isinstance(layers, nn.Module)
        matrices = [p for p in layers.parameters() if p.ndim == 2]
        others = [p for p in self.module.parameters() if not any(p is m for m in matrices)]
        self.optimizers: list[torch.optim.Optimizer] = []
        if self.dtype == torch.bfloat16:
            self.optimizers.append(
                torch.optim.Muon(
                    matrices,
                    lr=recipe.rate,
                    weight_decay=0.01,
                    momentum=0.95,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        else:
            # Muon multiplies in bfloat16, which takes longer than all the rest where no unit is
            # made for it.
            others = [*matrices, *others]
        self.optimizers.append(
            torch.optim.AdamW(others, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.01)
        )
        self.step = 0
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.order: list[int] = []
        self.position_weight = (-torch.arange(self.chain) / recipe.decay).exp()

    @abstractmethod
    def chains(
        self, corpus: Corpus, rows: Sequence[int], generator: torch.Generator, training: bool
    ) -> Chains:
        """Draft at random anchors of some sessions; training: leave out what a step can do
        without."""

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write the drafter in its published format."""

    def drafted_tokens(self) -> Tensor | None:
        """The tokens that can be drafted at all, int64; None for the whole vocabulary."""
        return None

    def rate(self) -> float:
        done = self.step / self.recipe.steps
        warm = min(1.0, (self.step + 1) / self.recipe.warmup)
        return (
            self.recipe.rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
        )

    def autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16
        )

    def _vocabulary(self) -> Tensor:
        """The tokens that occur and some that do not, which are drawn anew each step: left out for
        good, nothing would ever push them down."""
        if (drafted := self.drafted_tokens()) is not None:
            return drafted
        count = self.recipe.negatives if len(self.rare) else 0
        drawn = torch.randint(max(len(self.rare), 1), (count,), generator=self.generator)
        return torch.cat((self.common, self.rare[drawn]))

    def train_step(self) -> dict[str, float]:
        recipe = self.recipe
        if len(self.order) < recipe.sequences:
            self.order = torch.randperm(len(self.train_set), generator=self.generator).tolist()
        rows, self.order = self.order[: recipe.sequences], self.order[recipe.sequences :]
        chains = self.chains(self.train_set, rows, self.generator, True)
        ids = self._vocabulary()
        place = torch.full((self.target.vocab_size,), -1)
        place[ids] = torch.arange(len(ids))
        valid = chains.valid
        labels = place[chains.labels[valid]]
        # What cannot be drafted teaches nothing but how the rest is distributed.
        known = labels >= 0
        weight = self.position_weight[: valid.shape[-1]].expand(valid.shape)[valid] * known
        weight = (weight / weight.sum()).to(self.device)
        loss, gradient, choice = head_loss(
            chains.hidden,
            chains.final.to(self.device),
            labels.clamp_min(0).to(self.device),
            weight,
            self.head[ids.to(self.device)],
            recipe.hard,
        )
        chains.hidden.backward(gradient.to(chains.hidden.dtype))
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {
            "loss": loss,
            "mal": 1 + float(accepted(valid, choice.cpu() == labels).sum(-1).float().mean()),
        }

    @torch.no_grad()
    def evaluate(self) -> dict[str, object]:
        """Held-out mean accepted length and per-position accuracy given all before it, over all
        that can be drafted."""
        generator = torch.Generator().manual_seed(1)
        kept = []
        ids = self.drafted_tokens()
        head = self.head if ids is None else self.head[ids.to(self.device)]
        for rows in torch.arange(len(self.held)).split(self.recipe.sequences):
            chains = self.chains(self.held, rows.tolist(), generator, False)
            logits = [F.linear(part.to(head.dtype), head) for part in chains.hidden.split(2048)]
            choice = torch.cat([part.float().argmax(-1).cpu() for part in logits])
            if ids is not None:
                choice = ids[choice]
            kept.append(accepted(chains.valid, choice == chains.labels[chains.valid]).float())
        right = torch.cat(kept)
        return {
            "held_mal": 1 + float(right.sum(-1).mean()),
            "held_accepted": right.mean(0).tolist(),
        }

    def state(self) -> dict[str, Any]:
        return {
            "recipe": asdict(self.recipe),
            "module": self.module.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "generator": self.generator.get_state(),
            "order": self.order,
        }

    def save(self) -> None:
        partial = self.out / "state.partial"
        try:
            torch.save(self.state(), partial)
        except RuntimeError as error:  # what torch makes of a full disk
            partial.unlink(missing_ok=True)
            raise OSError(f"{partial}: {error}") from error
        os.replace(partial, self.out / "state.pt")

    def resume(self) -> bool:
        path = self.out / "state.pt"
        if not path.exists():
            return False
        state = torch.load(path, map_location="cpu", weights_only=True)
        if {**state["recipe"], "steps": 0} != {**asdict(self.recipe), "steps": 0}:
            raise SharpDraftError(
                f"{path} was trained by another recipe: give another --out, or remove it"
            )
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.order = state["step"], state["order"]
        self.generator.set_state(state["generator"])
        return True

    def run(
        self, on_step: Callable[[dict[str, float]], None] = lambda row: None, every: int = 200
    ) -> None:
        """Train to the recipe's last step, evaluating and saving every `every` steps.

        Ctrl-C ends it after the step under way, saved, with KeyboardInterrupt. Raises OSError for a
        full disk; what was saved last stays.
        """
        with (
            open(self.out / "log.jsonl", "a", encoding="utf-8") as log,
            _interrupt_noted() as interrupted,
        ):
            started = time.perf_counter()
            while self.step < self.recipe.steps:
                if interrupted():
                    self.save()
                    raise KeyboardInterrupt
                row: dict[str, object] = dict(self.train_step())
                row["step"] = self.step
                on_step(row)  # type: ignore[arg-type]
                if self.step % every == 0 or self.step == self.recipe.steps:
                    row |= self.evaluate()
                    row["seconds"] = time.perf_counter() - started
                    self.save()
                    log.write(json.dumps(row) + "\n")
                    log.flush()
                    on_step(row)  # type: ignore[arg-type]


@contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted, not raised, so that no step is left half done. Outside the main thread it
    stays as it is."""
    noted = False

    def note(*_: object) -> None:
        nonlocal noted
        noted = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)
