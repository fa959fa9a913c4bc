"""Commands: parse, call, print. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .errors import SharpDraftError

app = typer.Typer(
    help="Speculative decoding that stays fast when generations get long.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
train_app = typer.Typer(help="Train a drafter for a target.", no_args_is_help=True)
app.add_typer(train_app, name="train")

out = Console()
err = Console(stderr=True)

_TARGET = "smollm2-135m-instruct"
TargetOption = Annotated[str, typer.Option("--target", help="Built-in name, local directory or hub id.")]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="Local directory or hub id of a DFlash checkpoint.",
        show_default="the one that comes with the target",
    ),
]
BlockOption = Annotated[
    int | None,
    typer.Option("--block", help="Tokens of a block, anchor included.", show_default="the drafter's"),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or mps.", show_default="the best there is")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable results on stdout.")]
ReferenceOption = Annotated[
    int | None,
    typer.Option("--reference", help="N0: Keys up to which nothing is scaled.", show_default="the drafter's"),
]


def main() -> None:
    """Entry point: every foreseen error is one line on stderr and exit code 1."""
    try:
        app()
    except SharpDraftError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


class _Loaded:
    """Target, tokenizer, drafter and the drafter's policy, as the options name them."""

    def __init__(
        self,
        target: str,
        drafter: str | None,
        device: str | None,
        reference: int | None,
        *,
        need_drafter: bool,
    ) -> None:
        from .drafters.dflash import DFlash
        from .models import checkpoint_dir, load_target
        from .scale import FixedSlope
        from .settings import built_in_drafter, recommended

        directory = checkpoint_dir(drafter) if drafter else built_in_drafter(target)
        if directory is None and need_drafter:
            raise SharpDraftError(f"no drafter comes with {target}: give one with --drafter, or train one")
        with err.status(f"loading {target}"):
            self.target, self.tokenizer = load_target(target, device=device)
            self.drafter = None if directory is None else DFlash.load(directory, self.target)
        self.policy: FixedSlope | None = None
        if directory is not None:
            self.policy, found = recommended(directory)
            if reference is not None:
                try:
                    self.policy = FixedSlope(
                        reference, self.policy.slope, self.policy.top_k, self.policy.max_scale
                    )
                except ValueError as error:
                    raise SharpDraftError(f"--reference: {error}") from error
            elif not found:
                err.print(
                    f"note: {directory} has no sharpdraft.json; using the paper's DFlash setting "
                    f"(N0 = {self.policy.reference}), which needs validation for this drafter"
                )
        ends = self.target.config.eos_token_id
        self.stop: tuple[int, ...] = (
            tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
        )

    def prompt(self, turn: str, *, first: bool) -> list[int]:
        from .train.sessions import chat_tokens

        return chat_tokens(self.tokenizer, turn, first=first)


@contextmanager
def _progress(total: int, text: str) -> Iterator[tuple[Progress, Any]]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        yield progress, progress.add_task(text, total=total)


@contextmanager
def _resumable(what: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise SharpDraftError(f"stopped; {what} is kept, and the same command goes on from there") from None


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The user's message; from stdin if left out.")] = None,
    target: TargetOption = _TARGET,
    drafter: DrafterOption = None,
    arm: Annotated[
        str, typer.Option("--arm", help="ar, frozen, sharpdraft, sharpdraft@N0 or fixed@SCALE.")
    ] = "sharpdraft",
    reference: ReferenceOption = None,
    block: BlockOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 512,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stream an answer; accepted drafts are green, the target's own tokens plain."""
    from .decode.loop import Session
    from .lab.bench import arm as arm_named
    from .scale import REPORTED_SETTINGS

    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise SharpDraftError("the prompt is empty: give a text")
    loaded = _Loaded(target, drafter, device, reference, need_drafter=arm != "ar")
    chosen = arm_named(arm, loaded.policy or REPORTED_SETTINGS["dflash"])
    used = loaded.drafter if chosen.drafting else None
    session = Session(loaded.target, used, chosen.policy, block if used else None)
    if raw or not getattr(loaded.tokenizer, "chat_template", None):
        ids = list(loaded.tokenizer(text)["input_ids"])
    else:
        ids = loaded.prompt(text, first=True)
    rounds = []
    shown = ""
    for done in session.generate(ids, max_new_tokens, loaded.stop):
        rounds.append(done)
        if as_json:
            continue
        written = session.tokens[len(ids) :]
        # A token can be part of a character: what is not yet whole is shown with the next one.
        drafts_end = loaded.tokenizer.decode(written[:-1], skip_special_tokens=True)
        whole = loaded.tokenizer.decode(written, skip_special_tokens=True)
        if whole.endswith("\ufffd"):
            continue
        middle = max(len(shown), min(len(drafts_end), len(whole)))
        out.print(
            f"[green]{escape(whole[len(shown) : middle])}[/]"
            if done.accepted
            else escape(whole[len(shown) : middle]),
            end="",
            highlight=False,
            soft_wrap=True,
        )
        out.print(escape(whole[middle:]), end="", highlight=False, soft_wrap=True)
        shown = whole
    drafted = [r for r in rounds if r.drafted]
    seconds = sum(r.draft_seconds + r.verify_seconds for r in rounds[1:])
    count = len(session.tokens) - len(ids)
    figures = {
        "arm": arm,
        "prompt_tokens": len(ids),
        "tokens": count,
        "finish": session.finish,
        "prefill_seconds": session.prefill_seconds,
        "decode_seconds": seconds,
        "tokens_per_second": (count - 1) / seconds if seconds else None,
        "mal": sum(r.accepted + 1 for r in drafted) / len(drafted) if drafted else None,
    }
    if as_json:
        written = session.tokens[len(ids) :]
        print(
            json.dumps(
                {
                    **figures,
                    "text": loaded.tokenizer.decode(written, skip_special_tokens=True),
                    "token_ids": written,
                }
            )
        )
        return
    out.print()
    speed = f", {figures['tokens_per_second']:.1f} tokens/s" if seconds else ""
    mal = f", {figures['mal']:.2f} tokens a verification" if drafted else ""
    err.print(
        f"[dim]{arm}: {count} tokens{speed}{mal}; prefill of {len(ids)} in {session.prefill_seconds:.2f} s; ended by {session.finish}[/]",
        highlight=False,
    )


@app.command()
def demo(
    out_dir: Annotated[Path, typer.Option("--out", help="Where the figure and the rows go.")] = Path(
        "sharpdraft-demo"
    ),
    as_json: JsonOption = False,
) -> None:
    """A long session three ways (AR, Frozen, SharpDraft), side by side at growing context lengths."""
    from .lab.bench import EDGES, Plan, run_recording
    from .lab.bench import arm as arm_named
    from .lab.tasks import recordings

    loaded = _Loaded(_TARGET, None, None, None, need_drafter=True)
    recording = recordings()[0]
    assert loaded.policy is not None and loaded.drafter is not None
    arms = tuple(arm_named(name, loaded.policy) for name in ("ar", "frozen", "sharpdraft"))
    plan = Plan(_TARGET, "built-in", loaded.drafter.block_size, arms, arms[1:], masses_every=8)
    if not as_json:
        err.print(
            f"[bold]One real session, '{recording.name}', three ways.[/] {_TARGET} has written a conversation of "
            f"{len(recording.tokens)} tokens.\nAt {len(EDGES)} points of it the next answer is written by the target "
            "alone (AR), with its DFlash drafter as\ntrained on at most 512 tokens (Frozen), and with that drafter's "
            f"Queries scaled above {loaded.policy.reference} Keys (SharpDraft).\nThe three must agree token by token; "
            "they differ in speed.\n",
            highlight=False,
        )
    rows: list[dict[str, Any]] = []
    session = _session(loaded, None)
    with _progress(len(EDGES), "starting") as (progress, bar):

        def on_row(row: dict[str, Any]) -> None:
            rows.append(row)
            progress.advance(bar)
            if not as_json:
                _show_answer(progress.console, loaded.tokenizer, row)

        run_recording(
            session,
            recording,
            plan,
            loaded.stop,
            [],
            on_row,
            lambda text: progress.update(bar, description=text),
        )
    _report(rows, plan.edges, out_dir, f"{_TARGET}, one session, answers of up to 192 tokens", as_json)


@app.command()
def bench(
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="Prompts, one a line, or JSON lines with prompt or turns.",
            show_default="the built-in sessions",
        ),
    ] = None,
    target: TargetOption = _TARGET,
    drafter: DrafterOption = None,
    arms: Annotated[
        str,
        typer.Option(
            "--arms", help="Timed, taking turns: ar, frozen, sharpdraft, sharpdraft@N0, fixed@SCALE."
        ),
    ] = "ar,frozen,sharpdraft",
    replay: Annotated[
        str, typer.Option("--replay", help="Arms whose accepted lengths are replayed on AR's text.")
    ] = "",
    sessions: Annotated[
        int | None, typer.Option("--sessions", min=1, help="How many sessions.", show_default="all")
    ] = None,
    turns_per_bucket: Annotated[
        int,
        typer.Option(
            "--turns-per-bucket", min=1, help="Measured answers in each context bucket of a recorded session."
        ),
    ] = 2,
    mass_every: Annotated[
        int,
        typer.Option(
            "--mass-every", min=0, help="Attention mass at every so many anchors of a replay; 0 for none."
        ),
    ] = 0,
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", min=2, help="Longest answer to a prompt of --prompts.")
    ] = 192,
    reference: ReferenceOption = None,
    block: BlockOption = None,
    device: DeviceOption = None,
    out_dir: Annotated[
        Path, typer.Option("--out", help="Rows, table and figure; a broken run goes on from its rows.")
    ] = Path("sharpdraft-bench"),
    as_json: JsonOption = False,
) -> None:
    """Compare arms on long sessions, by context length."""
    from .lab.bench import Plan, RunLog, measured_turns, run_live, run_recording
    from .lab.bench import arm as arm_named
    from .lab.tasks import built_in, from_file, recordings

    tasks = from_file(prompts, answer_tokens) if prompts else built_in()
    recorded = recordings() if prompts is None and target == _TARGET else []
    timed_names = [n.strip() for n in arms.split(",") if n.strip()]
    replay_names = [n.strip() for n in replay.split(",") if n.strip()]
    if not timed_names:
        raise SharpDraftError("--arms names no arm")
    from .scale import REPORTED_SETTINGS

    for name in (*timed_names, *replay_names):
        arm_named(name, REPORTED_SETTINGS["dflash"])
    if "ar" in replay_names:
        raise SharpDraftError("--replay takes drafting arms only: ar drafts nothing")
    loaded = _Loaded(target, drafter, device, reference, need_drafter=True)
    assert loaded.policy is not None and loaded.drafter is not None
    session = _session(loaded, block)
    plan = Plan(
        target,
        drafter or "built-in",
        session.size,
        tuple(arm_named(n, loaded.policy) for n in timed_names),
        tuple(arm_named(n, loaded.policy) for n in replay_names),
        turns_per_bucket,
        masses_every=mass_every,
    )
    log = RunLog(out_dir / "rows.jsonl", plan)
    work = recorded[:sessions] if recorded else []
    total = sum(len(measured_turns(r, plan, loaded.target.max_positions)) for r in work)
    total = total or sum(len(task.turns) for task in tasks[:sessions])
    with _progress(total, "starting") as (progress, bar), _resumable(str(log.path)):
        progress.advance(bar, len(log.rows))

        def on_row(row: dict[str, Any]) -> None:
            log.add(row)
            progress.advance(bar)

        def on_progress(text: str) -> None:
            progress.update(bar, description=text)

        if recorded:
            for recording in work:
                run_recording(session, recording, plan, loaded.stop, log.rows, on_row, on_progress)
        else:
            for task in tasks[:sessions]:
                session.rewind(0)
                turns = (loaded.prompt(turn, first=i == 0) for i, turn in enumerate(task.turns))
                run_live(session, task, turns, plan, loaded.stop, log.rows, on_row, on_progress)
    _report(log.rows, plan.edges, out_dir, f"{target}, block {session.size}", as_json)


@train_app.command("dflash")
def train_dflash(
    out_dir: Annotated[Path, typer.Option("--out", help="Text, checkpoints, log and the finished drafter.")],
    target: TargetOption = _TARGET,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Training text that the target writes first.")
    ] = 1_048_576,
    context: Annotated[
        int, typer.Option("--context", min=64, help="Length of a training session, tokens.")
    ] = 512,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sessions written at once.")] = 128,
    steps: Annotated[int | None, typer.Option("--steps", min=1, show_default="the recipe's")] = None,
    device: DeviceOption = None,
) -> None:
    """Let the target write text, then distil a DFlash drafter from it. The same command resumes."""
    from .train.pipeline import distil_dflash

    with _resumable(f"what was written to {out_dir}"):
        drafter = distil_dflash(
            target,
            out_dir,
            tokens=tokens,
            context=context,
            batch=batch,
            steps=steps,
            device=device,
            progress=_progress,
        )
    out.print(f"{drafter}")


@app.command()
def record(
    out_file: Annotated[Path, typer.Option("--out", help="The recording, a safetensors file.")],
    target: TargetOption = _TARGET,
    length: Annotated[int, typer.Option("--length", min=64, help="Tokens of each session.")] = 8192,
    device: DeviceOption = None,
) -> None:
    """Let a target write the built-in sessions once, so that a bench can start deep inside them."""
    from .train.pipeline import record_sessions

    record_sessions(target, out_file, length=length, device=device, progress=_progress)
    out.print(f"{out_file}")


def _session(loaded: _Loaded, block: int | None) -> Any:
    from .decode.loop import Session

    return Session(loaded.target, loaded.drafter, None, block)


def _show_answer(console: Console, tokenizer: Any, row: dict[str, Any]) -> None:
    """One measured answer: where, what was written, and each arm's speed."""
    text = " ".join(tokenizer.decode(row["tokens"], skip_special_tokens=True).split())
    console.print(
        f"[bold]at {row['context']} tokens:[/] [dim]{escape(text[:150])} ...[/]",
        highlight=False,
        soft_wrap=True,
    )
    parts = []
    for name, arm in row["arms"].items():
        mal = (
            ""
            if name == "ar" or not arm["rounds"]
            else f", MAL {1 + sum(a for _, _, a in arm['rounds']) / len(arm['rounds']):.2f}"
        )
        same = "" if name not in row["differences"] else " [red](differs)[/]"
        parts.append(f"{name} {arm['tokens'] / arm['seconds']:.1f} tok/s{mal}{same}")
    console.print("   " + "   ".join(parts) + "\n", highlight=False)


def _report(
    rows: Sequence[dict[str, Any]], edges: Sequence[int], out_dir: Path, title: str, as_json: bool
) -> None:
    from dataclasses import asdict

    from .lab.report import figure, summarise, table

    if not rows:
        raise SharpDraftError("nothing was measured: no turn of the sessions fits into the context")
    cells = summarise(rows, edges)
    agreed = sum(
        arm["tokens"] for row in rows for name, arm in row["arms"].items() if name not in row["differences"]
    )
    differences = [
        {"session": row["session"], "turn": row["turn"], "arm": name, **what}
        for row in rows
        for name, what in row["differences"].items()
    ]
    out_dir.mkdir(parents=True, exist_ok=True)
    picture: Path | None = out_dir / "figure.png"
    try:
        figure(cells, edges, out_dir / "figure.png", title)
    except SharpDraftError as error:
        picture = None
        err.print(f"note: {error}")
    if as_json:
        print(
            json.dumps(
                {"cells": [asdict(c) for c in cells], "differences": differences, "figure": str(picture)}
            )
        )
        return
    out.print(table(cells, edges, title))
    first = next(iter(rows[0]["arms"]))
    if not differences:
        out.print(f"All arms wrote the same tokens as {first} ({agreed} tokens in all).", highlight=False)
    for d in differences:
        out.print(
            f"{d['session']}, turn {d['turn']}: {d['arm']} differs from {first} at token {d['at']}, where the target's "
            f"two logits are {d['gap']:.1e} apart",
            highlight=False,
        )
    if picture is not None:
        out.print(f"figure: {picture}", highlight=False)
