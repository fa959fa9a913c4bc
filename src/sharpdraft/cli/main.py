"""The program: its commands, and how errors are printed."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Any

import typer
from rich.markup import escape

from ..errors import SharpDraftError, SharpDraftNote
from .bench import bench
from .console import err
from .demo import demo
from .doctor import doctor
from .generate import generate
from .record import record
from .train import train_app

app = typer.Typer(
    help="Speculative decoding that stays fast when generations get long.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for _command in (generate, demo, bench):
    app.command()(_command)
app.add_typer(train_app, name="train")
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(doctor)
app.command()(record)


def main() -> None:
    """Entry point: every foreseen error is one line on stderr and exit code 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", SharpDraftNote)
        warnings.showwarning = partial(_show, warnings.showwarning)
        try:
            app()
        except SharpDraftError as error:
            err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
            sys.exit(1)


def _show(others: Any, message: Warning | str, *rest: Any, **named: Any) -> None:
    """Show our notes as lines of their own, and the warnings of others as Python does."""
    if isinstance(message, SharpDraftNote):
        err.print(f"note: {escape(str(message))}", soft_wrap=True, highlight=False)
    else:
        others(message, *rest, **named)
