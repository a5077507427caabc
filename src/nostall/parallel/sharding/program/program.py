"""Program of a sharding plan: the operators of a captured step on local tensors.

Before an operator runs, each of its inputs is brought into the placement that the operator's
strategy needs.  The collectives are therefore those that the cost model counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from nostall.parallel.sharding.capture.operators import CapturedStep
from nostall.parallel.sharding.graph import (
    Assignment,
    input_placements,
    output_placements,
)
from nostall.parallel.sharding.placements import Placements, local_shape
from nostall.parallel.sharding.program.devices import Devices, Values, redistribute, scatter
from nostall.parallel.sharding.program.local_arguments import localize

_WITHOUT_STRIDES = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}
"""Operators that need strides which a redistribution does not keep, and what replaces them."""


@dataclass(frozen=True, eq=False)
class StepResult:
    """Loss and gradients of one training step."""

    loss: Values
    gradients: dict[str, Values]
    """By the name of the parameter; sharded as the parameter is."""


class ShardedProgram:
    """A captured training step under an assignment of strategies, on some devices of its mesh."""

    def __init__(self, step: CapturedStep, assignment: Assignment, devices: Devices) -> None:
        self.step, self.assignment, self.devices = step, assignment, devices
        graph = step.graph
        self.placements = [
            output_placements(graph, assignment, t) for t in range(len(graph.tensors))
        ]
        """Placements of each tensor as its producer returns it."""
        self._edges: list[list[Any]] = [[] for _ in graph.operators]
        for edge in graph.edges:
            self._edges[edge.consumer].append(edge)
        self._last_use = {edge.tensor: edge.consumer for edge in graph.edges}
        for number in graph.parameters:
            for tensor in graph.operators[number].inputs:  # gradients stay until the end
                self._last_use[tensor] = len(graph.operators)

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
    ) -> StepResult:
        """Run one step on local parameters, whole buffers and the leaves of a whole batch.

        ``record`` receives the local values of all tensors by number, for tests.
        """
        graph, values = self.step.graph, dict[int, Values]()
        loss: Values = []
        for number, operator in enumerate(graph.operators):
            inputs = [
                self._read(values, edge)
                for edge in self._edges[number]
                if operator.kind != "parameter"  # gradients are read at the end
            ]
            match operator.kind:
                case "parameter":
                    outputs = [parameters[operator.target]]
                case "constant":
                    outputs = [self._constant(operator.target, buffers)]
                case "input":
                    outputs = [self._batch(operator.target, leaves)]
                case "branch":
                    outputs = inputs
                case "loss":
                    (loss,), outputs = inputs, []
                case _:
                    outputs = self._call(number, inputs)
            values.update(zip(operator.outputs, outputs, strict=True))
            if record is not None:
                record.update({t: values[t] for t in operator.outputs})
            for tensor in operator.inputs:
                if self._last_use[tensor] == number:
                    values.pop(tensor, None)
        gradients = {
            graph.operators[number].target: self._read(values, self._edges[number][0])
            for number in graph.parameters
            if graph.operators[number].inputs
        }
        return StepResult(loss, gradients)

    def _read(self, values: Mapping[int, Values], edge: Any) -> Values:
        """A tensor in the placement in which a consumer needs it."""
        target = input_placements(self.step.graph, self.assignment, edge)
        return redistribute(self.devices, values[edge.tensor], self.placements[edge.tensor], target)

    def _call(self, number: int, inputs: Sequence[Values]) -> list[Values]:
        """Run an operator on each held device; returns the local values of each output."""
        graph, node = self.step.graph, self.step.nodes[number]
        assert node is not None
        shapes = [
            local_shape(graph.tensors[t].shape, self.placements[t], graph.mesh)
            for t in graph.operators[number].outputs
        ]
        indices = self.step.output_indices[number]
        results = [
            call(node, [values[i] for values in inputs], indices, [s or () for s in shapes])
            for i in range(len(self.devices.coordinates))
        ]
        return [list(column) for column in zip(*results, strict=True)]

    def _constant(self, name: str, buffers: Mapping[str, torch.Tensor]) -> Values:
        if name in buffers:
            value = buffers[name]
        elif name == self.step.graph.operators[self._tangent].target:
            value = torch.ones((), dtype=self.step.joint.tangent.meta["val"].dtype)
        else:
            value = getattr(self.step.joint.graph_module, name)
        return [value for _ in self.devices.coordinates]

    def _batch(self, name: str, leaves: Sequence[Any]) -> Values:
        """Local part of a tensor of the batch."""
        placements = self.placements[self._source("input", name)]
        return scatter(self.devices, leaves[int(name.rpartition(" ")[2])], placements)

    @property
    def _tangent(self) -> int:
        return self.step.nodes.index(self.step.joint.tangent)

    def _source(self, kind: str, target: str) -> int:
        """The tensor of a parameter or of a tensor of the batch."""
        return next(
            o.outputs[0] for o in self.step.graph.operators if o.kind == kind and o.target == target
        )


def call(
    node: Node,
    inputs: Sequence[torch.Tensor],
    indices: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
) -> list[torch.Tensor]:
    """Run the operator of an FX node on local inputs; returns the outputs at ``indices``.

    ``shapes`` are the local shapes of these outputs.
    """
    leaves, structure = tree_flatten((list(node.args), dict(node.kwargs)))
    remaining = iter(inputs)
    filled = [next(remaining) if isinstance(leaf, Node) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(filled, structure)
    target: Any = _WITHOUT_STRIDES.get(node.target, node.target)
    result = target(*localize(node.target, args, inputs, shapes), **kwargs)
    return [result[i] for i in indices] if isinstance(result, list | tuple) else [result]
