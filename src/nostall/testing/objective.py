"""Does an objective keep its contract?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nostall.core import Measurement, Objective, Space
from nostall.core.space import M, S
from nostall.testing.claim import attempt, claim

_KINDS = ("measured", "modelled")


def check_objective(
    objective: Objective[S], space: Space[S, M], *, seed: int = 0, steps: int = 10
) -> None:
    """Evaluate the start state and ``steps`` states of a random walk, and check every promise.

    Checked are: kind, unit and flops; one measurement for each state, of that kind and unit;
    failures that are returned, not raised; states left as they were; a start state that can be
    evaluated; and for a modelled objective the same value for the same state, whatever is
    evaluated with it.  Raises :class:`~nostall.core.ContractBroken` at the first that is not kept.
    """
    _check_facts(objective)
    states = _walk(space, seed, steps)
    dumps = [space.dump(state) for state in states]
    first = _evaluate(objective, states)
    claim(
        [space.dump(state) for state in states] == dumps,
        "evaluate() changed a state",
        "another dump() than before",
        "states as they were",
        "work on a copy; states are immutable",
    )
    claim(
        first[0].failure is None,
        "the start state cannot be evaluated",
        first[0].failure,
        "a measurement with samples",
        "give the space a start that runs",
    )
    _evaluate(objective, [])
    if objective.kind == "modelled":
        _check_deterministic(objective, space, states, first)


def _check_facts(objective: Objective[S]) -> None:
    claim(
        getattr(objective, "kind", None) in _KINDS,
        "an objective must say what kind of number it gives",
        getattr(objective, "kind", None),
        " or ".join(map(repr, _KINDS)),
        "set the class variable `kind`",
    )
    unit = getattr(objective, "unit", None)
    claim(
        isinstance(unit, str) and bool(unit),
        "an objective must name its unit",
        unit,
        "a text such as 's' or 'cycles'",
        "set the class variable `unit`",
    )
    flops = objective.flops
    claim(
        flops is None or (math.isfinite(flops) and flops > 0),
        "flops is no amount of work",
        flops,
        "None or a finite number > 0",
        "leave it None when the work is unknown",
    )


def _walk(space: Space[S, M], seed: int, steps: int) -> list[S]:
    rng = np.random.default_rng(seed)
    states = [space.start()]
    for _ in range(steps):
        move = space.propose(states[-1], rng)
        if move is None:
            break
        states.append(space.apply(states[-1], move))
    return states


def _evaluate(objective: Objective[S], states: Sequence[S]) -> list[Measurement]:
    measurements = attempt(
        lambda: objective.evaluate(states),
        f"evaluate() raised on {len(states)} states",
        "a Measurement with `failure` for a state that cannot be evaluated",
        "catch the error and return it as a failure",
    )
    claim(
        isinstance(measurements, list) and len(measurements) == len(states),
        f"evaluate() must answer for each of {len(states)} states",
        measurements,
        "a list with one Measurement per state, in order",
        "return one for failed states too",
    )
    for measurement in measurements:
        claim(
            isinstance(measurement, Measurement),
            "evaluate() returned something else than measurements",
            measurement,
            "nostall.core.Measurement",
            "wrap the number: Measurement(unit, (value,), kind)",
        )
        claim(
            (measurement.unit, measurement.kind) == (objective.unit, objective.kind),
            "a measurement contradicts its objective",
            (measurement.unit, measurement.kind),
            f"unit {objective.unit!r} and kind {objective.kind!r}",
            "pass self.unit and self.kind on",
        )
        claim(
            measurement.failure is None or not measurement.samples,
            "a failed measurement has samples",
            measurement,
            "samples or a failure",
            "leave samples empty when the state failed",
        )
    return measurements


def _check_deterministic(
    objective: Objective[S], space: Space[S, M], states: list[S], first: list[Measurement]
) -> None:
    def said(measurements: list[Measurement]) -> list[tuple[tuple[float, ...], str | None]]:
        return [(each.samples, each.failure) for each in measurements]

    allowed = "the same samples each time, bit for bit"
    todo = "let a model depend on the state only, or call the objective 'measured'"
    alone = [_evaluate(objective, [state])[0] for state in states]
    claim(said(alone) == said(first), "a model differs for states alone", alone, allowed, todo)
    back = _evaluate(objective, states[::-1])[::-1]
    claim(said(back) == said(first), "a model differs in another order", back, allowed, todo)
    copies = [space.load(space.dump(state)) for state in states]
    loaded = _evaluate(objective, copies)
    claim(said(loaded) == said(first), "a model differs for loaded states", loaded, allowed, todo)
