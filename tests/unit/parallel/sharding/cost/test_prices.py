"""Seconds and memory of a small graph, against values computed by hand."""

from __future__ import annotations

import pytest

from nostall.core.errors import BadHardware
from nostall.parallel.cluster import parse_cluster
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.memory import memory_use
from nostall.parallel.sharding.cost.prices import Prices, step_cost
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.graph import Operator, OperatorKind, ShardingGraph, TensorInfo
from nostall.parallel.sharding.placements import Strategy

X, W, Y, LOSS, GRADIENT = range(5)
CLUSTER = parse_cluster(
    'name = "2"\n[[servers]]\ngpus = 2\nmemory_gib = 1\nlink = { bandwidth_gbytes = 1 }\n'
)
RATES = DeviceRates("test", {"float32": 1e6}, 1e6)


def _f32(*shape: int) -> TensorInfo:
    return TensorInfo(shape, "float32", 4)


def _source(name: str, kind: OperatorKind, inputs: tuple[int, ...], output: int) -> Operator:
    """A parameter or a tensor of the batch that may be sharded along its first dimension."""
    strategies = tuple(Strategy((p,) * len(inputs), (p,)) for p in ("R", "S0"))
    return Operator(name, kind, name, inputs, (output,), (strategies,), moves_memory=False)


def _operation(name: str, inputs: tuple[int, ...], output: int, *rules: Strategy) -> Operator:
    flops = 2000.0 if name.startswith("mm") else 0.0
    is_forward = name != "mm_1"
    return Operator(
        name, "operation", name, inputs, (output,), (rules,), flops, is_forward=is_forward
    )


def _linear(
    gradient_rules: tuple[Strategy, ...] = (Strategy(("R",), ("R",)), Strategy(("S0",), ("P",))),
) -> ShardingGraph:
    """y = x W with 100 samples, loss = sum of y, and the gradient of W."""
    operators = (
        _source("w", "parameter", (GRADIENT,), W),
        _source("x", "input", (), X),
        _operation("mm", (X, W), Y, Strategy(("R", "R"), ("R",)), Strategy(("S0", "R"), ("S0",))),
        _operation("sum", (Y,), LOSS, Strategy(("R",), ("R",)), Strategy(("S0",), ("P",))),
        _operation("mm_1", (X,), GRADIENT, *gradient_rules),
        Operator("loss", "loss", "loss", (LOSS,), (), ((Strategy(("R",), ()),),)),
    )
    tensors = (_f32(100, 2), _f32(2, 50), _f32(100, 50), _f32(), _f32(2, 50))
    return ShardingGraph("linear", (2,), tensors, operators)


def _prices(rates: DeviceRates = RATES) -> Prices:
    return Prices(_linear(), ClusterMesh(CLUSTER, (2,)), rates)


def test_a_replicated_step_is_bound_by_memory() -> None:
    cost = step_cost(_prices(), ((0,) * 6,))
    assert cost is not None
    product = (800 + 400 + 20_000) / 1e6
    total = (20_000 + 4) / 1e6
    gradient = max((800 + 400) / 1e6, 2000 / 1e6)  # bound by arithmetic
    assert cost.operators_s == pytest.approx(product + total + gradient)
    assert cost.redistributions == ()


def test_data_parallelism_halves_the_work_and_reduces_gradient_and_loss() -> None:
    cost = step_cost(_prices(), ((0, 1, 1, 1, 1, 0),))
    assert cost is not None
    product = (400 + 400 + 10_000) / 1e6
    total = (10_000 + 4) / 1e6
    gradient = max((400 + 400) / 1e6, 1000 / 1e6)
    assert cost.operators_s == pytest.approx(product + total + gradient)
    assert [priced.step.kind for _, priced in cost.collectives] == ["all-reduce"] * 2
    copies = 2 * (400 + 4) / 1e6  # all-reduces work on copies, which are read and written
    assert cost.collectives_s == pytest.approx(2 * (400 + 4) / 2 / 1e9 + copies)


def test_a_sharded_parameter_is_gathered_and_its_gradient_scattered() -> None:
    cost = step_cost(_prices(), ((1, 1, 1, 1, 1, 0),))
    assert cost is not None
    kinds = sorted(priced.step.kind for _, priced in cost.collectives)
    assert kinds == ["all-gather", "all-reduce", "reduce-scatter"]
    # Parts along the first dimension are not copied.
    assert cost.collectives_s == pytest.approx((400 / 2 + 400 / 2 + 4) / 1e9 + 2 * 4 / 1e6)


@pytest.mark.parametrize(
    ("source", "target", "kind", "sent", "copied"),
    [
        # Bytes of a local tensor of 100 x 50 elements: 20,000 replicated, 10,000 sharded.  Parts
        # along the first dimension are contiguous, and others are copied: read and written.
        ("S0", "S1", "all-to-all", 10_000, 2 * 10_000),
        ("S1", "S0", "all-to-all", 10_000, 2 * 10_000),
        ("S0", "R", "all-gather", 20_000, 0),
        ("S1", "R", "all-gather", 20_000, 2 * 20_000),
        ("P", "S0", "reduce-scatter", 20_000, 0),
        ("P", "S1", "reduce-scatter", 20_000, 2 * 20_000),
        ("P", "R", "all-reduce", 2 * 20_000, 2 * 20_000),
    ],
)
def test_seconds_of_each_redistribution(
    source: str, target: str, kind: str, sent: float, copied: float
) -> None:
    """On two GPUs at 1 GB/s, half of the larger local tensor is sent (of an all-reduce: twice)."""
    steps = _prices().redistribution(_f32(100, 50), (source,), (target,))
    assert steps is not None
    (priced,) = steps
    assert priced.step.kind == kind
    assert priced.seconds == pytest.approx(sent / 2 / 1e9 + copied / 1e6)


def test_an_all_to_all_between_two_inner_dimensions_copies_both_sides() -> None:
    steps = _prices().redistribution(_f32(10, 10, 50), ("S1",), ("S2",))
    assert steps is not None
    (priced,) = steps
    assert priced.step.kind == "all-to-all"
    assert priced.seconds == pytest.approx(10_000 / 2 / 1e9 + 4 * 10_000 / 1e6)


def test_an_assignment_with_an_impossible_redistribution_has_no_cost() -> None:
    assert step_cost(_prices(), ((0, 1, 1, 1, 0, 0),)) is not None
    graph = _linear((Strategy(("P",), ("P",)),))  # nothing sharded becomes partial
    prices = Prices(graph, ClusterMesh(CLUSTER, (2,)), RATES)
    assert step_cost(prices, ((0, 1, 1, 1, 0, 0),)) is None


def test_memory_counts_state_and_alive_tensors() -> None:
    whole = memory_use(_prices(), ((0,) * 6,), state_factor=4.0)
    assert whole.state == 4 * 400
    assert whole.tensors == 800 + 20_000 + 4  # x, y and the loss, while the loss is computed
    half = memory_use(_prices(), ((1, 1, 1, 1, 1, 0),), state_factor=4.0)
    assert half.state == 4 * 200
    # x, y and the loss; the parameter that is gathered ahead counts during the whole step
    assert half.tensors == 400 + 10_000 + 4 + 400


def test_every_kernel_takes_its_least_time_and_an_unknown_type_is_named() -> None:
    cost = step_cost(_prices(DeviceRates("slow", {"float32": 1e9}, 1e9, 1.0)), ((0,) * 6,))
    assert cost is not None and cost.operators_s == 3.0
    with pytest.raises(BadHardware, match="float32"):
        step_cost(_prices(DeviceRates("none", {"float64": 1e9}, 1e9)), ((0,) * 6,))
