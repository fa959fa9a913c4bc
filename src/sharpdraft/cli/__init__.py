"""Commands: parse, call, print. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from ..errors import SharpDraftError

if TYPE_CHECKING:
    from ..method.policies import FixedSlope

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

_BUILT_IN = "smollm2-135m-instruct"
_ARMS = "ar, frozen, sharpdraft, sharpdraft@N0, fixed@SCALE, window@KEYS"


def _option(
    default: object, *names: str, help: str, shown: str | None = None, least: int | None = None
) -> Any:
    return typer.Option(default, *names, help=help, show_default=shown or True, min=least)


PROMPT: Any = typer.Argument(None, help="The user's message.", show_default="read from stdin")
TARGET = _option(_BUILT_IN, "--target", help="Built-in name, local directory or hub id.")
DRAFTER = _option(
    None,
    "--drafter",
    help="Directory or hub id of a DFlash, EAGLE-3 or PARD checkpoint; or dflash, eagle3, pard: those built in.",
    shown="the DFlash one built in for the target",
)
DRAFTERS = _option(
    None,
    "--drafter",
    help="As in generate; several, with commas between them, are compared side by side.",
    shown="the DFlash one built in for the target",
)
REFERENCE = _option(
    None,
    "--reference",
    help="N0: Keys up to which nothing is scaled.",
    shown="the drafter's",
    least=1,
)
BLOCK = _option(None, "--block", help="Tokens of a block, anchor included.", shown="the drafter's")
DEVICE = _option(None, "--device", help="cpu, cuda or mps.", shown="the best there is")
WEIGHTS = _option(
    None,
    "--weights",
    help="bfloat16: round the target's weights, which a CPU then reads in half the time; some tokens change.",
    shown="as they are",
)
JSON = _option(False, "--json", help="Machine-readable results on stdout.")
ARM = _option("sharpdraft", "--arm", help=f"One of {_ARMS}.")
ARMS = _option("ar,frozen,sharpdraft", "--arms", help=f"Timed, taking turns, from {_ARMS}.")
REPLAY = _option(
    "", "--replay", help="Arms whose accepted lengths are replayed on the text.", shown="none"
)
MAX_NEW = _option(512, "--max-new-tokens", help="Longest answer, tokens.", least=1)
RAW = _option(False, "--raw", help="Continue the text as it is, without the chat template.")
TEMPERATURE = _option(0.0, "--temperature", help="0: greedy.", least=0)
TOP_K = _option(0, "--top-k", help="Sample from this many likeliest tokens; 0: all.", least=0)
TOP_P = _option(
    1.0, "--top-p", help="Sample from the likeliest tokens that make up this probability."
)
MIN_P = _option(
    0.0, "--min-p", help="Leave out tokens below this share of the likeliest one's probability."
)
PENALTY = _option(
    1.0, "--repetition-penalty", help="Above 1 makes tokens that occurred less likely."
)
SEED = _option(None, "--seed", help="Repeats a sampled answer.", shown="a random one")
PROMPTS = _option(
    None,
    "--prompts",
    help="A prompt a line, or JSON lines with prompt or turns.",
    shown="the built-in sessions",
)
SESSIONS = _option(None, "--sessions", help="How many of the sessions.", shown="all", least=1)
TURNS = _option(
    2,
    "--turns-per-bucket",
    help="Answers measured in each context bucket of a recorded session.",
    least=1,
)
MASS = _option(
    0, "--mass-every", help="Attention mass at every so many replayed tokens; 0: never.", least=0
)
ANSWER = _option(
    192, "--answer-tokens", help="Longest answer to a prompt of --prompts, tokens.", least=2
)
ENGINE = _option(
    None, "--engine", help="Serve with vllm instead of the lab's own loop.", shown="the lab's loop"
)
DOCTOR_ENGINE = _option("vllm", "--engine", help="The engine to look at.")
ENGINE_ARGS = _option(
    "{}", "--engine-args", help="Further arguments of vllm.LLM, as a JSON object."
)
BASE_URL = _option(
    None,
    "--base-url",
    help="Running OpenAI-compatible servers instead: ARM=URL,ARM=URL or one URL.",
    shown="none",
)
CONCURRENCY = _option(1, "--concurrency", help="Requests at once to an engine or server.", least=1)
DEMO_OUT = _option(Path("sharpdraft-demo"), "--out", help="Directory of the figure.")
BENCH_OUT = _option(
    Path("sharpdraft-bench"),
    "--out",
    help="Directory of rows and figure; a broken run goes on from its rows.",
)
TRAIN_OUT = _option(
    ..., "--out", help="Directory of text, checkpoints, log and the finished drafter."
)
RECORD_OUT = _option(..., "--out", help="The recording, a safetensors file.")
TOKENS = _option(
    1_048_576, "--tokens", help="Training text that the target writes first, tokens.", least=1
)
CONTEXT = _option(512, "--context", help="Length of a training session, tokens.", least=64)
BATCH = _option(128, "--batch", help="Sessions written at once.", least=1)
STEPS = _option(None, "--steps", help="Training steps.", shown="the recipe's", least=1)
TEXT = _option(
    None, "--text", help="Directory of the text, which families can share.", shown="OUT/text"
)
START = _option(None, "--from", help="A drafter to go on from.", shown="layers of the target")
WAVE = _option(
    0,
    "--first-wave",
    help="Number of the first wave of text: each number is another text.",
    least=0,
)
LENGTH = _option(8192, "--length", help="Length of each session, tokens.", least=64)


def main() -> None:
    """Entry point: every foreseen error is one line on stderr and exit code 1."""
    try:
        app()
    except SharpDraftError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(1)


@app.command()
def generate(
    prompt: str | None = PROMPT,
    target: str = TARGET,
    drafter: str | None = DRAFTER,
    arm: str = ARM,
    reference: int | None = REFERENCE,
    block: int | None = BLOCK,
    max_new_tokens: int = MAX_NEW,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    top_p: float = TOP_P,
    min_p: float = MIN_P,
    repetition_penalty: float = PENALTY,
    seed: int | None = SEED,
    raw: bool = RAW,
    device: str | None = DEVICE,
    weights: str | None = WEIGHTS,
    as_json: bool = JSON,
) -> None:
    """Stream an answer; accepted drafts are green, the target's own tokens plain."""
    from ..decode.sampling import Sampling
    from ..decode.session import Session
    from ..lab.runs import arm as arm_named
    from ..method.policies import REPORTED_SETTINGS

    arm_named(arm, REPORTED_SETTINGS["dflash"])
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed=seed)
    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise SharpDraftError("the prompt is empty: give a text")
    loaded = _Loaded(target, drafter, device, reference, need_drafter=arm != "ar", weights=weights)
    chosen = arm_named(arm, loaded.policy or REPORTED_SETTINGS["dflash"])
    used = loaded.drafter if chosen.drafting else None
    session = Session(
        loaded.target, used, chosen.policy, block if used else None, sampling=sampling
    )
    if raw or not getattr(loaded.tokenizer, "chat_template", None):
        ids = list(loaded.tokenizer(text)["input_ids"])
    else:
        ids = loaded.prompt(text, first=True)
    rounds = []
    shown = ""
    for done in session.generate(ids, max_new_tokens, loaded.stop):
        rounds.append(done)
        if not as_json:
            shown = _show_round(
                loaded.tokenizer, session.tokens[len(ids) :], bool(done.accepted), shown
            )
    drafted = [r for r in rounds if r.drafted]
    seconds = sum(r.draft_seconds + r.verify_seconds for r in rounds[1:])
    written = session.tokens[len(ids) :]
    speed = (len(written) - 1) / seconds if seconds else None
    mal = sum(r.accepted + 1 for r in drafted) / len(drafted) if drafted else None
    if as_json:
        figures = {
            "arm": arm,
            "text": loaded.tokenizer.decode(written, skip_special_tokens=True),
            "token_ids": written,
            "prompt_tokens": len(ids),
            "finish": session.finish,
            "prefill_seconds": session.prefill_seconds,
            "decode_seconds": seconds,
            "tokens_per_second": speed,
            "mal": mal,
        }
        typer.echo(json.dumps(figures))
        return
    out.print()
    parts = [f"{arm}: {len(written)} tokens"]
    parts += [f"{speed:.1f} tokens/s"] if speed else []
    parts += [f"{mal:.2f} tokens a verification"] if mal else []
    parts += [
        f"prefill of {len(ids)} tokens {session.prefill_seconds:.2f} s",
        f"ended by {session.finish}",
    ]
    err.print(f"[dim]{', '.join(parts)}[/]", highlight=False, soft_wrap=True)


@app.command()
def demo(out_dir: Path = DEMO_OUT, as_json: bool = JSON) -> None:
    """A long session three ways (AR, Frozen, SharpDraft), side by side at growing context
    lengths."""
    from ..decode.session import Session
    from ..lab.runs import EDGES, Plan, run_recording
    from ..lab.runs import arm as arm_named
    from ..workloads.tasks import recordings

    loaded = _Loaded(_BUILT_IN, None, None, None, need_drafter=True)
    drafter, policy = loaded.drafter, loaded.policy
    assert drafter is not None and policy is not None
    recording = recordings()[0]
    arms = tuple(arm_named(name, policy) for name in ("ar", "frozen", "sharpdraft"))
    plan = Plan(_BUILT_IN, "built-in", None, arms, arms[1:], masses_every=8)
    err.print(
        f"[bold]One session of {_BUILT_IN}, three ways.[/] '{recording.name}' is a conversation of "
        f"{len(recording.tokens)} tokens.\nAt {len(EDGES)} points the next answer is written by "
        "the target alone (AR), with its DFlash drafter, trained on\n512 tokens of context "
        f"(Frozen), and with that drafter's Queries scaled above {policy.reference} Keys "
        "(SharpDraft).\nAll three must write the same tokens; they differ in speed.\n",
        highlight=False,
    )
    rows: list[dict[str, Any]] = []
    session = Session(loaded.target, drafter)
    with _progress(len(EDGES), "starting") as (progress, bar):

        def on_row(row: dict[str, Any]) -> None:
            rows.append(row)
            progress.advance(bar)
            _show_answer(progress.console, loaded.tokenizer, row)

        def on_progress(text: str) -> None:
            progress.update(bar, description=text)

        run_recording(session, recording, plan, loaded.stop, [], on_row, on_progress)
    _report(rows, plan.edges, out_dir, f"{_BUILT_IN}, session {recording.name}", as_json)


@app.command()
def bench(
    prompts: Path | None = PROMPTS,
    target: str = TARGET,
    drafter: str | None = DRAFTERS,
    arms: str = ARMS,
    replay: str = REPLAY,
    sessions: int | None = SESSIONS,
    turns_per_bucket: int = TURNS,
    mass_every: int = MASS,
    answer_tokens: int = ANSWER,
    reference: int | None = REFERENCE,
    block: int | None = BLOCK,
    temperature: float = TEMPERATURE,
    seed: int | None = SEED,
    device: str | None = DEVICE,
    weights: str | None = WEIGHTS,
    engine: str | None = ENGINE,
    engine_args: str = ENGINE_ARGS,
    base_url: str | None = BASE_URL,
    concurrency: int = CONCURRENCY,
    out_dir: Path = BENCH_OUT,
    as_json: bool = JSON,
) -> None:
    """Compare arms on long sessions, by context length: in the lab's own loop, in vLLM, or in
    running servers."""
    if temperature and (engine is not None or base_url is not None or replay):
        raise SharpDraftError(
            "--temperature is for timed arms of the lab's own loop: a replay follows a known text"
        )
    if engine is not None or base_url is not None:
        if weights is not None:
            raise SharpDraftError(
                "--weights is for the lab's own loop: tell an engine with --engine-args"
            )
        _bench_engines(
            engine,
            engine_args,
            base_url,
            concurrency,
            prompts=prompts,
            answer_tokens=answer_tokens,
            target=target,
            drafter=drafter,
            arms=arms,
            sessions=sessions,
            turns_per_bucket=turns_per_bucket,
            reference=reference,
            block=block,
            out_dir=out_dir,
            as_json=as_json,
        )
        return
    from ..decode.sampling import Sampling
    from ..decode.session import Session
    from ..lab.runs import Plan, RunLog, arms_of, measured_turns, run_live, run_recording
    from ..lab.runs import arm as arm_named
    from ..method.policies import REPORTED_SETTINGS
    from ..workloads.tasks import built_in, digest, from_file, recordings

    timed_names, replay_names = (
        [name.strip() for name in names.split(",") if name.strip()] for names in (arms, replay)
    )
    for name in (*timed_names, *replay_names):
        arm_named(name, REPORTED_SETTINGS["dflash"])
    if not timed_names:
        raise SharpDraftError("--arms names no arm")
    if "ar" in replay_names:
        raise SharpDraftError("--replay takes drafting arms only: ar drafts nothing")
    every_task = from_file(prompts, answer_tokens) if prompts else built_in()
    tasks = every_task[:sessions]
    recorded = recordings()[:sessions] if prompts is None and target == _BUILT_IN else []
    loaded = _Loaded(
        target, drafter, device, reference, need_drafter=True, several=True, weights=weights
    )
    session = Session(loaded.target, loaded.drafter, block=block)
    named = target if weights is None else f"{target}, weights in {weights}"
    plan = Plan(
        named,
        drafter or "built-in",
        block,
        arms_of(timed_names, loaded.policies),
        arms_of(replay_names, loaded.policies),
        turns_per_bucket,
        masses_every=mass_every,
        tasks=digest(every_task),
        sampling=Sampling(temperature, seed=seed),
    )
    log = RunLog(out_dir / "rows.jsonl", plan)
    total = sum(len(task.turns) for task in tasks)
    if recorded:
        total = sum(len(measured_turns(r, plan, loaded.target.max_positions)) for r in recorded)
    with _resumable(str(log.path)), _progress(total, "starting") as (progress, bar):
        progress.advance(bar, len(log.rows))

        def on_row(row: dict[str, Any]) -> None:
            log.add(row)
            progress.advance(bar)

        def on_progress(text: str) -> None:
            progress.update(bar, description=text)

        for recording in recorded:
            run_recording(session, recording, plan, loaded.stop, log.rows, on_row, on_progress)
        for task in () if recorded else tasks:
            session.rewind(0)
            turns = (loaded.prompt(turn, first=i == 0) for i, turn in enumerate(task.turns))
            run_live(session, task, turns, plan, loaded.stop, log.rows, on_row, on_progress)
    _report(
        log.rows,
        plan.edges,
        out_dir,
        f"{named}, {drafter or 'built-in drafter'}",
        as_json,
        temperature > 0,
    )


def _bench_engines(
    engine: str | None,
    engine_args: str,
    base_url: str | None,
    concurrency: int,
    *,
    prompts: Path | None,
    answer_tokens: int,
    target: str,
    drafter: str | None,
    arms: str,
    sessions: int | None,
    turns_per_bucket: int,
    reference: int | None,
    block: int | None,
    out_dir: Path,
    as_json: bool,
) -> None:
    """One engine or server an arm, taking turns."""
    from ..hub.models import drafter_dir, load_tokenizer
    from ..lab.backends.server import Server
    from ..lab.backends.vllm import Engine
    from ..lab.engines import Backend, Prompt, asked_for, groups_of, recorded_prompts, run_groups
    from ..lab.runs import Arm, Plan, RunLog
    from ..lab.runs import arm as arm_named
    from ..train.sessions import chat_tokens
    from ..workloads.tasks import digest, from_file, recordings

    if engine not in (None, "vllm"):
        raise SharpDraftError(
            f"--engine {engine}: known is vllm; any server is reached with --base-url"
        )
    if engine is not None and base_url is not None:
        raise SharpDraftError("give --engine or --base-url, not both")
    try:
        options = json.loads(engine_args)
    except ValueError as error:
        raise SharpDraftError(f"--engine-args is no JSON: {error}") from error
    if not isinstance(options, dict):
        raise SharpDraftError("--engine-args is no JSON object")
    where, tokenizer, limit, ends = load_tokenizer(target)
    directory = drafter_dir(target, drafter)
    servers: dict[str, str] = {}
    if base_url is not None:
        pairs = (each.rpartition("=") for each in base_url.split(","))
        servers = {name or "server": url for name, _, url in pairs}
    elif directory is None:
        raise SharpDraftError(f"no drafter comes with {target}: give one with --drafter")
    chosen: tuple[Arm, ...] = ()
    if directory is not None and not servers:
        policy = _policy(directory, reference)
        chosen = tuple(arm_named(name.strip(), policy) for name in arms.split(",") if name.strip())
    if windowed := [arm.name for arm in chosen if arm.window]:
        raise SharpDraftError(
            f"vLLM takes no drafter window as a setting: leave out {', '.join(windowed)}"
        )
    size = block or (_block_of(directory) if directory else 0)
    tasks = from_file(prompts, answer_tokens) if prompts else []
    if long := [task.name for task in tasks if len(task.turns) > 1]:
        raise SharpDraftError(f"an engine is given single prompts: {long[0]} has several turns")
    plan = Plan(
        target,
        f"{drafter or 'built-in'} in {base_url or engine} with {engine_args}, {concurrency} at "
        "once",
        size,
        chosen,
        (),
        turns_per_bucket,
        tasks=digest(tasks),
    )
    texts = [
        Prompt(t.name, tuple(chat_tokens(tokenizer, t.turns[0], first=True)), t.answer_tokens)
        for t in tasks
    ] or recorded_prompts(recordings()[:sessions], plan, limit)
    groups = groups_of(texts, plan.edges, concurrency)
    log = RunLog(out_dir / "rows.jsonl", plan)
    backends: dict[str, Backend] = {}
    engines: list[Engine] = []
    try:
        with _resumable(str(log.path)), _progress(len(groups), "starting") as (progress, bar):
            progress.advance(bar, len(log.rows))

            def on_row(row: dict[str, Any]) -> None:
                log.add(row)
                progress.advance(bar)

            if len(log.rows) < len(groups):
                for name, url in servers.items():
                    backends[name] = Server(url)
                for arm in chosen:
                    progress.update(bar, description=f"starting vLLM for {arm.name}")
                    used = directory if arm.drafting else None
                    log_file = out_dir / f"vllm-{arm.name}.log"
                    engines.append(Engine(where, used, size - 1, asked_for(arm), options, log_file))
                    backends[arm.name] = engines[-1]
                run_groups(
                    groups,
                    backends,
                    ends,
                    log.rows,
                    on_row,
                    lambda text: progress.update(bar, description=text),
                )
    finally:
        for started in engines:
            started.close()
    _report(
        log.rows,
        plan.edges,
        out_dir,
        f"{target} in {base_url or engine}, {concurrency} at once",
        as_json,
    )


def _block_of(directory: Path) -> int:
    """Tokens of a block, anchor included, that a drafter's config names; 6 where it names none."""
    from ..drafters.checkpoint import read_json

    config = read_json(directory)
    if "num_drafts" in config:
        return int(config["num_drafts"]) + 1
    return int((config.get("dflash_config") or {}).get("block_size", config.get("block_size", 6)))


def _train_command(family: str, name: str) -> None:
    def command(
        out_dir: Path = TRAIN_OUT,
        target: str = TARGET,
        tokens: int = TOKENS,
        context: int = CONTEXT,
        batch: int = BATCH,
        steps: int | None = STEPS,
        text: Path | None = TEXT,
        start: str | None = START,
        first_wave: int = WAVE,
        device: str | None = DEVICE,
    ) -> None:
        from ..hub.models import checkpoint_dir
        from ..train.pipeline import distil

        with _resumable(f"what is in {out_dir}"):
            drafter = distil(
                family,
                target,
                out_dir,
                tokens=tokens,
                context=context,
                batch=batch,
                steps=steps,
                device=device,
                text=text,
                start=checkpoint_dir(start) if start else None,
                first_wave=first_wave,
                progress=_progress,
            )
        typer.echo(drafter)

    help_text = (
        f"Let the target write text, then train {name} drafter on it. The same command resumes."
    )
    train_app.command(family, help=help_text)(command)


_train_command("dflash", "a DFlash")
_train_command("eagle3", "an EAGLE 3.1")
_train_command("pard", "a PARD")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor(context: typer.Context, engine: str = DOCTOR_ENGINE, as_json: bool = JSON) -> None:
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


@app.command()
def record(
    out_file: Path = RECORD_OUT,
    target: str = TARGET,
    sessions: int | None = SESSIONS,
    length: int = LENGTH,
    device: str | None = DEVICE,
) -> None:
    """Let a target write the built-in sessions once, so that a bench can start deep inside them."""
    from ..train.pipeline import record_sessions

    record_sessions(
        target, out_file, sessions=sessions, length=length, device=device, progress=_progress
    )
    typer.echo(out_file)


class _Loaded:
    """Target, tokenizer, drafter and its policy, as the options name them; of several drafters, the
    policy of each."""

    def __init__(
        self,
        target: str,
        drafter: str | None,
        device: str | None,
        reference: int | None,
        *,
        need_drafter: bool,
        several: bool = False,
        weights: str | None = None,
    ) -> None:
        from ..drafters import load_drafter
        from ..hub.models import drafter_dir, load_target, stop_tokens
        from ..lab.several import Several

        if weights not in (None, "bfloat16"):
            raise SharpDraftError(
                f"--weights {weights}: the only choice is bfloat16; leave it out for weights as "
                "they are"
            )
        names = drafter.split(",") if drafter and several else [drafter]
        directories = [
            found for name in names if (found := drafter_dir(target, name and name.strip()))
        ]
        if need_drafter and not directories:
            raise SharpDraftError(
                f"no drafter comes with {target}: give one with --drafter, or train one"
            )
        labels = [name.strip().rstrip("/").rpartition("/")[2] if name else "" for name in names]
        if len(set(labels)) < len(labels):
            raise SharpDraftError(
                f"--drafter {drafter}: their names must differ, to tell their arms apart"
            )
        self.policies = {
            name: _policy(path, reference) for name, path in zip(labels, directories, strict=False)
        }
        with err.status(f"loading {target}"):
            self.target, self.tokenizer = load_target(
                target, device=device, rounded=weights is not None
            )
            drafters = {
                n: load_drafter(path, self.target)
                for n, path in zip(labels, directories, strict=False)
            }
        self.drafter: Any = (
            Several(drafters) if len(drafters) > 1 else next(iter(drafters.values()), None)
        )
        self.policy = next(iter(self.policies.values()), None)
        self.stop = stop_tokens(self.target.config.eos_token_id)

    def prompt(self, turn: str, *, first: bool) -> list[int]:
        from ..train.sessions import chat_tokens

        return chat_tokens(self.tokenizer, turn, first=first)


def _policy(directory: Path, reference: int | None) -> FixedSlope:
    """What a drafter's directory recommends, with --reference in the place of its N0 if given."""
    from ..method.settings import recommended

    policy, found = recommended(directory)
    if reference is not None:
        try:
            return policy.with_reference(reference)
        except ValueError as error:
            raise SharpDraftError(f"--reference: {error}") from error
    if not found:
        err.print(
            f"note: {directory} has no sharpdraft.json; using the paper's setting "
            f"(N0 = {policy.reference}), which needs validation for this drafter",
            soft_wrap=True,
        )
    return policy


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
    # Where nobody watches, even a transient bar would leave an empty line.
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield progress, progress.add_task(text, total=total)


@contextmanager
def _resumable(what: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise SharpDraftError(
            f"stopped; {what} is kept, and the same command goes on from there"
        ) from None


def _show_round(tokenizer: Any, written: Sequence[int], accepted: bool, shown: str) -> str:
    """Print what is new, drafts in green; returns all that has been shown."""
    whole = tokenizer.decode(written, skip_special_tokens=True)
    # A token can be part of a character: what is not yet whole is shown with the next one.
    if whole.endswith("\ufffd"):
        return shown
    drafts = len(tokenizer.decode(written[:-1], skip_special_tokens=True)) if accepted else 0
    middle = max(len(shown), min(drafts, len(whole)))
    line = f"[green]{escape(whole[len(shown) : middle])}[/]{escape(whole[middle:])}"
    out.print(line, end="", highlight=False, soft_wrap=True)
    return str(whole)


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


def _report(
    rows: Sequence[dict[str, Any]],
    edges: Sequence[int],
    out_dir: Path,
    title: str,
    as_json: bool,
    sampled: bool = False,
) -> None:
    from ..lab.report import figure, summarise, table

    if not rows:
        raise SharpDraftError(
            "nothing was measured: no answer of the sessions fits into the context"
        )
    cells = summarise(rows, edges)
    first = next(iter(rows[0]["arms"]))
    agreed = sum(
        arm["tokens"] for row in rows for name, arm in row["arms"].items() if name != first
    )
    differences = [
        {"session": row["session"], "turn": row["turn"], "arm": name, **what}
        for row in rows
        for name, what in row["differences"].items()
    ]
    picture: Path | None = out_dir / "figure.png"
    try:
        figure(cells, edges, out_dir / "figure.png", title)
    except SharpDraftError as error:
        picture = None
        err.print(f"note: {error}", highlight=False)
    if as_json:
        shown = None if picture is None else str(picture)
        typer.echo(
            json.dumps(
                {"cells": [asdict(c) for c in cells], "differences": differences, "figure": shown}
            )
        )
        return
    out.print(table(cells, edges, title))
    if not differences and not sampled:
        out.print(
            f"All {agreed} tokens of the other arms are those that {first} wrote.", highlight=False
        )
    for d in differences:
        gap = f", where the target's two logits are {d['gap']:.1e} apart" if "gap" in d else ""
        out.print(
            f"{d['session']}, turn {d['turn']}: {d['arm']} differs from {first} at {d['at']} of "
            f"the answer{gap}",
            highlight=False,
        )
    if picture is not None:
        out.print(f"figure: {picture}", highlight=False)
