"""The expression of a region: the operator graph of one element, and the lists that it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from nostall.fusion.capture.call import Unsupported, dtype_name
from nostall.fusion.capture.capture import capture
from nostall.fusion.codegen.expressions.reductions import check_template
from nostall.fusion.codegen.expressions.templates import TRITON_DTYPES
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import ELEMENTWISE
from nostall.fusion.lists.calls import ListCall, aten, results
from nostall.fusion.lists.slots import Slot, has_same_memory_order, slot_of

ELEMENTS = 8
"""Elements of the tensors in the graph of an expression; kernels do not depend on it."""
OperandKind = Literal["full", "single", "packed", "shared", "numbers"]


@dataclass(frozen=True)
class Packed:
    """An element of a vector that holds the results of a list, one element a slot."""

    vector: Node
    slot: int


PackedNodes = Mapping[Node, Packed]


@dataclass(frozen=True)
class Operand:
    """A list that a kernel reads.

    ``full``: a tensor with the layout of the slot; ``single``: one element for each slot;
    ``packed``: a vector with one element for each slot; ``shared``: one element for all slots;
    ``numbers``: a number for each slot, part of the kernel's source.
    """

    kind: OperandKind
    nodes: tuple[Node, ...]
    dtype: str
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class Expression:
    """The operator graph of a region's calls."""

    graph: Graph
    operands: tuple[Operand, ...]
    """In the order of the graph's inputs."""
    values: dict[Node, int]
    """The graph node of each call's results."""


def check_call(call: ListCall, slots: Sequence[Slot]) -> None:
    """Raise :class:`Unsupported` if no kernel can compute a call."""
    build_expression([call], slots, {})


def build_expression(
    calls: Sequence[ListCall], slots: Sequence[Slot], packed: PackedNodes
) -> Expression:
    """The expression of calls in topological order.

    Raises :class:`Unsupported` with the reason if kernels cannot compute one of them.
    """
    builder = _Builder(slots, packed)
    for call in calls:
        builder.add(call)
    return builder.finish()


class _Builder:
    """Writes an FX graph of the calls for one tensor, and captures it."""

    def __init__(self, slots: Sequence[Slot], packed: PackedNodes) -> None:
        self.slots, self.packed = slots, packed
        self.graph = FxGraph()
        self.mode = FakeTensorMode()
        self.operands: dict[tuple[Any, ...], Node] = {}
        self.described: dict[Node, Operand] = {}
        # The results of each call by slot, and the node that computes them here.
        self.results: dict[tuple[Node | None, ...], Node] = {}
        self.values: dict[Node, Node] = {}

    def add(self, call: ListCall) -> None:
        device = call.node.meta["val"][0].device
        args = tuple(self._argument(value, device) for value in call.args)
        kwargs = {key: self._argument(value, device) for key, value in call.kwargs.items()}
        node = self.graph.call_function(call.target, args, kwargs)

        def value(operand: Node) -> Any:
            return operand.meta["val"]

        fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), value)
        try:
            with self.mode:
                node.meta["val"] = call.target(*fake_args, **fake_kwargs)
        except (RuntimeError, TypeError) as error:  # such as addcdiv, whose factor is one number
            raise Unsupported("operands that the operator of one tensor does not take") from error
        expected = {value.dtype for value in call.node.meta["val"]}
        if expected != {node.meta["val"].dtype} or node.meta["val"].numel() != ELEMENTS:
            raise Unsupported("a list of several dtypes, or promotion that differs between slots")
        self.values[call.node] = node
        found = results(call.node)
        count = len(self.slots)
        self.results[tuple(found.get(slot) for slot in range(count))] = node

    def finish(self) -> Expression:
        self.graph.output(tuple(self.values.values()))
        module = GraphModule(torch.nn.Module(), self.graph)
        captured = capture(module)
        for reason, _ in captured.report.unsupported:
            raise Unsupported(reason)
        graph = captured.graph
        _check_templates(graph)
        operands = tuple(self.described[captured.origins[index]] for index in graph.inputs)
        values = {node: captured.values[inner] for node, inner in self.values.items()}
        return Expression(graph, operands, {k: v for k, v in values.items() if isinstance(v, int)})

    def _argument(self, value: Any, device: torch.device) -> Any:
        """The argument for one tensor in place of a list, or of a tensor for all slots."""
        if isinstance(value, Node):
            tensor = value.meta["val"]
            if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
                raise Unsupported("a list and a tensor of several elements")
            if tensor.device != device:  # such as a learning rate in the memory of the CPU
                raise Unsupported("tensors on several devices")
            return self._operand(Operand("shared", (value,), dtype_name(tensor.dtype)), (), device)
        if not isinstance(value, tuple):
            return value
        if len(value) != len(self.slots):
            raise Unsupported("lists of several lengths")
        if all(isinstance(x, (int, float)) for x in value):
            return self._numbers(value, device)
        return self._list(value, device)

    def _numbers(self, value: tuple[Any, ...], device: torch.device) -> Node:
        if any(isinstance(x, int) for x in value):
            raise Unsupported("a list of several integers")
        return self._operand(Operand("numbers", (), "float32", value), (), device)

    def _list(self, nodes: tuple[Node, ...], device: torch.device) -> Node:
        if not all(isinstance(node, Node) for node in nodes):
            raise Unsupported("a list of complex or dynamic numbers")
        for produced, inner in self.results.items():
            pairs = zip(produced, nodes, strict=True)
            if all(own is node for own, node in pairs):
                return inner
        tensors = [node.meta["val"] for node in nodes]
        if any(not isinstance(x, torch.Tensor) or x.device != device for x in tensors):
            raise Unsupported("tensors on several devices")
        dtypes = {dtype_name(x.dtype) for x in tensors}
        if len(dtypes) > 1:
            raise Unsupported("a list of several dtypes")
        (dtype,) = dtypes
        shape = self._shape(tensors)
        number = _common_number(nodes)
        if number is not None:
            return self._constant(number, shape, tensors[0])
        if len(set(nodes)) == 1 and not shape:
            return self._operand(Operand("shared", nodes[:1], dtype), shape, device)
        positions = [self.packed.get(node) for node in nodes]
        vectors = {each.vector for each in positions if each is not None}
        in_order = all(each and each.slot == slot for slot, each in enumerate(positions))
        if len(vectors) == 1 and in_order:
            return self._operand(Operand("packed", tuple(vectors), dtype), shape, device)
        kind: OperandKind = "full" if shape else "single"
        return self._operand(Operand(kind, nodes, dtype), shape, device)

    def _shape(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The shape here of a list: that of its slots, or one element for each.

        Raises :class:`Unsupported` if elements are broadcast in another way.
        """
        own = [slot_of(tensor) for tensor in tensors]
        pairs = zip(own, self.slots, strict=True)
        if all(has_same_memory_order(a, b) for a, b in pairs):
            return (ELEMENTS,)
        if all(slot.elements == 1 for slot in own):
            return ()
        raise Unsupported("tensors of a list are broadcast, or differ in their strides")

    def _operand(self, operand: Operand, shape: tuple[int, ...], device: torch.device) -> Node:
        key = (operand.kind, operand.nodes, operand.numbers, shape)
        if key not in self.operands:
            node = self.graph.placeholder(f"x{len(self.operands)}")
            with self.mode:
                dtype = getattr(torch, operand.dtype)
                node.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
            self.operands[key] = node
            self.described[node] = operand
        return self.operands[key]

    def _constant(self, number: float, shape: tuple[int, ...], like: torch.Tensor) -> Node:
        options = {"dtype": like.dtype, "device": like.device}
        node = self.graph.call_function(aten("full.default"), (list(shape), number), options)
        with self.mode:
            node.meta["val"] = torch.full(shape, number, **options)
        return node


def _common_number(nodes: Sequence[Node]) -> float | None:
    """The number that all tensors of a list are filled with; None if there is none."""
    if any(node.target is not aten("full.default") for node in nodes):
        return None
    numbers = [node.args[1] for node in nodes]
    first = numbers[0]
    is_common = len({repr(number) for number in numbers}) == 1  # 0.0 is not -0.0
    return first if is_common and isinstance(first, (int, float)) else None


def _check_templates(graph: Graph) -> None:
    for node in graph:
        if node.dtype not in TRITON_DTYPES:
            raise Unsupported(f"dtype {node.dtype}")
        if node.op == "iota" or node.op == "checked_index":
            raise Unsupported("an element that depends on its position")
        if node.kind in ELEMENTWISE:
            try:
                check_template(node, [graph[i] for i in node.inputs])
            except BadFusion as error:
                raise Unsupported("an operator without a template for its dtype") from error
        elif node.kind not in ("input", "constant", "layout"):
            raise Unsupported(f"{node.op} in an expression of elements")
