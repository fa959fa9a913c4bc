"""What vLLM's scheduler accepted, counted by context."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from sharpdraft.adapters.vllm import stats
from sharpdraft.adapters.vllm.request import is_asked
from sharpdraft.method.settings import FROZEN
from support.vllm_standin import config


def test_buckets() -> None:
    assert [stats.bucket(n) for n in (0, 1, 512, 513, 1024, 1025, 2048, 2049)] == [
        0,
        0,
        0,
        1,
        1,
        2,
        2,
        3,
    ]
    assert [stats.label(stats.bucket(n)) for n in (512, 513, 8192)] == [
        "0-512",
        "512-1024",
        "4096-8192",
    ]
    assert stats.label(stats.bucket(10**9)) == "524288-inf"


@dataclass
class Counted:
    """Stands for vLLM's SpecDecodingStats."""

    num_spec_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    other: list[int] = field(default_factory=list)


class Scheduler:
    def __init__(self, lengths: dict[str, int], asked: bool = True) -> None:
        self.requests = {
            name: SimpleNamespace(num_tokens=length) for name, length in lengths.items()
        }
        self.vllm_config = config(FROZEN if asked else None)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: Any,
        request_id: str,
    ) -> Any:
        if not num_draft_tokens:
            return None
        return spec_decoding_stats or Counted()


def test_the_scheduler_counts_by_context() -> None:
    module = ModuleType("metrics")
    module.SpecDecodingStats = Counted  # type: ignore[attr-defined]
    stats.extend_statistics(module)
    stats.extend_statistics(module)
    assert Counted().by_context == {}  # type: ignore[attr-defined]
    assert Counted(5) == Counted(5) and Counted(5) != Counted(5, by_context={0: [1, 2, 3]})  # type: ignore[call-arg]

    class Here(Scheduler):
        pass

    scheduling = ModuleType("scheduler")
    scheduling.Scheduler = Here  # type: ignore[attr-defined]
    stats.count_in(scheduling, is_asked)
    stats.count_in(scheduling, is_asked)
    scheduler = Here({"a": 513, "b": 514, "c": 9000})
    made = None
    for name, drafted, accepted, invalid in (
        ("a", 5, 2, None),
        ("b", 5, 0, {"b": 2}),
        ("c", 5, 5, None),
        ("a", 5, 1, {}),
    ):
        made = scheduler.make_spec_decoding_stats(
            made,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            num_invalid_spec_tokens=invalid,
            request_id=name,
        )
    assert made.by_context == {0: [2, 10, 3], 1: [1, 3, 0], 5: [1, 5, 5]}
    unasked = Here({"a": 513}, asked=False)
    assert unasked.make_spec_decoding_stats(None, 5, 2, None, "a").by_context == {}
    assert stats.mal_line(made.by_context) == "0-512: 2.50, 512-1024: 1.00, 8192-16384: 6.00"


def test_another_scheduler_than_the_known_one_is_left_alone() -> None:
    class Other:
        def make_spec_decoding_stats(self, something_else: Any) -> Any:
            return something_else

    before = Other.make_spec_decoding_stats
    module = ModuleType("scheduler")
    module.Scheduler = Other  # type: ignore[attr-defined]
    stats.count_in(module, is_asked)
    assert Other.make_spec_decoding_stats is before
