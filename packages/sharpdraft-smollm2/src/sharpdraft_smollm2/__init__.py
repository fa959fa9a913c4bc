"""Drafters for SmolLM2-135M-Instruct, and sessions that it wrote, for the package sharpdraft."""

from __future__ import annotations

from pathlib import Path


def path(*parts: str) -> Path:
    """Where a file or directory of this package is: "recorded.safetensors", or "drafters" and the
    name of one."""
    return Path(__file__).parent.joinpath(*parts)
