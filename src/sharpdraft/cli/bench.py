"""`sharpdraft bench`: arms side by side, in the lab's own loop; engines.py has the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SharpDraftError
from ..hub.smollm2 import SMOLLM2
from .options import BenchOptions, taking

if TYPE_CHECKING:
    from ..decode.session import Arm
    from ..lab.plan import Plan, RunLog
    from ..workloads.tasks import Recording, Task
    from .loading import Loaded


@taking(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Compare arms on long sessions by context length: here, in vLLM or in running servers."""
    elsewhere = options.engine is not None or options.base_url is not None
    if options.temperature and (elsewhere or options.replay):
        raise SharpDraftError(
            "--temperature is for timed arms of the lab's own loop: a replay follows a known text"
        )
    if elsewhere and options.weights is not None:
        raise SharpDraftError(
            "--weights is for the lab's own loop: tell an engine with --engine-args"
        )
    if elsewhere:
        from .engines import bench_engines

        bench_engines(options)
    else:
        _bench(options)


def _bench(options: BenchOptions) -> None:
    from ..decode.session import HOST
    from ..lab.plan import RunLog
    from .loading import Drafters, Loaded, check_arms, names_of
    from .report import Run, report

    timed, replayed = names_of(options.arms), names_of(options.replay)
    for names in (timed, replayed):
        check_arms(names)
    if not timed:
        raise SharpDraftError("--arms names no arm")
    if "ar" in replayed:
        raise SharpDraftError("--replay takes drafting arms only: ar drafts nothing")
    work = _Work.of(options)
    drafters = Drafters.find(options, [*timed, *replayed], several=True)
    plan = work.plan(options, drafters.arms(timed, HOST), drafters.arms(replayed, HOST))
    loaded = Loaded.load(options, drafters)
    for arm in plan.arms:
        # What this drafter cannot do is refused before anything is measured.
        loaded.session.use(arm)
    log = RunLog(options.out_dir / "rows.jsonl", plan)
    work.run(loaded, plan, log)
    title = f"{plan.target}, {options.drafter or 'built-in drafter'}"
    report(Run(log.rows, plan, options.out_dir, title), options.as_json)


@dataclass(frozen=True)
class _Work:
    """What is measured: recorded sessions where there are some, or else tasks."""

    tasks: list[Task]
    recorded: list[Recording]
    digest: str

    @classmethod
    def of(cls, options: BenchOptions) -> _Work:
        from ..workloads.tasks import built_in, digest, from_file, recordings

        prompts = options.prompts
        tasks = from_file(prompts, options.answer_tokens) if prompts else built_in()
        ours = prompts is None and options.target == SMOLLM2
        recorded = recordings()[: options.sessions] if ours else []
        return cls(tasks[: options.sessions], recorded, digest(tasks))

    def plan(
        self, options: BenchOptions, timed: tuple[Arm, ...], replayed: tuple[Arm, ...]
    ) -> Plan:
        from ..decode.sampling import Sampling
        from ..lab.plan import Plan

        weights = f", weights in {options.weights}" if options.weights else ""
        return Plan(
            f"{options.target}{weights}",
            options.drafter or "built-in",
            timed,
            replayed,
            options.turns_per_bucket,
            masses_every=options.mass_every,
            tasks=self.digest,
            sampling=Sampling(options.temperature, seed=options.seed),
        )

    def run(self, loaded: Loaded, plan: Plan, log: RunLog) -> None:
        """Measure what `log` does not hold yet."""
        from ..lab.measure import run_live, run_recording
        from ..lab.plan import measured_turns
        from .progress import bar, resumable

        session, stop = loaded.session, loaded.stop
        total = sum(len(task.turns) for task in self.tasks)
        if self.recorded:
            limit = loaded.target.max_positions
            total = sum(len(measured_turns(each, plan, limit)) for each in self.recorded)
        with resumable(str(log.path)), bar(total, "starting") as (progress, task_id):
            progress.advance(task_id, len(log.rows))

            def on_row(row: dict[str, Any]) -> None:
                log.add(row)
                progress.advance(task_id)

            def on_progress(text: str) -> None:
                progress.update(task_id, description=text)

            for recording in self.recorded:
                run_recording(session, recording, plan, stop, log.rows, on_row, on_progress)
            for task in () if self.recorded else self.tasks:
                session.rewind(0)
                turns = (loaded.prompt(turn, first=not i) for i, turn in enumerate(task.turns))
                run_live(session, task, turns, plan, stop, log.rows, on_row, on_progress)
