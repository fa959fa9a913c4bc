"""Distilling a DFlash drafter from text that its target wrote.

Many blocks of a sequence are trained at once: each block is an anchor token and mask tokens, sees the
context before its anchor and itself, and learns what the target says at each of its positions.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from ..attention import additive, attend, rotate
from ..drafters.dflash import ARCHITECTURE, DFlash, read_checkpoint, save
from ..errors import SharpDraftError
from ..linear import fast_bfloat16
from ..target import Target


@dataclass(frozen=True)
class Recipe:
    """How to train. Defaults made the drafter in this repository."""

    block: int = 6
    layers: int = 3
    taps: tuple[int, ...] = (1, 8, 15, 22, 28)
    start_layers: tuple[int, ...] = (9, 19, 29)
    mask_token: int = 4
    steps: int = 3600
    sequences: int = 8
    anchors: int = 40
    rate: float = 1.5e-3
    warmup: int = 100
    # Position i of a block is worth exp(-(i - 1) / decay): a later token counts only if all before it hold.
    decay: float = 3.0
    # Weight of the token the target chose; the rest of the loss is its whole distribution.
    hard: float = 0.5
    negatives: int = 2048
    seed: int = 0

    @classmethod
    def of(cls, directory: Path) -> Recipe:
        """The recipe that goes on with a drafter: its shape, fewer steps and a lower rate. Raises SharpDraftError for a
        directory that holds no DFlash checkpoint."""
        config, _ = read_checkpoint(directory)
        try:
            return cls(
                block=config["block_size"],
                layers=config["num_hidden_layers"],
                taps=tuple(config["dflash_config"]["target_layer_ids"]),
                mask_token=config["dflash_config"]["mask_token_id"],
                start_layers=(),
                steps=400,
                rate=5e-4,
                warmup=40,
            )
        except (KeyError, TypeError) as error:
            raise SharpDraftError(
                f"{directory / 'config.json'} is not one that training can go on from: {error}"
            ) from error


class TrainableDFlash(nn.Module):
    """DFlash's parameters under their published names, and a forward over many blocks of many sequences."""

    def __init__(self, target: Target, recipe: Recipe, scale: Tensor) -> None:
        """scale [taps * hidden]: see `robust_scale`; features are divided by it, within the fusion product."""
        super().__init__()
        self.scale = scale
        config = target.config
        self.heads, self.kv_heads, self.head_dim = target.heads, target.kv_heads, target.head_dim
        self.hidden, self.eps, self.rotary = target.hidden_size, target.eps, target.rotary
        self.fc = nn.Linear(len(recipe.taps) * self.hidden, self.hidden, bias=False)
        self.hidden_norm = _Norm(self.hidden, eps=self.eps)
        self.layers = nn.ModuleList(
            _Block(self.hidden, config.intermediate_size, self.heads, self.kv_heads, self.head_dim, self.eps)
            for _ in range(recipe.layers)
        )
        self.norm = _Norm(self.hidden, eps=self.eps)
        if recipe.start_layers:
            self._start_from(target, recipe)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a drafter's weights under their published names; the features' scale comes out of the fusion's."""
        self.load_state_dict({name: tensors[name].float() for name in self.state_dict()})
        self.fc.weight *= self.scale

    @torch.no_grad()
    def _start_from(self, target: Target, recipe: Recipe) -> None:
        """Start from layers of the target, and from its last tap passed through."""
        generator = torch.Generator(self.fc.weight.device).manual_seed(recipe.seed)
        nn.init.normal_(self.fc.weight, std=0.02, generator=generator)
        self.fc.weight[:, -self.hidden :] += torch.eye(self.hidden, device=self.fc.weight.device)
        for block, source in zip(self.layers, recipe.start_layers, strict=True):
            assert isinstance(block, _Block)
            layer = target.layers[source]
            sizes = (self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim)
            for name, weight in zip(("q_proj", "k_proj", "v_proj"), layer.qkv.weight.float().split(sizes), strict=True):
                getattr(block.self_attn, name).weight.copy_(weight)
            block.self_attn.o_proj.weight.copy_(layer.out.weight.float())
            gate, up = layer.gate_up.weight.float().chunk(2)
            block.mlp.gate_proj.weight.copy_(gate)
            block.mlp.up_proj.weight.copy_(up)
            block.mlp.down_proj.weight.copy_(layer.down.weight.float())
            block.input_layernorm.weight.copy_(layer.attn_norm)
            block.post_attention_layernorm.weight.copy_(layer.mlp_norm)
        self.norm.weight.copy_(target.norm)

    def forward(self, features: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """features [batch, context, taps * hidden]; blocks (embeddings) [batch, anchors, block, hidden];
        anchors (positions) [batch, anchors]. Returns hidden states [batch, anchors, block, hidden]."""
        batch, count, size, width = blocks.shape
        length = features.shape[1]
        context = self.hidden_norm(F.linear(features, self.fc.weight / self.scale))
        at = (anchors[..., None] + torch.arange(size, device=anchors.device)).view(batch, count * size)
        mask = additive(block_mask(anchors, size, length), context.dtype)[:, None]
        tables = [(table[:length], table[at][:, None]) for table in (self.rotary.cos, self.rotary.sin)]
        hidden = blocks.reshape(batch, count * size, width)
        for layer in self.layers:
            hidden = layer(hidden, context, tables, mask)
        return self.norm(hidden).view(batch, count, size, width)


class _Norm(nn.RMSNorm):
    """RMS norm with its weight in the input's dtype, which is what the fused kernel takes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int, eps: float) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)
        self.q_norm = _Norm(dim, eps=eps)
        self.k_norm = _Norm(dim, eps=eps)


class _MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)


class _Block(nn.Module):
    def __init__(self, hidden: int, inner: int, heads: int, kv_heads: int, dim: int, eps: float) -> None:
        super().__init__()
        self.dim = dim
        self.self_attn = _Attention(hidden, heads, kv_heads, dim, eps)
        self.mlp = _MLP(hidden, inner)
        self.input_layernorm = _Norm(hidden, eps=eps)
        self.post_attention_layernorm = _Norm(hidden, eps=eps)

    def forward(self, hidden: Tensor, context: Tensor, tables: Sequence[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
        (context_cos, cos), (context_sin, sin) = tables
        attn, mlp = self.self_attn, self.mlp

        def split(x: Tensor) -> Tensor:
            return x.view(*x.shape[:2], -1, self.dim).transpose(1, 2)

        normed = self.input_layernorm(hidden)
        query = rotate(attn.q_norm(split(attn.q_proj(normed))), cos, sin)
        own = rotate(attn.k_norm(split(attn.k_proj(normed))), cos, sin)
        past = rotate(attn.k_norm(split(attn.k_proj(context))), context_cos, context_sin)
        keys = torch.cat((past, own), dim=2)
        values = torch.cat((split(attn.v_proj(context)), split(attn.v_proj(normed))), dim=2)
        hidden = hidden + attn.o_proj(attend(query, keys.to(query.dtype), values.to(query.dtype), mask))
        normed = self.post_attention_layernorm(hidden)
        return hidden + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))


def block_mask(anchors: Tensor, block: int, length: int) -> Tensor:
    """Visible Keys bool [batch, anchors * block, length + anchors * block]: the context before the anchor,
    then the row's own block."""
    rows = anchors.repeat_interleave(block, dim=1)
    owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block)
    context = torch.arange(length, device=anchors.device) < rows[..., None]
    own = (owner[:, None] == owner).expand(len(anchors), -1, -1)
    return torch.cat((context, own), dim=-1)


class Corpus:
    """Written waves on disk; sessions are read one at a time, never a whole wave."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files = [safe_open(str(path), framework="pt") for path in paths]
        if len({f.get_slice("features").get_shape()[1] for f in self.files}) > 1:
            raise SharpDraftError(f"{paths[0].parent} holds sessions of different lengths: remove those of another run")
        self.tokens = torch.cat([f.get_tensor("tokens") for f in self.files]).long()
        self.written = torch.cat([f.get_tensor("written") for f in self.files])
        self.places = [(f, row) for f in self.files for row in range(f.get_slice("tokens").get_shape()[0])]

    def __len__(self) -> int:
        return len(self.places)

    def features(self, rows: Sequence[int]) -> Tensor:
        """float16 [rows, length, (taps + 1) * hidden]."""
        return torch.stack([f.get_slice("features")[i] for f, i in (self.places[row] for row in rows)])


@dataclass
class Batch:
    features: Tensor
    final: Tensor
    anchors: Tensor
    tokens: Tensor
    labels: Tensor
    valid: Tensor


def draw(corpus: Corpus, rows: Sequence[int], recipe: Recipe, width: int, generator: torch.Generator) -> Batch:
    """Blocks at random anchors: a position is trained while everything from its anchor on was the target's
    own greedy choice, since only then is it what the target would verify."""
    tokens, written = corpus.tokens[list(rows)], corpus.written[list(rows)]
    features = corpus.features(rows)
    length = tokens.shape[1]
    usable = written[:, 1:].clone()
    usable[:, :8] = False
    usable[:, length - recipe.block :] = False
    noise = torch.rand(usable.shape, generator=generator).masked_fill(~usable, -1)
    anchors = noise.topk(recipe.anchors, dim=1).indices
    ahead = anchors[..., None] + torch.arange(1, recipe.block)
    row = torch.arange(len(tokens))[:, None, None]
    ahead = ahead.clamp(max=length - 1)
    valid = written[row, ahead].long().cumprod(-1).bool() & usable.gather(1, anchors)[..., None]
    return Batch(
        features=features[..., :width],
        final=features[..., width:][row, ahead - 1],
        anchors=anchors,
        tokens=tokens.gather(1, anchors),
        labels=tokens[row, ahead],
        valid=valid,
    )


def robust_scale(corpus: Corpus, width: int, sessions: int = 64) -> Tensor:
    """Per dimension, what a normal variable's deviation would be from the median magnitude: residual streams
    carry a few dimensions of enormous values, which would otherwise drown the rest in the fusion norm."""
    rows = torch.linspace(0, len(corpus) - 1, sessions).long().tolist()
    sample = corpus.features(rows)[:, ::8, :width].reshape(-1, width).float()
    return (sample.abs().median(dim=0).values / 0.6745).clamp_min(1e-3)


def head_loss(
    hidden: Tensor,
    final: Tensor,
    labels: Tensor,
    weight: Tensor,
    head: Tensor,
    hard: float,
    chunk: int = 1024,
) -> tuple[float, Tensor, Tensor]:
    """Cross-entropy against `hard` of the chosen token and `1 - hard` of the target's distribution.

    hidden, final [rows, hidden]: drafter's and target's last states; labels [rows], weight [rows];
    head [vocab, hidden]. The gradient is written out (softmax minus aim), so that logits are never kept.
    Returns the weighted sum, its gradient for hidden, and the drafter's choice [rows].
    """
    total, gradient, choice = 0.0, torch.empty_like(hidden, dtype=torch.float32), torch.empty_like(labels)
    with torch.no_grad():
        for part in torch.arange(len(hidden)).split(chunk):
            lo, hi = int(part[0]), int(part[-1]) + 1
            logits = (hidden[lo:hi].to(head.dtype) @ head.T).float()
            aim = (final[lo:hi].to(head.dtype) @ head.T).float().softmax(-1).mul_(1 - hard)
            rows = torch.arange(hi - lo, device=hidden.device)
            aim[rows, labels[lo:hi]] += hard
            choice[lo:hi] = logits.argmax(-1)
            log_norm = logits.logsumexp(-1)
            total += float((weight[lo:hi] * (log_norm - (aim * logits).sum(-1))).sum())
            error = logits.sub_(log_norm[:, None]).exp_().sub_(aim).mul_(weight[lo:hi, None])
            gradient[lo:hi] = (error.to(head.dtype) @ head).float()
    return total, gradient, choice


@contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted, not raised, so that no step is left half done. Outside the main thread it stays as it is."""
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


class Trainer:
    """Training with a held-out curve, checkpoints that a later run goes on from, and a log as JSON lines."""

    def __init__(
        self, target: Target, recipe: Recipe, train: Corpus, held: Corpus, out: Path, start: Path | None = None
    ) -> None:
        """start: a drafter to go on from; Raises SharpDraftError where it is not one for this target."""
        self.target, self.recipe, self.train_set, self.held, self.out = target, recipe, train, held, out
        out.mkdir(parents=True, exist_ok=True)
        self.width = len(recipe.taps) * target.hidden_size
        self.device = target.device
        with torch.device(self.device):
            self.module = TrainableDFlash(target, recipe, robust_scale(train, self.width).to(self.device))
        if start is not None:
            config, tensors = read_checkpoint(start)
            DFlash(config, tensors, target)  # refuses a drafter of another target
            self.module.load(tensors)
        occurring = torch.zeros(target.vocab_size, dtype=torch.bool)
        occurring[train.tokens.unique()] = True
        self.common = occurring.nonzero()[:, 0]
        self.rare = (~occurring).nonzero()[:, 0]
        self.embedding = target.embedding.float()
        self.dtype = torch.bfloat16 if fast_bfloat16(self.device) else torch.float32
        self.head = target.head.weight.to(self.dtype)
        matrices = [p for p in self.module.layers.parameters() if p.ndim == 2]
        others = [p for p in self.module.parameters() if not any(p is m for m in matrices)]
        self.optimizers: list[torch.optim.Optimizer] = []
        if self.dtype == torch.bfloat16:
            self.optimizers.append(
                torch.optim.Muon(
                    matrices, lr=recipe.rate, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"
                )
            )
        else:
            # Muon multiplies in bfloat16, which takes longer than all the rest where no unit is made for it.
            others = [*matrices, *others]
        self.optimizers.append(torch.optim.AdamW(others, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.01))
        self.step = 0
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.order: list[int] = []
        powers = torch.arange(recipe.block - 1) / recipe.decay
        self.position_weight = (-powers).exp()

    def rate(self) -> float:
        done = self.step / self.recipe.steps
        warm = min(1.0, (self.step + 1) / self.recipe.warmup)
        return self.recipe.rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))

    def _hidden(self, batch: Batch) -> Tensor:
        ids = torch.full((*batch.anchors.shape, self.recipe.block), self.recipe.mask_token)
        ids[..., 0] = batch.tokens
        blocks = F.embedding(ids.to(self.device), self.embedding)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            out: Tensor = self.module(batch.features.to(self.device, self.dtype), blocks, batch.anchors.to(self.device))
        return out[:, :, 1:]

    def _vocabulary(self) -> tuple[Tensor, Tensor]:
        """Head rows of the tokens that occur and of some that do not, and each token's place among them.

        The others are drawn anew each step: left out for good, nothing would ever push them down.
        """
        count = self.recipe.negatives if len(self.rare) else 0
        drawn = torch.randint(max(len(self.rare), 1), (count,), generator=self.generator)
        ids = torch.cat((self.common, self.rare[drawn]))
        place = torch.zeros(self.target.vocab_size, dtype=torch.long)
        place[self.common] = torch.arange(len(self.common))
        return self.head[ids.to(self.device)], place

    def train_step(self) -> dict[str, float]:
        recipe = self.recipe
        if len(self.order) < recipe.sequences:
            self.order = torch.randperm(len(self.train_set), generator=self.generator).tolist()
        rows, self.order = self.order[: recipe.sequences], self.order[recipe.sequences :]
        batch = draw(self.train_set, rows, recipe, self.width, self.generator)
        hidden = self._hidden(batch)
        head, place = self._vocabulary()
        valid = batch.valid
        weight = self.position_weight.expand(valid.shape)[valid]
        weight = (weight / weight.sum()).to(self.device)
        labels = place[batch.labels[valid]].to(self.device)
        drafted = hidden[valid.to(self.device)]
        loss, gradient, choice = head_loss(
            drafted, batch.final[valid].to(self.device), labels, weight, head, recipe.hard
        )
        drafted.backward(gradient.to(drafted.dtype))
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {"loss": loss, "mal": self._accepted(valid, (choice == labels).cpu())}

    @staticmethod
    def _accepted(valid: Tensor, hits: Tensor) -> float:
        """Mean accepted length over the blocks whose whole length is the target's own text."""
        right = torch.zeros(valid.shape, dtype=torch.long)
        right[valid] = hits.long()
        whole = valid.all(-1)
        return 1 + float(right[whole].cumprod(-1).sum(-1).float().mean())

    @torch.no_grad()
    def evaluate(self) -> dict[str, object]:
        """Held-out mean accepted length and per-position accuracy given all before it, full vocabulary."""
        generator = torch.Generator().manual_seed(1)
        right, whole = [], []
        for rows in torch.arange(len(self.held)).split(self.recipe.sequences):
            batch = draw(self.held, rows.tolist(), self.recipe, self.width, generator)
            hidden = self._hidden(batch)
            for h, label, valid in zip(hidden, batch.labels, batch.valid, strict=True):
                logits = F.linear(h.reshape(-1, h.shape[-1]).to(self.head.dtype), self.head)
                choice = logits.float().argmax(-1).view(label.shape).cpu()
                right.append((choice == label).long().cumprod(-1))
                whole.append(valid.all(-1))
        kept = torch.cat(right)[torch.cat(whole)].float()
        return {"held_mal": 1 + float(kept.sum(-1).mean()), "held_accepted": kept.mean(0).tolist()}

    def state(self) -> dict[str, object]:
        return {
            "recipe": asdict(self.recipe),
            "module": self.module.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "generator": self.generator.get_state(),
            "order": self.order,
            "scale": self.module.scale,
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
            raise SharpDraftError(f"{path} was trained by another recipe: give another --out, or remove it")
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.order, self.module.scale = (
            state["step"],
            state["order"],
            state["scale"].to(self.device),
        )
        self.generator.set_state(state["generator"])
        return True

    def export(self, directory: Path) -> None:
        """Write the drafter in the published format. The features' scale goes into the fusion weights."""
        recipe, config = self.recipe, self.target.config
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}
        tensors["fc.weight"] /= self.module.scale.cpu()
        parameters = dict(config.rope_parameters)
        save(
            directory,
            {
                "architectures": [ARCHITECTURE],
                "model_type": "qwen3",
                "dtype": "bfloat16",
                "block_size": recipe.block,
                "dflash_config": {"target_layer_ids": list(recipe.taps), "mask_token_id": recipe.mask_token},
                "num_target_layers": self.target.num_layers,
                "vocab_size": self.target.vocab_size,
                "hidden_size": self.target.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": recipe.layers,
                "num_attention_heads": self.target.heads,
                "num_key_value_heads": self.target.kv_heads,
                "head_dim": self.target.head_dim,
                "hidden_act": "silu",
                "rms_norm_eps": self.target.eps,
                "max_position_embeddings": self.target.max_positions,
                "rope_theta": parameters.get("rope_theta"),
                "rope_parameters": parameters,
                "attention_bias": False,
                "attention_dropout": 0.0,
                "tie_word_embeddings": False,
                "use_cache": True,
            },
            {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()},
        )

    def run(self, on_step: Callable[[dict[str, float]], None] = lambda row: None, every: int = 200) -> None:
        """Train to the recipe's last step, evaluating and saving every `every` steps.

        Ctrl-C ends it after the step under way, saved, with KeyboardInterrupt. Raises OSError for a full disk;
        what was saved last stays.
        """
        with open(self.out / "log.jsonl", "a", encoding="utf-8") as log, _interrupt_noted() as interrupted:
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
