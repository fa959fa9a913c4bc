"""Linear layers in any layout."""

from __future__ import annotations

import pytest
import torch

from sharpdraft.model.kernels import build
from sharpdraft.model.linear import Linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@torch.inference_mode()
def test_linear_in_any_layout(bias: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, offset = torch.randn(24, 16), torch.randn(24) if bias else None
    if not compiled:
        monkeypatch.setattr(build, "library", lambda lanes: None)
    layer = Linear(weight, offset)
    assert torch.equal(layer.weight, weight)
    for rows in (1, 2, 3, 8, 31, 128, 129, 300):
        for x in (
            torch.randn(rows, 16),
            torch.randn(1, rows, 16),
            torch.randn(2, 16, rows).transpose(1, 2),
        ):
            expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
            torch.testing.assert_close(layer(x), expected.float(), rtol=1e-4, atol=1e-4)
    half = Linear(weight.bfloat16(), None if offset is None else offset.bfloat16())
    assert half(torch.randn(5, 16)).dtype == torch.bfloat16
