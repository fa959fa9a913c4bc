"""Methods of an engine, wrapped when the engine itself imports them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

Around = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called in place of a method, as around(method, self, args, kwargs)."""


def when_imported(module: str, hook: Callable[[ModuleType], object]) -> None:
    """Call `hook` with a module: now if it is imported, else once it is. No import is forced."""
    wrapt.register_post_import_hook(hook, module)


def wrap_once(module: ModuleType, path: str, around: Around) -> bool:
    """Call `around` in place of a module's `Class.method`, however often it is asked for.

    Returns False where the module has no such method.
    """
    name, _, method = path.partition(".")
    cls = getattr(module, name, None)
    if not hasattr(cls, method):
        return False
    if not hasattr(vars(cls).get(method), "_self_sharpdraft"):
        wrapt.wrap_function_wrapper(module, path, around)
        vars(cls)[method]._self_sharpdraft = True
    return True
