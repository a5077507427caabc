"""Program of a sharding plan: the operators of a captured step on local tensors.

Before an operator runs, each of its inputs is brought into the placement that the operator's
strategy needs.  The collectives are therefore those that the cost model counts, in the order of
:mod:`nostall.parallel.sharding.schedule`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nostall.parallel.sharding.capture.operators import CapturedStep
from nostall.parallel.sharding.graph import Assignment, Edge, input_placements, output_placements
from nostall.parallel.sharding.placements import (
    REPLICATED,
    Placements,
    is_sharded,
    local_shape,
    shard,
    shard_dim,
)
from nostall.parallel.sharding.program.devices import (
    Devices,
    Values,
    holds_memory_alone,
    redistribute,
    scatter,
    sum_in_place,
    together,
)
from nostall.parallel.sharding.program.local_operator import LocalOperator
from nostall.parallel.sharding.program.segments import Segment, SegmentCompiler
from nostall.parallel.sharding.program.side_stream import SideStream
from nostall.parallel.sharding.schedule import (
    Action,
    Run,
    Start,
    bucket_step,
    schedule,
    shared_step,
)

_CPU = torch.device("cpu")
_SAMPLES = shard(0)


@dataclass(frozen=True, eq=False)
class StepResult:
    """Loss and gradients of one training step."""

    loss: Values
    gradients: dict[str, Values]
    """By the name of the parameter; sharded as the parameter is."""


@dataclass(eq=False)
class KeptSums:
    """Gradients of parameters that are added up over runs before they are reduced over devices."""

    names: frozenset[str] = frozenset()
    """The parameters; the gradients of others are reduced in every run."""
    scale: float = 1.0
    """Factor of the next run's gradients."""
    reduce: bool = True
    """Whether the next run reduces the sums, and returns these gradients."""
    values: dict[str, Values] = field(default_factory=dict)
    """The sums, in the placements in which the step computes them."""

    def add(self, name: str, gradient: Values, parameter: Values) -> Values:
        """The sum with a gradient, in the type of the parameter if it is not the only one."""
        if self.scale == 1.0 and self.reduce and name not in self.values:
            return gradient
        total = [g.to(p.dtype) * self.scale for g, p in zip(gradient, parameter, strict=True)]
        known = self.values.pop(name, None)
        return [k.add_(t) for k, t in zip(known, total, strict=True)] if known else total


class ShardedProgram:
    """A captured training step under an assignment of strategies, on some devices of its mesh."""

    def __init__(
        self,
        step: CapturedStep,
        assignment: Assignment,
        devices: Devices,
        device: torch.device = _CPU,
        batched: Sequence[bool] = (),
    ) -> None:
        """``device`` holds the local tensors.

        ``batched`` says which leaves of the batch have one entry for each sample.  The program is
        then given these with the device's own samples only, those of :attr:`sample_dims`.
        """
        self.step, self.assignment, self.devices, self.device = step, assignment, devices, device
        graph = step.graph
        self.placements = [
            output_placements(graph, assignment, t) for t in range(len(graph.tensors))
        ]
        """Placements of each tensor as its producer returns it."""
        self.schedule = schedule(graph, assignment)
        self._orders = self._memory_orders()
        self._targets = {e: input_placements(graph, assignment, e) for e in graph.edges}
        self._batched = tuple(batched)
        self.sample_dims = self._cut_by_samples()
        """Mesh dimensions along which every tensor of the batch is cut by samples."""
        self._calls = [self._local_operator(n) for n in range(len(graph.operators))]
        self._freed = self._tensors_to_free()
        self._constants: dict[str, torch.Tensor] = {}
        self._side = SideStream(device)
        self._compiler: SegmentCompiler | None = None
        self._compiled: dict[frozenset[int], Sequence[Action | Segment]] = {}
        self._shared_steps = {
            edge: own
            for action in self.schedule.actions
            if isinstance(action, Start) and len(action.edges) > 1
            for edge in action.edges
            if (own := shared_step(graph, assignment, edge)) is not None
        }

    def _cut_by_samples(self) -> tuple[int, ...]:
        """The mesh dimensions that cut all batched inputs that the step reads.

        An input that every consumer slices is cut, too: a slice sends nothing.
        """
        graph, cuts = self.step.graph, list[tuple[int, ...]]()
        for operator in graph.operators:
            if operator.kind != "input" or not self._is_batched(operator.target):
                continue
            (tensor,) = operator.outputs
            read = [self._targets[edge] for edge in graph.edges if edge.tensor == tensor]
            if not read:
                continue
            self.placements[tensor] = tuple(
                _SAMPLES if all(own[d] == _SAMPLES for own in read) else placement
                for d, placement in enumerate(self.placements[tensor])
            )
            cut = [d for d, own in enumerate(self.placements[tensor]) if own == _SAMPLES]
            cuts.append(tuple(cut))
        return cuts[0] if len(set(cuts)) == 1 else ()

    def _is_batched(self, target: str) -> bool:
        leaf = _leaf(target)
        return leaf < len(self._batched) and self._batched[leaf]

    def own_samples(self, samples: int) -> tuple[int, int]:
        """The range of the samples of a batch that the first held device is given."""
        (coordinates, *_) = self.devices.coordinates
        part, parts = 0, 1
        for d in self.sample_dims:
            part, parts = part * self.devices.mesh[d] + coordinates[d], parts * self.devices.mesh[d]
        return samples * part // parts, samples * (part + 1) // parts

    def _local_operator(self, number: int) -> LocalOperator | None:
        graph, node = self.step.graph, self.step.nodes[number]
        if graph.operators[number].kind != "operation" or node is None:
            return None
        shapes = [
            local_shape(graph.tensors[t].shape, self.placements[t], graph.mesh) or ()
            for t in graph.operators[number].outputs
        ]
        return LocalOperator(node, self.step.output_indices[number], shapes, self.device)

    def _memory_orders(self) -> dict[int, tuple[int, ...]]:
        """Dimensions of tensors that are not contiguous in the trace, from the outermost in memory
        on."""
        orders: dict[int, tuple[int, ...]] = {}
        for operator, node, indices in zip(
            self.step.graph.operators, self.step.nodes, self.step.output_indices, strict=True
        ):
            if node is None:  # a branch returns its input
                known = [orders[t] for t in operator.inputs if t in orders]
                orders.update(zip(operator.outputs, known, strict=False))
                continue
            value = node.meta["val"]
            values = [value[i] for i in indices] if isinstance(value, list | tuple) else [value]
            for tensor, own in zip(operator.outputs, values, strict=True):
                if not own.is_contiguous():
                    orders[tensor] = tuple(sorted(range(own.dim()), key=own.stride, reverse=True))
        return orders

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

    def compile(self, note: Callable[[str], None]) -> None:
        """Compile the operators between redistributions from the next run on.

        ``note`` is told why some are launched one by one.
        """
        changed = {e for e, target in self._targets.items() if target != self.placements[e.tensor]}
        self._compiler = SegmentCompiler(
            self.step, self._calls, self.schedule.edges, self._targets, changed, note
        )

    def run(
        self,
        parameters: Mapping[str, Values],
        buffers: Mapping[str, torch.Tensor],
        leaves: Sequence[Any],
        record: dict[int, Values] | None = None,
        until: frozenset[int] = frozenset(),
        sums: KeptSums | None = None,
    ) -> StepResult:
        """Run one step on local parameters, whole buffers and the leaves of a whole batch.

        ``record`` receives the local values of all tensors by number.  With ``until``, it receives
        only these, the run ends when they exist, and the result is empty.  The gradients that
        ``sums`` names are added to it, and are part of the result if it says so.
        """
        run = _Run(self, parameters, buffers, leaves, sums or KeptSums())
        run.may_overwrite = record is None
        for action in self._actions(until, is_recorded=record is not None and not until):
            outputs = run.do(action)
            if record is not None:
                record.update({t: run.values[t] for t in outputs if not until or t in until})
                if until and until <= record.keys():
                    return StepResult([], {})
            for tensor in self._freed_after(action):
                run.values.pop(tensor, None)
        return run.result()

    def _actions(self, until: frozenset[int], *, is_recorded: bool) -> Sequence[Action | Segment]:
        """The actions of a run, with compiled segments if there is a compiler."""
        if self._compiler is None or is_recorded:
            return self.schedule.actions
        if until not in self._compiled:
            actions, missing = list[Action](), set(until)
            for action in self.schedule.actions:
                actions.append(action)
                if isinstance(action, Run) and missing:
                    missing -= set(self.step.graph.operators[action.operator].outputs)
                    if not missing:
                        break
            self._compiled[until] = self._compiler.segments(actions, until)
        return self._compiled[until]

    def _freed_after(self, action: Action | Segment) -> list[int]:
        events: Sequence[int | Edge] = (
            action.edges if isinstance(action, Start)
            else (action.operator,) if isinstance(action, Run) else action.operators
        )  # fmt: skip
        return [tensor for event in events for tensor in self._freed.get(event, [])]

    def loss(
        self,
        parameters: Mapping[str, Values],
        buffers: Mapping[str, torch.Tensor],
        leaves: Sequence[Any],
    ) -> torch.Tensor:
        """The loss by the forward pass alone, on the first held device; arguments as of a run."""
        number = next(n for n, o in enumerate(self.step.graph.operators) if o.kind == "loss")
        (edge,) = self.schedule.edges[number]
        record: dict[int, Values] = {}
        self.run(parameters, buffers, leaves, record, frozenset({edge.tensor}))
        return self.redistributed(record[edge.tensor], edge)[0]

    def start(
        self, edges: Sequence[Edge], tensors: Sequence[Values], *, may_overwrite: bool
    ) -> dict[Edge, Callable[[], Values]]:
        """Start the redistributions of edges; for each, a function that waits for its result.

        With ``may_overwrite``, the result may take the memory of a tensor that nothing reads later.
        """
        overwrites = may_overwrite and self._is_overwritten(edges, tensors[0])

        def work() -> list[Values]:
            if overwrites:
                step = bucket_step(self.step.graph, self.assignment, edges[0])
                assert step is not None
                return [sum_in_place(self.devices, tensors[0], step)]
            if len(edges) == 1:
                return [self.redistributed(tensors[0], edges[0])]
            return together(self.devices, tensors, [self._shared_steps[e] for e in edges])

        wait = self._side.start(work, list(itertools.chain.from_iterable(tensors)))
        return {edge: partial(_entry, wait, number) for number, edge in enumerate(edges)}

    def _is_overwritten(self, edges: Sequence[Edge], tensor: Values) -> bool:
        """Whether the sum of one gradient over devices can take its memory."""
        step = bucket_step(self.step.graph, self.assignment, edges[0])
        return (
            len(edges) == 1
            and step is not None
            and step.kind == "all-reduce"
            and edges[0].tensor in self._freed.get(edges[0], ())
            and all(own.is_contiguous() and holds_memory_alone(own) for own in tensor)
        )

    def redistributed(self, value: Values, edge: Edge) -> Values:
        """The tensor of an edge in the placement in which its consumer needs it.

        Its dimensions have the order in memory that they have in the trace, which copies a tensor
        before a kernel that reads memory without strides only if that order needs it.
        """
        source, target = self.placements[edge.tensor], self._targets[edge]
        if source == target:
            return value
        order = self._orders.get(edge.tensor)
        if order is None:
            return redistribute(self.devices, value, source, target)
        source, target = _permuted(source, order), _permuted(target, order)
        moved = redistribute(self.devices, [v.permute(order) for v in value], source, target)
        back = [order.index(dim) for dim in range(len(order))]
        return [own.permute(back) for own in moved]

    def call(self, number: int, inputs: Sequence[Values]) -> list[Values]:
        """Run an operator on each held device; returns the local values of each output."""
        operator = self._calls[number]
        assert operator is not None
        results = [
            operator([values[i] for values in inputs]) for i in range(len(self.devices.coordinates))
        ]
        return [list(column) for column in zip(*results, strict=True)]

    def computed(self, number: int, values: Values) -> Values:
        """A parameter in the type of the computation, which weights in another type do not have."""
        node = self.step.nodes[number]
        assert node is not None  # a parameter has one
        return [value.to(node.meta["val"].dtype) for value in values]

    def constant(self, name: str, buffers: Mapping[str, torch.Tensor]) -> Values:
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

    def batch(self, name: str, leaves: Sequence[Any]) -> Values:
        """Local part of a tensor of the batch."""
        placements = self.placements[self._source("input", name)]
        if self._is_batched(name):  # what is cut by samples is given so
            placements = tuple(
                REPLICATED if d in self.sample_dims else p for d, p in enumerate(placements)
            )
        return scatter(self.devices, leaves[_leaf(name)], placements)

    def _source(self, kind: str, target: str) -> int:
        """The tensor of a parameter or of a tensor of the batch."""
        return next(
            o.outputs[0] for o in self.step.graph.operators if o.kind == kind and o.target == target
        )


class _Run:
    """The state of one run of a program; arguments are those of :meth:`ShardedProgram.run`."""

    def __init__(
        self,
        program: ShardedProgram,
        parameters: Mapping[str, Values],
        buffers: Mapping[str, torch.Tensor],
        leaves: Sequence[Any],
        sums: KeptSums,
    ) -> None:
        self.program, self.graph = program, program.step.graph
        self.values: dict[int, Values] = {}
        """The tensors that exist, by number."""
        self._parameters, self._buffers, self._leaves = parameters, buffers, leaves
        self._sums = sums
        self.may_overwrite = False
        self._started: dict[Edge, Callable[[], Values]] = {}
        self._loss: Values = []

    def do(self, action: Action | Segment) -> Sequence[int]:
        """Run an action; returns the numbers of the tensors that it computes."""
        if isinstance(action, Start):
            self._start(action.edges)
            return ()
        if isinstance(action, Run):
            outputs = self.graph.operators[action.operator].outputs
            self.values.update(zip(outputs, self._operator(action.operator), strict=True))
            return outputs
        inputs = [self._read(edge) for edge in action.reads]
        count = range(len(self.program.devices.coordinates))
        results = [action.function(*(values[i] for values in inputs)) for i in count]
        self.values.update(zip(action.outputs, map(list, zip(*results, strict=True)), strict=True))
        return action.outputs

    def result(self) -> StepResult:
        """The loss, and the gradients that the run reduces."""
        own = [(self.graph.operators[n].target, self.program.schedule.edges[n])
               for n in self.graph.parameters]  # fmt: skip
        found = {name: self._read_gradient(edges[0]) for name, edges in own if edges}
        return StepResult(self._loss, {n: values for n, values in found.items() if values})

    def _start(self, edges: Sequence[Edge]) -> None:
        kept = [e for e in edges if self._is_summed(e)]
        # Sums may have another type than the gradients that they would share a bucket with.
        for own in (kept, [edge for edge in edges if edge not in kept]):
            values = [self._gradient(e) if own is kept else self.values[e.tensor] for e in own]
            if own and (own is not kept or self._sums.reduce):
                self._started.update(
                    self.program.start(own, values, may_overwrite=self.may_overwrite)
                )

    def _is_summed(self, edge: Edge) -> bool:
        consumer = self.graph.operators[edge.consumer]
        return consumer.kind == "parameter" and consumer.target in self._sums.names

    def _gradient(self, edge: Edge) -> Values:
        """The sum of a parameter's gradients with the one of this run."""
        name = self.graph.operators[edge.consumer].target
        total = self._sums.add(name, self.values[edge.tensor], self._parameters[name])
        if not self._sums.reduce:
            self._sums.values[name] = total
        return total

    def _read_gradient(self, edge: Edge) -> Values:
        """The gradient as the parameter is placed; empty if the run does not reduce it."""
        if not self._is_summed(edge):
            return self._read(edge)
        if edge not in self.program.schedule.started:
            total = self._gradient(edge)
            return self.program.redistributed(total, edge) if self._sums.reduce else []
        return self._read(edge) if self._sums.reduce else []

    def _read(self, edge: Edge) -> Values:
        wait = self._started.pop(edge, None)
        return wait() if wait else self.program.redistributed(self.values[edge.tensor], edge)

    def _operator(self, number: int) -> list[Values]:
        program, operator = self.program, self.graph.operators[number]
        match operator.kind:
            case "parameter":  # gradients are read at the end
                return [program.computed(number, self._parameters[operator.target])]
            case "constant":
                return [program.constant(operator.target, self._buffers)]
            case "input":
                return [program.batch(operator.target, self._leaves)]
        inputs = [self._read(edge) for edge in program.schedule.edges[number]]
        if operator.kind == "loss":
            (self._loss,) = inputs
            return []
        return inputs if operator.kind == "branch" else program.call(number, inputs)


def _permuted(placements: Placements, order: Sequence[int]) -> Placements:
    """The placements of a tensor whose dimensions are permuted to an order."""
    return tuple(shard(order.index(shard_dim(p))) if is_sharded(p) else p for p in placements)


def _leaf(target: str) -> int:
    """The number of the leaf of the batch that an operator stands for."""
    return int(target.rpartition(" ")[2])


def _entry(wait: Callable[[], list[Values]], number: int) -> Values:
    """One of the results that a function waits for."""
    return wait()[number]
