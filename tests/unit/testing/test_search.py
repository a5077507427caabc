"""check_search accepts what keeps its contract and refuses each kind of breach."""

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
    """A right search, small enough to break one line at a time."""

    name = "walk"
    seeded = True
    overspend = 0
    miscount = 0

    def run(self, space, objective, budget, *, seed=0, observers=(), resume=None):
        clock = budget.clock()
        rng = np.random.default_rng(seed if self.seeded else None)
        start = space.start()
        first = objective.evaluate([start])[0]
        book = {"state": start, "value": first.value, "best": start, "low": first, "count": 1}
        if resume is not None:
            rng.bit_generator.state = self.restored(resume)
            book["state"], book["value"] = space.load(resume.current), resume.current_value
            book["best"], book["count"] = space.load(resume.best), resume.evaluations
            book["low"] = objective.evaluate([book["best"]])[0]
        else:
            self.tell(observers, Trial(0, first.value, True, first.value, "start", 0, 0.0))
        saved, stopped = rng.bit_generator.state, "budget"
        try:
            while not clock.spent(book["count"] - self.overspend):
                self.step(space, objective, rng, book, observers)
                saved = rng.bit_generator.state
        except KeyboardInterrupt:
            stopped = self.interrupted()
        last = self.checkpoint(space, seed, book, saved)
        for observer in observers:
            observer.on_checkpoint(last)
        return self.result(book, first, clock, stopped, last)

    def step(self, space, objective, rng, book, observers):
        move = space.propose(book["state"], rng)
        state = space.apply(book["state"], move)
        measurement = objective.evaluate([state])[0]
        accepted = self.accepts(measurement, book)
        if self.improves(measurement, book):
            book["best"], book["low"] = state, measurement
        trial = Trial(
            book["count"],
            measurement.value,
            accepted,
            book["low"].value,
            str(move),
            0,
            0.0,
            measurement.failure,
        )
        self.tell(observers, trial)
        if accepted:
            book["state"], book["value"] = state, measurement.value
        book["count"] += 1

    def accepts(self, measurement, book):
        return measurement.failure is None

    def improves(self, measurement, book):
        return measurement.value < book["low"].value

    def tell(self, observers, trial):
        for observer in observers:
            observer.on_trial(trial)

    def interrupted(self):
        return "interrupted"

    def restored(self, resume):
        return resume.rng

    def checkpoint(self, space, seed, book, saved):
        return Checkpoint(
            self.name,
            seed,
            book["count"],
            0,
            space.dump(book["state"]),
            book["value"],
            space.dump(book["best"]),
            book["low"].value,
            saved,
            {},
        )

    def result(self, book, first, clock, stopped, last):
        return SearchResult(
            book["best"],
            book["low"],
            first,
            book["count"] + self.miscount,
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
    def improves(self, measurement, book):
        return measurement.failure is None


class NeverBetter(Walk):
    def improves(self, measurement, book):
        return False


class BestIsAFailure(Walk):
    def improves(self, measurement, book):
        return measurement.failure is not None or super().improves(measurement, book)


class AcceptsFailures(Walk):
    def accepts(self, measurement, book):
        return True


class WrongPair(Walk):
    """The best value with another state."""

    def result(self, book, first, clock, stopped, last):
        whole = super().result(book, first, clock, stopped, last)
        return replace(whole, best=tuple(range(5)))


class Silent(Walk):
    def tell(self, observers, trial):
        pass


class Exaggerates(Walk):
    def tell(self, observers, trial):
        super().tell(observers, replace(trial, best=trial.best / 2))


class Uninterruptible(Walk):
    """Ctrl-C is taken for the end of the budget."""

    def interrupted(self):
        return "budget"


class ForgetsTheGenerator(Walk):
    def restored(self, resume):
        return np.random.default_rng(resume.seed).bit_generator.state


class StaleCheckpoint(Walk):
    def checkpoint(self, space, seed, book, saved):
        return replace(super().checkpoint(space, seed, book, saved), evaluations=1)


class BinaryCheckpoint(Walk):
    def checkpoint(self, space, seed, book, saved):
        return replace(super().checkpoint(space, seed, book, saved), memory={"x": b"bytes"})


class Passes(Walk):
    def step(self, *arguments):
        raise ZeroDivisionError


class SkipsTheStart(Walk):
    """Compares with some other state than the start."""

    def run(self, space, objective, budget, **options):
        class Moved(Permutations):
            def start(self):
                return tuple(range(self.size))

        return super().run(Moved(5), objective, budget, **options)


class Grows(Walk):
    """Keeps something between runs."""

    runs = 0

    def run(self, space, objective, budget, *, seed=0, observers=(), resume=None):
        type(self).runs += 1
        return super().run(
            space, objective, budget, seed=seed + self.runs, observers=observers, resume=resume
        )


class Dawdles(Walk):
    def result(self, book, first, clock, stopped, last):
        return replace(super().result(book, first, clock, stopped, last), seconds=60.0)


BROKEN_SEARCHES = [
    (Nameless, "must have a name"),
    (Unseeded, "same seed gives another search"),
    (Grows, "same seed gives another search"),
    (Overspends, "the budget is overspent"),
    (Dawdles, "a budget of 0.02 s is overspent"),
    (Miscounts, "miscounts"),
    (KeepsTheLast, "the best is"),
    (NeverBetter, "not the best of what was evaluated"),
    (BestIsAFailure, "worse than the start"),
    (AcceptsFailures, "a failed state was accepted"),
    (WrongPair, "does not have the best measurement"),
    (Silent, "observers are not told of each evaluation"),
    (Exaggerates, "misreports"),
    (Uninterruptible, "stopped"),
    (ForgetsTheGenerator, "goes another way"),
    (StaleCheckpoint, "last checkpoint is not of the end"),
    (BinaryCheckpoint, "cannot be written as JSON"),
    (Passes, "run() raised"),
    (SkipsTheStart, "not the start state"),
]


def test_the_right_search_is_accepted():
    check_search(Walk(), Permutations(5), Disorder(), evaluations=40)


@pytest.mark.parametrize(
    ("cls", "said"), BROKEN_SEARCHES, ids=lambda value: getattr(value, "__name__", "")
)
def test_broken_searches_are_refused(cls, said):
    with pytest.raises(ContractBroken) as caught:
        check_search(cls(), Permutations(5), Disorder(), evaluations=40)
    assert said in str(caught.value)


def test_a_search_that_lets_ctrl_c_through_is_refused():
    class Through(Walk):
        def interrupted(self):
            raise

    with pytest.raises(ContractBroken, match="let KeyboardInterrupt through"):
        check_search(Through(), Permutations(5), Disorder(), evaluations=40)


def test_only_a_modelled_objective_can_check_a_search():
    class Real(Disorder):
        kind = "measured"

    with pytest.raises(BadInput, match="modelled objective"):
        check_search(Walk(), Permutations(5), Real())
