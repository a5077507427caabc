"""Evolution: its operators and bandit, and its run on a pipeline that reverses its order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.ptx.evolution import (
    Bandit,
    Child,
    Evolve,
    Variation,
    block_weights,
    recombine,
    variations_of,
)

from nostall.core import BadInput, Budget
from nostall.ptx.schedule.levers import NO_LEVERS
from nostall.ptx.schedule.state import PtxState
from nostall.search.orders.random_orders import finalists
from nostall.testing import Disorder, Permutations, check_search
from nostall.tuning.assembler.space import AssemblerSpace
from tests.unit.ptx.schedule.test_space import space as ptx_space
from tests.unit.search.blocks import Backwards, Blocks, Order


@recombine.register
def _(space: Blocks, first: Order, second: Order, rng: np.random.Generator) -> Order:
    return first if rng.random() < 0.5 else second


@block_weights.register
def _(space: Blocks) -> tuple[float, ...]:
    return (0.0, 1.0)


def assembler_space(body: str) -> AssemblerSpace:
    return AssemblerSpace(ptx_space(body), NO_LEVERS)


def run(objective: Backwards, space: Blocks, evaluations: int, search: Evolve):
    return search.run(space, objective, Budget(evaluations=evaluations), seed=2)


@pytest.mark.parametrize("search", [Evolve(), Evolve(population=3, max_drops=20)])
def test_evolution_keeps_the_contract_of_a_search(search: Evolve) -> None:
    check_search(search, Permutations(), Disorder())


def test_it_finds_a_better_state_and_keeps_the_best() -> None:
    space = Blocks(8, 2)
    result = run(Backwards(space), space, 400, Evolve())
    assert result.ratio > 1.1 and result.best == finalists(result, space)[0].state


def test_a_resumed_search_keeps_its_population() -> None:
    space = Blocks(8, 2)
    first = run(Backwards(space), space, 200, Evolve())
    resumed = Evolve().run(
        space, Backwards(space), Budget(evaluations=210), seed=2, resume=first.checkpoint
    )
    before = {m.state for m in finalists(first, space)}
    after = {m.state for m in finalists(resumed, space)}
    assert len(before & after) >= len(before) // 2
    assert resumed.evaluations == 210


def test_a_hot_block_alone_changes() -> None:
    space = Blocks(8, 2)
    operator = Variation("reorder", 20.0, scope="hot")
    for seed in range(5):
        state = Child(operator, space.start(), (seed,)).realize(space)
        assert state[:4] == space.start()[:4]
        assert sorted(state) == sorted(space.start())


def test_the_same_proposal_gives_the_same_state() -> None:
    space = Blocks(8, 2)
    for operator in variations_of(space)[:-1]:
        proposal = Child(operator, space.start(), (3, 4), space.portfolio()[0])
        assert proposal.realize(space) == proposal.realize(space)


def test_operators_fit_the_space() -> None:
    assert {o.kind for o in variations_of(Permutations())} == {"moves"}
    assert {o.kind for o in variations_of(Blocks())} == {"reorder", "moves"}
    assert "recombine" in map(str, variations_of(Blocks()))
    assert len({str(o) for o in variations_of(Blocks())}) == len(variations_of(Blocks()))


def test_recombination_takes_each_order_and_setting_from_one_parent() -> None:
    body = "mov.b32 %r1, 1; mov.b32 %r2, 2; "
    own = assembler_space("".join(f"L{n}: {body} @%p1 bra L{n};" for n in range(6)))
    a = own.reorder(PtxState(kernel_name="x", options=("-O1",)), np.random.default_rng(0), 9.0)
    b = replace(own.start(), max_registers=64, hints=((0, "L2::64B"),))
    children = {recombine(own, a, b, np.random.default_rng(seed)) for seed in range(40)}
    assert len(children) > 10
    for child in children:
        for number in range(len(own.ptx.blocks)):
            parents = (own.ptx.order(a, number), own.ptx.order(b, number))
            assert own.ptx.order(child, number) in parents
        assert child.kernel_name in ("x", "")
        assert child.max_registers in (None, 64)
    assert recombine(own, a, a, np.random.default_rng(0)) == a


def test_a_block_weighs_more_in_a_loop() -> None:
    body = "mov.b32 %r1, 1; mov.b32 %r2, 2; mov.b32 %r3, 3; "
    own = assembler_space(body * 2 + "L:" + body.replace("%r", "%r1") + "@%p1 bra L;")
    assert block_weights(own) == (12.0, 30.0)


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


def test_operators_that_are_left_out_make_no_proposal() -> None:
    space = Blocks(8, 2)
    objective = Backwards(space)
    seen: set[str] = set()
    submit = objective.submit
    objective.submit = lambda number, proposal: (  # type: ignore[method-assign]
        seen.add(str(proposal.operator)),
        submit(number, proposal),
    )
    run(objective, space, 400, Evolve(without=("reorder sigma=1 *", "* hot", "immigrants")))
    assert {"reorder sigma=3 all", "reorder sigma=8 all", "recombine"} <= seen
    assert not any(name.endswith(" hot") or "sigma=1 " in name for name in seen)
    assert not any("sigma=80" in name or "sigma=6" in name for name in seen), "immigrants"


@pytest.mark.parametrize("without", [("reorder sigma=7 *",), ("*",)])
def test_patterns_that_leave_out_nothing_or_all_are_refused(without: tuple[str, ...]) -> None:
    space = Blocks(8, 2)
    with pytest.raises(BadInput, match=r"operators of this space are .*recombine"):
        run(Backwards(space), space, 400, Evolve(without=without))
