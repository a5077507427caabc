"""Engines that hold one GPU in turns: so many decode steps of one, then of the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from nostall.attach.rollouts.workload import REPEATS, Rollout
from nostall.core.errors import BadInput

PREPARE_S = 90.0
"""Longest time in which the prompts of a generation are cached and its requests start."""
SLACK = 8
"""Tokens of a request that no turn decodes: the first ones, and those of the last steps."""
STEPS = 64
"""Decode steps of a turn, of samples that are long enough."""


def default_steps(new: int) -> int:
    """Decode steps of a turn for samples of so many tokens."""
    return min(STEPS, max(1, new - SLACK))


class Asked(Protocol):
    """An engine that answers commands; None after a problem."""

    name: str
    problem: str
    record: dict[str, Any]

    def ask(self, command: dict[str, Any], seconds: float = ...) -> Any: ...


@dataclass(frozen=True)
class TurnPlan:
    """How a workload is measured."""

    generations: int
    turns: int
    """Turns of each engine in a generation."""
    steps: int
    """Decode steps of a turn."""

    @staticmethod
    def of(workload: Rollout, rounds: int, steps: int) -> TurnPlan:
        """At least so many turns of so many steps, in two or more equal generations.

        Turns fill the generation, so that all lengths of its requests are in. Raises
        :class:`BadInput` if no turn fits.
        """
        fitting = (workload.new - SLACK) // steps
        if fitting < 1:
            raise BadInput(
                f"{workload.new} new tokens and turns of {steps} steps; allowed are "
                f"{steps + SLACK} tokens or more; generate more, or give fewer --steps"
            )
        return TurnPlan(max(REPEATS, -(-rounds // fitting)), fitting, steps)


def measure(
    workload: Rollout,
    engines: Sequence[Asked],
    plan: TurnPlan,
    until: float,
    progress: Callable[[float], None] = lambda share: None,
) -> None:
    """Append a row with the turns of a workload to the record of each engine.

    ``until``: time of the monotonic clock at which no generation begins. ``progress`` gets the
    share of the turns that ran.
    """
    rows: dict[str, dict[str, Any]] = {}
    for engine in engines:
        rows[engine.name] = {"workload": workload.text, "turns": [], "generations": []}
        engine.record["rounds"].append(rows[engine.name])
    for number in range(plan.generations):
        if number and monotonic() > until:
            break
        _generation(workload, engines, plan, number, rows, progress)
    progress(1.0)


def _generation(
    workload: Rollout,
    engines: Sequence[Asked],
    plan: TurnPlan,
    number: int,
    rows: dict[str, dict[str, Any]],
    progress: Callable[[float], None],
) -> None:
    """Measure one generation; an engine with a problem is left out from then on."""
    prepare = {"do": "prepare", "workload": workload.text, "generation": number}
    active = []
    for engine in engines:
        about = None if engine.problem else engine.ask(prepare, PREPARE_S)
        if about is not None:
            rows[engine.name]["generations"].append(about)
            active.append(engine)
    running = list(active)
    for turn in range(plan.turns):
        shift = turn % max(1, len(running))
        for engine in running[shift:] + running[:shift]:
            taken = engine.ask({"do": "decode", "steps": plan.steps})
            if taken is None or taken["is_done"]:
                active.remove(engine)
            if taken is not None and taken["tokens"]:
                rows[engine.name]["turns"].append({**taken, "generation": number})
        running = [engine for engine in running if engine in active]
        progress((number + (turn + 1) / plan.turns) / plan.generations)
        if not running:
            break
    for engine in engines:
        done = None if engine.problem else engine.ask({"do": "finish"})
        if done is not None:
            rows[engine.name]["generations"][-1] |= done
