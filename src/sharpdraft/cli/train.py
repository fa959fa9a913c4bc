"""`sharpdraft train`: text from the target, then a drafter from the text."""

from __future__ import annotations

from collections.abc import Callable

import typer

from .options import TrainOptions, taking
from .progress import bar, resumable

train_app = typer.Typer(help="Train a drafter for a target.", no_args_is_help=True)


def _command(family: str) -> Callable[..., None]:
    @taking(TrainOptions)
    def train(options: TrainOptions) -> None:
        from ..hub.checkpoints import checkpoint_dir
        from ..train.pipeline import distil
        from .loading import chat_settings

        with resumable(f"what is in {options.out_dir}"):
            drafter = distil(
                family,
                options.target,
                options.out_dir,
                tokens=options.tokens,
                context=options.context,
                batch=options.batch,
                steps=options.steps,
                device=options.device,
                text=options.text,
                start=checkpoint_dir(options.start) if options.start else None,
                first_wave=options.first_wave,
                chat=chat_settings(options),
                progress=bar,
            )
        typer.echo(drafter)

    return train


for _family, _name in (("dflash", "a DFlash"), ("eagle3", "an EAGLE 3.1"), ("pard", "a PARD")):
    train_app.command(
        _family,
        help=f"Let the target write text, then train {_name} drafter on it. The same command "
        "resumes.",
    )(_command(_family))
