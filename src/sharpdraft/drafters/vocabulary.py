"""A drafter's vocabulary beside its target's: embedding and head, which of the target's tokens a
row of logits stands for, and whether the two mean the same by a token."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SharpDraftError, note
from ..model.causal_lm import CausalLM
from ..model.config import Config
from ..model.linear import Linear
from .checkpoint import other_target
from .configs import number, whole

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
VOCABULARY = (_EMBEDDING, _HEAD, "d2t", "t2d")
"""Tensors of a drafter that are read here."""


@dataclass(frozen=True)
class Vocabulary:
    """What a drafter that reads the target's states has for its tokens: its own tensors where its
    checkpoint has them, else the target's.

    embedding [rows, hidden]. head: logits of [..., hidden]. token_of: the target's token of each
    logit, int64 [logits]; None for the target's, in order. scale: factor on logits. short: whether
    the target has tokens that the embedding has no row for.
    """

    embedding: Tensor
    head: Linear
    token_of: Tensor | None
    scale: float
    short: bool

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        target: CausalLM,
        config: Config,
        scale: float = 1.0,
    ) -> Vocabulary:
        """Read a checkpoint's VOCABULARY.

        tensors: under their published names. config: of the drafter, which may give its own
        vocabulary's size. scale: a factor on its logits beside its `logit_scale`.

        Raises SharpDraftError for shapes that do not fit together, and tensors that contradict each
        other or the target.
        """
        dtype, device, hidden_size = target.dtype, target.device, config.hidden_size
        draft_size, values = None, config.source
        if values.get("draft_vocab_size") not in (None, config.vocab_size, target.vocab_size):
            draft_size = whole(values, "draft_vocab_size")
        scale *= number(values, "logit_scale", 1.0)
        own = {name: tensors[name] for name in (_EMBEDDING, _HEAD) if name in tensors}
        for name, tensor in own.items():
            if tensor.dim() != 2 or tensor.shape[1] != hidden_size:
                raise SharpDraftError(
                    f"the drafter's {name} has shape {tuple(tensor.shape)}, its hidden size is "
                    f"{hidden_size}: config.json and weights belong to different checkpoints"
                )
        token_of = _token_of(tensors, target, draft_size)
        head = target.head
        if _HEAD in own:
            weight = own[_HEAD].to(device=device, dtype=dtype)
            if token_of is None:
                # Rows behind the target's vocabulary are padding: no token is behind them.
                weight = weight[: target.vocab_size]
                if len(weight) < target.vocab_size:
                    token_of = torch.arange(len(weight), device=device)
            elif len(weight) != len(token_of):
                raise SharpDraftError(
                    f"the drafter's {_HEAD} has {len(weight)} rows, its d2t {len(token_of)}: "
                    "config.json and weights belong to different checkpoints"
                )
            head = Linear(weight)
        elif token_of is not None:
            raise SharpDraftError(
                f"the drafter's checkpoint lacks {_HEAD}, which a vocabulary of its own (d2t) "
                "needs: download it again"
            )
        embedding = target.embedding
        if _EMBEDDING in own:
            embedding = own[_EMBEDDING].to(device=device, dtype=dtype)
        return cls(embedding, head, token_of, scale, len(embedding) < target.vocab_size)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of the target's tokens, [..., hidden]; those that have none share the last."""
        if self.short:
            tokens = tokens.clamp(max=len(self.embedding) - 1)
        return F.embedding(tokens, self.embedding)

    def logits(self, states: Tensor) -> Tensor:
        """Logits of normed states [..., hidden]."""
        logits = self.head(states)
        return logits if self.scale == 1.0 else logits * self.scale


def _token_of(
    tensors: Mapping[str, Tensor], target: CausalLM, draft_size: int | None
) -> Tensor | None:
    """The target's token of each row of a drafter's own, smaller vocabulary. The published `d2t`
    are offsets from the row; `t2d` marks the same tokens."""
    if "d2t" not in tensors:
        if draft_size is not None:
            raise SharpDraftError(
                f"the drafter's config says a vocabulary of {draft_size} tokens of its own, and "
                "its checkpoint has no d2t, which says what they are: download it again"
            )
        if "t2d" in tensors and not bool(tensors["t2d"].all()):
            raise SharpDraftError(
                "the drafter's checkpoint has t2d but no d2t, which says what its tokens are: "
                "download it again"
            )
        return None
    offsets = tensors["d2t"].to(target.device).long()
    if offsets.dim() != 1 or draft_size not in (None, len(offsets)):
        raise SharpDraftError(
            f"the drafter's d2t has shape {tuple(offsets.shape)}, its config says a vocabulary of "
            f"{draft_size or target.vocab_size}: config.json and weights belong to different "
            "checkpoints"
        )
    token_of = torch.arange(len(offsets), device=target.device) + offsets
    if not bool(((token_of >= 0) & (token_of < target.vocab_size)).all()):
        raise SharpDraftError(
            "the drafter's d2t maps to tokens outside the target's vocabulary: it holds offsets, "
            "each token's id less its own row"
        )
    if len(token_of.unique()) < len(token_of):
        raise SharpDraftError(
            "the drafter's d2t maps two of its tokens to one of the target's: it holds offsets, "
            "each token's id less its own row"
        )
    if "t2d" in tensors:
        marks = tensors["t2d"].to(target.device).bool()
        marked = marks.nonzero()[:, 0] if marks.dim() == 1 else None
        if marked is None or not torch.equal(marked, token_of.sort().values):
            raise SharpDraftError(
                "the drafter's t2d and d2t contradict each other: config.json and weights belong "
                "to different checkpoints, or it is broken; download it again"
            )
    same = len(token_of) == target.vocab_size and not bool(offsets.any())
    return None if same else token_of


def check_hidden_size(
    size: int, values: Mapping[str, Any], tensors: Collection[str], target: CausalLM
) -> None:
    """Refuse a drafter that reads states of another size than the target's, or whose own states,
    of `size`, have no embedding and head. values: what its config.json says."""
    if (read := values.get("target_hidden_size", target.hidden_size)) != target.hidden_size:
        raise other_target("target_hidden_size", read, target.hidden_size)
    lacking = [name for name in (_EMBEDDING, _HEAD) if name not in tensors]
    if size != target.hidden_size and lacking:
        raise SharpDraftError(
            f"this drafter belongs to another target: its hidden size is {size}, the target's "
            f"{target.hidden_size}, and it has no {' and no '.join(lacking)} of its own; use the "
            "drafter that was trained for this target"
        )


def check_vocabulary(
    size: int, tensors: Mapping[str, Tensor], target: CausalLM, directory: Path
) -> None:
    """As `check_size`, for a drafter that reads the target's states: `size` is what its config.json
    says, and its own head, where it has one, says it better."""
    if "d2t" in tensors:
        size = target.vocab_size
    elif _HEAD in tensors:
        size = len(tensors[_HEAD])
    check_size(size, target, directory)


def check_size(theirs: int, target: CausalLM, directory: Path) -> None:
    """Whether a drafter with `theirs` tokens drafts for a target with another number of them: it
    does if the difference is padding.

    directory: the drafter's.

    Raises SharpDraftError where the target has tokens that the drafter has not, and where their
    tokenizers differ. Notes where nothing tells.
    """
    ours, told = target.vocab_size, _tokens(directory)
    if theirs == ours and not told:
        return
    known = _tokens(target.directory)
    other = min((i for i in known.keys() & told.keys() if known[i] != told[i]), default=None)
    if other is not None:
        raise SharpDraftError(
            f"the drafter has another tokenizer than the target: token {other} is "
            f"{told[other]!r} in its tokenizer.json and {known[other]!r} in the target's; use a "
            "drafter of the target's family"
        )
    sizes = f"the drafter's vocabulary has {theirs} tokens, the target's {ours}"
    if beyond := sum(token >= theirs for token in known):
        raise SharpDraftError(
            f"{sizes}, and {beyond} of these stand for text that the drafter does not know: use "
            "the drafter that was trained for this target"
        )
    if theirs != ours and not known:
        note(f"{sizes}; taken for padding, as the target has no tokenizer.json to tell")


def _tokens(directory: Path | None) -> dict[int, str]:
    """Texts of a tokenizer's own tokens by their ids, without those that were added to it, whose
    names differ between versions of one tokenizer; nothing where there is none to read."""
    if directory is None:
        return {}
    try:
        read = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        added = {entry["id"] for entry in read.get("added_tokens") or ()}
        vocab: Any = read["model"]["vocab"]
        if isinstance(vocab, dict):
            pairs = {index: text for text, index in vocab.items()}
        else:
            pairs = {index: entry[0] for index, entry in enumerate(vocab)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return {}
    return {index: text for index, text in pairs.items() if index not in added}
