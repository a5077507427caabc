"""Schedule and modelled step with overlap, against values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices, step_cost
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.cost.timeline import timeline
from nostall.parallel.sharding.graph import Assignment, Operator, ShardingGraph, TensorInfo
from nostall.parallel.sharding.placements import Strategy
from nostall.parallel.sharding.schedule import PREFETCH, Run, Start, may_overlap, schedule
from tests.unit.parallel.sharding.cost.test_prices import CLUSTER, RATES, Y, _linear

DATA_PARALLEL: Assignment = ((0, 1, 1, 1, 1, 0),)
SHARDED: Assignment = ((1, 1, 1, 1, 1, 0),)


def _actions(graph: ShardingGraph, assignment: Assignment) -> list[str]:
    names = [operator.name for operator in graph.operators]
    return [
        names[action.operator]
        if isinstance(action, Run)
        else f"{names[action.edges[0].producer]} -> {names[action.edges[0].consumer]}"
        for action in schedule(graph, assignment).actions
    ]


def test_a_gradient_is_reduced_beside_what_follows() -> None:
    assert _actions(_linear(), DATA_PARALLEL) == [
        "w", "x", "mm", "sum", "mm_1", "mm_1 -> w", "loss"
    ]  # fmt: skip


def test_a_parameter_is_gathered_ahead() -> None:
    assert _actions(_linear(), SHARDED)[:4] == ["w", "x", "w -> mm", "mm"]


def test_the_loss_waits_for_its_own_sum_and_the_step_for_the_gradient() -> None:
    prices = Prices(_linear(), ClusterMesh(CLUSTER, (2,)), RATES)
    cost = step_cost(prices, DATA_PARALLEL)
    assert cost is not None
    found = timeline(prices, DATA_PARALLEL)
    # The links sum the gradient first and the loss, which the device waits for, after it.
    assert found.step_s == pytest.approx(cost.step_s)
    assert found.exposed_s == pytest.approx(cost.collectives_s)
    # A parameter is gathered at the start, when no operator can run: only its bytes are exposed.
    assert timeline(prices, SHARDED).step_s <= step_s(prices, SHARDED)


def step_s(prices: Prices, assignment: Assignment) -> float:
    cost = step_cost(prices, assignment)
    assert cost is not None
    return cost.step_s


def test_a_gradient_hides_behind_later_operators() -> None:
    """The gradient's operator runs first, so that its sum needs no time of its own."""
    graph = _linear()
    w, x, mm, total, gradient, loss = graph.operators
    early = replace(graph, operators=(w, x, gradient, mm, total, loss))
    assignment: Assignment = ((0, 1, 1, 1, 1, 0),)
    prices = Prices(early, ClusterMesh(CLUSTER, (2,)), RATES)
    hidden = 400 / 1e9 + 2 * 400 / 1e6  # the all-reduce of the gradient with its copy
    assert timeline(prices, assignment).step_s == pytest.approx(step_s(prices, assignment) - hidden)


def test_a_processor_that_launches_slowly_sets_the_pace() -> None:
    rates = DeviceRates("slow host", {"float32": 1e12}, 1e12, launch_s=1.0, send_s=2.0)
    prices = Prices(_linear(), ClusterMesh(CLUSTER, (2,)), rates)
    assert timeline(prices, ((0,) * 6,)).step_s == pytest.approx(3.0)  # three operations
    assert timeline(prices, DATA_PARALLEL).step_s == pytest.approx(7.0)  # and two all-reduces


@pytest.mark.parametrize(("contention", "lost"), [(0.0, 0.0), (0.25, 0.25), (1.0, 1.0)])
def test_a_collective_takes_a_share_of_the_speed_of_operators(
    contention: float, lost: float
) -> None:
    """The all-reduce of the gradient runs beside two operators and ends before they do."""
    graph = _linear()
    w, x, mm, total, gradient, loss = graph.operators
    early = replace(graph, operators=(w, x, gradient, mm, total, loss))
    own = replace(RATES, flops={"float32": 1e3}, contention=contention)
    prices = Prices(early, ClusterMesh(CLUSTER, (2,)), own)
    alone = timeline(replace(prices, rates=replace(own, contention=0.0)), DATA_PARALLEL)
    reduced = 400 / 1e9 + 2 * 400 / 1e6
    found = timeline(prices, DATA_PARALLEL)
    assert found.step_s == pytest.approx(alone.step_s + lost * reduced)
    assert found.operators_s == pytest.approx(alone.operators_s)


def test_only_parameters_the_batch_and_gradients_may_overlap() -> None:
    graph = _linear()
    found = {
        (graph.operators[e.producer].name, graph.operators[e.consumer].name): may_overlap(graph, e)
        for e in graph.edges
    }
    assert found == {
        ("mm_1", "w"): True, ("x", "mm"): True, ("w", "mm"): True, ("mm", "sum"): False,
        ("x", "mm_1"): True, ("sum", "loss"): False,
    }  # fmt: skip


def test_small_parameters_share_a_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five parameters of 64 bytes each: a bundle is full with three, and the others share one."""
    monkeypatch.setattr("nostall.parallel.sharding.schedule.BUNDLE_BYTES", 150)
    graph = _row_of_products(5)
    assignment = (tuple(int(o.kind == "parameter") for o in graph.operators),)
    starts = [a for a in schedule(graph, assignment).actions if isinstance(a, Start)]
    assert [len(start.edges) for start in starts] == [3, 2]
    prices = Prices(graph, ClusterMesh(CLUSTER, (2,)), RATES)
    found = timeline(prices, assignment)
    assert [call.size for call in found.calls] == [192, 128]
    assert found.counts == {"all-gather": 2}


def test_gathers_start_a_fixed_number_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row of products, each with a parameter, the first gathers start before all of them."""
    monkeypatch.setattr("nostall.parallel.sharding.schedule.SMALL_BYTES", 0)
    graph = _row_of_products(PREFETCH + 3)
    assignment = (tuple(int(o.kind == "parameter") for o in graph.operators),)
    actions = schedule(graph, assignment).actions
    products = [
        i
        for i, action in enumerate(actions)
        if isinstance(action, Run) and graph.operators[action.operator].kind == "operation"
    ]
    started = [sum(isinstance(action, Start) for action in actions[:before]) for before in products]
    assert started == [PREFETCH + 1, PREFETCH + 2, *[PREFETCH + 3] * (PREFETCH + 1)]


def _row_of_products(count: int) -> ShardingGraph:
    """x w0 w1 ...; products are replicated and parameters may be sharded."""
    kept = (Strategy((), ("R",)), Strategy((), ("S0",)))
    product = (Strategy(("R", "R"), ("R",)),)
    operators = [Operator("x", "input", "x", (), (0,), (kept[:1],), moves_memory=False)]
    for i in range(count):
        operators.append(
            Operator(f"w{i}", "parameter", f"w{i}", (), (i + 1,), (kept,), moves_memory=False)
        )
    for i in range(count):
        result = count + i + 1
        read = (result - 1 if i else 0, i + 1)
        operators.append(Operator(f"mm{i}", "operation", "mm", read, (result,), (product,)))
    tensors = (TensorInfo((4, 4), "float32", 4),) * (2 * count + 1)
    return ShardingGraph("row", (2,), tensors, tuple(operators))


def test_small_gradients_share_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three gradients of 64 bytes: the bucket is full with two, and the third has its own."""
    monkeypatch.setattr("nostall.parallel.sharding.schedule.BUCKET_BYTES", 100)
    graph = _gradients(3)
    assignment = ((0,) * len(graph.operators),)
    starts = [a for a in schedule(graph, assignment).actions if isinstance(a, Start)]
    names = [[graph.operators[e.consumer].name for e in start.edges] for start in starts]
    assert names == [["w0", "w1"], ["w2"]]
    prices = Prices(graph, ClusterMesh(CLUSTER, (2,)), RATES)
    found = timeline(prices, assignment)
    assert [call.size for call in found.calls] == [128, 64]
    assert found.counts == {"all-reduce": 2}


def test_a_large_gradient_has_a_collective_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nostall.parallel.sharding.schedule.BUCKET_BYTES", 64)
    graph = _gradients(3)
    starts = [
        action.edges
        for action in schedule(graph, ((0,) * len(graph.operators),)).actions
        if isinstance(action, Start)
    ]
    assert [len(edges) for edges in starts] == [1, 1, 1]


def _gradients(count: int) -> ShardingGraph:
    """Products whose partial sums are gradients of replicated parameters."""
    product = (Strategy((), ("P",)),)
    operators = [
        Operator(f"w{i}", "parameter", f"w{i}", (count + i,), (i,), ((Strategy(("R",), ("R",)),),),
                 moves_memory=False)
        for i in range(count)
    ]  # fmt: skip
    operators += [
        Operator(f"mm{i}", "operation", "mm", (), (count + i,), (product,)) for i in range(count)
    ]
    tensors = (TensorInfo((4, 4), "float32", 4),) * (2 * count)
    return ShardingGraph("gradients", (2,), tensors, tuple(operators))


def test_a_forward_pass_has_no_gradients() -> None:
    graph = _linear()
    w, x, mm, total, gradient, loss = graph.operators
    backward = replace(gradient, is_forward=False)
    graph = replace(graph, operators=(w, x, mm, total, backward, loss))
    prices = Prices(graph, ClusterMesh(CLUSTER, (2,)), RATES)
    found = timeline(prices, DATA_PARALLEL, forward_only=True)
    assert found.operators_s == pytest.approx(prices.operators_s(DATA_PARALLEL, forward=True))
    assert found.counts == {"all-reduce": 1}  # of the loss
    assert timeline(prices, DATA_PARALLEL).counts == {"all-reduce": 2}


def test_gathered_tensors_become_whole_at_the_end() -> None:
    prices = Prices(_linear(), ClusterMesh(CLUSTER, (2,)), RATES)
    alone, gathered = timeline(prices, DATA_PARALLEL), timeline(prices, DATA_PARALLEL, [Y])
    steps = prices.redistribution(prices.graph.tensors[Y], ("S0",), ("R",))
    assert steps is not None
    assert gathered.counts == {**alone.counts, "all-gather": 1}
    assert gathered.step_s == pytest.approx(alone.step_s + sum(s.seconds for s in steps))
    assert timeline(prices, ((0,) * 6,), [Y]).counts == {}  # it is whole
