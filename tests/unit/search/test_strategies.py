"""Strategies: conformance, resuming, the published rules of SIP, and the gain of annealing."""

import dataclasses
import math
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.core import (
    BadInput,
    BadRun,
    Budget,
    ContractBroken,
    Measurement,
    MissingPart,
    Objective,
    Run,
    Search,
)
from nostall.search import Anneal, RandomSearch, Sip, make, strategies
from nostall.search.anneal import Memo
from nostall.search.loop import draw_legal
from nostall.search.orders.random_orders import RandomOrders
from nostall.testing import (
    Disorder,
    Permutations,
    RecordingObserver,
    check_search,
    record_evaluations,
)

ALL = [
    Anneal(),
    Anneal(exploration=0.0, perturb_after=5, max_perturbations=3),
    Anneal(memo_size=0, walk_length=3),
    Anneal(memo_size=7),
    Sip(),
    Sip(start_temperature=0.06, restarts=True),
    RandomOrders(),
    RandomOrders(population=3, max_drops=20),
    RandomSearch(),
    RandomSearch(walk_length=3),
]
EACH = pytest.mark.parametrize("search", ALL, ids=lambda search: search.name)


class Immovable(Permutations):
    """A space in which nothing can move."""

    def draw(self, state, rng, required_tags=frozenset()):
        return None

    def moves(self, state):
        return iter(())


class Noisy(Disorder):
    """Measured objective with another value at each evaluation."""

    kind = "measured"
    evaluations = 0

    def evaluate(self, states):
        self.evaluations += len(states)
        return [
            Measurement("s", (self._seconds(state) * (1 + 1e-6 * self.evaluations),), "measured")
            for state in states
        ]


@EACH
@pytest.mark.parametrize("size", [3, 7])
def test_each_strategy_meets_the_contract(search, size):
    check_search(search, Permutations(size), Disorder(), seed=size)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(ALL),
    st.integers(0, 2**32),
    st.integers(2, 150),
    st.integers(1, 149),
    st.integers(2, 8),
)
def test_a_resumed_search_equals_an_uninterrupted_one(search, seed, evaluations, cut, size):
    space, budget = Permutations(size), Budget(evaluations=evaluations)
    full, parts = RecordingObserver(), RecordingObserver()
    expected = search.run(space, Disorder(), budget, seed=seed, observers=[full])
    interrupting = record_evaluations(Disorder(), interrupt_at=cut)
    first = search.run(space, interrupting, budget, seed=seed, observers=[parts])
    assert first.stopped == ("interrupted" if cut < expected.evaluations else expected.stopped)
    result = search.run(
        space, Disorder(), budget, seed=seed, observers=[parts], resume=first.checkpoint
    )
    assert [(t.index, t.value, t.move) for t in parts.trials] == [
        (t.index, t.value, t.move) for t in full.trials
    ]
    assert result.best == expected.best
    assert result.checkpoint.rng == expected.checkpoint.rng
    assert result.checkpoint.current == expected.checkpoint.current
    memories = [
        {k: v for k, v in r.checkpoint.memory.items() if k != "seconds"} for r in (result, expected)
    ]
    assert memories[0] == memories[1]


def test_anneal_beats_sip_and_random_at_equal_evaluations():
    space, objective, budget = Permutations(16, 4), Disorder(), Budget(evaluations=400)
    means = {
        search.name: mean(
            search.run(space, objective, budget, seed=seed).best_measurement.value
            for seed in range(5)
        )
        for search in (Anneal(), Sip(restarts=True), RandomSearch())
    }
    assert means["anneal"] < 0.5 * means["sip"]
    assert means["anneal"] < 0.5 * means["random"]


def test_anneal_finds_the_optimum_and_stops_if_the_space_is_exhausted():
    result = Anneal().run(Permutations(4), Disorder(), Budget(evaluations=10_000))
    assert result.best == (0, 1, 2, 3)
    assert result.best_measurement.value == Disorder.optimum
    assert result.stopped == "finished"
    assert result.evaluations == math.factorial(4)


def test_anneal_evaluates_a_modelled_state_once():
    objective = record_evaluations(Disorder())
    result = Anneal().run(Permutations(6), objective, Budget(evaluations=300))
    assert len(objective.states) == result.evaluations == len(set(objective.states))


def test_anneal_evaluates_a_measured_state_at_each_visit():
    objective = record_evaluations(Noisy())
    result = Anneal().run(Permutations(3), objective, Budget(evaluations=100))
    assert len(objective.states) == result.evaluations == 100
    assert len(set(objective.states)) <= 6


def test_anneal_does_not_depend_on_the_size_of_the_unit():
    class Slow(Disorder):
        def _seconds(self, state):
            return 2.0**30 * super()._seconds(state)

    budget = Budget(evaluations=200)
    fast = Anneal().run(Permutations(9), Disorder(), budget)
    slow = Anneal().run(Permutations(9), Slow(), budget)
    assert fast.best == slow.best
    assert fast.checkpoint.current == slow.checkpoint.current


@pytest.mark.parametrize("search", [Anneal(), RandomSearch()], ids=["anneal", "random"])
def test_a_start_that_costs_nothing_is_the_best(search):
    class Free(Disorder):
        def _seconds(self, state):
            return 0.0 if state == Permutations().start() else super()._seconds(state)

    result = search.run(Permutations(), Free(), Budget(evaluations=20))
    assert result.best == Permutations().start()


def test_sip_is_finished_at_its_temperature_floor():
    result = Sip().run(Permutations(7), Disorder(), Budget(evaluations=100_000))
    assert result.stopped == "finished"
    # 0.997 ** 997 is the last temperature above 0.05: 998 steps after the start state.
    assert result.evaluations == 1 + 998
    assert result.rejected > 0


def test_sip_is_finished_after_its_iterations():
    result = Sip(iterations=10).run(Permutations(7), Disorder(), Budget(evaluations=100))
    assert (result.stopped, result.evaluations) == ("finished", 11)


def test_sip_with_restarts_spends_all_of_the_budget():
    budget = Budget(evaluations=1500)
    result = Sip(restarts=True).run(Permutations(7), Disorder(), budget)
    assert (result.stopped, result.evaluations) == ("budget", 1500)


def test_sip_moves_by_one_line_only():
    observer = RecordingObserver()
    Sip().run(Permutations(9, 4), Disorder(), Budget(evaluations=200), observers=[observer])
    assert {trial.move.rsplit(" ", 1)[1] for trial in observer.trials[1:]} == {"+1", "-1"}


def test_sip_accepts_by_absolute_throughput():
    # A loss of 1e-9 TFLOPS is nothing at T = 1; one of 1e6 TFLOPS is never taken.
    def accepted(flops):
        observer = RecordingObserver()
        Sip().run(Permutations(9), Disorder(flops), Budget(evaluations=300), observers=[observer])
        return [trial.accepted for trial in observer.trials]

    assert all(accepted(1e-3))
    assert not all(accepted(1e15))


@pytest.mark.parametrize("unit", ["s", "cycles"])
def test_sip_needs_flops_and_seconds(unit):
    class Unusable(Disorder):
        pass

    Unusable.unit = unit
    with pytest.raises(BadInput, match="flops = N"):
        Sip().run(Permutations(), Unusable(None if unit == "s" else 1e6), Budget(evaluations=5))


def test_random_returns_to_the_start():
    objective = record_evaluations(Disorder())
    RandomSearch(walk_length=1).run(Permutations(8, 1), objective, Budget(evaluations=200))
    # One step from the start exchanges two neighbours: at most two numbers are elsewhere.
    start = Permutations(8).start()
    assert all(sum(a != b for a, b in zip(s, start, strict=True)) <= 2 for s in objective.states)


def test_illegal_draws_are_counted_and_then_enumerated():
    class NeverDraws(Permutations):
        def draw(self, state, rng, required_tags=frozenset()):
            return None

    rng = np.random.default_rng(0)
    space = NeverDraws(4)
    move, rejected = draw_legal(space, space.start(), rng, frozenset({"distance=2"}))
    assert abs(move.offset) == 2
    assert rejected == space.max_draws
    assert draw_legal(Immovable(4), space.start(), rng, frozenset())[0] is None


@EACH
def test_a_space_without_moves_ends_the_search(search):
    result = search.run(Immovable(), Disorder(), Budget(evaluations=10))
    assert (result.stopped, result.evaluations) == ("no legal move", 1)
    assert result.best == Immovable().start()


@EACH
def test_seconds_alone_end_the_search(search):
    result = search.run(Permutations(9), Noisy(), Budget(seconds=0.05))
    assert result.stopped in ("budget", "finished")
    assert result.seconds < 2


def test_a_start_that_fails_is_bad_input():
    failing = record_evaluations(Disorder(), fails=lambda _: True)
    with pytest.raises(BadInput, match="start state cannot be measured"):
        Anneal().run(Permutations(), failing, Budget(evaluations=5))


def test_an_interruption_before_anything_was_found_is_passed_on():
    with pytest.raises(KeyboardInterrupt):
        Anneal().run(
            Permutations(), record_evaluations(Disorder(), interrupt_at=0), Budget(evaluations=5)
        )


def test_errors_of_the_objective_are_passed_on():
    class Lost(Disorder):
        def evaluate(self, states):
            if states[0] != Permutations().start():
                raise MissingPart("the GPU is gone")
            return super().evaluate(states)

    for search in (Anneal(), Sip(), RandomSearch()):
        with pytest.raises(MissingPart):
            search.run(Permutations(), Lost(), Budget(evaluations=5))


def test_a_miscounting_objective_is_rejected():
    class Short(Disorder):
        def evaluate(self, states):
            return []

    with pytest.raises(ContractBroken, match="0 measurements for 1 states"):
        Anneal().run(Permutations(), Short(), Budget(evaluations=5))


@pytest.mark.parametrize("change", [{"strategy": "sip"}, {"seed": 1}, {"rng": {"state": 1}}])
def test_a_foreign_checkpoint_is_rejected(change):
    done = Anneal().run(Permutations(), Disorder(), Budget(evaluations=5)).checkpoint
    with pytest.raises(BadRun, match="checkpoint"):
        Anneal().run(
            Permutations(),
            Disorder(),
            Budget(evaluations=9),
            resume=dataclasses.replace(done, **change),
        )


def test_the_start_replaces_a_best_that_fails_on_resume():
    done = Anneal().run(Permutations(), Disorder(), Budget(evaluations=30))
    assert done.ratio > 1
    failing = record_evaluations(Disorder(), fails=lambda state: state == done.best)
    result = Anneal().run(Permutations(), failing, Budget(evaluations=30), resume=done.checkpoint)
    assert result.best == Permutations().start()
    assert result.best_measurement.failure is None


def test_a_finished_budget_is_not_spent_again():
    done = Anneal().run(Permutations(), Disorder(), Budget(evaluations=30))
    resumed = Anneal().run(
        Permutations(), Disorder(), Budget(evaluations=30), resume=done.checkpoint
    )
    assert (resumed.evaluations, resumed.stopped, resumed.best) == (30, "budget", done.best)
    assert resumed.seconds >= done.seconds


def test_checkpoints_come_during_the_search(monkeypatch):
    monkeypatch.setattr("nostall.search.loop.CHECKPOINT_SECONDS", 0.0)
    observer = RecordingObserver()
    RandomSearch().run(Permutations(), Disorder(), Budget(evaluations=20), observers=[observer])
    assert [c.evaluations for c in observer.checkpoints] == [*range(2, 21), 20]


def test_a_run_directory_observes_and_resumes(tmp_path):
    space, budget = Permutations(8), Budget(evaluations=100)
    full = Anneal().run(space, Disorder(), budget)
    with Run.create(tmp_path, "tune", {}) as run:
        Anneal().run(
            space, record_evaluations(Disorder(), interrupt_at=60), budget, observers=[run]
        )
        result = Anneal().run(space, Disorder(), budget, observers=[run], resume=run.checkpoint())
        run.finish("done", {})
    assert result.best == full.best
    trials = list(Run.open(tmp_path).trials())
    assert [trial.index for trial in trials] == list(range(full.evaluations))
    assert trials[-1].best == full.best_measurement.value


def test_the_memo_drops_the_oldest_and_holds_back_uncommitted_values():
    memo = Memo(2)
    for index, name in enumerate("abc"):
        memo.note(index, name, float(index))
        assert memo.get(name) is None
        memo.commit(index + 1)
        assert memo.get(name) == index
    assert memo.get("a") is None
    memo.note(3, "d", 3.0)
    memo.commit(3)  # evaluation 3 was interrupted
    assert memo.get("d") is None
    restored = Memo(2)
    assert restored.load({**memo.dump(3), "free": 1.0}) == {"free": 1.0}
    assert (restored.get("b"), restored.get("c")) == (1.0, 2.0)


@pytest.mark.parametrize("name", sorted(strategies))
def test_strategies_are_made_by_name(name):
    search = make(name)
    assert isinstance(search, Search)
    assert search.name == name
    assert strategies[name]() == search


def test_parameters_reach_the_strategy():
    assert make("sip", restarts=True) == Sip(restarts=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make("annealing"), "anneal, random, sip"),
        (lambda: make("sip", heat=2), "has no parameter heat"),
        (lambda: make("sip", end_temperature=2.0), "end_temperature < start_temperature"),
        (lambda: make("anneal", walk_length=0), "walk_length"),
        (lambda: make("anneal", exploration=1.0), "exploration"),
        (lambda: make("random", walk_length=0), "walk_length=0"),
        (lambda: Permutations(0), "size=0"),
    ],
)
def test_wrong_names_and_values_are_bad_input(call, message):
    with pytest.raises(BadInput) as caught:
        call()
    assert message in str(caught.value)


def test_objectives_of_any_unit_can_be_searched():
    class Cycles(Objective):
        kind, unit = "modelled", "cycles"

        def evaluate(self, states):
            return [Measurement("cycles", (float(state[0] + 1),), "modelled") for state in states]

    result = Anneal().run(Permutations(6), Cycles(), Budget(evaluations=150))
    assert result.best_measurement.value == 1.0
    assert result.ratio == 6.0
