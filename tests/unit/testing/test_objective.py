"""check_objective accepts what keeps its contract and refuses each kind of breach."""

import pytest

from nostall.core import (
    ContractBroken,
    Measurement,
)
from nostall.testing import (
    Disorder,
    Permutations,
    check_objective,
)


def measured(unit="s", kind="modelled", samples=(1.0,), failure=None):
    return Measurement(unit, samples, kind, failure=failure)


class Unnamed(Disorder):
    kind = "guessed"


class Unitless(Disorder):
    unit = ""


class NoWork(Disorder):
    def __init__(self):
        super().__init__(flops=0.0)


class TooFew(Disorder):
    def evaluate(self, states):
        return super().evaluate(states[:1])


class Lazy(Disorder):
    def evaluate(self, states):
        return iter(super().evaluate(states))


class Bare(Disorder):
    def evaluate(self, states):
        return [self._seconds(state) for state in states]


class OtherUnit(Disorder):
    def evaluate(self, states):
        return [measured(unit="cycles") for _ in states]


class OtherKind(Disorder):
    def evaluate(self, states):
        return [measured(kind="measured") for _ in states]


class Raises(Disorder):
    def evaluate(self, states):
        if any(state[0] != 4 for state in states):
            raise RuntimeError("the model has no row for this")
        return super().evaluate(states)


class FailsWithSamples(Disorder):
    def evaluate(self, states):
        return [measured(failure="half") for _ in states]


class FailingStart(Disorder):
    def evaluate(self, states):
        return [measured(samples=(), failure="no") for _ in states]


class Drifting(Disorder):
    looks = 0

    def _seconds(self, state):
        self.looks += 1
        return super()._seconds(state) + self.looks * 1e-12


class DependsOnTheBatch(Disorder):
    def evaluate(self, states):
        return [
            measured(samples=(self._seconds(state) * (1 + place),))
            for place, state in enumerate(states)
        ]


class DependsOnIdentity(Disorder):
    def __init__(self):
        super().__init__()
        self.seen = []

    def _seconds(self, state):
        known = any(state is other for other in self.seen)
        self.seen.append(state)
        return super()._seconds(state) * (2 if known or len(self.seen) <= 11 else 1)


class Meddling(Disorder):
    def evaluate(self, states):
        measurements = super().evaluate(states)
        for state in states:
            state.reverse()
        return measurements


class Lists(Permutations):
    """States that an objective could change."""

    def start(self):
        return list(super().start())

    def apply(self, state, move):
        return list(super().apply(tuple(state), move))

    def load(self, text):
        return list(super().load(text))


BROKEN_OBJECTIVES = [
    (Unnamed, "what kind of number"),
    (Unitless, "must name its unit"),
    (NoWork, "flops is no amount"),
    (TooFew, "must answer for each"),
    (Lazy, "a list with one Measurement"),
    (Bare, "something else than measurements"),
    (OtherUnit, "contradicts its objective"),
    (OtherKind, "contradicts its objective"),
    (Raises, "evaluate() raised"),
    (FailsWithSamples, "has samples"),
    (FailingStart, "the start state cannot be evaluated"),
    (Drifting, "differs for states alone"),
    (DependsOnTheBatch, "differs for states alone"),
    (DependsOnIdentity, "differs for loaded states"),
    (Meddling, "changed a state"),
]


@pytest.mark.parametrize(
    ("cls", "said"), BROKEN_OBJECTIVES, ids=lambda value: getattr(value, "__name__", "")
)
def test_broken_objectives_are_refused(cls, said):
    with pytest.raises(ContractBroken) as caught:
        check_objective(cls(), Lists(5), steps=10)
    assert said in str(caught.value)


def test_an_objective_may_fail_states_and_measured_ones_may_drift():
    class Picky(Drifting):
        kind = "measured"

        def evaluate(self, states):
            return [
                measured(kind="measured", samples=(), failure="illegal address")
                if state[0] == 0
                else measured(kind="measured", samples=(self._seconds(state),) * 3)
                for state in states
            ]

    check_objective(Picky(), Permutations(3), steps=30)
