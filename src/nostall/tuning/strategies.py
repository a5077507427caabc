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
    "ppo": ("nostall.sass.game.ppo_search", "PpoSearch"),
}
"""Module and class of each strategy that learns."""

LOGS = "tensorboard"
"""Directory of their curves in a run's directory."""


POLICY = "policy.safetensors"
"""Name of the policy file in a training's directory, and of the one that a run began with."""


def need_learning(name: str) -> type[Search]:
    """The class of a strategy that learns; :class:`~nostall.core.MissingPart` without the extra."""
    module, cls = LEARNING[name]
    found: type[Search] = getattr(import_module(module), cls)
    return found


def strategy(name: str, *, logs: Path | None = None, policy: Path | None = None) -> Search:
    """The strategy of that name with its usual parameters; ``logs`` is where a learning one leaves
    its curves for TensorBoard, ``policy`` the file that ``ppo`` begins with.

    Raises :class:`BadInput` for an unknown name or a policy that another strategy cannot use,
    :class:`~nostall.core.MissingPart` where the extra is not installed.
    """
    if policy is not None and name != "ppo":
        raise BadInput(f"strategy {name!r} begins with no policy; leave it out, or choose ppo")
    if name in LEARNING:
        given = {} if policy is None else {"policy": policy}
        return need_learning(name)(logs=logs, **given)  # type: ignore[call-arg]
    if name not in strategies:
        known = ", ".join(sorted({*strategies, *LEARNING}))
        raise BadInput(f"unknown strategy {name!r}; there are {known}; choose one of them")
    return make(name)
