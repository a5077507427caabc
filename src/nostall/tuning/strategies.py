"""Search strategies by name: those for any space, those that learn, and that of the assembler.

The learning strategies need the extra ``nostall[rl]``, so they are imported only when used.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from nostall.core import BadInput, Search
from nostall.core.text.suggest import unknown
from nostall.search import make, strategies
from nostall.search.orders.random_orders import RandomOrders

ASSEMBLER = "assembler"
"""Strategy that searches what ptxas is given; its states are PTX programs."""
OBJECTIVES = ("gpu", "recorded", "model")
"""Where the values of a search come from; ``recorded``: measurements of an earlier search."""
LEARNING_STRATEGIES: dict[str, tuple[str, str]] = {}
"""Module and class of each learning strategy; ``import nostall.papers`` fills the table."""

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
    if name == ASSEMBLER:
        return RandomOrders()
    if name in LEARNING_STRATEGIES:
        options = {} if policy is None else {"policy": policy}
        return load_strategy_class(name)(logs=logs, **options)  # type: ignore[call-arg]
    if name not in strategies:
        known = sorted({*strategies, *LEARNING_STRATEGIES, ASSEMBLER})
        hint = "" if LEARNING_STRATEGIES else "; `import nostall.papers` adds those that learn"
        raise BadInput(unknown("strategy", name, known) + hint)
    return make(name)


def complete_choice(
    strategy: str | None,
    objective: str | None,
    *,
    has_ptx: bool,
    has_policy: bool = False,
    is_distributed: bool = False,
) -> tuple[str, str]:
    """The strategy and the objective of a search, where the user gives one or none of them.

    PTX is searched where there is some: ptxas selects registers and native instructions anew, so
    more can be gained than by moves of native instructions.  A distributed search and a policy
    move native instructions.
    """
    if strategy is None and has_policy:
        strategy = "ppo"
    assembles = has_ptx and not is_distributed and strategy in (None, ASSEMBLER)
    if objective is None:
        objective = "recorded" if assembles else "model"
    if strategy is None:
        is_searched = objective == "recorded" or (assembles and objective == "gpu")
        strategy = ASSEMBLER if is_searched else "anneal"
    return strategy, objective


def check_choice(
    strategy: str, objective: str, *, has_ptx: bool, is_distributed: bool, origin: str
) -> None:
    """Raise :class:`BadInput` for a strategy that cannot work with the objective or the kernel.

    ``origin`` names the kernel in messages.
    """
    if objective not in OBJECTIVES:
        raise BadInput(unknown("--objective", objective, OBJECTIVES))
    if strategy != ASSEMBLER:
        if objective == "recorded":
            raise BadInput(
                f"--objective recorded replays searches of --strategy {ASSEMBLER}, but the "
                f"strategy is {strategy}; give --objective model or gpu"
            )
        return
    if objective == "model":
        raise BadInput(
            f"--strategy {ASSEMBLER} has no model of its candidates' times; give --objective gpu "
            "(measures), or --objective recorded (needs no GPU)"
        )
    if is_distributed:
        raise BadInput(
            f"--strategy {ASSEMBLER} measures on one GPU; leave --workers and --scheduler out, or "
            "give --strategy anneal"
        )
    if not has_ptx:
        raise BadInput(
            f"{origin} has no PTX, so there is nothing to assemble; give a Triton kernel "
            "(path.py:kernel) or a .ptx file, or use --strategy anneal, which moves native "
            "instructions"
        )
