"""Put a trained drafter of the built-in target among those of sharpdraft-smollm2.

    python scripts/pack_drafter.py runs/eagle3/drafter eagle3

Matrices that are the target's own are left out: `hub.smollm2.built_in_drafter` puts them back.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

_OF_THE_TARGET = ("lm_head.weight", "model.embed_tokens.weight")
_PACKAGE = Path(__file__).parent.parent / "packages/sharpdraft-smollm2/src/sharpdraft_smollm2"


def main() -> None:
    source, family = Path(sys.argv[1]), sys.argv[2]
    folder = _PACKAGE / "drafters" / f"{family}-smollm2-135m"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.json", folder)
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in _OF_THE_TARGET}
    save_file(kept, str(folder / "model.safetensors"), {"format": "pt"})
    if (log := source.parent / "log.jsonl").exists():
        shutil.copy(log, folder / "training.jsonl")


if __name__ == "__main__":
    main()
