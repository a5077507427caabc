"""Strategies by name: those over any space, and those that learn on schedules.

The learning ones need the extra ``nostall[rl]``, so they are imported only when asked for.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from nostall.core import BadInput, Search
from nostall.search import make, strategies

LEARNING = {
    "cuasmrl": ("nostall.sass.game.cuasmrl", "Cuasmrl"),
    "ppo": ("nostall.sass.game.ppo", "LearnedSearch"),
}
"""Module and class of each strategy that learns."""

LOGS = "tensorboard"
"""Directory of their curves in a run's directory."""


def strategy(name: str, *, logs: Path | None = None) -> Search:
    """The strategy of that name with its usual parameters; ``logs`` is where a learning one leaves
    its curves for TensorBoard.

    Raises :class:`BadInput` for an unknown name, :class:`~nostall.core.MissingPart` where the
    extra is not installed.
    """
    if name in LEARNING:
        module, cls = LEARNING[name]
        made: Search = getattr(import_module(module), cls)(logs=logs)
        return made
    if name not in strategies:
        known = ", ".join(sorted({*strategies, *LEARNING}))
        raise BadInput(f"unknown strategy {name!r}; there are {known}; choose one of them")
    return make(name)
