"""`sharpdraft demo`: a long session three ways."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from ..hub.smollm2 import SMOLLM2
from .console import err
from .options import DemoOptions, ModelOptions, taking


@taking(DemoOptions)
def demo(options: DemoOptions) -> None:
    """A long session three ways (AR, Frozen, SharpDraft) at growing context lengths."""
    from ..decode.session import HOST
    from ..lab.measure import run_recording
    from ..lab.plan import Plan, measured_turns
    from ..workloads.tasks import recordings
    from .loading import Drafters, Loaded
    from .progress import bar
    from .report import Run, report

    models = ModelOptions(target=SMOLLM2)
    names = ["ar", "frozen", "sharpdraft"]
    drafters = Drafters.find(models, names)
    arms = drafters.arms(names, HOST)
    loaded = Loaded.load(models, drafters)
    recording = recordings()[0]
    plan = Plan(SMOLLM2, "built-in", arms, arms[1:], masses_every=8)
    points = len(measured_turns(recording, plan, loaded.target.max_positions))
    err.print(
        f"[bold]One session of {SMOLLM2}, three ways.[/] '{recording.name}' is a conversation "
        f"of {len(recording.tokens)} tokens.\nAt {points} points the next answer is "
        "written by the target alone (AR), with its DFlash drafter, trained on\n512 tokens of "
        "context (Frozen), and with that drafter's Queries scaled by the Keys they see "
        f"(SharpDraft):\n{arms[-1].settings.describe()}.\nAll three must write the same tokens; "
        "they differ in speed.\n",
        highlight=False,
    )
    rows: list[dict[str, Any]] = []
    with bar(points, "starting") as (progress, task):

        def on_row(row: dict[str, Any]) -> None:
            rows.append(row)
            progress.advance(task)
            if "skipped" not in row:
                _show_answer(progress.console, loaded.tokenizer, row)

        def on_progress(text: str) -> None:
            progress.update(task, description=text)

        run_recording(loaded.session, recording, plan, loaded.stop, [], on_row, on_progress)
    title = f"{SMOLLM2}, session {recording.name}"
    report(Run(rows, plan, options.out_dir, title), options.as_json)


def _show_answer(console: Console, tokenizer: Any, row: dict[str, Any]) -> None:
    """One measured answer: where, what was written, and each arm's speed."""
    text = " ".join(tokenizer.decode(row["tokens"], skip_special_tokens=True).split())
    console.print(
        f"[bold]at {row['context']} tokens:[/] [dim]{escape(text[:90])} ...[/]", highlight=False
    )
    parts = []
    for name, arm in row["arms"].items():
        lengths = [accepted + 1 for _, _, accepted in arm["rounds"]]
        mal = f", MAL {sum(lengths) / len(lengths):.2f}" if lengths else ""
        differs = " [red](differs)[/]" if name in row["differences"] else ""
        parts.append(f"{name} {arm['tokens'] / arm['seconds']:.1f} tok/s{mal}{differs}")
    console.print("   " + "   ".join(parts) + "\n", highlight=False)
