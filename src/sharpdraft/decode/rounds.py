"""What a round was, and the time its parts took."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Round:
    """One round: what it wrote, at which context length (Keys before its anchor), and the seconds
    it took.

    `accepted` counts the drafts that were written; the last of `tokens` is the target's own, or the
    stop token that cut the round short.
    """

    tokens: tuple[int, ...]
    context: int
    drafted: int
    accepted: int
    draft_seconds: float
    verify_seconds: float


class Stopwatch:
    """Seconds of the first part of a round: by the device's own clock where it runs behind the
    host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times = [self._now()]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        self.times.append(self._now())

    def seconds(self) -> float:
        """To be asked once the device has done both parts."""
        first, second = self.times
        return second - first if self.device.type != "cuda" else first.elapsed_time(second) / 1e3
