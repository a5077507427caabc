"""What a package hands on from its modules, imported when it is asked for.

A compiled program that runs an earlier choice needs a few light modules; it must not pay for the
rest of the packages that they stand in.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any


def among(package: str, names: Collection[str], *modules: str) -> Callable[[str], Any]:
    """``__getattr__`` of a package that hands on these names from these modules of its own; light
    modules come first, as each is imported until one has the name."""

    def found(name: str) -> Any:
        if name in names:
            for module in modules:
                scope = vars(importlib.import_module(f"{package}.{module}"))
                if name in scope:
                    return scope[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return found
