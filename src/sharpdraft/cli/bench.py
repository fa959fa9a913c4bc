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
    if options.base_url is None and (options.chat or options.served_model is not None):
        raise SharpDraftError("--chat and --served-model are for servers: give --base-url")
    if options.temperature and (elsewhere or options.replay):
        raise SharpDraftError(
            "--temperature is for timed arms of the lab's own loop: a replay follows a known text"
        )
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
    from .loading import Drafters, Loaded, check_arms, names_of, read_chat
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
    chat = read_chat(options)
    chat.check(() if work.recorded else work.tasks)
    loaded = Loaded.load(options, drafters, chat)
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
        from .loading import RECORDED_AS_IT_IS, chat_settings

        prompts = options.prompts
        tasks = from_file(prompts, options.answer_tokens) if prompts else built_in()
        ours = prompts is None and options.target == SMOLLM2
        recorded = recordings()[: options.sessions] if ours else []
        if recorded and chat_settings(options).to_dict():
            raise SharpDraftError(RECORDED_AS_IT_IS)
        return cls(tasks[: options.sessions], recorded, digest(tasks))

    def plan(
        self, options: BenchOptions, timed: tuple[Arm, ...], replayed: tuple[Arm, ...]
    ) -> Plan:
        from ..decode.sampling import Sampling
        from ..lab.plan import Plan
        from .loading import chat_settings

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
            template=chat_settings(options).to_dict(),
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
            known = {(row["session"], row["turn"]) for row in log.rows}
            for task in () if self.recorded else self.tasks:
                if all((task.name, number) in known for number in range(len(task.turns))):
                    continue
                session.rewind(0)
                turns, several = loaded.chat.prompts(task), len(task.turns) > 1
                end = loaded.chat.end_of_turn if several else None
                run_live(
                    *(session, task, turns, plan, stop, log.rows, on_row, on_progress),
                    end_of_turn=end,
                )
