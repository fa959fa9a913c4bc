"""`sharpdraft record`: a workload's sessions as a target writes them."""

from __future__ import annotations

import typer

from .options import RecordOptions, taking
from .progress import bar


@taking(RecordOptions)
def record(options: RecordOptions) -> None:
    """Let a target write a workload's sessions once, so that a bench can start deep inside them."""
    from ..train.pipeline import record_sessions
    from .loading import chat_settings

    record_sessions(
        options.target,
        options.out_file,
        workload=options.workload,
        sessions=options.sessions,
        length=options.length,
        temperature=options.temperature,
        device=options.device,
        chat=chat_settings(options),
        progress=bar,
    )
    typer.echo(options.out_file)
