"""Lazy re-exports of a package (PEP 562): a submodule is imported when a name is first accessed.

A process that only loads a stored choice imports a few light modules.  Without lazy exports it
would import everything that their packages re-export, including pydantic and PyTorch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any


def lazy_exports(package: str, names: Collection[str], *modules: str) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` that finds ``names`` in submodules of ``package``.

    ``modules`` are searched in order, and each one searched is imported: list light modules first.
    """

    def getattr_from_submodules(name: str) -> Any:
        if name in names:
            for module in modules:
                scope = vars(importlib.import_module(f"{package}.{module}"))
                if name in scope:
                    return scope[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattr_from_submodules
