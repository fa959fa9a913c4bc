"""How tokens are chosen, for the target alone and for verification alike.

Greedily, or by rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
2302.01318): a draft x that the drafter chose with probability q(x) is accepted with probability
min(1, p(x) / q(x)), p being the target's, and a refused one is replaced by a draw from max(p - q,
0). What comes out is distributed as the target's own tokens are, whatever the drafter. A drafter
that always gives its likeliest token has q(x) = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..drafters.base import Pick, likeliest
from ..errors import SharpDraftError

if TYPE_CHECKING:
    from transformers import LogitsProcessor


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens; as it is, greedily. The filters are transformers', in the order of its
    `generate`.

    temperature: 0 is greedy. top_k: 0 is off. processors: transformers' logits processors, applied
    behind the repetition penalty and before the temperature; each is called with the tokens so far
    int64 [1, length] and logits [1, vocab]. seed: of this one answer; None draws one. drafts:
    "sampled" from the drafter's own filtered distribution, or its "likeliest".

    Raises SharpDraftError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    processors: tuple[LogitsProcessor, ...] = ()
    seed: int | None = None
    drafts: Literal["sampled", "likeliest"] = "sampled"

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, float("inf")),
            ("top_k", 0, float("inf")),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
        ):
            if not low <= (value := getattr(self, name)) <= high:
                raise SharpDraftError(f"{name} is {value}: it must be from {low:g} to {high:g}")
        if self.top_p == 0:
            raise SharpDraftError(
                "top_p is 0, which leaves no token: for greedy decoding set temperature to 0"
            )
        if self.repetition_penalty <= 0:
            raise SharpDraftError(
                f"repetition_penalty is {self.repetition_penalty}: it must be above 0; 1 is off"
            )

    def filters(self) -> list[LogitsProcessor]:
        """What logits go through, one behind the other, before they are probabilities."""
        if self.repetition_penalty == 1 and not self.temperature:
            return [*self.processors]
        # Imported when it is needed: it takes seconds, and greedy decoding needs none of it.
        import transformers as hf

        found = [*self.processors]
        if self.repetition_penalty != 1:
            found.insert(0, hf.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.temperature not in (0, 1):
            found.append(hf.TemperatureLogitsWarper(self.temperature))
        if self.temperature and self.top_k:
            found.append(hf.TopKLogitsWarper(self.top_k))
        if self.temperature and self.top_p < 1:
            found.append(TopP(self.top_p))
        if self.temperature and self.min_p:
            found.append(hf.MinPLogitsWarper(self.min_p))
        return found


# Tokens that usually have almost all of the probability.
_LIKELY = 256


class TopP:
    """What transformers' TopPLogitsWarper keeps, without its sort of the whole vocabulary, which
    takes longer than a draft: the tokens above which there is less than `top_p` of the
    probability."""

    def __init__(self, top_p: float) -> None:
        self.top_p = top_p

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: not looked at; scores [rows, vocab]. Returns scores with -inf where a token is
        left out."""
        shares, count = scores.softmax(-1), _LIKELY
        while True:
            # By scores, as close ones can have one share.
            tokens = scores.topk(min(count, scores.shape[-1])).indices
            high = shares.gather(-1, tokens)
            above = high.double().cumsum(-1) - high
            if count >= scores.shape[-1] or bool((above[:, -1] >= self.top_p).all()):
                break
            count *= 16
        kept = scores.gather(-1, tokens).masked_fill(above >= self.top_p, -torch.inf)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens, kept)


GREEDY = Sampling()


class Sampler:
    """Chooses the tokens of one answer. Its random numbers are its own, so that no other answer
    changes them."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.filters = sampling.filters()
        self.looks_back = sampling.repetition_penalty != 1 or bool(sampling.processors)
        self.generator = torch.Generator()
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether a token is simply the likeliest."""
        return not self.sampling.temperature and not self.filters

    def pick(self, tokens: Sequence[int], vocab: int) -> Pick:
        """How a drafter chooses behind `tokens`, for a target of `vocab` tokens."""
        if not self.sampling.temperature:
            return likeliest
        if self.sampling.drafts == "likeliest":
            return _likeliest_to_be_drawn

        # Drafts of one block are not yet among the tokens: any q is right, as long as it is drawn
        # from.
        ids = self._ids(tokens)

        def sampled(logits: Tensor, token_of: Tensor | None) -> tuple[Tensor, Tensor]:
            if token_of is not None:
                whole = torch.full((len(logits), vocab), -torch.inf, device=logits.device)
                logits = whole.index_copy_(1, token_of, logits.float())
            shares = torch.stack([self._filtered(row, ids).softmax(-1) for row in logits])
            return draws(shares, self.generator).to(logits.device), shares

        return sampled

    def shares(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """The probabilities that the token behind `tokens` is drawn with, from the target's logits
        [vocab]; float32 [vocab]. Raises SharpDraftError for logits that are not numbers."""
        return self._filtered(logits, self._ids(tokens)).softmax(-1)

    def verify(
        self,
        logits: Tensor,
        tokens: Sequence[int],
        proposed: Sequence[int] = (),
        probabilities: Tensor | None = None,
        best: Sequence[int] | None = None,
    ) -> list[int]:
        """Drafts that are accepted, and one token more.

        logits [len(proposed) + 1, vocab]: row i says which token follows `tokens` and the first i
        of `proposed`. probabilities [len(proposed), vocab]: what drafts were drawn with, see
        `Draft`. best: the likeliest token of each row where the host knows it already. Raises
        SharpDraftError for logits that are not numbers.
        """
        if self.greedy:
            if best is None:
                values, choice = logits.max(-1)
                _require_numbers(values)
                best = choice.tolist()
            same = takewhile(lambda pair: pair[0] == pair[1], zip(proposed, best, strict=False))
            return list(best[: len(list(same)) + 1])
        written: list[int] = []
        ids = self._ids([*tokens, *proposed])
        for row, logit in enumerate(logits):
            scores = self._filtered(logit, ids[:, : len(tokens) + row])
            draft = proposed[row] if row < len(proposed) else None
            drawn = None if probabilities is None or draft is None else probabilities[row]
            random = self.sampling.temperature > 0
            token = (
                self._sampled(scores.softmax(-1), draft, drawn) if random else int(scores.argmax())
            )
            written.append(token)
            if token != draft:
                break
        return written

    def _sampled(self, target: Tensor, draft: int | None, drawn: Tensor | None) -> int:
        """The draft if it is accepted, else another token. target, drawn: p and q, [vocab]."""
        if draft is None:
            return draw(target, self.generator)
        chance = float(target[draft]) / (1.0 if drawn is None else float(drawn[draft]))
        if float(torch.rand((), generator=self.generator, dtype=torch.double)) < chance:
            return draft
        if drawn is None:
            rest = target.clone()
            rest[draft] = 0
        else:
            rest = (target - drawn).clamp_min_(0)
        # Where both distributions are the same to the last bit, a refusal is a rounding error.
        return draw(rest if float(rest.sum()) > 0 else target, self.generator)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        """Tokens as filters take them, int64 [1, length]; none where no filter looks at them."""
        return torch.tensor([list(tokens) if self.looks_back else []], dtype=torch.long)

    def _filtered(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Logits [vocab] as the filters leave them, float32."""
        _require_numbers(logits.max())
        if not self.filters:
            return logits.float()
        ids, scores = ids.to(logits.device), logits.float()[None].clone()
        for each in self.filters:
            scores = each(ids, scores)
        return scores[0]


def _likeliest_to_be_drawn(logits: Tensor, token_of: Tensor | None) -> tuple[Tensor, None]:
    return likeliest(logits, token_of)


def draw(weights: Tensor, generator: torch.Generator) -> int:
    """An index with a probability in proportion to weights [n]."""
    return int(draws(weights[None], generator))


def draws(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One index of each row of weights [rows, n], int64 [rows]: one random number a row, where
    torch.multinomial draws one for each of the n."""
    sums = weights.double().cumsum(-1)
    at = (
        torch.rand(len(weights), 1, generator=generator, dtype=torch.double).to(sums.device)
        * sums[:, -1:]
    )
    # A sum can round to the random number itself: never beyond the last index that has any weight.
    last = (sums < sums[:, -1:]).sum(-1)
    return torch.searchsorted(sums, at, right=True)[:, 0].minimum(last)


def _require_numbers(values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise broken_logits()


def broken_logits() -> SharpDraftError:
    return SharpDraftError(
        "the target's logits are NaN or infinite: its weights or dtype are broken; try float32"
    )
