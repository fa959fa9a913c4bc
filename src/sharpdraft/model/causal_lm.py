"""A causal LM as target: one forward over cached Keys, with taps on the layers a drafter reads.

The weights, configuration, rotary tables and tokenizer come from transformers; the forward is ours,
over preallocated Keys, so that prefill, single-token decoding and verification are one piece of
code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SharpDraftError
from ..method.scale import Policy
from ..method.theory import attention_mass
from .attention import CAUSAL, Rotary, Rows, Segments
from .cache import KVCache
from .linear import Linear
from .stack import Layer, Stack

ARCHITECTURES = ("llama", "qwen2", "qwen3")


class CausalLM:
    """The target model. Shapes: batch rows stand at the same positions; hidden states are [batch,
    rows, hidden]."""

    def __init__(
        self, model: Any, *, weight_dtype: torch.dtype | None = None, release: bool = False
    ) -> None:
        """Take over the weights of a transformers causal LM (Llama, Qwen2 or Qwen3 architecture).

        weight_dtype: run layers in another dtype than the model's; the residual stream and the head
        keep the model's, so that close logits stay apart. release: let go of the model's layers one
        by one, so that memory for the weights is needed once; the model is of no use afterwards.

        Raises SharpDraftError for an architecture without a forward here.
        """
        config = model.config
        if config.model_type not in ARCHITECTURES:
            raise SharpDraftError(
                f"target architecture '{config.model_type}' is not supported; supported: "
                f"{', '.join(ARCHITECTURES)}"
            )
        self.config = config
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.max_positions: int = config.max_position_embeddings
        self.eps: float = config.rms_norm_eps
        self.weight_dtype: torch.dtype = weight_dtype or model.dtype

        def linear(*modules: Any) -> Linear:
            weight = torch.cat([m.weight.detach() for m in modules]).to(self.weight_dtype)
            bias = (
                None
                if modules[0].bias is None
                else torch.cat([m.bias.detach() for m in modules]).to(self.weight_dtype)
            )
            return Linear(weight, bias)

        body = model.model
        self.embedding: Tensor = body.embed_tokens.weight.detach()
        self.device = self.embedding.device
        self.dtype = self.embedding.dtype
        layers = []
        for block in body.layers:
            attn, mlp = block.self_attn, block.mlp
            layers.append(
                Layer(
                    attn_norm=block.input_layernorm.weight.detach(),
                    qkv=linear(attn.q_proj, attn.k_proj, attn.v_proj),
                    q_norm=attn.q_norm.weight.detach() if hasattr(attn, "q_norm") else None,
                    k_norm=attn.k_norm.weight.detach() if hasattr(attn, "k_norm") else None,
                    out=linear(attn.o_proj),
                    mlp_norm=block.post_attention_layernorm.weight.detach(),
                    gate_up=linear(mlp.gate_proj, mlp.up_proj),
                    down=linear(mlp.down_proj),
                )
            )
            if release:
                block.to("meta")
        self.stack = Stack(
            tuple(layers), body.norm.weight.detach(), self.heads, self.kv_heads, self.eps
        )
        self.head = Linear(model.lm_head.weight)
        self.rotary = Rotary(body.rotary_emb, self.max_positions, self.device)

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
        policies: Sequence[Policy | None] = (),
        probe: Callable[[int, Tensor], None] | None = None,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Run ids [batch, rows] behind `cache` and append their Keys to it.

        Several requests go in one flat pass: ids [1, all their rows], cache: one for each, rows:
        how many each has.

        taps: ids of layers whose output hidden states are wanted. logits_from: first row whose
        logits are computed (negative counts from the end, as in slicing), or the indices of those
        rows. policies, probe: for a draft LM, whose Queries each request's policy scales; the probe
        gets the top-k attention mass of the rows with logits, layer by layer, of a single request.

        Returns logits [batch, wanted rows, vocab], the tapped hidden states in the order asked
        (each [batch, rows, hidden]) and the final normed ones [batch, wanted rows, hidden]. Raises
        SharpDraftError where a cache has no room or another shape, and for a tap that is no layer.
        """
        caches = [cache] if isinstance(cache, KVCache) else list(cache)
        counts = [ids.shape[1]] if rows is None else list(rows)
        pasts = [each.length for each in caches]
        segments = Segments(caches, pasts, counts, self.rotary)
        wanted = slice(logits_from, None) if isinstance(logits_from, int) else logits_from
        found = self.run(ids, segments, taps, wanted=wanted, policies=policies, probe=probe)
        for each, past, count in zip(caches, pasts, counts, strict=True):
            each.length = past + count
        return found

    def run(
        self,
        ids: Tensor,
        where: Rows,
        taps: Sequence[int] = (),
        *,
        wanted: slice | Tensor = slice(None),
        policies: Sequence[Policy | None] = (),
        probe: Callable[[int, Tensor], None] | None = None,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """The passes of `forward` wherever their rows stand; how many Keys a cache holds is the
        caller's to count."""
        _, final, tapped = self.stack.run(
            F.embedding(ids, self.embedding),
            {CAUSAL: where},
            {CAUSAL: where.gains(policies)},
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
        attention_mass(query[:, :, wanted], keys, None if mask is None else (mask == 0)[wanted]),
    )
