"""Where what was fetched or made for this machine is kept."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """$SHARPDRAFT_CACHE, or `sharpdraft` in $XDG_CACHE_HOME, or the platform's place for caches."""
    if own := os.environ.get("SHARPDRAFT_CACHE"):
        return Path(own).expanduser()
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches).expanduser() / "sharpdraft"
    return platformdirs.user_cache_path("sharpdraft", appauthor=False)
