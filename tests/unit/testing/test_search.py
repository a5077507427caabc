"""check_search accepts a correct search and rejects each kind of violation."""

from dataclasses import replace

import numpy as np
import pytest

from nostall.core import (
    BadInput,
    Checkpoint,
    ContractBroken,
    Search,
    SearchResult,
    Trial,
)
from nostall.testing import (
    Disorder,
    Permutations,
    check_search,
)


class Walk(Search):
    """A correct random walk, of which each subclass breaks one part."""

    name = "walk"
    seeded = True
    overspend = 0
    miscount = 0

    def run(self, space, objective, budget, *, seed=0, observers=(), resume=None):
        clock = budget.clock()
        rng = np.random.default_rng(seed if self.seeded else None)
        start = space.start()
        first = objective.evaluate([start])[0]
        run_state = {"state": start, "value": first.value, "best": start, "low": first, "count": 1}
        if resume is not None:
            rng.bit_generator.state = self.restored(resume)
            run_state["state"], run_state["value"] = (
                space.load(resume.current),
                resume.current_value,
            )
            run_state["best"], run_state["count"] = space.load(resume.best), resume.evaluations
            run_state["low"] = objective.evaluate([run_state["best"]])[0]
        else:
            self.notify(observers, Trial(0, first.value, True, first.value, "start", 0, 0.0))
        saved, stopped = rng.bit_generator.state, "budget"
        try:
            while not clock.spent(run_state["count"] - self.overspend):
                self.step(space, objective, rng, run_state, observers)
                saved = rng.bit_generator.state
        except KeyboardInterrupt:
            stopped = self.interrupted()
        last = self.checkpoint(space, seed, run_state, saved)
        for observer in observers:
            observer.on_checkpoint(last)
        return self.result(run_state, first, clock, stopped, last)

    def step(self, space, objective, rng, run_state, observers):
        move = space.propose(run_state["state"], rng)
        state = space.apply(run_state["state"], move)
        measurement = objective.evaluate([state])[0]
        accepted = self.accepts(measurement, run_state)
        if self.improves(measurement, run_state):
            run_state["best"], run_state["low"] = state, measurement
        trial = Trial(
            run_state["count"],
            measurement.value,
            accepted,
            run_state["low"].value,
            str(move),
            0,
            0.0,
            measurement.failure,
        )
        self.notify(observers, trial)
        if accepted:
            run_state["state"], run_state["value"] = state, measurement.value
        run_state["count"] += 1

    def accepts(self, measurement, run_state):
        return measurement.failure is None

    def improves(self, measurement, run_state):
        return measurement.value < run_state["low"].value

    def notify(self, observers, trial):
        for observer in observers:
            observer.on_trial(trial)

    def interrupted(self):
        return "interrupted"

    def restored(self, resume):
        return resume.rng

    def checkpoint(self, space, seed, run_state, saved):
        return Checkpoint(
            self.name,
            seed,
            run_state["count"],
            0,
            space.dump(run_state["state"]),
            run_state["value"],
            space.dump(run_state["best"]),
            run_state["low"].value,
            saved,
            {},
        )

    def result(self, run_state, first, clock, stopped, last):
        return SearchResult(
            run_state["best"],
            run_state["low"],
            first,
            run_state["count"] + self.miscount,
            0,
            clock.elapsed,
            stopped,
            last,
        )


class Nameless(Walk):
    name = None


class Unseeded(Walk):
    seeded = False


class Overspends(Walk):
    overspend = 1


class Miscounts(Walk):
    miscount = 3


class KeepsTheLast(Walk):
    def improves(self, measurement, run_state):
        return measurement.failure is None


class NeverBetter(Walk):
    def improves(self, measurement, run_state):
        return False


class BestIsAFailure(Walk):
    def improves(self, measurement, run_state):
        return measurement.failure is not None or super().improves(measurement, run_state)


class AcceptsFailures(Walk):
    def accepts(self, measurement, run_state):
        return True


class WrongPair(Walk):
    """The best value with another state."""

    def result(self, run_state, first, clock, stopped, last):
        correct = super().result(run_state, first, clock, stopped, last)
        return replace(correct, best=tuple(range(5)))


class Silent(Walk):
    def notify(self, observers, trial):
        pass


class Exaggerates(Walk):
    def notify(self, observers, trial):
        super().notify(observers, replace(trial, best=trial.best / 2))


class Uninterruptible(Walk):
    """Reports Ctrl-C as the end of the budget."""

    def interrupted(self):
        return "budget"


class ForgetsTheGenerator(Walk):
    def restored(self, resume):
        return np.random.default_rng(resume.seed).bit_generator.state


class StaleCheckpoint(Walk):
    def checkpoint(self, space, seed, run_state, saved):
        return replace(super().checkpoint(space, seed, run_state, saved), evaluations=1)


class BinaryCheckpoint(Walk):
    def checkpoint(self, space, seed, run_state, saved):
        return replace(super().checkpoint(space, seed, run_state, saved), memory={"x": b"bytes"})


class Raises(Walk):
    def step(self, *arguments):
        raise ZeroDivisionError


class SkipsTheStart(Walk):
    """Begins with another state than the start state."""

    def run(self, space, objective, budget, **options):
        class Moved(Permutations):
            def start(self):
                return tuple(range(self.size))

        return super().run(Moved(5), objective, budget, **options)


class KeepsState(Walk):
    """Keeps state between runs."""

    runs = 0

    def run(self, space, objective, budget, *, seed=0, observers=(), resume=None):
        type(self).runs += 1
        return super().run(
            space, objective, budget, seed=seed + self.runs, observers=observers, resume=resume
        )


class Overtime(Walk):
    def result(self, run_state, first, clock, stopped, last):
        return replace(super().result(run_state, first, clock, stopped, last), seconds=60.0)


BROKEN_SEARCHES = [
    (Nameless, "must have a name"),
    (Unseeded, "same seed gives another search"),
    (KeepsState, "same seed gives another search"),
    (Overspends, "the budget is overspent"),
    (Overtime, "a budget of 0.02 s is overspent"),
    (Miscounts, "miscounts"),
    (KeepsTheLast, "the best is"),
    (NeverBetter, "not the best of what was evaluated"),
    (BestIsAFailure, "worse than the start"),
    (AcceptsFailures, "a failed state was accepted"),
    (WrongPair, "does not have the best measurement"),
    (Silent, "observers do not get a trial for each evaluation"),
    (Exaggerates, "misreports"),
    (Uninterruptible, "stopped"),
    (ForgetsTheGenerator, "visits other states"),
    (StaleCheckpoint, "last checkpoint is not that of the end"),
    (BinaryCheckpoint, "cannot be written as JSON"),
    (Raises, "run() raised"),
    (SkipsTheStart, "not the start state"),
]


def test_a_correct_search_is_accepted():
    check_search(Walk(), Permutations(5), Disorder(), evaluations=40)


@pytest.mark.parametrize(
    ("cls", "message"), BROKEN_SEARCHES, ids=lambda value: getattr(value, "__name__", "")
)
def test_broken_searches_are_rejected(cls, message):
    with pytest.raises(ContractBroken) as caught:
        check_search(cls(), Permutations(5), Disorder(), evaluations=40)
    assert message in str(caught.value)


def test_a_search_that_lets_ctrl_c_through_is_rejected():
    class Uncaught(Walk):
        def interrupted(self):
            raise

    with pytest.raises(ContractBroken, match="let KeyboardInterrupt through"):
        check_search(Uncaught(), Permutations(5), Disorder(), evaluations=40)


def test_only_a_modelled_objective_can_check_a_search():
    class Measured(Disorder):
        kind = "measured"

    with pytest.raises(BadInput, match="modelled objective"):
        check_search(Walk(), Permutations(5), Measured())
