"""Where what was fetched or made for this machine is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$SHARPDRAFT_CACHE, or `sharpdraft` in the user's cache directory."""
    if own := os.environ.get("SHARPDRAFT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sharpdraft"
