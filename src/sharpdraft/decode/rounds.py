"""What a round was, and the time its parts took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Round:
    """One round: what it wrote, at which context length (Keys before its anchor), and its seconds.

    `drafted` counts the tokens that were drafted, `accepted` those of them that were written; the
    last of `tokens` is the target's own, or the stop token that cut the round short. `asked`: how
    many the drafter was asked for, which may have given fewer, or none.
    """

    tokens: tuple[int, ...]
    context: int
    drafted: int
    accepted: int
    draft_seconds: float
    verify_seconds: float
    asked: int = 0


class Stopwatch:
    """Seconds of a round and of its first part, from when this is made: by the device's own clock
    where it runs behind the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began = time.perf_counter()
        self.times = [self._now()]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        """The first part, drafting, is over."""
        self.times.append(self._now())

    def times_of(self, rounds: Sequence[Round]) -> list[Round]:
        """The rounds with their seconds; to be asked once the device has done both parts."""
        first, second = self.times
        cpu = self.device.type != "cuda"
        drafted = second - first if cpu else first.elapsed_time(second) / 1e3
        rest = time.perf_counter() - self.began - drafted
        return [
            replace(done, draft_seconds=drafted if done.asked else 0.0, verify_seconds=rest)
            for done in rounds
        ]
