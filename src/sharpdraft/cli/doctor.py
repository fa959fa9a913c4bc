"""`sharpdraft doctor`: what the plugin would do in an engine."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markup import escape

from ..errors import SharpDraftError
from .console import out
from .options import Json


def doctor(
    context: typer.Context,
    engine: Annotated[str, typer.Option("--engine", help="The engine to look at.")] = "vllm",
    as_json: Json = False,
) -> None:
    """What the plugin would do in an engine, without starting it.

    Everything behind -- is what `vllm serve` takes: doctor -- MODEL --speculative-config ...
    --additional-config ... Exit code 2: there are warnings.
    """
    if engine != "vllm":
        raise SharpDraftError(f"--engine {engine}: known is vllm")
    from ..adapters.vllm.checks import doctor as checked

    facts, warnings = checked(context.args)
    if as_json:
        typer.echo(json.dumps({"facts": facts, "warnings": warnings}))
    else:
        for fact in facts:
            out.print(escape(fact), highlight=False, soft_wrap=True)
        for warning in warnings:
            out.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)
    if warnings:
        raise typer.Exit(2)
