"""Where things are printed: results on stdout, everything else on stderr."""

from __future__ import annotations

from rich.console import Console

out = Console()
err = Console(stderr=True)
