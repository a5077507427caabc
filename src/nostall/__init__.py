"""nostall: find where a deep-learning program waits, and remove the wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nostall.attach.fuse import fuse
    from nostall.attach.load import load
    from nostall.attach.optimize import optimize

__all__ = ["fuse", "load", "optimize"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    # Imported on first access: `nostall.core` imports this package, and must stay light.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"nostall.attach.{name}"), name)
