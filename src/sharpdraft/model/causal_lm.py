"""A causal LM as target: one forward over cached Keys, with taps on the layers a drafter reads.

It runs over preallocated Keys, so that prefill, single-token decoding and verification are one
piece of code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SharpDraftError
from ..method.scale import Scale
from ..method.settings import Window
from ..method.theory import attention_mass
from ..method.visible import CAUSAL
from .cache import KVCache
from .config import ARCHITECTURES, Config
from .linear import Linear
from .rotary import head_order, in_order, rotary_of
from .rows import RaggedRows, Rows
from .stack import Layer, Stack


class CausalLM:
    """The target model. Shapes: batch rows stand at the same positions; hidden states are [batch,
    rows, hidden].

    directory: where it was read from, None for one that was made otherwise.
    """

    directory: Path | None = None

    def __init__(
        self,
        config: Config,
        read: Callable[..., Tensor | None],
        *,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        """Take over a model's tensors, asked for once each and layer by layer.

        read: given names that published checkpoints have, those tensors one behind the other, None
        for what the model has not; all of one dtype, in which the model runs, and on one device.
        Without "lm_head.weight" the embedding is the head. weight_dtype: run layers in another
        dtype than the model's; the residual stream and the head keep the model's, so that close
        logits stay apart.
        """

        def whole(*names: str) -> Tensor:
            found = read(*names)
            assert found is not None, names
            return found

        def linear(*names: str, heads: int = 0) -> Linear:
            weight = whole(*(f"{name}.weight" for name in names)).to(self.weight_dtype)
            bias = read(*(f"{name}.bias" for name in names))
            return Linear(
                in_order(weight, order, heads),
                None if bias is None else in_order(bias.to(self.weight_dtype), order, heads),
            )

        def head_norm(name: str) -> Tensor | None:
            weight = read(name)
            return None if weight is None else in_order(weight, order, 1)

        self.config = config
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.max_positions: int = config.max_position_embeddings
        self.eps: float = config.rms_norm_eps
        self.embedding = whole("model.embed_tokens.weight")
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.weight_dtype = weight_dtype or self.dtype
        order, turned = head_order(config), self.heads + self.kv_heads
        layers = []
        for at in (f"model.layers.{index}" for index in range(self.num_layers)):
            attn, mlp = f"{at}.self_attn", f"{at}.mlp"
            layers.append(
                Layer(
                    attn_norm=whole(f"{at}.input_layernorm.weight"),
                    qkv=linear(*(f"{attn}.{name}_proj" for name in "qkv"), heads=turned),
                    q_norm=head_norm(f"{attn}.q_norm.weight"),
                    k_norm=head_norm(f"{attn}.k_norm.weight"),
                    out=linear(f"{attn}.o_proj"),
                    mlp_norm=whole(f"{at}.post_attention_layernorm.weight"),
                    gate_up=linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                    down=linear(f"{mlp}.down_proj"),
                )
            )
        norm, head = whole("model.norm.weight"), read("lm_head.weight")
        self.stack = Stack(tuple(layers), norm, self.heads, self.kv_heads, self.eps)
        self.head = Linear(self.embedding if head is None else head)
        self.rotary = rotary_of(config, self.max_positions, self.device)

    @classmethod
    def of(cls, model: Any, *, weight_dtype: torch.dtype | None = None) -> CausalLM:
        """A transformers causal LM's weights, which it may go on using, with the forward here.
        Raises SharpDraftError for an architecture that there is none for."""
        if (family := model.config.model_type) not in ARCHITECTURES:
            raise SharpDraftError(
                f"target architecture '{family}' is not supported; supported: "
                f"{', '.join(ARCHITECTURES)}"
            )
        tensors = model.state_dict()

        def read(*names: str) -> Tensor | None:
            found = [tensors[name].detach() for name in names if name in tensors]
            return torch.cat(found) if len(found) > 1 else next(iter(found), None)

        return cls(Config.of(model.config.to_dict()), read, weight_dtype=weight_dtype)

    def new_cache(
        self, capacity: int, *, batch: int = 1, dtype: torch.dtype | None = None
    ) -> KVCache:
        """Room for `capacity` Keys a row. Raises SharpDraftError for more than the model has
        positions."""
        if capacity > self.max_positions:
            raise SharpDraftError(
                f"a context of {capacity} tokens: this target has {self.max_positions} positions"
            )
        return KVCache(
            self.num_layers,
            self.kv_heads,
            self.head_dim,
            capacity,
            batch=batch,
            dtype=dtype or self.dtype,
            device=self.device,
            limit=self.rotary.limit,
        )

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        cache: KVCache | Sequence[KVCache],
        taps: Sequence[int] = (),
        *,
        rows: Sequence[int] | None = None,
        logits_from: int | Tensor = 0,
        scales: Sequence[Scale | None] = (),
        window: Window | None = None,
        probe: Callable[[int, Tensor], None] | None = None,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Run ids [batch, rows] behind `cache` and append their Keys to it.

        Several requests go in one flat pass: ids [1, all their rows], cache: one for each, rows:
        how many each has.

        taps: ids of layers whose output hidden states are wanted. logits_from: first row whose
        logits are computed (negative counts from the end, as in slicing), or the indices of those
        rows. scales, window, probe: for a draft LM, whose Queries each request's policy scales and
        whose rows all see what the window leaves; the probe gets the top-k attention mass of the
        rows with logits, layer by layer, of a single request.

        Returns logits [batch, wanted rows, vocab], the tapped hidden states in the order asked
        (each [batch, rows, hidden]) and the final normed ones [batch, wanted rows, hidden]. Raises
        SharpDraftError where a cache has no room or another shape, and for a tap that is no layer.
        """
        caches = [cache] if isinstance(cache, KVCache) else list(cache)
        counts = [ids.shape[1]] if rows is None else list(rows)
        pasts = [each.length for each in caches]
        new = RaggedRows(caches, pasts, counts, self.rotary)
        wanted = slice(logits_from, None) if isinstance(logits_from, int) else logits_from
        found = self.run(ids, new, taps, wanted=wanted, scales=scales, window=window, probe=probe)
        for each, past, count in zip(caches, pasts, counts, strict=True):
            each.length = past + count
        return found

    def run(
        self,
        ids: Tensor,
        rows: Rows,
        taps: Sequence[int] = (),
        *,
        wanted: slice | Tensor = slice(None),
        scales: Sequence[Scale | None] = (),
        window: Window | None = None,
        probe: Callable[[int, Tensor], None] | None = None,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """The passes of `forward` wherever their rows stand; how many Keys a cache holds is the
        caller's to count."""
        views = [CAUSAL if window is None else window.on(CAUSAL)] * self.num_layers
        _, final, tapped = self.stack.run(
            F.embedding(ids, self.embedding),
            rows,
            views,
            rows.gains(scales, views),
            taps=taps,
            probe=None if probe is None else partial(_show, probe, wanted),
        )
        final = final[:, wanted]
        return self.head(final), [tapped[index] for index in taps], final


def _show(
    probe: Callable[[int, Tensor], None],
    wanted: slice | Tensor,
    index: int,
    query: Tensor,
    keys: Tensor,
    mask: Tensor | None,
) -> None:
    """Show a probe the attention mass of the wanted rows."""
    probe(
        index,
        attention_mass(query[:, :, wanted], keys, None if mask is None else mask[wanted]),
    )
