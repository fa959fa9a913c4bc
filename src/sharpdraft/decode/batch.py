"""Many requests at once: they join and leave between rounds, and share every pass of target and
drafter.

Nothing is padded: the rows of all requests are one flat pass, and attention runs over each
request's own Keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..drafters.base import Drafter
from ..errors import SharpDraftError
from ..method.scale import Scale
from ..method.settings import DraftSettings
from ..model.causal_lm import CausalLM
from .rounds import Round
from .sampling import GREEDY, Sampling
from .session import Session
from .step import step


@dataclass(eq=False)
class Request:
    """One answer, as it comes. `tokens` are those written so far; `finish` is "" until it ends:
    "stop", "length" or "cancelled"."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop: Collection[int]
    tokens: list[int] = field(default_factory=list)
    finish: str = ""

    @property
    def size(self) -> int:
        """Tokens of context that it may come to."""
        return len(self.prompt) + self.max_new_tokens

    def take(self, done: Round) -> None:
        self.tokens.extend(done.tokens)
        if done.tokens[-1] in self.stop:
            self.finish = "stop"
        elif len(self.tokens) == self.max_new_tokens:
            self.finish = "length"


class Batch:
    """Requests in the order they came, as many at once as fit."""

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter[Any] | None = None,
        settings: DraftSettings | Scale | None = None,
        *,
        max_requests: int = 16,
        max_tokens: int = 65_536,
    ) -> None:
        """settings: of every request's drafts, which are scaled by its own Keys. max_tokens bounds
        the memory: contexts of all running requests together, in tokens, each counted to its
        longest.

        Raises SharpDraftError for settings that the lab or this drafter cannot do.
        """
        self.target, self.drafter, self.settings = target, drafter, settings
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, Session] = {}
        Session(
            target, drafter, settings, capacity=2
        )  # Wrong settings are found before the first request.

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        sampling: Sampling = GREEDY,
        stop: Collection[int] = (),
    ) -> Request:
        """Queue a request. Raises SharpDraftError for one that can never run."""
        request = Request(tuple(prompt), max_new_tokens, sampling, stop)
        if max_new_tokens < 1:
            raise SharpDraftError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
        if not prompt or min(prompt) < 0 or max(prompt) >= self.target.vocab_size:
            raise SharpDraftError(
                "the prompt is empty or has tokens outside the vocabulary of "
                f"{self.target.vocab_size}"
            )
        if request.size > (limit := min(self.max_tokens, self.target.max_positions)):
            raise SharpDraftError(
                f"{len(prompt)} tokens of prompt and {max_new_tokens} of answer: at most {limit} "
                "fit together"
            )
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Take a request out; what it has written stays. Nothing happens to one that has ended."""
        if not request.finish:
            request.finish = "cancelled"
            self.running.pop(request, None)
            if request in self.waiting:
                self.waiting.remove(request)

    def step(self) -> list[tuple[Request, Round]]:
        """Let in those that fit, each reading its prompt and writing a token, and do one round of
        all that run.

        Returns what was written; nothing once every request has ended.
        """
        written = []
        while self.waiting and self._fits(self.waiting[0]):
            request = self.waiting.popleft()
            session = Session(
                self.target,
                self.drafter,
                self.settings,
                capacity=request.size,
                sampling=request.sampling,
            )
            self.running[request] = session
            first = session.prefill(request.prompt)
            written.append(
                (request, Round((first,), session.cache.length, 0, 0, 0.0, session.prefill_seconds))
            )
            self._took(*written[-1])
        if running := list(self.running):
            sessions = [self.running[request] for request in running]
            left = [request.max_new_tokens - len(request.tokens) for request in running]
            rounds = step(sessions, left, [request.stop for request in running])
            for request, done in zip(running, rounds, strict=True):
                written.append((request, done))
                self._took(request, done)
        return written

    def _fits(self, request: Request) -> bool:
        taken = sum(other.size for other in self.running)
        return len(self.running) < self.max_requests and taken + request.size <= self.max_tokens

    def _took(self, request: Request, done: Round) -> None:
        request.take(done)
        if request.finish:
            del self.running[request]
