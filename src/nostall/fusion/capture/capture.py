"""Lowering of an FX graph of ATen calls to an operator graph; unsupported calls become opaque.

Conversion of an FX graph's sizes to ints; a placeholder prime replaces each dynamic size.

PyTorch writes a dynamic size as a SymPy symbol. Each size of a tensor must be a number times a
product of symbols (:mod:`nostall.fusion.graph.dynamic_size`).
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from nostall.fusion.capture import left_to_pytorch
from nostall.fusion.capture.call import Call, Unsupported, Value, dtype_name
from nostall.fusion.capture.lowering import RULES
from nostall.fusion.capture.memory import draws_random_numbers, mutated_tensors
from nostall.fusion.capture.randomness import SEEDS
from nostall.fusion.capture.reduction_rules import SOFTMAX_STATISTICS
from nostall.fusion.errors import BadCapture, BadGraph
from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.dynamic_size import placeholder_prime
from nostall.fusion.graph.graph import MAX_ELEMENTS, Graph
from nostall.fusion.graph.graph import Node as Operator
from nostall.fusion.graph.operations import DTYPE_BYTES
from nostall.fusion.graph.shapes import Shape, span


class Sizes:
    """Sizes of one graph: its symbols with the placeholder prime of each."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        hints: dict[Any, int] = {}
        static_sizes: set[int] = set()
        for size in _sizes(nodes):
            if isinstance(size, int):
                static_sizes.add(size)
                continue
            factor, symbols = _product(size)
            static_sizes.add(factor)
            if len(symbols) == 1 and size.node.hint is not None:
                hints.setdefault(*symbols, size.node.hint // factor)
        self.primes: dict[Any, int] = {}
        for symbol, hint in hints.items():
            self.primes[symbol] = placeholder_prime(hint, static_sizes)
            static_sizes.add(self.primes[symbol])
        self.varying = math.prod(self.primes.values()) if self.primes else None

    def layout(self, value: torch.Tensor) -> tuple[Shape, Shape]:
        """Shape and strides of a fake tensor as ints; raises :class:`Unsupported` if impossible."""
        return tuple(map(self.number, value.shape)), tuple(map(self.number, value.stride()))

    def number(self, size: int | torch.SymInt) -> int:
        """A size as an int; raises :class:`Unsupported` if it is no product of symbols."""
        if isinstance(size, int):
            return size
        if any(str(symbol).startswith("u") for symbol in size.node.expr.free_symbols):
            raise Unsupported("data-dependent shape")
        factor, symbols = _product(size)
        if not symbols or any(symbol not in self.primes for symbol in symbols):
            raise Unsupported("a size that is no product of dynamic dimensions")
        return factor * math.prod(self.primes[symbol] for symbol in symbols)


def _product(size: Any) -> tuple[int, tuple[Any, ...]]:
    """A size as its constant factor and the symbols that it is the product of, powers repeated.

    There are no symbols if the size is no such product.
    """
    constant, rest = size.node.expr.as_coeff_Mul()
    symbols: list[Any] = []
    for base, power in rest.as_powers_dict().items():
        if not (base.is_Symbol and power.is_Integer and power > 0):
            return 1, ()
        symbols += [base] * int(power)
    return (int(constant), tuple(symbols)) if constant.is_Integer and constant > 0 else (1, ())


def _sizes(nodes: Iterable[Node]) -> Iterator[int | torch.SymInt]:
    """All sizes and strides of all strided tensors of the graph, and its dynamic numbers."""
    for node in nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(item, torch.Tensor) and item.layout == torch.strided:
                yield from (*item.shape, *item.stride())
            elif isinstance(item, torch.SymInt):
                yield item


@dataclass(frozen=True)
class CaptureReport:
    """Counts of ATen calls that can be fused and of those that cannot."""

    fusible: int
    """ATen calls that became operators."""
    unsupported: Counter[tuple[str, str]]
    """Opaque calls, counted by (reason, ATen operator)."""
    reasons: dict[int, tuple[str, str]] = field(default_factory=dict)
    """(reason, ATen operator) of each opaque node that stands for a call."""

    def __str__(self) -> str:
        stay = self.unsupported.total()
        lines = [f"{self.fusible} ATen calls can be fused, {stay} stay as they are"]
        counts = sorted(self.unsupported.items(), key=lambda item: (-item[1], item[0]))
        for (reason, target), count in counts:
            lines.append(f"  {count:4} x {target}: {reason}")
        return "\n".join(lines)


@dataclass(frozen=True)
class CapturedGraph:
    """An operator graph with the mapping between its nodes and those of the FX graph."""

    graph: Graph
    values: dict[Node, Value]
    """The graph node (or a tuple, for several tensors) of each FX node that holds tensors."""
    origins: dict[int, Node]
    """The first FX node of each graph node. An intermediate node of the lowering of one ATen call
    has none, and only nodes of the same lowering read it. Several FX nodes may have one node."""
    report: CaptureReport
    primes: Mapping[Any, int] = field(default_factory=dict)
    """SymPy symbol of each dynamic size, with the prime in its place."""


def capture(module: GraphModule) -> CapturedGraph:
    """Lower a functional ATen graph whose nodes carry fake tensors (``meta["val"]``).

    An unsupported call does not fail the capture. It becomes an opaque node, and the report counts
    the reason. The first call that computes again what Inductor's softmax statistics have computed
    gets its node. Raises :class:`BadCapture` if a node has no ``meta["val"]``.
    """
    sizes = Sizes(module.graph.nodes)
    build = Builder(sizes.varying)
    values: dict[Node, Value] = {}
    unsupported: Counter[tuple[str, str]] = Counter()
    reasons: dict[int, tuple[str, str]] = {}
    mutated = mutated_tensors(module.graph.nodes)
    known = _SoftmaxOperators(build)
    fusible = 0
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        if node.op != "call_function" or node.target is SEEDS:
            values[node] = _add_input(node, build, sizes)
            continue
        node_count = len(build.nodes)
        try:
            values[node] = _lower(node, build, values, mutated, sizes)
            if str(node.target) == SOFTMAX_STATISTICS:
                known.add(node_count, values[node])
            elif node not in mutated:  # other readers of the same value must not see the change
                values[node] = known.merged(node_count, values[node])
            fusible += node.target is not operator.getitem
        except (Unsupported, BadGraph) as error:
            del build.nodes[node_count:]
            opaque = values[node] = _add_opaque_call(node, build, values, sizes)
            reason = str(error) if isinstance(error, Unsupported) else "operands that do not fit"
            if not (_is_size(node) or node.target is operator.getitem or _is_kernel(node)):
                unsupported[reason, str(node.target)] += 1
                reasons[opaque] = reason, str(node.target)
    (output,) = module.graph.find_nodes(op="output")
    results = [values[node] for node in output.all_input_nodes]
    flat = [i for value in results for i in (value if isinstance(value, tuple) else (value,))]
    graph = build.graph(*flat)
    report = CaptureReport(fusible, unsupported, reasons)
    return CapturedGraph(graph, values, _origins(values), report, sizes.primes)


class _SoftmaxOperators:
    """The operators of lowered softmax statistics, some of which later calls compute again."""

    def __init__(self, build: Builder) -> None:
        self._build = build
        self._indices: dict[Operator, int] = {}
        # Those that are results of calls. The strides of all others do not matter.
        self._results: set[int] = set()

    def add(self, first: int, results: Value) -> None:
        """Add the operators from the node ``first`` on; ``results`` are the call's."""
        self._indices |= {self._key(each): each.index for each in self._build.nodes[first:]}
        self._results.update(results if isinstance(results, tuple) else (results,))

    def merged(self, first: int, value: Value) -> Value:
        """Merge the operator of a call with an equal one; returns the value of the call.

        The call has added the nodes from ``first`` on. Its value becomes the equal operator, and
        its node is removed, unless that operator is another call's result: calls whose results
        leave the graph need a tensor each.
        """
        nodes = self._build.nodes
        same = self._indices.get(self._key(nodes[first])) if len(nodes) == first + 1 else None
        if same is None or same in self._results:
            return value
        nodes[same] = replace(nodes[same], strides=nodes.pop().strides)
        self._results.add(same)
        return same

    @staticmethod
    def _key(node: Operator) -> Operator:
        return replace(node, index=0, strides=())


def _origins(values: dict[Node, Value]) -> dict[int, Node]:
    origins: dict[int, Node] = {}
    for node, value in values.items():
        if isinstance(value, int):
            origins.setdefault(value, node)
    return origins


def _meta(node: Node) -> Any:
    """The fake value of a node; None for nodes for which traces record none."""
    if "val" not in node.meta and _may_lack_value(node):
        return None
    if "val" not in node.meta:
        raise BadCapture(
            f"FX node {node.name} has no meta['val']; fusion needs shapes and dtypes; trace with "
            "torch.export or AOTAutograd"
        )
    return node.meta["val"]


def _may_lack_value(node: Node) -> bool:
    """Whether traces may record no value: for attributes, for calls without a result (assertions),
    and for calls of higher-order operators (checkpoints with random numbers) and their parts."""
    if node.op == "get_attr" or isinstance(node.target, HigherOrderOperator):
        return True
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and _may_lack_value(node.args[0])
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.returns


def _is_kernel(node: Node) -> bool:
    """Whether a node calls a stitched kernel, which an earlier pass has inserted."""
    return str(node.target).startswith("nostall.stitched")


def _is_size(node: Node) -> bool:
    """Whether a call computes a size, which happens on the CPU."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _add_input(node: Node, build: Builder, sizes: Sizes) -> Value:
    """Add a placeholder or attribute: an input if kernels can read it, else an opaque node."""
    value = _meta(node)
    try:
        _check_tensor(value, sizes)
    except Unsupported:
        return _add_opaque(build, f"{node.op} {node.target}", (), value, sizes)
    shape, strides = sizes.layout(value)
    return build.input(shape, dtype_name(value.dtype), strides)


def _lower(
    node: Node, build: Builder, values: dict[Node, Value], mutated: set[Node], sizes: Sizes
) -> Value:
    """Add the nodes of an ATen call; raises :class:`Unsupported` if no kernel can compute it."""
    if node.target is operator.getitem:
        results_of_call = values[node.args[0]]
        if isinstance(results_of_call, int):
            raise Unsupported("part of an opaque result")
        return results_of_call[int(node.args[1])]
    rule = RULES.get(str(node.target))
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        raise Unsupported("changes a tensor in place")
    reason = left_to_pytorch.reason(node.target)
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        if rule is None and reason != left_to_pytorch.NO_RULE:
            raise Unsupported(reason)  # says more than a tag, which may be of dropout that is off
        if draws_random_numbers(node.target, node.args, node.kwargs):
            raise Unsupported("random numbers")
    results = _meta(node)
    for value in results if isinstance(results, (tuple, list)) else [results]:
        _check_tensor(value, sizes)
    if rule is None:
        raise Unsupported(reason)
    operands = [operand for operand in node.all_input_nodes if not _is_size(operand)]
    for operand in operands:
        if operand in mutated:
            raise Unsupported("reads a tensor that is changed in place")
        _check_tensor(_meta(operand), sizes)
    if len({_meta(operand).device for operand in operands}) > 1:
        raise Unsupported("tensors on several devices")
    node_count = len(build.nodes)
    value = rule(Call(node, build, values, sizes.layout))
    if node in mutated and isinstance(value, int) and value < node_count:
        raise Unsupported("a copy that is changed in place")  # the value must not change with it
    return value


def _check_tensor(value: Any, sizes: Sizes) -> None:
    """Raise :class:`Unsupported` if kernels cannot read or write a value."""
    if not isinstance(value, torch.Tensor):
        raise Unsupported("no tensor")
    if value.layout != torch.strided:
        raise Unsupported("sparse tensor")
    if value.is_neg() or value.is_conj():
        raise Unsupported("a tensor whose memory holds the negative or the conjugate")
    if dtype_name(value.dtype) not in DTYPE_BYTES:
        raise Unsupported(f"dtype {dtype_name(value.dtype)}")
    shape, strides = sizes.layout(value)
    if math.prod(shape) > MAX_ELEMENTS:
        raise Unsupported("more than 2^31 - 1 elements")
    if math.prod(shape) and span(shape, strides) > MAX_ELEMENTS:
        raise Unsupported("a view of more than 2^31 - 1 elements")


def _add_opaque_call(node: Node, build: Builder, values: dict[Node, Value], sizes: Sizes) -> int:
    """Add an opaque node for a call that PyTorch computes."""
    inputs: list[int] = []
    for operand in node.all_input_nodes:
        value = values[operand]
        inputs += [value] if isinstance(value, int) else value
    value = node.meta.get("val")
    return _add_opaque(build, str(node.target), tuple(dict.fromkeys(inputs)), value, sizes)


def _add_opaque(
    build: Builder, target: str, inputs: tuple[int, ...], value: Any, sizes: Sizes
) -> int:
    """Add an opaque node. If its sizes cannot be written as ints, its shape is empty.

    No kernel reads such a node: `_lower` checks the sizes of all operands.
    """
    shape: Shape = ()
    strides: Shape = ()
    dtype = "none"
    if isinstance(value, torch.Tensor):
        dtype = dtype_name(value.dtype)
        if value.layout == torch.strided:
            with contextlib.suppress(Unsupported):
                shape, strides = sizes.layout(value)
    return build.opaque(target, *inputs, shape=shape, dtype=dtype, strides=strides)
