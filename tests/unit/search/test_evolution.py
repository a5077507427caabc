"""Evolution: operators, bandit, population, portfolio, and a pipeline that reverses its order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from nostall.core import BadInput, Budget, Measurement
from nostall.search.evolution.evolve import Bandit, Evolve
from nostall.search.evolution.operators import (
    GIVEN,
    Operator,
    PortfolioSpace,
    Proposal,
    ReorderSpace,
    operators_of,
    realize,
)
from nostall.search.evolution.pipeline import Finished, Pipeline
from nostall.search.evolution.random_orders import Member, Population, RandomOrders, finalists
from nostall.testing import Disorder, Permutations

Order = tuple[int, ...]


class Blocks(Permutations):
    """Permutations with two blocks (halves), re-ordering and a portfolio."""

    def reorder(
        self,
        state: Order,
        rng: np.random.Generator,
        sigma: float,
        blocks: Sequence[int] | None = None,
    ) -> Order:
        half = self.size // 2
        parts = [state[:half], state[half:]]
        for number in (0, 1) if blocks is None else blocks:
            part = parts[number]
            keys = np.arange(len(part)) + rng.normal(0, sigma, len(part))
            parts[number] = tuple(part[i] for i in np.argsort(keys))
        return (*parts[0], *parts[1])

    def recombine(self, first: Order, second: Order, rng: np.random.Generator) -> Order:
        return first if rng.random() < 0.5 else second

    def block_weights(self) -> tuple[float, ...]:
        return (0.0, 1.0)

    def portfolio(self) -> list[Order]:
        a, b, c, d, e, f, g, h = self.start()
        return [(d, c, b, a, e, f, g, h), (a, b, c, d, h, f, g, e), (b, a, c, d, e, f, g, h)]

    def combine(self, first: Order, second: Order) -> Order | None:
        start = self.start()
        if first == second:
            return None
        mixed = [a if a != s else b for s, a, b in zip(start, first, second, strict=True)]
        return tuple(mixed)


class Backwards(Disorder):
    """A measured objective with noise; the best state has both halves in ascending order.

    It finishes what it holds in reverse order.
    """

    kind = "measured"
    capacity = 5

    def __init__(self, space: Blocks, wrong: Sequence[Order] = ()) -> None:
        super().__init__()
        self.space, self.wrong = space, set(wrong)
        self.rng = np.random.default_rng(1)
        self.waiting: list[tuple[int, Proposal[Order]]] = []
        self.ready: list[tuple[int, Proposal[Order]]] = []
        self.target = (*sorted(space.start()[:4]), *sorted(space.start()[4:]))
        self.most = 0
        self.measured: list[Order] = []
        self.discarded = False

    @property
    def idle(self) -> bool:
        return len(self.waiting) + len(self.ready) < 2

    def submit(self, number: int, proposal: Proposal[Order]) -> None:
        self.waiting.append((number, proposal))
        self.most = max(self.most, len(self.waiting) + len(self.ready))

    def collect(self) -> Finished[Order]:
        if not self.ready:
            self.ready, self.waiting = self.waiting, self.ready
        number, proposal = self.ready.pop()
        state = realize(self.space, proposal)
        if state in self.wrong:
            failed = Measurement("s", (), "measured", failure="wrong: outputs differ")
            return Finished(number, state, failed)
        if state in self.measured and proposal.operator is not GIVEN:
            return Finished(number, state, None, "duplicate")
        self.measured.append(state)
        noise = 1 + 0.01 * self.rng.normal()
        return Finished(number, state, Measurement("s", (self._seconds(state) * noise,), self.kind))

    def _seconds(self, state: Order) -> float:
        return self.optimum * (10 + sum(a != b for a, b in zip(state, self.target, strict=True)))

    def discard(self) -> None:
        self.waiting.clear()
        self.ready.clear()
        self.discarded = True


def run(
    objective: Backwards, space: Blocks, evaluations: int = 400, search: RandomOrders | None = None
):
    return (search or Evolve()).run(space, objective, Budget(evaluations=evaluations), seed=2)


def test_a_pipeline_is_kept_full_and_emptied_at_the_end() -> None:
    space = Blocks(8, 2)
    objective = Backwards(space)
    result = run(objective, space)
    assert isinstance(objective, Pipeline)
    assert objective.most >= objective.capacity and objective.discarded
    assert result.evaluations == 400 and result.rejected > 0
    assert result.ratio > 1.1


def test_the_best_state_is_confirmed_by_values_that_did_not_select_it() -> None:
    space = Blocks(8, 2)
    objective = Backwards(space)
    result = run(objective, space)
    assert len(result.best_measurement.samples) >= 2
    assert objective.measured.count(result.best) >= 3
    best, *others = finalists(result, space)
    assert best.state == result.best and best.value == result.best_measurement.value
    assert all(best.value <= other.value for other in others)


def test_a_state_with_wrong_outputs_is_never_a_finalist() -> None:
    space = Blocks(8, 2)
    first = run(Backwards(space), space, 300)
    objective = Backwards(space, [first.best])
    result = run(objective, space, 300)
    assert first.best not in [member.state for member in finalists(result, space)]


def test_the_portfolio_comes_first_and_pairs_that_help_follow() -> None:
    space = Blocks(8, 2)
    objective = Backwards(space)
    run(objective, space, 60)
    portfolio = space.portfolio()
    assert set(portfolio) <= set(objective.measured[:10])
    pairs = {space.combine(a, b) for a in portfolio for b in portfolio} - {None}
    assert pairs & set(objective.measured)
    assert isinstance(space, PortfolioSpace)


def test_a_resumed_search_keeps_its_population() -> None:
    space = Blocks(8, 2)
    first = run(Backwards(space), space, 200)
    resumed = Evolve().run(
        space, Backwards(space), Budget(evaluations=210), seed=2, resume=first.checkpoint
    )
    before = {m.state for m in finalists(first, space)}
    after = {m.state for m in finalists(resumed, space)}
    assert len(before & after) >= len(before) // 2
    assert resumed.evaluations == 210


def test_a_hot_block_alone_changes() -> None:
    space = Blocks(8, 2)
    operator = Operator("reorder", 20.0, "hot")
    for seed in range(5):
        state = realize(space, Proposal(operator, space.start(), seed=(seed,)))
        assert state[:4] == space.start()[:4]
        assert sorted(state) == sorted(space.start())


def test_the_same_proposal_gives_the_same_state() -> None:
    space = Blocks(8, 2)
    for operator in operators_of(space)[:-1]:
        proposal = Proposal(operator, space.start(), space.portfolio()[0], seed=(3, 4))
        assert realize(space, proposal) == realize(space, proposal)


def test_operators_fit_the_space() -> None:
    assert {o.kind for o in operators_of(Permutations())} == {"moves"}
    assert {o.kind for o in operators_of(Blocks())} == {"reorder", "recombine", "moves"}
    assert isinstance(Blocks(), ReorderSpace) and not isinstance(Permutations(), ReorderSpace)
    assert len({str(o) for o in operators_of(Blocks())}) == len(operators_of(Blocks()))


def test_the_bandit_prefers_the_operator_that_pays_and_forgets() -> None:
    rng = np.random.default_rng(0)
    bandit = Bandit.of(3)
    for _ in range(200):
        chosen = bandit.choose(rng)
        bandit = bandit.reward(chosen, 1.0 if chosen == 1 else 0.0)
    assert [bandit.choose(rng) for _ in range(50)].count(1) > 40
    assert Bandit.load(bandit.dump(), 3) == bandit
    for _ in range(600):
        bandit = bandit.reward(1, 0.0)
    assert bandit.successes[1] < 1.0


def test_a_member_is_valued_by_what_did_not_select_it() -> None:
    lucky = Member((1,), b"a", (1.0,))
    assert lucky.value == 1.0
    assert lucky.measured(3.0).measured(5.0).value == 4.0
    assert math.isinf(lucky.measured(math.inf).value)


def test_a_population_holds_the_best_and_drops_failures() -> None:
    population: Population[Order] = Population(2)
    for n, value in enumerate((3.0, 1.0, 2.0)):
        population = population.insert(Member((n,), bytes([n]), (value,)))
    assert [m.state for m in population] == [(1,), (2,)] and population.threshold == 2.0
    best = population.members[0]
    assert len(population.insert(best.measured(math.inf))) == 1
    assert [m.values for m in population.insert(best.measured(9.0))] == [(2.0,), (1.0, 9.0)]


@pytest.mark.parametrize("parameters", [{"population": 1}, {"max_drops": 0}])
def test_parameters_out_of_range_are_refused(parameters: dict[str, int]) -> None:
    with pytest.raises(BadInput, match="population >= 2"):
        Evolve(**parameters)


def test_operators_that_are_left_out_make_no_proposal() -> None:
    space = Blocks(8, 2)
    objective = Backwards(space)
    seen: set[str] = set()
    submit = objective.submit
    objective.submit = lambda number, proposal: (  # type: ignore[method-assign]
        seen.add(str(proposal.operator)),
        submit(number, proposal),
    )
    run(objective, space, search=Evolve(without=("reorder sigma=1 *", "* hot", "immigrants")))
    assert {"reorder sigma=3 all", "reorder sigma=8 all", "recombine"} <= seen
    assert not any(name.endswith(" hot") or "sigma=1 " in name for name in seen)
    assert not any("sigma=80" in name or "sigma=6" in name for name in seen), "immigrants"


def submitted(search: RandomOrders, evaluations: int = 400) -> list[Proposal[Order]]:
    """The proposals of a search."""
    space = Blocks(8, 2)
    objective = Backwards(space)
    seen: list[Proposal[Order]] = []
    submit = objective.submit
    objective.submit = lambda number, proposal: (  # type: ignore[method-assign]
        seen.append(proposal),
        submit(number, proposal),
    )
    assert run(objective, space, evaluations, search).ratio > 1.05
    return seen


def test_random_orders_start_from_the_start_and_from_settings_only() -> None:
    space = Blocks(8, 2)
    portfolio = space.portfolio()
    pairs = [space.combine(a, b) for a in portfolio for b in portfolio]
    given = {space.start(), *portfolio, *pairs}
    orders = [p for p in submitted(RandomOrders()) if p.operator is not GIVEN]
    assert len(orders) > 100 and {p.operator.kind for p in orders} == {"reorder"}
    assert {p.operator.sigma for p in orders} == {2.0, 6.0, 20.0, 80.0}
    assert {p.parent for p in orders} <= given and len({p.parent for p in orders}) > 2


@pytest.mark.parametrize("without", [("reorder sigma=7 *",), ("*",)])
def test_patterns_that_leave_out_nothing_or_all_are_refused(without: tuple[str, ...]) -> None:
    space = Blocks(8, 2)
    with pytest.raises(BadInput, match=r"operators of this space are .*recombine"):
        run(Backwards(space), space, search=Evolve(without=without))
