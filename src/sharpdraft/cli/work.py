"""What a bench in the lab's own loop measures: sessions of workloads, or of a prompt file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import SharpDraftError
from ..hub.smollm2 import SMOLLM2
from .loading import RECORDED_AS_IT_IS, Loaded, chat_settings, context_of
from .options import BenchOptions, names_of

if TYPE_CHECKING:
    from ..decode.session import Arm
    from ..lab.plan import Plan, RunLog
    from ..workloads.chat import Chat
    from ..workloads.tasks import Recording, Task
    from ..workloads.workload import Reader, Workload


@dataclass(frozen=True)
class _Part:
    """The sessions of one workload: recorded where they are, or else tasks. workload: "" where none
    was named."""

    workload: str
    tasks: Sequence[Task]
    recorded: Sequence[Recording]

    @classmethod
    def named(cls, workload: Workload, reader: Reader, target: str) -> _Part:
        """Raises SharpDraftError where the workload's source is missing."""
        from ..workloads.registry import tasks_of
        from ..workloads.tasks import recordings

        found = recordings(workload.name)[: reader.sessions] if target == SMOLLM2 else []
        recorded = [replace(each, name=f"{workload.name}/{each.name}") for each in found]
        return cls(workload.name, () if recorded else tasks_of(workload, reader), recorded)


@dataclass(frozen=True)
class Work:
    """What is measured. digest: tells it from other work; temperature: at which answers are
    chosen."""

    parts: Sequence[_Part]
    digest: str
    temperature: float

    @classmethod
    def of(cls, options: BenchOptions, chat: Chat) -> Work:
        """Raises SharpDraftError for what cannot be measured like this."""
        from ..workloads.tasks import built_in, digest, from_file, recordings

        if options.workload is not None:
            found = cls._named(options, chat)
        else:
            prompts, ours = options.prompts, options.target == SMOLLM2
            tasks = from_file(prompts, options.answer_tokens) if prompts else built_in()
            recorded = recordings()[: options.sessions] if ours and prompts is None else []
            own = () if recorded else tasks[: options.sessions]
            found = cls((_Part("", own, recorded),), digest(tasks), options.temperature)
        if any(part.recorded for part in found.parts) and chat_settings(options).to_dict():
            raise SharpDraftError(RECORDED_AS_IT_IS)
        return found

    @classmethod
    def _named(cls, options: BenchOptions, chat: Chat) -> Work:
        from ..workloads.registry import available, workloads_of
        from ..workloads.tasks import digest
        from ..workloads.workload import Reader

        workloads = workloads_of(names_of(options.workload or ""))
        temperatures = {options.temperature or each.temperature for each in workloads}
        if len(temperatures) > 1:
            sampled = ", ".join(each.name for each in workloads if each.temperature)
            raise SharpDraftError(
                f"{sampled} is measured on sampled answers, the others on greedy ones: give it a "
                "bench of its own, or one --temperature for all"
            )
        (temperature,) = temperatures
        reader = Reader(chat.tokenizer, context_of(options.target), options.sessions)
        parts = available(workloads, lambda each: _Part.named(each, reader, options.target))
        digests = [digest(part.recorded or part.tasks) for part in parts]
        return cls(parts, ",".join(digests), temperature)

    @property
    def tasks(self) -> list[Task]:
        """All that are not recorded."""
        return [task for part in self.parts for task in part.tasks]

    @property
    def workloads(self) -> tuple[str, ...]:
        """Those that were named."""
        return tuple(part.workload for part in self.parts if part.workload)

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
            sampling=Sampling(self.temperature, seed=options.seed),
            template=chat_settings(options).to_dict(),
            workloads=self.workloads,
        )

    def run(self, loaded: Loaded, plan: Plan, log: RunLog) -> None:
        """Measure what `log` does not hold yet."""
        from ..lab.measure import run_recording
        from ..lab.plan import measured_turns
        from .progress import bar, resumable

        limit = loaded.target.max_positions
        recorded = [each for part in self.parts for each in part.recorded]
        total = sum(len(task.turns) for task in self.tasks)
        total += sum(len(measured_turns(each, plan, limit)) for each in recorded)
        with resumable(str(log.path)), bar(total, "starting") as (progress, task_id):
            progress.advance(task_id, len(log.rows))

            def on_progress(text: str) -> None:
                progress.update(task_id, description=text)

            for part in self.parts:
                said = {"workload": part.workload} if part.workload else {}

                def on_row(row: dict[str, Any], said: dict[str, str] = said) -> None:
                    log.add({**said, **row})
                    progress.advance(task_id)

                watched = (on_row, on_progress)
                for each in part.recorded:
                    run_recording(loaded.session, each, plan, loaded.stop, log.rows, *watched)
                for task in part.tasks:
                    _run_task(loaded, task, plan, log, *watched)


def _run_task(loaded: Loaded, task: Task, plan: Plan, log: RunLog, *watched: Any) -> None:
    """Measure the turns of a session that `log` does not hold yet."""
    from ..lab.measure import run_live

    known = {row["turn"] for row in log.rows if row["session"] == task.name}
    if known.issuperset(range(len(task.turns))):
        return
    lead = loaded.chat.lead(task)
    if not lead:
        loaded.session.rewind(0)
    run_live(
        *(loaded.session, task, loaded.chat.prompts(task), plan, loaded.stop, log.rows, *watched),
        end_of_turn=loaded.chat.end_of_turn if len(task.turns) > 1 else None,
        lead=lead,
    )
