"""Linear layers for few rows: the weight layouts that decoding needs, chosen once at load."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Between these row counts oneDNN's blocked layout beats the plain one on float32 CPUs: one or two rows
# are a matrix-vector product, which the plain layout already runs at memory speed.
_PACKED_ROWS = range(3, 129)
_PACK_FOR = 8


class Linear:
    """`x @ weight.T + bias` with an extra blocked copy of float32 CPU weights for 3 to 128 rows.

    weight: [out, in]; bias: [out] or None. Calls take x [..., in] of any floating dtype and return [..., out]
    in the weight's dtype, in which the product runs.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = True) -> None:
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach()
        self.packed: Tensor | None = None
        if pack and weight.device.type == "cpu" and weight.dtype == torch.float32 and _onednn():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACK_FOR)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None and x.numel() // x.shape[-1] in _PACKED_ROWS:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


def fast_bfloat16(device: torch.device) -> bool:
    """Whether a device has units that multiply bfloat16 matrices faster than float32 ones."""
    if device.type == "cpu":
        return torch.cpu._is_amx_tile_supported()
    return device.type == "cuda"


def _onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
