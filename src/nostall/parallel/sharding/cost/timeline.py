"""Modelled step of a plan with the redistributions that run beside the operators.

A processor launches operators and collectives one after the other; a GPU runs the operators in that
order, and the links run the collectives in theirs.  A collective slows the operators beside it by a
share, because its kernels take multiprocessors and memory from them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from nostall.parallel.sharding.cost.prices import PricedStep, Prices
from nostall.parallel.sharding.graph import (
    Assignment,
    Edge,
    ShardingGraph,
    input_placements,
    output_placements,
    strategy_of,
)
from nostall.parallel.sharding.placements import COLLECTIVES, REPLICATED, Placements
from nostall.parallel.sharding.schedule import Run, Start, schedule


@dataclass(frozen=True, slots=True)
class Timeline:
    """Modelled seconds of one training step."""

    step_s: float
    operators_s: float
    """Sum of the operators and of the redistributions' steps that send nothing, as if nothing ran
    beside them."""
    collectives_s: float
    """Sum of the collectives."""
    calls: tuple[PricedStep, ...] = ()
    """The collectives in the order in which they start; one for each bucket of gradients."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of collectives by kind."""
        counts: dict[str, int] = {}
        for priced in self.calls:
            counts[priced.step.kind] = counts.get(priced.step.kind, 0) + 1
        return counts

    @property
    def exposed_s(self) -> float:
        """Seconds in which the GPU runs no operator, or that collectives take from operators."""
        return self.step_s - self.operators_s


@dataclass
class _Clock:
    """Times at which the processor, the GPU and the links are done with all their work so far."""

    launch_s: float
    send_s: float
    contention: float
    processor: float = 0.0
    gpu: float = 0.0
    link: float = 0.0
    operators_s: float = 0.0
    collectives_s: float = 0.0
    calls: list[PricedStep] = field(default_factory=list)
    busy: deque[tuple[float, float]] = field(default_factory=deque)
    """Start and end of the collectives that may run beside later operators."""

    def compute(self, seconds: float) -> None:
        """Run an operator on the GPU."""
        self.processor += self.launch_s
        self.gpu = self._end(max(self.gpu, self.processor), seconds)
        self.operators_s += seconds

    def _end(self, start: float, seconds: float) -> float:
        """When an operator ends that starts now and takes ``seconds`` alone."""
        time, left, speed = start, seconds, 1.0 - self.contention
        while self.busy and self.busy[0][0] < time + left:
            begin, end = self.busy[0]
            if end > time:
                left -= max(0.0, begin - time)
                time = max(time, begin)
                if left < (end - time) * speed:
                    return time + left / speed
                left -= (end - time) * speed
                time = end
            self.busy.popleft()
        return time + left

    def redistribute(self, steps: Sequence[PricedStep]) -> None:
        """Run a redistribution that the GPU waits for."""
        for priced in steps:
            if priced.step.kind in COLLECTIVES:
                self.gpu = self.send(priced, self.gpu)
            else:
                self.compute(priced.seconds)

    def send(self, priced: PricedStep, ready: float, wait_s: float = 0.0) -> float:
        """Run one step of a redistribution whose tensor exists at ``ready``; returns its end."""
        self.processor += self.send_s
        begin = max(self.link, self.processor, ready)
        self.link = begin + priced.seconds + wait_s
        self.busy.append((begin, self.link))
        self.collectives_s += priced.seconds
        if priced.step.kind in COLLECTIVES:
            self.calls.append(priced)
        return self.link


def timeline(
    prices: Prices,
    assignment: Assignment,
    gathered: Sequence[int] = (),
    *,
    forward_only: bool = False,
) -> Timeline:
    """The step of a plan that is possible, in the order of its schedule.

    The tensors ``gathered`` become whole at the end.  ``forward_only`` leaves the backward pass
    out.
    """
    graph, rates = prices.graph, prices.rates
    clock = _Clock(rates.launch_s, rates.send_s, rates.contention)
    plan = schedule(graph, assignment)
    arrives: dict[Edge, float] = {}

    def read(edge: Edge) -> None:
        if edge in arrives:
            clock.gpu = max(clock.gpu, arrives[edge])
        else:
            clock.redistribute(_steps(prices, assignment, edge))

    for action in plan.actions:
        if forward_only and not _is_in_forward_pass(graph, action):
            continue
        if isinstance(action, Start):
            time = clock.gpu
            for priced in _started(prices, assignment, action.edges):
                time = clock.send(priced, time, rates.wait_s)
            arrives.update(dict.fromkeys(action.edges, time))
            continue
        operator = graph.operators[action.operator]
        if operator.kind == "parameter":
            continue
        for edge in plan.edges[action.operator]:
            read(edge)
        if operator.kind == "operation":
            seconds = prices.operator_s(operator, strategy_of(graph, assignment, action.operator))
            assert seconds is not None
            clock.compute(seconds)
    for number in () if forward_only else graph.parameters:
        for edge in plan.edges[number]:
            read(edge)
    for tensor in gathered:
        source = output_placements(graph, assignment, tensor)
        clock.redistribute(_possible(prices, tensor, source, (REPLICATED,) * len(source)))
    return Timeline(clock.gpu, clock.operators_s, clock.collectives_s, tuple(clock.calls))


def _steps(prices: Prices, assignment: Assignment, edge: Edge) -> Sequence[PricedStep]:
    """The redistribution of an edge."""
    source = output_placements(prices.graph, assignment, edge.tensor)
    return _possible(prices, edge.tensor, source, input_placements(prices.graph, assignment, edge))


def _started(prices: Prices, assignment: Assignment, edges: Sequence[Edge]) -> Sequence[PricedStep]:
    """The redistribution of one edge, or the collective of a bucket."""
    if len(edges) == 1:
        return _steps(prices, assignment, edges[0])
    own = [priced for edge in edges for priced in _steps(prices, assignment, edge)]
    return [prices.bucket([priced.size for priced in own], own[0].step)]  # one for each edge


def _possible(
    prices: Prices, tensor: int, source: Placements, target: Placements
) -> Sequence[PricedStep]:
    found = prices.redistribution(prices.graph.tensors[tensor], source, target)
    assert found is not None  # the plan is possible
    return found


def _is_in_forward_pass(graph: ShardingGraph, action: Start | Run) -> bool:
    """Whether a pass without gradients has an action."""
    consumers = (
        [e.consumer for e in action.edges] if isinstance(action, Start) else [action.operator]
    )
    own = [graph.operators[number] for number in consumers]
    return all(operator.is_forward and operator.kind != "parameter" for operator in own)
