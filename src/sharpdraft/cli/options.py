"""What can be said on a command line. A command takes one options object, a dataclass whose fields
are its parameters; what takes long to import is imported when a command runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from ..hub.smollm2 import SMOLLM2

# What arms are called; a test holds it to the words that settings know, which need torch.
ARM_WORDS = (
    "ar",
    "frozen",
    "sharpdraft",
    "sharpdraft@N0",
    "fixed@SCALE",
    "slopes@N0:S/S/...",
    "window@KEYS",
    "sinks@KEYS",
    "drafts@N",
)
_ARM = f"{', '.join(ARM_WORDS)}; + composes."
LOOKUP = "lookup"
"""The drafter that has no checkpoint."""
_DRAFTER = (
    "Directory or hub id of a DFlash, EAGLE-3 or PARD checkpoint; lookup, which drafts what the "
    "text has said before; DRAFTER+lookup, whichever promises more; or dflash, eagle3, pard"
)

_Options = TypeVar("_Options")


def names_of(text: str) -> list[str]:
    """What is named between commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def taking(options: type[_Options]) -> Callable[[Callable[[_Options], None]], Callable[..., None]]:
    """Decorator that shows typer a function of one options object with a parameter for each of its
    fields."""
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(options)  # type: ignore[arg-type]
    ]

    def decorate(run: Callable[[_Options], None]) -> Callable[..., None]:
        @wraps(run)
        def command(**given: Any) -> None:
            run(options(**given))

        command.__annotations__ = {}
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _option(name: str, help: str, shown: str | None = None, least: float | None = None) -> Any:
    return typer.Option(name, help=help, show_default=shown or True, min=least)


Target = Annotated[str, _option("--target", "Built-in name, local directory or hub id.")]
Device = Annotated[str | None, _option("--device", "cpu, cuda or mps.", "the best there is")]
Json = Annotated[bool, _option("--json", "Machine-readable results on stdout.")]
Sessions = Annotated[int | None, _option("--sessions", "How many of the sessions.", "all", least=1)]
Temperature = Annotated[float, _option("--temperature", "0: greedy.", least=0)]
System = Annotated[str | None, _option("--system", "System message for the chat template.", "none")]
TemplateArgs = Annotated[
    list[str] | None,
    _option(
        "--template-arg",
        "NAME=VALUE for the chat template, as enable_thinking=false; can be given again.",
        "none",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which target and drafters, and how they are held."""

    target: Target = SMOLLM2
    drafter: Annotated[
        str | None,
        _option("--drafter", f"{_DRAFTER}: those built in.", "the DFlash one built in"),
    ] = None
    family: Annotated[
        str | None,
        _option("--family", "What --drafter is: dflash, eagle3 or pard.", "told by its checkpoint"),
    ] = None
    drafts: Annotated[
        int | None,
        _option("--drafts", "Tokens drafted in a round.", "the drafter's", least=1),
    ] = None
    device: Device = None
    weights: Annotated[
        str | None,
        _option(
            "--weights",
            "bfloat16: round the target's weights, which a CPU then reads in half the time; some "
            "tokens change.",
            "as they are",
        ),
    ] = None
    system: System = None
    template_arg: TemplateArgs = None
    raw: Annotated[
        bool, _option("--raw", "Take single prompts as they are, without the chat template.")
    ] = False

    @property
    def arm_by_default(self) -> str:
        """The arm of a drafter as it is best run; lookup has no attention to sharpen."""
        return "frozen" if self.drafter == LOOKUP else "sharpdraft"


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    prompt: Annotated[
        str | None, typer.Argument(help="The user's message.", show_default="read from stdin")
    ] = None
    arm: Annotated[
        str | None, _option("--arm", f"One of {_ARM}", "sharpdraft; frozen with lookup")
    ] = None
    max_new_tokens: Annotated[
        int, _option("--max-new-tokens", "Longest answer, tokens.", least=1)
    ] = 512
    temperature: Temperature = 0.0
    top_k: Annotated[
        int, _option("--top-k", "Sample from this many likeliest tokens; 0: all.", least=0)
    ] = 0
    top_p: Annotated[
        float,
        _option("--top-p", "Sample from the likeliest tokens that make up this probability."),
    ] = 1.0
    min_p: Annotated[
        float,
        _option("--min-p", "Leave out tokens below this share of the likeliest's probability."),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        _option("--repetition-penalty", "Above 1 makes tokens that occurred less likely."),
    ] = 1.0
    seed: Annotated[int | None, _option("--seed", "Repeats a sampled answer.", "a random one")] = (
        None
    )
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    out_dir: Annotated[Path, _option("--out", "Directory of the figure.")] = Path("sharpdraft-demo")
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class BenchOptions(ModelOptions):
    drafter: Annotated[
        str | None,
        _option(
            "--drafter",
            f"{_DRAFTER}: those built in. Several, with commas between them, are compared side by "
            "side.",
            "the DFlash one built in",
        ),
    ] = None
    arms: Annotated[
        str | None,
        _option(
            "--arms",
            f"Timed, taking turns, from {_ARM}",
            "ar,frozen,sharpdraft; ar,frozen with lookup",
        ),
    ] = None
    replay: Annotated[
        str,
        _option("--replay", "Arms whose accepted lengths are replayed on the text.", "none"),
    ] = ""
    prompts: Annotated[
        Path | None,
        _option(
            "--prompts",
            "A prompt a line, JSON lines with prompt or turns, CSV or Parquet.",
            "the built-in sessions",
        ),
    ] = None
    workload: Annotated[
        str | None,
        _option(
            "--workload",
            "Kinds of text to measure on, with commas between them; list: which there are.",
            "the built-in sessions",
        ),
    ] = None
    answer_tokens: Annotated[
        int,
        _option("--answer-tokens", "Longest answer to a prompt of --prompts, tokens.", least=2),
    ] = 192
    sessions: Sessions = None
    turns_per_bucket: Annotated[
        int,
        _option(
            "--turns-per-bucket",
            "Answers measured in each context bucket of a recorded session.",
            least=1,
        ),
    ] = 2
    mass_every: Annotated[
        int,
        _option(
            "--mass-every",
            "Attention mass at every so many replayed tokens; 0: never.",
            least=0,
        ),
    ] = 0
    temperature: Temperature = 0.0
    seed: Annotated[int | None, _option("--seed", "Repeats sampled answers.", "0")] = None
    engine: Annotated[
        str | None,
        _option("--engine", "Serve with vllm instead of the lab's own loop.", "the lab's loop"),
    ] = None
    engine_args: Annotated[
        str, _option("--engine-args", "Further arguments of vllm.LLM, as a JSON object.")
    ] = "{}"
    base_url: Annotated[
        str | None,
        _option(
            "--base-url",
            "Running OpenAI-compatible servers instead: ARM=URL,ARM=URL or one URL.",
            "none",
        ),
    ] = None
    chat: Annotated[
        bool,
        _option("--chat", "Ask servers for chat completions: their template, texts of --prompts."),
    ] = False
    served_model: Annotated[
        str | None,
        _option(
            "--served-model",
            "What servers call the model: one name, or ARM=NAME,ARM=NAME.",
            "the first they list",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", help="Key of the servers.", envvar="OPENAI_API_KEY", show_default="none"
        ),
    ] = field(default=None, repr=False)
    concurrency: Annotated[
        int, _option("--concurrency", "Requests at once to an engine or server.", least=1)
    ] = 1
    out_dir: Annotated[
        Path,
        _option("--out", "Directory of rows and figure; a broken run goes on from its rows."),
    ] = Path("sharpdraft-bench")
    as_json: Json = False

    @property
    def timed(self) -> list[str]:
        """What --arms names, or the arms that are timed by default."""
        if self.arms is None:
            return list(dict.fromkeys(("ar", "frozen", self.arm_by_default)))
        return names_of(self.arms)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    out_dir: Annotated[
        Path,
        _option("--out", "Directory of text, checkpoints, log and the finished drafter."),
    ]
    target: Target = SMOLLM2
    tokens: Annotated[
        int,
        _option("--tokens", "Training text that the target writes first, tokens.", least=1),
    ] = 1_048_576
    context: Annotated[
        int, _option("--context", "Length of a training session, tokens.", least=64)
    ] = 512
    batch: Annotated[int, _option("--batch", "Sessions written at once.", least=1)] = 128
    steps: Annotated[int | None, _option("--steps", "Training steps.", "the recipe's", least=1)] = (
        None
    )
    text: Annotated[
        Path | None,
        _option("--text", "Directory of the text, which families can share.", "OUT/text"),
    ] = None
    start: Annotated[
        str | None, _option("--from", "A drafter to go on from.", "layers of the target")
    ] = None
    first_wave: Annotated[
        int,
        _option(
            "--first-wave",
            "Number of the first wave of text: each number is another text.",
            least=0,
        ),
    ] = 0
    system: System = None
    template_arg: TemplateArgs = None
    device: Device = None


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    out_file: Annotated[Path, _option("--out", "The recording, a safetensors file.")]
    target: Target = SMOLLM2
    workload: Annotated[
        str, _option("--workload", "Whose sessions; bench --workload list names them.")
    ] = "greedy"
    sessions: Sessions = None
    length: Annotated[int, _option("--length", "Length of each session, tokens.", least=64)] = 8192
    temperature: Annotated[
        float | None, _option("--temperature", "0: greedy.", "the workload's", least=0)
    ] = None
    system: System = None
    template_arg: TemplateArgs = None
    device: Device = None
