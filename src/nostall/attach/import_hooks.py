"""Hooks that run after a program's imports; used inside the user's program.

Imports only the standard library.  An error of a hook is printed and never reaches the program.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module after its import."""

    def __init__(self, hooks: dict[str, Callable[[ModuleType], None]], problem: str) -> None:
        """``problem``: what an error of a hook means, for its message."""
        self.hooks, self.problem = hooks, problem

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        hook = self.hooks.pop(name, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(name)  # by the other finders: the hook is taken
        loader = getattr(spec, "loader", None)
        if spec is None or loader is None or not hasattr(loader, "exec_module"):
            return spec
        spec.loader = _HookedLoader(loader, hook, self.problem)
        return spec


class _HookedLoader(importlib.abc.Loader):
    """A loader that calls a hook after the module's code has run."""

    def __init__(self, loader: Any, hook: Callable[[ModuleType], None], problem: str) -> None:
        self.loader, self.hook, self.problem = loader, hook, problem

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self.loader  # type: ignore[union-attr]
        quietly(self.problem, self.hook, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def quietly(problem: str, function: Callable[..., Any], *args: Any) -> Any:
    """The function's result; None after an error, which is printed: it is not the program's."""
    try:
        return function(*args)
    except Exception as error:  # any error: the program runs on
        with contextlib.suppress(Exception):  # stderr can be closed, or on a full disk
            print(f"nostall: {problem}: {error}", file=sys.stderr)
    return None
