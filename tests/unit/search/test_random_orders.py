"""Random orders: population, portfolio, and a pipeline that reverses its order."""

from __future__ import annotations

import math

import pytest

from nostall.core import BadInput, Budget
from nostall.search.orders.operators import GIVEN, PortfolioSpace, Proposal
from nostall.search.orders.pipeline import Pipeline
from nostall.search.orders.random_orders import Member, Population, RandomOrders, finalists
from tests.unit.search.blocks import Backwards, Blocks, Order


def run(
    objective: Backwards, space: Blocks, evaluations: int = 400, search: RandomOrders | None = None
):
    return (search or RandomOrders()).run(space, objective, Budget(evaluations=evaluations), seed=2)


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
    resumed = RandomOrders().run(
        space, Backwards(space), Budget(evaluations=210), seed=2, resume=first.checkpoint
    )
    before = {m.state for m in finalists(first, space)}
    after = {m.state for m in finalists(resumed, space)}
    assert len(before & after) >= len(before) // 2
    assert resumed.evaluations == 210


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
        RandomOrders(**parameters)


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
