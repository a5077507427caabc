"""Conformance check of an objective."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nostall.core import Measurement, Objective, Space
from nostall.core.space import M, S
from nostall.testing.contract import attempt, require

_KINDS = ("measured", "modelled")


def check_objective(
    objective: Objective[S], space: Space[S, M], *, seed: int = 0, steps: int = 10
) -> None:
    """Evaluate the start state and ``steps`` states of a random walk, and check the results.

    The contract: kind, unit and flops are valid; each state gets one measurement of this kind and
    unit; failures are returned, not raised; states do not change; the start state can be
    evaluated. A modelled objective gives a state the same value each time, whichever states are
    evaluated with it. Raises :class:`~nostall.core.ContractBroken` at the first violation.
    """
    _check_attributes(objective)
    states = _random_walk(space, seed, steps)
    dumps = [space.dump(state) for state in states]
    first = _evaluate(objective, states)
    require(
        [space.dump(state) for state in states] == dumps,
        "evaluate() changed a state",
        "another dump() than before",
        "unchanged states",
        "work on a copy; states are immutable",
    )
    require(
        first[0].failure is None,
        "the start state cannot be evaluated",
        first[0].failure,
        "a measurement with samples",
        "give the space a start that runs",
    )
    _evaluate(objective, [])
    if objective.kind == "modelled":
        _check_deterministic(objective, space, states, first)


def _check_attributes(objective: Objective[S]) -> None:
    require(
        getattr(objective, "kind", None) in _KINDS,
        "an objective must declare what kind of value it returns",
        getattr(objective, "kind", None),
        " or ".join(map(repr, _KINDS)),
        "set the class variable `kind`",
    )
    unit = getattr(objective, "unit", None)
    require(
        isinstance(unit, str) and bool(unit),
        "an objective must name its unit",
        unit,
        "a text such as 's' or 'cycles'",
        "set the class variable `unit`",
    )
    flops = objective.flops
    require(
        flops is None or (math.isfinite(flops) and flops > 0),
        "flops is no amount of work",
        flops,
        "None or a finite number > 0",
        "leave it None if the work is unknown",
    )


def _random_walk(space: Space[S, M], seed: int, steps: int) -> list[S]:
    rng = np.random.default_rng(seed)
    states = [space.start()]
    for _ in range(steps):
        move = space.propose(states[-1], rng)
        if move is None:
            break
        states.append(space.apply(states[-1], move))
    return states


def _evaluate(objective: Objective[S], states: Sequence[S]) -> list[Measurement]:
    """Evaluate ``states`` and check the form of the measurements."""
    measurements = attempt(
        lambda: objective.evaluate(states),
        f"evaluate() raised on {len(states)} states",
        "a Measurement with `failure` for a state that cannot be evaluated",
        "catch the error and return it as a failure",
    )
    require(
        isinstance(measurements, list) and len(measurements) == len(states),
        f"evaluate() must return a measurement for each of {len(states)} states",
        measurements,
        "a list with one Measurement per state, in order",
        "return one for failed states too",
    )
    for measurement in measurements:
        require(
            isinstance(measurement, Measurement),
            "evaluate() returned something else than measurements",
            measurement,
            "nostall.core.Measurement",
            "wrap the number: Measurement(unit, (value,), kind)",
        )
        require(
            (measurement.unit, measurement.kind) == (objective.unit, objective.kind),
            "a measurement contradicts its objective",
            (measurement.unit, measurement.kind),
            f"unit {objective.unit!r} and kind {objective.kind!r}",
            "pass self.unit and self.kind on",
        )
        require(
            measurement.failure is None or not measurement.samples,
            "a failed measurement has samples",
            measurement,
            "samples or a failure",
            "leave samples empty if the state failed",
        )
    return measurements


def _check_deterministic(
    objective: Objective[S], space: Space[S, M], states: list[S], first: list[Measurement]
) -> None:
    """Check that values do not depend on the company, the order or the identity of states."""

    def results(measurements: list[Measurement]) -> list[tuple[tuple[float, ...], str | None]]:
        return [(measurement.samples, measurement.failure) for measurement in measurements]

    def require_same(measurements: list[Measurement], problem: str) -> None:
        require(
            results(measurements) == results(first),
            problem,
            measurements,
            "the same samples each time, bit for bit",
            "let a model depend on the state only, or declare the objective 'measured'",
        )

    alone = [_evaluate(objective, [state])[0] for state in states]
    require_same(alone, "a model differs for states alone")
    reversed_order = _evaluate(objective, states[::-1])[::-1]
    require_same(reversed_order, "a model differs in another order")
    copies = [space.load(space.dump(state)) for state in states]
    require_same(_evaluate(objective, copies), "a model differs for loaded states")
