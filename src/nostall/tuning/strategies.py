"""Search strategies by name: those for any space, and those that learn to schedule.

The learning strategies need the extra ``nostall[rl]``, so they are imported only when used.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from nostall.core import BadInput, Search
from nostall.core.suggest import unknown
from nostall.search import make, strategies

LEARNING_STRATEGIES = {
    "cuasmrl": ("nostall.sass.game.cuasmrl", "Cuasmrl"),
    "ppo": ("nostall.sass.game.ppo_search", "PpoSearch"),
}
"""Module and class of each learning strategy."""

LOG_FOLDER = "tensorboard"
"""Folder of a run directory for the curves of a learning strategy."""

POLICY_FILE = "policy.safetensors"
"""Policy file of a training, and copy of the policy that a run started with."""


def load_strategy_class(name: str) -> type[Search]:
    """The class of a learning strategy.

    Raises :class:`~nostall.core.MissingPart` if the extra ``nostall[rl]`` is not installed.
    """
    module, class_name = LEARNING_STRATEGIES[name]
    strategy_class: type[Search] = getattr(import_module(module), class_name)
    return strategy_class


def make_strategy(name: str, *, logs: Path | None = None, policy: Path | None = None) -> Search:
    """Create a strategy with its default parameters.

    ``logs`` is the folder for the TensorBoard curves of a learning strategy, ``policy`` the policy
    file that ``ppo`` starts with.  Raises :class:`BadInput` for an unknown name, or for a policy
    with another strategy than ``ppo``, and :class:`~nostall.core.MissingPart` if the extra
    ``nostall[rl]`` is not installed.
    """
    if policy is not None and name != "ppo":
        raise BadInput(
            f"strategy {name!r} cannot use a policy file; leave --policy out, or use ppo"
        )
    if name in LEARNING_STRATEGIES:
        options = {} if policy is None else {"policy": policy}
        return load_strategy_class(name)(logs=logs, **options)  # type: ignore[call-arg]
    if name not in strategies:
        raise BadInput(unknown("strategy", name, sorted({*strategies, *LEARNING_STRATEGIES})))
    return make(name)
