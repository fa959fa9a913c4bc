"""The target's text as training data: waves on disk, read a few sessions at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import SharpDraftError


class Corpus:
    """Written waves on disk; sessions are read one at a time, never a whole wave.

    tokens int64 [sessions, length]; written bool [sessions, length], true where the target chose
    the token greedily.
    """

    def __init__(self, paths: Sequence[Path], taps: Sequence[int]) -> None:
        """taps: the layers whose states the waves hold, in order. Raises SharpDraftError where they
        do not fit."""
        self.files = [safe_open(str(path), framework="pt") for path in paths]
        shapes = {tuple(f.get_slice("features").get_shape()[1:]) for f in self.files}
        if len({length for length, _ in shapes}) > 1:
            raise SharpDraftError(
                f"{paths[0].parent} holds sessions of different lengths: remove those of another "
                "run"
            )
        ((_, width),) = shapes
        self.taps = tuple(taps)
        self.hidden = width // (len(taps) + 1)
        self.tokens = torch.cat([f.get_tensor("tokens") for f in self.files]).long()
        self.written = torch.cat([f.get_tensor("written") for f in self.files])
        self.places = [
            (f, row) for f in self.files for row in range(f.get_slice("tokens").get_shape()[0])
        ]

    def __len__(self) -> int:
        return len(self.places)

    def features(self, rows: Sequence[int], taps: Sequence[int]) -> Tensor:
        """float16 [rows, length, len(taps) * hidden]: the states of some of the tapped layers."""
        columns = [self.taps.index(tap) for tap in taps]
        states = self._states(rows, 0).unflatten(-1, (-1, self.hidden))
        return states[..., columns, :].flatten(-2)

    def final(self, rows: Sequence[int]) -> Tensor:
        """float16 [rows, length, hidden]: the final normed states, from which the head makes
        logits."""
        return self._states(rows, len(self.taps) * self.hidden)

    def _states(self, rows: Sequence[int], start: int) -> Tensor:
        return torch.stack(
            [f.get_slice("features")[i, :, start:] for f, i in (self.places[row] for row in rows)]
        )


def robust_scale(sample: Tensor) -> Tensor:
    """Per dimension of sample [rows, width], what a normal variable's deviation would be from the
    median magnitude: residual streams carry a few dimensions of enormous values, which would
    otherwise drown the rest."""
    return (sample.float().abs().median(dim=0).values / 0.6745).clamp_min(1e-3)


def sample_features(corpus: Corpus, taps: Sequence[int], sessions: int = 64) -> Tensor:
    """Every eighth position of sessions spread over the corpus, float32 [rows, len(taps) *
    hidden]."""
    rows = torch.linspace(0, len(corpus) - 1, sessions).long().tolist()
    return corpus.features(rows, taps)[:, ::8].flatten(0, 1).float()


def draw_anchors(
    written: Tensor, count: int, ahead: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random positions int64 [sessions, count] that `ahead` tokens follow, the first of them the
    target's choice, and which of them are such, bool: there may be fewer. The first few positions
    of a session see too little."""
    usable = written[:, 1:].clone()
    usable[:, :8] = False
    usable[:, written.shape[1] - ahead :] = False
    noise = torch.rand(usable.shape, generator=generator).masked_fill(~usable, -1)
    anchors = noise.topk(count, dim=1).indices
    return anchors, usable.gather(1, anchors)


def labels_behind(
    tokens: Tensor, written: Tensor, anchors: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The `count` tokens behind each anchor int64 [sessions, anchors, count], and whether drafts of
    them would be judged by the target's own choice, bool: while everything from the anchor on
    was."""
    length = tokens.shape[1]
    ahead = anchors[..., None] + torch.arange(1, count + 1)
    row = torch.arange(len(tokens))[:, None, None]
    inside = ahead < length
    ahead = ahead.clamp(max=length - 1)
    return tokens[row, ahead], (written[row, ahead] & inside).long().cumprod(-1).bool()


def states_before(final: Tensor, anchors: Tensor, count: int) -> Tensor:
    """What the target said at each of the `count` tokens behind the anchors: its state one token
    earlier, [sessions, anchors, count, hidden] of final [sessions, length, hidden]."""
    at = (anchors[..., None] + torch.arange(count)).clamp(max=final.shape[1] - 1)
    return final[torch.arange(len(final))[:, None, None], at]
