"""Program of a sharding plan: the operators of a captured step on local tensors.

Before an operator runs, each of its inputs is brought into the placement that the operator's
strategy needs.  The collectives are therefore those that the cost model counts, in the order of
:mod:`nostall.parallel.sharding.schedule`.

Operators of a captured step on the local tensors of one device.

The positions of tensors among the arguments are found once, so that a call costs little.

Operators that replace, on a GPU, those that PyTorch has for CPUs only.

Steps are traced for CPUs, so that a plan can be made without a GPU.  The one operator that PyTorch
selects by device is attention: the CPU's becomes FlashAttention for half precision without a mask,
and memory-efficient attention otherwise.

Arguments of operators that hold sizes of whole tensors, replaced by those of local ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from nostall.parallel.errors import BadPlan
from nostall.parallel.sharding.capture.operators import CapturedStep
from nostall.parallel.sharding.graph import Assignment, Edge, input_placements, output_placements
from nostall.parallel.sharding.placements import REPLICATED, Placements, local_shape, shard
from nostall.parallel.sharding.program.devices import (
    Devices,
    Values,
    redistribute,
    scatter,
    sum_together,
)
from nostall.parallel.sharding.program.side_stream import SideStream
from nostall.parallel.sharding.schedule import Start, bucket_step, schedule

_aten = torch.ops.aten
_ALIGNMENT = 16
"""Memory-efficient attention reads masks in groups of this many columns."""


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logarithms of the sums of exponentials."""
    _check(query, dropout_p)
    if _is_flash(query, attn_mask):
        result = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
    else:
        result = _aten._scaled_dot_product_efficient_attention(
            query, key, value, _bias(query, key, attn_mask), True, 0.0, is_causal, scale=scale
        )
    return result[0], result[1]


def _attention_backward(
    *saved: Any, attn_mask: torch.Tensor | None = None, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; ``saved`` are the arguments of the CPU's operator."""
    gradient, query, key, value, output, sums, _dropout, is_causal = saved
    # Without dropout, kernels read neither seed nor offset, but the operators need tensors.
    if _is_flash(query, attn_mask):
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        offset = torch.empty((), dtype=torch.uint64, device=query.device)
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, output, sums, None, None, query.shape[2], key.shape[2],
            0.0, is_causal, seed, offset, scale=scale,
        )  # fmt: skip
    else:
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, _bias(query, key, attn_mask), output, sums, seed, seed,
            0.0, [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
    return gradients[0], gradients[1], gradients[2]


def _check(query: torch.Tensor, dropout_p: float) -> None:
    """Raise :class:`BadPlan` for attention that has no kernel here."""
    if dropout_p:
        raise BadPlan(
            f"attention with dropout {dropout_p} does not run sharded on a GPU, because shards "
            "would draw other random numbers; set the dropout of attention to 0"
        )
    if query.dtype is torch.float64:
        raise BadPlan(
            "attention in float64 has no fused kernel on a GPU; use float32, bfloat16 or float16"
        )


def _is_flash(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return mask is None and query.dtype in (torch.bfloat16, torch.float16)


def _bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask added to the scores, for all samples and heads, with aligned rows."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        zeros = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
        mask = zeros.masked_fill(mask.logical_not(), float("-inf"))
    columns = key.shape[2]
    padded = torch.nn.functional.pad(mask, (0, -columns % _ALIGNMENT))[..., :columns]
    return padded.expand(*query.shape[:3], columns)


GPU_OPERATORS: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
"""By operator for CPUs, the function that replaces it."""


Shape = tuple[int, ...]
Sizes = Callable[[Sequence[torch.Tensor], Sequence[Shape]], Any]
"""Gives an argument from the local inputs and the local shapes of the outputs."""


def _output_shape(inputs: Sequence[torch.Tensor], outputs: Sequence[Shape]) -> list[int]:
    return list(outputs[0])


def _output_rows(inputs: Sequence[torch.Tensor], outputs: Sequence[Shape]) -> int:
    return outputs[0][0]


def _samples(inputs: Sequence[torch.Tensor], outputs: Sequence[Shape]) -> int:
    return int(inputs[0].shape[0])


def _channels(inputs: Sequence[torch.Tensor], outputs: Sequence[Shape]) -> list[int]:
    return [int(inputs[0].shape[1])]


SIZE_ARGUMENTS: dict[Any, tuple[int, Sizes]] = {
    _aten.view.default: (1, _output_shape),
    _aten._unsafe_view.default: (1, _output_shape),
    _aten.reshape.default: (1, _output_shape),
    _aten.expand.default: (1, _output_shape),
    _aten.new_empty.default: (1, _output_shape),
    _aten.new_full.default: (1, _output_shape),
    _aten.new_ones.default: (1, _output_shape),
    _aten.new_zeros.default: (1, _output_shape),
    _aten.slice_backward.default: (1, _output_shape),
    _aten.select_backward.default: (1, _output_shape),
    _aten.embedding_dense_backward.default: (2, _output_rows),
    _aten.convolution_backward.default: (3, _channels),
    _aten.native_group_norm.default: (3, _samples),
    _aten.native_group_norm_backward.default: (5, _samples),
}
"""By operator, the position of the argument and the function that gives it."""


def localize(
    target: Any, args: list[Any], inputs: Sequence[torch.Tensor], outputs: Sequence[Shape]
) -> list[Any]:
    """The arguments of an operator with the sizes of its local inputs and outputs."""
    if target not in SIZE_ARGUMENTS:
        return args
    position, sizes = SIZE_ARGUMENTS[target]
    return [*args[:position], sizes(inputs, outputs), *args[position + 1 :]]


_WITHOUT_STRIDES = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}
"""Operators that need strides which a redistribution does not keep, and what replaces them."""


class LocalOperator:
    """The operator of an FX node, called with local inputs."""

    def __init__(
        self,
        node: Node,
        indices: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
    ) -> None:
        """``indices`` are the outputs that are read, ``shapes`` their local shapes."""
        self.indices, self.shapes = tuple(indices), tuple(shapes)
        self.node_target: Any = node.target
        target: Any = _WITHOUT_STRIDES.get(self.node_target, self.node_target)
        self.target = GPU_OPERATORS.get(target, target) if device.type != "cpu" else target
        self._has_sizes = self.node_target in SIZE_ARGUMENTS
        leaves, self._structure = tree_flatten((list(node.args), dict(node.kwargs)))
        self._leaves = [device if isinstance(leaf, torch.device) else leaf for leaf in leaves]
        self._tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Node)]
        # Most operators have tensors among their positional arguments only, outside of lists.
        args, self._kwargs = tree_unflatten(self._leaves, self._structure)
        self._args = list(args)
        self._positions = [i for i, arg in enumerate(args) if isinstance(arg, Node)]
        self._is_flat = len(self._positions) == len(self._tensors)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs at ``indices``."""
        if self._is_flat:
            args, kwargs = self._args.copy(), self._kwargs
            for position, value in zip(self._positions, inputs, strict=True):
                args[position] = value
        else:
            leaves = self._leaves.copy()
            for position, value in zip(self._tensors, inputs, strict=True):
                leaves[position] = value
            args, kwargs = tree_unflatten(leaves, self._structure)
        if self._has_sizes:
            args = localize(self.node_target, args, inputs, self.shapes)
        result = self.target(*args, **kwargs)
        return [result[i] for i in self.indices] if isinstance(result, list | tuple) else [result]


_CPU = torch.device("cpu")
_SAMPLES = shard(0)


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
        self._targets = {e: input_placements(graph, assignment, e) for e in graph.edges}
        self._batched = tuple(batched)
        self.sample_dims = self._cut_by_samples()
        """Mesh dimensions along which every tensor of the batch is cut by samples."""
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

        ``record`` receives the local values of all tensors by number.  With ``until``, it receives
        only these, the run ends when they exist, and the result is empty.
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
                    return [self._computed(number, parameters[operator.target])]
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
                    record.update({t: values[t] for t in outputs if not until or t in until})
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
        return self._redistribute(record, edge)[0]

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

    def _computed(self, number: int, values: Values) -> Values:
        """A parameter in the type of the computation, which weights in another type do not have."""
        node = self.step.nodes[number]
        assert node is not None  # a parameter has one
        return [value.to(node.meta["val"].dtype) for value in values]

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


def _leaf(target: str) -> int:
    """The number of the leaf of the batch that an operator stands for."""
    return int(target.rpartition(" ")[2])


def _entry(wait: Callable[[], list[Values]], number: int) -> Values:
    """One of the results that a function waits for."""
    return wait()[number]
