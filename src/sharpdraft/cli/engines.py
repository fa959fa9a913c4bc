"""`sharpdraft bench` in serving engines: one vLLM, or one running server, an arm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SharpDraftError
from ..hub.smollm2 import SMOLLM2
from .loading import RECORDED_AS_IT_IS, Drafters, chat_settings, check_arms
from .options import LOOKUP, BenchOptions
from .progress import bar, resumable
from .report import Run, report
from .servers import Servers
from .work import Work

if TYPE_CHECKING:
    from ..decode.session import Arm
    from ..lab.backends.groups import Backend, Prompt
    from ..lab.plan import Plan
    from ..workloads.chat import Chat, ChatSettings
    from ..workloads.tasks import Task


def bench_engines(options: BenchOptions) -> None:
    """Compare arms in vLLM, or running servers. Raises SharpDraftError."""
    from ..hub.targets import load_tokenizer
    from ..lab.backends.groups import fitting, groups_of, recorded_prompts, run_groups
    from ..lab.plan import Plan, RunLog
    from ..workloads.chat import Chat
    from ..workloads.tasks import digest, recordings

    where = _where(options)
    tasks = [] if options.workload is not None else _tasks(options)
    settings = _settings(options)
    directory, tokenizer, limit, ends = load_tokenizer(options.target)
    chat = Chat(tokenizer, settings)
    work = None if options.workload is None else _work(options, chat)
    tasks = tasks if work is None else work.tasks
    chat.check(tasks)
    plan = Plan(
        options.target,
        f"{options.drafter or 'built-in'} in {where.name} with {options.engine_args}, "
        f"{options.concurrency} at once",
        where.arms,
        turns_per_bucket=options.turns_per_bucket,
        tasks=digest(tasks) if work is None else work.digest,
        template=settings.to_dict(),
        workloads=() if work is None else work.workloads,
    )
    if work is not None:
        prompts = _prompts_of(work, plan, chat, limit)
    elif tasks:
        prompts = _prompts(tasks, chat)
    else:
        prompts = recorded_prompts(recordings()[: options.sessions], plan, limit)
    if isinstance(where, Servers):
        where = where.reading(chat, tasks, prompts)
    prompts, unfitting = fitting(prompts, limit)
    groups = groups_of(prompts, options.concurrency)
    log = RunLog(options.out_dir / "rows.jsonl", plan)
    with resumable(str(log.path)), bar(len(prompts), "starting") as (progress, task):
        answered = sum(row["requests"] for row in log.rows)
        progress.advance(task, answered)
        for row in unfitting:
            log.add(row)

        def on_row(row: dict[str, Any]) -> None:
            log.add(row)
            progress.advance(task, row.get("requests", 1))

        def on_progress(text: str) -> None:
            progress.update(task, description=text)

        if answered < len(prompts):
            with ExitStack() as open_ones:
                backends = {
                    name: open_ones.enter_context(closing(backend))
                    for name, backend in where.start(directory, options.out_dir, on_progress)
                }
                run_groups(groups, backends, chat.stops(ends), log.rows, on_row, on_progress)
    title = f"{options.target} in {where.name}, {options.concurrency} at once"
    title = ", ".join((title, *plan.workloads))
    report(Run(log.rows, plan, options.out_dir, title), options.as_json)


@dataclass(frozen=True)
class _Engines:
    """A vLLM for each arm. drafter: None for arms that look up, and where none drafts."""

    name: str
    arms: tuple[Arm, ...]
    drafter: Path | None
    arguments: dict[str, Any]

    def start(
        self, target: Path, out_dir: Path, say: Callable[[str], None]
    ) -> Iterator[tuple[str, Backend]]:
        from ..lab.backends.vllm import Engine

        for arm in self.arms:
            say(f"starting vLLM for {arm.name}")
            log = out_dir / f"vllm-{arm.name.replace('/', '-')}.log"
            yield arm.name, Engine.of(arm, target, self.drafter, self.arguments, log)


def _where(options: BenchOptions) -> Servers | _Engines:
    if options.engine not in (None, "vllm"):
        raise SharpDraftError(
            f"--engine {options.engine}: known is vllm; any server is reached with --base-url"
        )
    if options.engine is not None and options.base_url is not None:
        raise SharpDraftError("give --engine or --base-url, not both")
    if options.base_url is not None:
        return Servers.of(options)
    try:
        arguments = json.loads(options.engine_args)
    except ValueError as error:
        raise SharpDraftError(f"--engine-args is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise SharpDraftError("--engine-args is no JSON object")
    from ..adapters.vllm.request import VLLM

    names = options.timed
    check_arms(names)
    drafters = Drafters.find(options, names)
    arms, source = drafters.arms(names, VLLM), drafters.sources.get("")
    if source is not None and source.directory is not None and source.lookup:
        raise SharpDraftError(
            f"--drafter {options.drafter}: vLLM has no {LOOKUP} beside a drafter; compare "
            f"--drafter {LOOKUP} and the drafter by themselves"
        )
    return _Engines("vllm", arms, None if source is None else source.directory, arguments)


def _tasks(options: BenchOptions) -> list[Task]:
    from ..workloads.tasks import from_file

    if options.prompts is None:
        if options.chat:
            raise SharpDraftError(
                "the recorded sessions are token ids, and --chat sends text: give --prompts"
            )
        if options.target != SMOLLM2:
            raise SharpDraftError(
                f"the recorded sessions are those of {SMOLLM2}: give --prompts for another target"
            )
        return []
    tasks = from_file(options.prompts, options.answer_tokens)
    _check_single(tasks)
    return tasks


def _check_single(tasks: Sequence[Task]) -> None:
    if long := [task.name for task in tasks if len(task.turns) > 1]:
        raise SharpDraftError(f"an engine is given single prompts: {long[0]} has several turns")


def _work(options: BenchOptions, chat: Chat) -> Work:
    """The named workloads. Raises SharpDraftError for one that cannot be sent."""
    work = Work.of(options, chat)
    if work.temperature:
        raise SharpDraftError(
            f"--workload {options.workload}: sampled answers are for the lab's own loop"
        )
    if options.chat and (named := [part.workload for part in work.parts if part.recorded]):
        raise SharpDraftError(
            f"{', '.join(named)}: recorded sessions are token ids, and --chat sends text"
        )
    _check_single(work.tasks)
    return work


def _settings(options: BenchOptions) -> ChatSettings:
    """What the chat template is told. Raises SharpDraftError where nothing is rendered here."""
    settings = chat_settings(options)
    if options.prompts is None and options.workload is None and settings.to_dict():
        raise SharpDraftError(RECORDED_AS_IT_IS)
    if options.chat and (settings.arguments or settings.raw):
        raise SharpDraftError(
            "with --chat the template is the server's: tell the server, or leave --template-arg "
            "and --raw out"
        )
    return settings


def _prompts_of(work: Work, plan: Plan, chat: Chat, limit: int) -> list[Prompt]:
    from ..lab.backends.groups import recorded_prompts

    return [
        replace(prompt, workload=part.workload)
        for part in work.parts
        for prompt in (
            *recorded_prompts(part.recorded, plan, limit),
            *_prompts(part.tasks, chat),
        )
    ]


def _prompts(tasks: Sequence[Task], chat: Chat) -> list[Prompt]:
    from ..lab.backends.groups import Prompt

    return [
        Prompt(task.name, tuple(next(chat.prompts(task))), task.answer_tokens) for task in tasks
    ]
