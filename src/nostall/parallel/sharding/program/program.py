"""Program of a sharding plan: the operators of a captured step on local tensors.

Before an operator runs, each of its inputs is brought into the placement that the operator's
strategy needs.  The collectives are therefore those that the cost model counts, in the order of
:mod:`nostall.parallel.sharding.schedule`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nostall.parallel.sharding.capture.operators import CapturedStep
from nostall.parallel.sharding.graph import (
    Assignment,
    Edge,
    input_placements,
    output_placements,
)
from nostall.parallel.sharding.placements import Placements, local_shape
from nostall.parallel.sharding.program.devices import (
    Devices,
    Values,
    redistribute,
    scatter,
    sum_together,
)
from nostall.parallel.sharding.program.local_operator import LocalOperator
from nostall.parallel.sharding.program.side_stream import SideStream
from nostall.parallel.sharding.schedule import Start, bucket_step, schedule

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class StepResult:
    """Loss and gradients of one training step."""

    loss: Values
    gradients: dict[str, Values]
    """By the name of the parameter; sharded as the parameter is."""


class ShardedProgram:
    """A captured training step under an assignment of strategies, on some devices of its mesh."""

    def __init__(
        self,
        step: CapturedStep,
        assignment: Assignment,
        devices: Devices,
        device: torch.device = _CPU,
    ) -> None:
        """``device`` holds the local tensors."""
        self.step, self.assignment, self.devices, self.device = step, assignment, devices, device
        graph = step.graph
        self.placements = [
            output_placements(graph, assignment, t) for t in range(len(graph.tensors))
        ]
        """Placements of each tensor as its producer returns it."""
        self.schedule = schedule(graph, assignment)
        self._targets = {e: input_placements(graph, assignment, e) for e in graph.edges}
        self._calls = [self._local_operator(n) for n in range(len(graph.operators))]
        self._freed = self._tensors_to_free()
        self._constants: dict[str, torch.Tensor] = {}
        self._side = SideStream(device)
        self._bucket_steps = {
            edge: own
            for action in self.schedule.actions
            if isinstance(action, Start) and len(action.edges) > 1
            for edge in action.edges
            if (own := bucket_step(graph, assignment, edge)) is not None
        }

    def _local_operator(self, number: int) -> LocalOperator | None:
        graph, node = self.step.graph, self.step.nodes[number]
        if graph.operators[number].kind != "operation" or node is None:
            return None
        shapes = [
            local_shape(graph.tensors[t].shape, self.placements[t], graph.mesh) or ()
            for t in graph.operators[number].outputs
        ]
        return LocalOperator(node, self.step.output_indices[number], shapes, self.device)

    def _tensors_to_free(self) -> dict[int | Edge, list[int]]:
        """The tensors that nothing reads after an operator ran, or after an edge's start."""
        graph, last = self.step.graph, dict[int, int | Edge]()
        for action in self.schedule.actions:
            if isinstance(action, Start):
                if graph.operators[action.edges[0].consumer].kind == "parameter":
                    last.update({edge.tensor: edge for edge in action.edges})
            elif graph.operators[action.operator].kind != "parameter":
                last.update(dict.fromkeys(graph.operators[action.operator].inputs, action.operator))
        for edge in graph.edges:  # gradients that are not redistributed stay until the end
            is_gradient = graph.operators[edge.consumer].kind == "parameter"
            if is_gradient and edge not in self.schedule.started:
                last.pop(edge.tensor, None)
        freed: dict[int | Edge, list[int]] = {}
        for tensor, event in last.items():
            freed.setdefault(event, []).append(tensor)
        return freed

    def parameter_placements(self, name: str) -> Placements:
        """Placements of a parameter, one for each mesh dimension."""
        return self.placements[self._source("parameter", name)]

    def shard_parameters(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Values]:
        """Local tensors of the parameters that the step reads, from whole ones."""
        graph = self.step.graph
        names = [graph.operators[i].target for i in graph.parameters]
        return {
            name: [
                local.clone()
                for local in scatter(
                    self.devices, parameters[name], self.parameter_placements(name)
                )
            ]
            for name in names
        }

    def run(
        self,
        parameters: Mapping[str, Values],
        buffers: Mapping[str, torch.Tensor],
        leaves: Sequence[Any],
        record: dict[int, Values] | None = None,
        until: frozenset[int] = frozenset(),
    ) -> StepResult:
        """Run one step on local parameters, whole buffers and the leaves of a whole batch.

        ``record`` receives the local values of all tensors by number.  With ``until``, the run ends
        when these tensors exist, and the result is empty.
        """
        graph, values = self.step.graph, dict[int, Values]()
        started: dict[Edge, Callable[[], Values]] = {}
        loss: Values = []

        def read(edge: Edge) -> Values:
            wait = started.pop(edge, None)
            return wait() if wait is not None else self._redistribute(values, edge)

        def run_operator(number: int) -> list[Values]:
            nonlocal loss
            operator = graph.operators[number]
            match operator.kind:
                case "parameter":  # gradients are read at the end
                    return [parameters[operator.target]]
                case "constant":
                    return [self._constant(operator.target, buffers)]
                case "input":
                    return [self._batch(operator.target, leaves)]
            inputs = [read(edge) for edge in self.schedule.edges[number]]
            if operator.kind == "loss":
                (loss,) = inputs
                return []
            return inputs if operator.kind == "branch" else self._call(number, inputs)

        for action in self.schedule.actions:
            if isinstance(action, Start):
                started.update(self._start(action.edges, values))
                freed = [t for edge in action.edges for t in self._freed.get(edge, [])]
            else:
                outputs = graph.operators[action.operator].outputs
                values.update(zip(outputs, run_operator(action.operator), strict=True))
                if record is not None:
                    record.update({t: values[t] for t in outputs})
                freed = self._freed.get(action.operator, [])
            if until and record is not None and until <= record.keys():
                return StepResult([], {})
            for tensor in freed:
                values.pop(tensor, None)
        gradients = {
            graph.operators[number].target: read(self.schedule.edges[number][0])
            for number in graph.parameters
            if graph.operators[number].inputs
        }
        return StepResult(loss, gradients)

    def _start(
        self, edges: Sequence[Edge], values: Mapping[int, Values]
    ) -> dict[Edge, Callable[[], Values]]:
        """Start the redistributions of edges; for each, a function that waits for its result."""
        tensors = [values[edge.tensor] for edge in edges]

        def work() -> list[Values]:
            if len(edges) == 1:
                return [self._redistribute(values, edges[0])]
            return sum_together(self.devices, tensors, [self._bucket_steps[e] for e in edges])

        wait = self._side.start(work, list(itertools.chain.from_iterable(tensors)))
        return {edge: partial(_entry, wait, number) for number, edge in enumerate(edges)}

    def _redistribute(self, values: Mapping[int, Values], edge: Edge) -> Values:
        """A tensor in the placement in which a consumer needs it."""
        value, source = values[edge.tensor], self.placements[edge.tensor]
        target = self._targets[edge]
        return value if source == target else redistribute(self.devices, value, source, target)

    def _call(self, number: int, inputs: Sequence[Values]) -> list[Values]:
        """Run an operator on each held device; returns the local values of each output."""
        operator = self._calls[number]
        assert operator is not None
        results = [
            operator([values[i] for values in inputs]) for i in range(len(self.devices.coordinates))
        ]
        return [list(column) for column in zip(*results, strict=True)]

    def _constant(self, name: str, buffers: Mapping[str, torch.Tensor]) -> Values:
        if name in buffers:
            return [buffers[name] for _ in self.devices.coordinates]
        if name not in self._constants:
            tangent = self.step.joint.tangent
            is_tangent = name == self.step.graph.operators[self.step.nodes.index(tangent)].target
            value = (
                torch.ones((), dtype=tangent.meta["val"].dtype)
                if is_tangent
                else getattr(self.step.joint.graph_module, name)
            )
            self._constants[name] = value.to(self.device)
        return [self._constants[name] for _ in self.devices.coordinates]

    def _batch(self, name: str, leaves: Sequence[Any]) -> Values:
        """Local part of a tensor of the batch."""
        placements = self.placements[self._source("input", name)]
        return scatter(self.devices, leaves[int(name.rpartition(" ")[2])], placements)

    def _source(self, kind: str, target: str) -> int:
        """The tensor of a parameter or of a tensor of the batch."""
        return next(
            o.outputs[0] for o in self.step.graph.operators if o.kind == kind and o.target == target
        )


def _entry(wait: Callable[[], list[Values]], number: int) -> Values:
    """One of the results that a function waits for."""
    return wait()[number]
