"""Acceptance by context length in vLLM: Prometheus counters beside its own, and a line in its
periodic log.

The scheduler, which knows each request's length, counts; the counts travel to the front end in
vLLM's own statistics object, to whose dataclass a field is added, so that they arrive whatever
processes lie between.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ..hooks import when_imported, wrap_once

EDGES = tuple(512 << i for i in range(12))
"""Upper ends of the context buckets, in tokens; the last one takes whatever is longer."""

_LOG = logging.getLogger("vllm.sharpdraft")  # vLLM prints what is logged below its own name.
_MAKE = [
    "self",
    "spec_decoding_stats",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_invalid_spec_tokens",
    "request_id",
]
# drafts, drafted tokens, accepted tokens
Counts = list[int]
_COUNTERS = (
    ("vllm:spec_decode_num_drafts_by_context", "Number of spec decoding drafts by context length."),
    ("vllm:spec_decode_num_draft_tokens_by_context", "Number of draft tokens by context length."),
    (
        "vllm:spec_decode_num_accepted_tokens_by_context",
        "Number of accepted tokens by context length.",
    ),
)


def register(is_asked: Callable[[Any], bool]) -> None:
    """Count in every engine whose config `is_asked`."""
    when_imported("vllm.v1.spec_decode.metrics", extend_statistics)
    when_imported("vllm.v1.core.sched.scheduler", lambda m: count_in(m, is_asked))
    when_imported("vllm.v1.metrics.loggers", lambda m: show_in(m, is_asked))


def bucket(context: int) -> int:
    """Index of the bucket (0, 512], (512, 1024], ... of a context length in tokens."""
    return min(max(context - 1, 0) // EDGES[0], EDGES[-1] // EDGES[0] - 1).bit_length()


def label(index: int) -> str:
    """A bucket's name, such as 512-1024."""
    low = EDGES[index - 1] if index else 0
    return f"{low}-{EDGES[index]}" if index < len(EDGES) - 1 else f"{low}-inf"


def extend_statistics(module: ModuleType) -> None:
    """Give vLLM's statistics of drafts a field for counts by context."""
    cls = module.SpecDecodingStats
    if "by_context" in cls.__dataclass_fields__:
        return

    @dataclass
    class WithContext(cls):  # type: ignore[misc, valid-type]
        by_context: dict[int, list[int]] = field(default_factory=dict)

    # The class itself is kept: who took its name before sees the field as well, message decoders
    # included.
    cls.__annotations__ = {**cls.__annotations__, "by_context": dict[int, list[int]]}
    for name in ("__init__", "__repr__", "__eq__", "__match_args__", "__dataclass_fields__"):
        setattr(cls, name, getattr(WithContext, name))


def count_in(module: ModuleType, is_asked: Callable[[Any], bool]) -> None:
    """Have the scheduler count, whose module this is."""

    def counted(
        make: Callable[..., Any], scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        stats = make(*args, **kwargs)
        if stats is not None and _asked(scheduler, is_asked):
            given = dict(zip(_MAKE[1:], args, strict=False)) | kwargs
            request = given["request_id"]
            # Tokens up to the anchor: those of this step are appended later.
            counts = stats.by_context.setdefault(
                bucket(scheduler.requests[request].num_tokens - 1), [0, 0, 0]
            )
            counts[0] += 1
            counts[1] += given["num_draft_tokens"] - (given["num_invalid_spec_tokens"] or {}).get(
                request, 0
            )
            counts[2] += given["num_accepted_tokens"]
        return stats

    make = getattr(getattr(module, "Scheduler", None), "make_spec_decoding_stats", None)
    if make is None or list(inspect.signature(make).parameters) != _MAKE:
        _LOG.error(
            "sharpdraft: this vLLM counts drafts otherwise than relied on: none are counted by "
            "context length"
        )
    else:
        wrap_once(module, "Scheduler.make_spec_decoding_stats", counted)


def _asked(scheduler: Any, is_asked: Callable[[Any], bool]) -> bool:
    if not hasattr(scheduler, "_sharpdraft_asked"):
        scheduler._sharpdraft_asked = is_asked(scheduler.vllm_config)
    return bool(scheduler._sharpdraft_asked)


def show_in(module: ModuleType, is_asked: Callable[[Any], bool]) -> None:
    """Have the loggers show what is counted, whose module this is."""

    def with_line(
        init: Callable[..., Any], logger: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        init(*args, **kwargs)
        if is_asked(_config_of(args, kwargs)):
            logger.spec_decoding_logging = ContextLine(logger.spec_decoding_logging)

    def with_counters(
        init: Callable[..., Any], logger: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        init(*args, **kwargs)
        config = _config_of(args, kwargs)
        if is_asked(config):
            logger.spec_decoding_prom = ContextCounters(
                logger.spec_decoding_prom,
                ["model_name", "engine"],
                logger.per_engine_labelvalues,
                config.model_config.max_model_len,
            )

    for name, around in (("Logging", with_line), ("Prometheus", with_counters)):
        if not wrap_once(module, f"{name}StatLogger.__init__", around):
            _LOG.error("sharpdraft: this vLLM has no %sStatLogger: it shows no counts", name)


def _config_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]


class ContextLine:
    """vLLM's own log of drafts with one line more: mean accepted length by context."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.counts: dict[int, Counts] = {}

    def observe(self, stats: Any) -> None:
        self.inner.observe(stats)
        add(self.counts, stats.by_context)

    def log(self, log_fn: Callable[..., Any]) -> None:
        self.inner.log(log_fn=log_fn)
        if line := mal_line(self.counts):
            log_fn("SpecDecoding by context: %s", line)
        self.counts = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class ContextCounters:
    """vLLM's own counters of drafts, and the same by context length."""

    def __init__(
        self, inner: Any, labels: list[str], engines: Mapping[int, list[object]], longest: int
    ) -> None:
        self.inner = inner
        counters = [
            inner._counter_cls(name=n, documentation=d, labelnames=[*labels, "context"])
            for n, d in _COUNTERS
        ]
        buckets = range(bucket(longest) + 1)
        self.children = {
            engine: [[counter.labels(*values, label(i)) for counter in counters] for i in buckets]
            for engine, values in engines.items()
        }

    def observe(self, stats: Any, engine_idx: int = 0) -> None:
        self.inner.observe(stats, engine_idx)
        for index, counts in stats.by_context.items():
            for counter, count in zip(self.children[engine_idx][index], counts, strict=True):
                counter.inc(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def add(total: dict[int, Counts], more: Mapping[int, Counts]) -> None:
    """Add counts to a total, bucket by bucket."""
    for index, counts in more.items():
        total[index] = [a + b for a, b in zip(total.get(index, [0, 0, 0]), counts, strict=True)]


def mal_line(counts: Mapping[int, Counts]) -> str:
    """Mean accepted length, bonus token included, by context: `0-512: 1.90, 512-1024: 1.80`."""
    return ", ".join(
        f"{label(i)}: {1 + c[2] / c[0]:.2f}" for i, c in sorted(counts.items()) if c[0]
    )
