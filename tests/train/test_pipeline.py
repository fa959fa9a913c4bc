"""What no drafter is trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sharpdraft.errors import SharpDraftError
from sharpdraft.train.pipeline import distil
from support.hub import edit_config, make_model, save

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 16,
}
CHAT = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": None, "partial_rotary_factor": 0.5},
        {"rope_interleaved": True},
        {"rope_parameters": LONGROPE},
    ],
    ids=str,
)
def test_targets_whose_positions_turn_otherwise(changes: dict[str, Any], tmp_path: Path) -> None:
    """Their layers, which a drafter starts from, are not as their checkpoint has them."""
    target = save(make_model("llama"), tmp_path / "target")
    edit_config(target, **changes)
    (target / "chat_template.jinja").write_text(CHAT)
    out, options = tmp_path / "out", {"tokens": 8, "context": 8, "batch": 1, "steps": 1}
    asked: dict[str, Any] = {**options, "device": "cpu", "progress": None}
    with pytest.raises(SharpDraftError, match="no drafter is trained for this target: its rotary"):
        distil("dflash", str(target), out, **asked)
    assert not out.exists()
