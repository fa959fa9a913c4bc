"""`sharpdraft bench`: arms side by side, in the lab's own loop; engines.py has the others."""

from __future__ import annotations

import json

import typer

from ..errors import SharpDraftError
from .options import BenchOptions, names_of, taking


@taking(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Compare arms on long sessions by context length: here, in vLLM or in running servers."""
    if options.workload == "list":
        _list_workloads(options.as_json)
        return
    if options.workload is not None and options.prompts is not None:
        raise SharpDraftError("give --workload or --prompts, not both")
    elsewhere = options.engine is not None or options.base_url is not None
    if options.base_url is None and (options.chat or options.served_model is not None):
        raise SharpDraftError("--chat and --served-model are for servers: give --base-url")
    if options.temperature and elsewhere:
        raise SharpDraftError("--temperature is for the lab's own loop: engines are asked greedily")
    _check_lab_options(options, elsewhere)
    if elsewhere:
        from .engines import bench_engines

        bench_engines(options)
    else:
        _bench(options)


def _check_lab_options(options: BenchOptions, elsewhere: bool) -> None:
    """Refuse what would be ignored. Raises SharpDraftError."""
    lab = {
        "--weights": options.weights,
        "--family": options.family,
        "--device": options.device,
        "--replay": options.replay,
        "--mass-every": options.mass_every,
    }
    for name, given in lab.items():
        if given and elsewhere:
            raise SharpDraftError(
                f"{name} is for the lab's own loop; --engine-args has what vLLM is told"
            )
    others = {
        "--concurrency": options.concurrency != 1,
        "--engine-args": options.engine_args != "{}",
    }
    for name, given in others.items():
        if given and not elsewhere:
            raise SharpDraftError(f"{name} is for --engine and --base-url")
    if options.mass_every and not options.replay:
        raise SharpDraftError("--mass-every is for replayed arms: name some with --replay")


def _bench(options: BenchOptions) -> None:
    from ..decode.session import HOST
    from ..lab.plan import RunLog
    from .loading import Drafters, Loaded, check_arms, read_chat
    from .report import Run, report
    from .work import Work

    timed, replayed = options.timed, names_of(options.replay)
    for names in (timed, replayed):
        check_arms(names)
    if not timed:
        raise SharpDraftError("--arms names no arm")
    if "ar" in replayed:
        raise SharpDraftError("--replay takes drafting arms only: ar drafts nothing")
    chat = read_chat(options)
    work = Work.of(options, chat)
    drafters = Drafters.find(options, [*timed, *replayed], several=True)
    plan = work.plan(options, drafters.arms(timed, HOST), drafters.arms(replayed, HOST))
    chat.check(work.tasks)
    loaded = Loaded.load(options, drafters, chat)
    for arm in plan.arms:
        # What this drafter cannot do is refused before anything is measured.
        loaded.session.use(arm)
    log = RunLog(options.out_dir / "rows.jsonl", plan)
    work.run(loaded, plan, log)
    title = ", ".join((plan.target, options.drafter or "built-in drafter", *plan.workloads))
    if plan.sampling.temperature:
        title += f", at temperature {plan.sampling.temperature:g}"
    report(Run(log.rows, plan, options.out_dir, title), options.as_json)


def _list_workloads(as_json: bool) -> None:
    from ..workloads.registry import WORKLOADS

    told = [
        {key: getattr(each, key) for key in ("name", "about", "source", "licence", "temperature")}
        for each in WORKLOADS.values()
    ]
    if as_json:
        typer.echo(json.dumps(told))
        return
    for each in told:
        typer.echo(f"{each['name']}: {each['about']}")
        typer.echo(f"  from {each['source']}")
        typer.echo(f"  licence: {each['licence']}")
    typer.echo("A bench reads the half of each that is held out from training.")
