"""check_objective accepts a correct objective and rejects each kind of violation."""

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


def measurement(unit="s", kind="modelled", samples=(1.0,), failure=None):
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


class ReturnsIterator(Disorder):
    def evaluate(self, states):
        return iter(super().evaluate(states))


class BareNumbers(Disorder):
    def evaluate(self, states):
        return [self._seconds(state) for state in states]


class OtherUnit(Disorder):
    def evaluate(self, states):
        return [measurement(unit="cycles") for _ in states]


class OtherKind(Disorder):
    def evaluate(self, states):
        return [measurement(kind="measured") for _ in states]


class Raises(Disorder):
    def evaluate(self, states):
        if any(state[0] != 4 for state in states):
            raise RuntimeError("the model has no row for this")
        return super().evaluate(states)


class FailsWithSamples(Disorder):
    def evaluate(self, states):
        return [measurement(failure="half") for _ in states]


class FailingStart(Disorder):
    def evaluate(self, states):
        return [measurement(samples=(), failure="no") for _ in states]


class Drifting(Disorder):
    calls = 0

    def _seconds(self, state):
        self.calls += 1
        return super()._seconds(state) + self.calls * 1e-12


class DependsOnTheBatch(Disorder):
    def evaluate(self, states):
        return [
            measurement(samples=(self._seconds(state) * (1 + position),))
            for position, state in enumerate(states)
        ]


class DependsOnIdentity(Disorder):
    def __init__(self):
        super().__init__()
        self.seen = []

    def _seconds(self, state):
        known = any(state is earlier for earlier in self.seen)
        self.seen.append(state)
        return super()._seconds(state) * (2 if known or len(self.seen) <= 11 else 1)


class ChangesStates(Disorder):
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
    (Unnamed, "what kind of value"),
    (Unitless, "must name its unit"),
    (NoWork, "flops is no amount"),
    (TooFew, "must return a measurement for each"),
    (ReturnsIterator, "a list with one Measurement"),
    (BareNumbers, "something else than measurements"),
    (OtherUnit, "contradicts its objective"),
    (OtherKind, "contradicts its objective"),
    (Raises, "evaluate() raised"),
    (FailsWithSamples, "has samples"),
    (FailingStart, "the start state cannot be evaluated"),
    (Drifting, "differs for states alone"),
    (DependsOnTheBatch, "differs for states alone"),
    (DependsOnIdentity, "differs for loaded states"),
    (ChangesStates, "changed a state"),
]


@pytest.mark.parametrize(
    ("cls", "message"), BROKEN_OBJECTIVES, ids=lambda value: getattr(value, "__name__", "")
)
def test_broken_objectives_are_rejected(cls, message):
    with pytest.raises(ContractBroken) as caught:
        check_objective(cls(), Lists(5), steps=10)
    assert message in str(caught.value)


def test_states_may_fail_and_measured_values_may_drift():
    class Picky(Drifting):
        kind = "measured"

        def evaluate(self, states):
            return [
                measurement(kind="measured", samples=(), failure="illegal address")
                if state[0] == 0
                else measurement(kind="measured", samples=(self._seconds(state),) * 3)
                for state in states
            ]

    check_objective(Picky(), Permutations(3), steps=30)
