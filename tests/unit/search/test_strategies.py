"""The strategies: conformance, the published rules of SIP, and that the default is the best."""

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
from nostall.search.loop import draw_legal
from nostall.search.memo import Memo
from nostall.testing import Diary, Disorder, Permutations, check_search, recorded

ALL = [
    Anneal(),
    Anneal(opening=0.0, stuck=5, throws=3),
    Anneal(memo=0, walk=3),
    Anneal(memo=7),
    Sip(),
    Sip(hot=0.06, restarts=True),
    RandomSearch(),
    RandomSearch(length=3),
]
EACH = pytest.mark.parametrize("search", ALL, ids=lambda search: search.name)


class Still(Permutations):
    """A space in which nothing can move."""

    def draw(self, state, rng, wanted=frozenset()):
        return None

    def moves(self, state):
        return iter(())


class Noisy(Disorder):
    """Measured: another value at each look."""

    kind = "measured"
    looks = 0

    def evaluate(self, states):
        self.looks += len(states)
        return [
            Measurement("s", (self._seconds(state) * (1 + 1e-6 * self.looks),), "measured")
            for state in states
        ]


@EACH
@pytest.mark.parametrize("size", [3, 7])
def test_every_strategy_keeps_the_contract(search, size):
    check_search(search, Permutations(size), Disorder(), seed=size)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(ALL),
    st.integers(0, 2**32),
    st.integers(2, 150),
    st.integers(1, 149),
    st.integers(2, 8),
)
def test_interrupted_and_resumed_is_uninterrupted(search, seed, evaluations, cut, size):
    space, budget = Permutations(size), Budget(evaluations=evaluations)
    whole, parts = Diary(), Diary()
    expected = search.run(space, Disorder(), budget, seed=seed, observers=[whole])
    halting = recorded(Disorder(), interrupt_at=cut)
    first = search.run(space, halting, budget, seed=seed, observers=[parts])
    assert first.stopped == ("interrupted" if cut < expected.evaluations else expected.stopped)
    result = search.run(
        space, Disorder(), budget, seed=seed, observers=[parts], resume=first.checkpoint
    )
    assert [(t.index, t.value, t.move) for t in parts.trials] == [
        (t.index, t.value, t.move) for t in whole.trials
    ]
    assert result.best == expected.best
    assert result.checkpoint.rng == expected.checkpoint.rng
    assert result.checkpoint.current == expected.checkpoint.current
    steering = [
        {k: v for k, v in r.checkpoint.memory.items() if k != "seconds"} for r in (result, expected)
    ]
    assert steering[0] == steering[1]


def test_anneal_beats_sip_and_random_at_equal_evaluations():
    space, objective, budget = Permutations(16, 4), Disorder(), Budget(evaluations=400)
    found = {
        search.name: mean(
            search.run(space, objective, budget, seed=seed).best_measurement.value
            for seed in range(5)
        )
        for search in (Anneal(), Sip(restarts=True), RandomSearch())
    }
    assert found["anneal"] < 0.5 * found["sip"]
    assert found["anneal"] < 0.5 * found["random"]


def test_anneal_finds_the_optimum_and_knows_when_nothing_is_left():
    result = Anneal().run(Permutations(4), Disorder(), Budget(evaluations=10_000))
    assert result.best == (0, 1, 2, 3)
    assert result.best_measurement.value == Disorder.optimum
    assert result.stopped == "finished"
    assert result.evaluations == math.factorial(4)


def test_anneal_pays_once_for_a_modelled_state():
    seen = recorded(Disorder())
    result = Anneal().run(Permutations(6), seen, Budget(evaluations=300))
    assert len(seen.states) == result.evaluations == len(set(seen.states))


def test_anneal_measures_again_what_a_gpu_measures():
    seen = recorded(Noisy())
    result = Anneal().run(Permutations(3), seen, Budget(evaluations=100))
    assert len(seen.states) == result.evaluations == 100
    assert len(set(seen.states)) <= 6


def test_anneal_is_blind_to_the_size_of_the_unit():
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


def test_sip_restarts_spend_the_whole_budget():
    budget = Budget(evaluations=1500)
    result = Sip(restarts=True).run(Permutations(7), Disorder(), budget)
    assert (result.stopped, result.evaluations) == ("budget", 1500)


def test_sip_moves_by_one_line_only():
    diary = Diary()
    Sip().run(Permutations(9, 4), Disorder(), Budget(evaluations=200), observers=[diary])
    assert {trial.move.rsplit(" ", 1)[1] for trial in diary.trials[1:]} == {"+1", "-1"}


def test_sip_accepts_by_absolute_throughput():
    # A loss of 1e-9 TFLOPS is nothing at T = 1; one of 1e6 TFLOPS is never taken.
    def accepted(flops):
        diary = Diary()
        Sip().run(Permutations(9), Disorder(flops), Budget(evaluations=300), observers=[diary])
        return [trial.accepted for trial in diary.trials]

    assert all(accepted(1e-3))
    assert not all(accepted(1e15))


@pytest.mark.parametrize("unit", ["s", "cycles"])
def test_sip_needs_the_work_and_the_time(unit):
    class Other(Disorder):
        pass

    Other.unit = unit
    with pytest.raises(BadInput, match="flops = N"):
        Sip().run(Permutations(), Other(None if unit == "s" else 1e6), Budget(evaluations=5))


def test_random_returns_to_the_start():
    seen = recorded(Disorder())
    RandomSearch(length=1).run(Permutations(8, 1), seen, Budget(evaluations=200))
    # One step from the start exchanges two neighbours: at most two numbers are elsewhere.
    start = Permutations(8).start()
    assert all(sum(a != b for a, b in zip(s, start, strict=True)) <= 2 for s in seen.states)


def test_illegal_draws_are_counted_and_then_enumerated():
    class Shy(Permutations):
        def draw(self, state, rng, wanted=frozenset()):
            return None

    rng = np.random.default_rng(0)
    space = Shy(4)
    move, rejected = draw_legal(space, space.start(), rng, frozenset({"distance=2"}))
    assert abs(move.by) == 2
    assert rejected == space.max_draws
    assert draw_legal(Still(4), space.start(), rng, frozenset())[0] is None


@EACH
def test_a_space_without_moves_ends_the_search(search):
    result = search.run(Still(), Disorder(), Budget(evaluations=10))
    assert (result.stopped, result.evaluations) == ("no legal move", 1)
    assert result.best == Still().start()


@EACH
def test_seconds_alone_end_the_search(search):
    result = search.run(Permutations(9), Noisy(), Budget(seconds=0.05))
    assert result.stopped in ("budget", "finished")
    assert result.seconds < 2


def test_a_start_that_fails_is_bad_input():
    failing = recorded(Disorder(), fails=lambda _: True)
    with pytest.raises(BadInput, match="start state cannot be measured"):
        Anneal().run(Permutations(), failing, Budget(evaluations=5))


def test_an_interruption_before_anything_was_found_is_passed_on():
    with pytest.raises(KeyboardInterrupt):
        Anneal().run(Permutations(), recorded(Disorder(), interrupt_at=0), Budget(evaluations=5))


def test_other_errors_are_not_swallowed():
    class Lost(Disorder):
        def evaluate(self, states):
            if states[0] != Permutations().start():
                raise MissingPart("the GPU is gone")
            return super().evaluate(states)

    for search in (Anneal(), Sip(), RandomSearch()):
        with pytest.raises(MissingPart):
            search.run(Permutations(), Lost(), Budget(evaluations=5))


def test_a_miscounting_objective_is_refused():
    class Short(Disorder):
        def evaluate(self, states):
            return []

    with pytest.raises(ContractBroken, match="0 measurements for 1 states"):
        Anneal().run(Permutations(), Short(), Budget(evaluations=5))


@pytest.mark.parametrize("change", [{"strategy": "sip"}, {"seed": 1}, {"rng": {"state": 1}}])
def test_a_foreign_checkpoint_is_refused(change):
    done = Anneal().run(Permutations(), Disorder(), Budget(evaluations=5)).checkpoint
    with pytest.raises(BadRun, match="checkpoint"):
        Anneal().run(
            Permutations(),
            Disorder(),
            Budget(evaluations=9),
            resume=dataclasses.replace(done, **change),
        )


def test_a_best_that_fails_on_resume_gives_way_to_the_start():
    done = Anneal().run(Permutations(), Disorder(), Budget(evaluations=30))
    assert done.ratio > 1
    failing = recorded(Disorder(), fails=lambda state: state == done.best)
    result = Anneal().run(Permutations(), failing, Budget(evaluations=30), resume=done.checkpoint)
    assert result.best == Permutations().start()
    assert result.best_measurement.failure is None


def test_a_finished_budget_is_not_spent_again():
    done = Anneal().run(Permutations(), Disorder(), Budget(evaluations=30))
    again = Anneal().run(Permutations(), Disorder(), Budget(evaluations=30), resume=done.checkpoint)
    assert (again.evaluations, again.stopped, again.best) == (30, "budget", done.best)
    assert again.seconds >= done.seconds


def test_checkpoints_come_during_the_search(monkeypatch):
    monkeypatch.setattr("nostall.search.loop.CHECKPOINT_SECONDS", 0.0)
    diary = Diary()
    RandomSearch().run(Permutations(), Disorder(), Budget(evaluations=20), observers=[diary])
    assert [c.evaluations for c in diary.checkpoints] == [*range(2, 21), 20]


def test_a_run_directory_observes_and_resumes(tmp_path):
    space, budget = Permutations(8), Budget(evaluations=100)
    whole = Anneal().run(space, Disorder(), budget)
    with Run.create(tmp_path, "tune", {}) as run:
        Anneal().run(space, recorded(Disorder(), interrupt_at=60), budget, observers=[run])
        result = Anneal().run(space, Disorder(), budget, observers=[run], resume=run.checkpoint())
        run.finish("done", {})
    assert result.best == whole.best
    trials = list(Run.open(tmp_path).trials())
    assert [trial.index for trial in trials] == list(range(whole.evaluations))
    assert trials[-1].best == whole.best_measurement.value


def test_the_memo_forgets_the_oldest_and_waits_for_the_search():
    memo = Memo(2)
    for index, name in enumerate("abc"):
        memo.note(index, name, float(index))
        assert memo.get(name) is None
        memo.catch_up(index + 1)
        assert memo.get(name) == index
    assert memo.get("a") is None
    memo.note(3, "d", 3.0)
    memo.catch_up(3)  # evaluation 3 was interrupted
    assert memo.get("d") is None
    other = Memo(2)
    assert other.restore({**memo.saved(3), "free": 1.0}) == {"free": 1.0}
    assert (other.get("b"), other.get("c")) == (1.0, 2.0)


@pytest.mark.parametrize("name", sorted(strategies))
def test_strategies_are_made_by_name(name):
    search = make(name)
    assert isinstance(search, Search)
    assert search.name == name
    assert strategies[name]() == search


def test_parameters_reach_the_strategy():
    assert make("sip", restarts=True) == Sip(restarts=True)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: make("annealing"), "anneal, random, sip"),
        (lambda: make("sip", heat=2), "has no parameter heat"),
        (lambda: make("sip", cold=2.0), "cold < hot"),
        (lambda: make("anneal", walk=0), "walk"),
        (lambda: make("anneal", opening=1.0), "opening"),
        (lambda: make("random", length=0), "length=0"),
        (lambda: Permutations(0), "size=0"),
    ],
)
def test_wrong_names_and_values_are_bad_input(call, said):
    with pytest.raises(BadInput) as caught:
        call()
    assert said in str(caught.value)


def test_objectives_need_not_be_ours():
    class Cycles(Objective):
        kind, unit = "modelled", "cycles"

        def evaluate(self, states):
            return [Measurement("cycles", (float(state[0] + 1),), "modelled") for state in states]

    result = Anneal().run(Permutations(6), Cycles(), Budget(evaluations=150))
    assert result.best_measurement.value == 1.0
    assert result.ratio == 6.0
