"""Methods that are wrapped when their module is imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sharpdraft.adapters.hooks import when_imported, wrap_once


@pytest.fixture
def late_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "late_module.py").write_text(
        "class Thing:\n"
        "    value = 1\n"
        "    def twice(self, n, *, more=0):\n"
        "        return 2 * n + more\n"
        "class Other(Thing):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "late_module", raising=False)
    return "late_module"


def test_a_module_is_patched_when_it_is_imported(late_module: str) -> None:
    seen: list[ModuleType] = []
    when_imported(late_module, seen.append)
    assert not seen and late_module not in sys.modules
    module = importlib.import_module(late_module)
    assert seen == [module] and module.Thing.value == 1
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    when_imported(late_module, seen.append)
    assert seen == [module, module]


def test_a_method_is_wrapped_once(late_module: str) -> None:
    def around(method: Any, thing: Any, args: Any, kwargs: Any) -> Any:
        calls.append((type(thing).__name__, args, kwargs))
        return method(*args, **kwargs) + 100

    calls: list[Any] = []
    for _ in range(2):
        when_imported(late_module, lambda module: wrap_once(module, "Thing.twice", around))
    module = importlib.import_module(late_module)
    assert module.Thing().twice(3, more=1) == 107
    assert module.Other().twice(4) == 108
    assert calls == [("Thing", (3,), {"more": 1}), ("Other", (4,), {})]
    assert wrap_once(module, "Other.twice", around) and module.Other().twice(4) == 208
    assert module.Thing().twice(4) == 108


def test_a_method_that_is_not_there_is_told(late_module: str) -> None:
    module = importlib.import_module(late_module)
    assert not wrap_once(module, "Thing.thrice", lambda *a: None)
    assert not wrap_once(module, "Nothing.twice", lambda *a: None)
