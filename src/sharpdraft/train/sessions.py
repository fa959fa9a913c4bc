"""The target writes its own training text: many sessions at once, features kept as it writes.

All sessions of a wave stand at the same position: while a session's prompt lasts its tokens are
forced, then the target's own follow; at the end of an answer the next user turn is forced. No
padding, no masks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..decode.sampling import draws
from ..model.causal_lm import CausalLM
from ..workloads.chat import Chat

# Greedy text is what greedy decoding meets, but alike prompts give alike answers: some answers
# begin with a few sampled tokens and go on greedily from there.
_SAMPLED_STARTS = (0, 0, 4, 12)
# A small model caught in a loop repeats itself until the end of the session, which teaches a
# drafter nothing new: an answer ends when the same tokens come for the third time, and at the
# latest at this length.
_ANSWER_LIMIT = 192
_LOOP_TOKENS, _LOOP_TIMES = 8, 3
_CHAINED = 3


@torch.inference_mode()
def write_wave(
    target: CausalLM,
    turns: Sequence[Sequence[Sequence[int]]],
    length: int,
    end_of_turn: int,
    *,
    stops: Collection[int] = (),
    taps: Sequence[int] | None = None,
    seed: int | None = None,
    temperature: float = 0.0,
    on_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Tensor]:
    """Write one wave of sessions, `length` tokens each.

    turns: for each session the tokens of its user turns (see `Chat.prompt`), taken round and round.

    An answer ends at `end_of_turn` or one of `stops`, or else is cut at 192 tokens, or when it
    loops, and `end_of_turn` put behind it; the next turn follows.

    seed: for the answers that begin with a few sampled tokens; None for none. temperature: above 0,
    every token is sampled. taps: layers whose hidden states are kept; None for none.

    Returns tokens int32 [sessions, length]; written bool [sessions, length], true where the target
    chose the token, at that temperature; and with taps features float16 [sessions, length,
    (taps + 1) * hidden]: the tapped hidden states in order, then the final normed one.
    """
    count = len(turns)
    tokens = torch.zeros(count, length, dtype=torch.int32)
    written = torch.zeros(count, length, dtype=torch.bool)
    wave = {"tokens": tokens, "written": written}
    if taps is not None:
        width = target.hidden_size * (len(taps) + 1)
        wave["features"] = torch.empty(count, length, width, dtype=torch.float16)
    starts = (0,) if seed is None else _SAMPLED_STARTS
    # Attention on a CPU reads float32 Keys faster than half as many bytes of bfloat16.
    cache = target.new_cache(
        length, batch=count, dtype=None if target.device.type == "cpu" else target.weight_dtype
    )
    generator = torch.Generator().manual_seed(seed or 0)
    forced = [list(session[0]) for session in turns]
    turn = [0] * count
    left = [starts[row % len(starts)] for row in range(count)]
    chosen = [0] * count
    answers: list[list[int]] = [[] for _ in range(count)]
    for step in range(length):
        for row in range(count):
            if forced[row]:
                tokens[row, step] = forced[row].pop(0)
                continue
            token = chosen[row]
            tokens[row, step] = token
            if left[row] > 0:
                left[row] -= 1
            else:
                written[row, step] = True
            answers[row].append(token)
            ended = token == end_of_turn or token in stops
            if ended or len(answers[row]) >= _ANSWER_LIMIT or _loops(answers[row]):
                turn[row] += 1
                session = turns[row]
                forced[row] = ([] if ended else [end_of_turn]) + list(
                    session[turn[row] % len(session)]
                )
                answers[row] = []
                left[row] = starts[(turn[row] + row) % len(starts)]
        logits, tapped, final = target.forward(
            tokens[:, step : step + 1].long().to(target.device), cache, taps or ()
        )
        if taps is not None:
            wave["features"][:, step] = torch.cat([*tapped, final], dim=-1)[:, 0].clamp(
                -65000, 65000
            )
        choice = logits[:, 0].argmax(-1).cpu()
        if temperature:
            choice = draws((logits[:, 0].cpu().double() / temperature).softmax(-1), generator)
        sample = torch.tensor([row for row in range(count) if left[row] > 0], dtype=torch.long)
        if len(sample):
            choice[sample] = draws(logits[sample, 0].cpu().double().softmax(-1), generator)
        chosen = choice.tolist()
        on_step(step)
    return wave


def _loops(answer: list[int]) -> bool:
    tail = answer[-_LOOP_TOKENS:]
    if len(answer) < _LOOP_TIMES * _LOOP_TOKENS:
        return False
    starts = range(len(answer) - _LOOP_TOKENS + 1)
    return sum(answer[i : i + _LOOP_TOKENS] == tail for i in starts) >= _LOOP_TIMES


def save_wave(wave: dict[str, Tensor], path: Path) -> None:
    """Write a wave whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        save_file(wave, str(partial))
    except SafetensorError as error:  # what safetensors makes of a full disk
        partial.unlink(missing_ok=True)
        raise OSError(f"{partial}: {error}") from error
    os.replace(partial, path)


def session_turns(sessions: Iterator[list[str]], chat: Chat, count: int) -> list[list[list[int]]]:
    """Tokens of the user turns of `count` sessions, each long enough to fill a wave without
    repeating."""
    chained = [[turn for _ in range(_CHAINED) for turn in next(sessions)] for _ in range(count)]
    return [[chat.prompt(turn, first=i == 0) for i, turn in enumerate(turns)] for turns in chained]
