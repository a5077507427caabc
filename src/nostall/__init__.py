"""nostall: finds where a deep-learning program waits, and takes the wait out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nostall.attach.fuse import fuse
    from nostall.attach.load import load
    from nostall.attach.optimize import optimize

__all__ = ["fuse", "load", "optimize"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Found when asked for: the ground floor imports this package too, and must not pull in all.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"nostall.attach.{name}"), name)
