"""Stand-ins for the few vLLM objects that the plugin meets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sharpdraft import FixedSlope
from sharpdraft.adapters.vllm.layers import put_on
from sharpdraft.method.settings import DraftSettings

POLICY = FixedSlope(40, top_k=8)


class ForwardPass:
    """Stands for vLLM's forward context."""


@dataclass
class Metadata:
    query_start_loc: Tensor
    seq_lens: Tensor
    causal: Any = True


class Impl:
    """One that looks as far ahead as behind, where rows are not causal, as those of CPU, flash,
    flex and Triton attention do."""

    def __init__(self, window: object) -> None:
        self.sliding_window = window
        self.seen: list[Tensor] = []

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any = None,
    ) -> Any:
        self.seen.append(query.clone())
        if kv_cache is not None:
            self.attend(query, kv_cache, attn_metadata, output)
        return output

    def attend(self, query: Tensor, caches: Any, metadata: Any, output: Tensor) -> None:
        start, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for number, (keys, values) in enumerate(caches):
            rows = range(start[number], start[number + 1])
            for row in rows:
                at = lengths[number] - (rows.stop - row)
                near = [j for j in range(lengths[number]) if self.sees(at, j, metadata.causal)]
                weights = (query[row] @ keys[near].mT).softmax(-1)
                output[row] = weights @ values[near]

    def sees(self, at: int, key: int, causal: bool) -> bool:
        window = self.sliding_window
        reach = window[0] if isinstance(window, tuple) else (window or 0) - 1
        return not (causal and key > at) and (reach < 0 or abs(at - key) <= reach)


def kept(backend: str, window: int | None) -> object:
    """How a backend of vLLM keeps a window."""
    if backend in ("FLASH_ATTN", "TRITON_ATTN"):
        return (-1, -1) if window is None else (window - 1, 0)
    return -1 if window is None and backend == "CPU_ATTN" else window


class Attention(torch.nn.Module):
    """Stands for vLLM's layer of that name."""

    def __init__(
        self, window: int | None = None, backend: str = "FLASH_ATTN", quant: Any = None
    ) -> None:
        super().__init__()
        self.impl = Impl(kept(backend, window))
        self.sliding_window = window
        self.attn_backend = SimpleNamespace(get_name=lambda: backend)
        self.query_quant = quant
        self._q_scale = torch.tensor(2.0)
        self.use_direct_call = False

    def call(self, query: Tensor, metadata: Any) -> Tensor:
        """As vLLM's opaque attention op calls it; returns the Query that the backend got."""
        self.impl.forward(self, query, None, None, None, metadata, output=torch.empty(0))
        return self.impl.seen[-1]

    def attend(
        self, query: Tensor, caches: Sequence[tuple[Tensor, Tensor]], metadata: Any
    ) -> Tensor:
        """What comes out [rows, heads, dim]; caches: Keys and values of each request [keys, dim],
        shared by its heads."""
        output = torch.empty_like(query)
        self.impl.forward(self, query, None, None, caches, metadata, output=output)
        return output


def attached(
    *layers: Attention, settings: DraftSettings | None = None, **kwargs: Any
) -> tuple[dict[str, str], SimpleNamespace]:
    """Why layers were refused, and `it`, the forward pass that there is now; to be changed."""
    now = SimpleNamespace(it=ForwardPass())
    named = {f"layer.{i}": layer for i, layer in enumerate(layers)}
    settings = settings or DraftSettings(scale=POLICY)
    return put_on(named, settings, lambda: now.it, **kwargs), now


def visible(lengths: list[tuple[int, int]], causal: bool, window: int | None) -> list[int]:
    """Keys of each row, by definition: requests as (context, rows); one mask entry a Key."""
    counts = []
    for context, rows in lengths:
        for row in range(rows):
            at = context + row
            counts.append(
                sum(
                    (not causal or key <= at) and (window is None or at - key < window)
                    for key in range(context + rows)
                )
            )
    return counts


def config(additional: Any = None, **changes: Any) -> SimpleNamespace:
    model = {
        "max_model_len": 8192,
        "hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "default"}),
    }
    speculative = SimpleNamespace(
        model="/nowhere",
        method="dflash",
        num_speculative_tokens=changes.pop("drafts", 5),
        draft_model_config=SimpleNamespace(**{**model, **changes.pop("draft", {})}),
    )
    return SimpleNamespace(
        additional_config={} if additional is None else {"sharpdraft": additional},
        speculative_config=changes.pop("speculative", speculative),
        model_config=SimpleNamespace(**{**model, **changes.pop("target", {})}),
        kv_transfer_config=changes.pop("connector", None),
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
