"""An FX graph as an operator graph: what can be fused becomes operators, the rest is opaque."""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from nostall.fusion.capture.call import Call, Unfit, Value, dtype_name
from nostall.fusion.capture.lowering import RULES
from nostall.fusion.capture.randomness import SEEDS
from nostall.fusion.capture.sizes import Sizes
from nostall.fusion.errors import BadCapture, BadGraph
from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import MOST_ELEMENTS, Graph
from nostall.fusion.graph.operations import DTYPE_BYTES
from nostall.fusion.graph.shapes import Shape


@dataclass(frozen=True)
class Explanation:
    """What was taken and what was not: ``refused`` counts (reason, ATen operator)."""

    taken: int
    refused: Counter[tuple[str, str]]

    def __str__(self) -> str:
        lines = [f"{self.taken} ATen calls can be fused, {self.refused.total()} stay as they are"]
        for (reason, target), count in sorted(self.refused.items(), key=lambda r: (-r[1], r[0])):
            lines.append(f"  {count:4} x {target}: {reason}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Captured:
    """An operator graph and its way back.

    ``values`` gives for every FX node that holds tensors its node of ``graph`` (a tuple for several
    tensors), ``origins`` the other way the first FX node of a graph node; nodes that stand inside
    the lowering of one ATen call have none, and nothing outside of it reads them.
    """

    graph: Graph
    values: dict[Node, Value]
    origins: dict[int, Node]
    explanation: Explanation
    symbol: Any = None
    """PyTorch's name of the size that varies (``graph.varying`` stands for it)."""


def capture(module: GraphModule) -> Captured:
    """Lower a functional ATen graph whose nodes carry fake tensors (``meta["val"]``).

    Nothing is refused as a whole: what cannot be fused becomes an opaque node with a counted
    reason.  Raises :class:`BadCapture` where a node has no ``meta["val"]``.
    """
    sizes = Sizes(module.graph.nodes)
    build = Builder(sizes.varying)
    values: dict[Node, Value] = {}
    refused: Counter[tuple[str, str]] = Counter()
    changed = _changed(module.graph.nodes)
    taken = 0
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        if node.op != "call_function" or node.target is SEEDS:
            values[node] = _given(node, build, sizes)
            continue
        mark = len(build.nodes)
        try:
            values[node] = _lowered(node, build, values, changed, sizes)
            taken += node.target is not operator.getitem
        except (Unfit, BadGraph) as reason:
            del build.nodes[mark:]
            values[node] = _border(node, build, values, sizes)
            told = str(reason) if isinstance(reason, Unfit) else "operands that do not fit"
            if not _is_size(node) and node.target is not operator.getitem:
                refused[told, str(node.target)] += 1
    (output,) = module.graph.find_nodes(op="output")
    results = [values[node] for node in output.all_input_nodes]
    flat = [i for value in results for i in (value if isinstance(value, tuple) else (value,))]
    graph = build.graph(*flat)
    explanation = Explanation(taken, refused)
    return Captured(graph, values, _origins(values), explanation, sizes.symbol)


def _origins(values: dict[Node, Value]) -> dict[int, Node]:
    found: dict[int, Node] = {}
    for node, value in values.items():
        if isinstance(value, int):
            found.setdefault(value, node)
    return found


def _meta(node: Node) -> Any:
    if "val" not in node.meta and (node.op == "get_attr" or _gives_nothing(node)):
        return None
    if "val" not in node.meta:
        raise BadCapture(
            f"FX node {node.name} has no meta['val']; fusion needs shapes and dtypes; trace with "
            "torch.export or AOTAutograd"
        )
    return node.meta["val"]


def _gives_nothing(node: Node) -> bool:
    """Whether a call has no result: an assertion, of which a trace records no value."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.returns


def _is_size(node: Node) -> bool:
    """Whether a call only computes sizes, on the CPU."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _given(node: Node, build: Builder, sizes: Sizes) -> Value:
    """A placeholder or attribute: an input where a kernel can read it."""
    value = _meta(node)
    try:
        _check_tensor(value, sizes)
    except Unfit:
        return _opaque(build, f"{node.op} {node.target}", (), value, sizes)
    shape, strides = sizes.layout(value)
    return build.input(shape, dtype_name(value.dtype), strides)


def _lowered(
    node: Node, build: Builder, values: dict[Node, Value], changed: set[Node], sizes: Sizes
) -> Value:
    """The value of an ATen call; raises :class:`Unfit`."""
    if node.target is operator.getitem:
        whole = values[node.args[0]]
        if isinstance(whole, int):
            raise Unfit("part of an opaque result")
        return whole[int(node.args[1])]
    rule = RULES.get(str(node.target))
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        raise Unfit("changes a tensor in place")
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise Unfit("random numbers")
    results = _meta(node)
    for value in results if isinstance(results, (tuple, list)) else [results]:
        _check_tensor(value, sizes)
    if rule is None:
        raise Unfit("unsupported operator")
    operands = [operand for operand in node.all_input_nodes if not _is_size(operand)]
    for operand in operands:
        if operand in changed:
            raise Unfit("reads a tensor that is changed in place")
        _check_tensor(_meta(operand), sizes)
    if len({_meta(operand).device for operand in operands}) > 1:
        raise Unfit("tensors on several devices")
    return rule(Call(node, build, values, sizes.layout))


def _check_tensor(value: Any, sizes: Sizes) -> None:
    """Whether a kernel can read or write it; raises :class:`Unfit`."""
    if not isinstance(value, torch.Tensor):
        raise Unfit("no tensor")
    if value.layout != torch.strided:
        raise Unfit("sparse tensor")
    if dtype_name(value.dtype) not in DTYPE_BYTES:
        raise Unfit(f"dtype {dtype_name(value.dtype)}")
    shape, _ = sizes.layout(value)
    if math.prod(shape) > MOST_ELEMENTS:
        raise Unfit("more than 2^31 - 1 elements")


def _border(node: Node, build: Builder, values: dict[Node, Value], sizes: Sizes) -> int:
    """An opaque node for what is left to others."""
    inputs: list[int] = []
    for operand in node.all_input_nodes:
        value = values[operand]
        inputs += [value] if isinstance(value, int) else value
    value = node.meta.get("val")
    return _opaque(build, str(node.target), tuple(dict.fromkeys(inputs)), value, sizes)


def _opaque(build: Builder, target: str, inputs: tuple[int, ...], value: Any, sizes: Sizes) -> int:
    """Sizes are kept where they can be; nothing that a kernel reads lacks them."""
    shape: Shape = ()
    strides: Shape = ()
    dtype = "none"
    if isinstance(value, torch.Tensor):
        dtype = dtype_name(value.dtype)
        if value.layout == torch.strided:
            with contextlib.suppress(Unfit):
                shape, strides = sizes.layout(value)
    return build.opaque(target, *inputs, shape=shape, dtype=dtype, strides=strides)


def _changed(nodes: Iterable[Node]) -> set[Node]:
    """Tensors that some call changes in place, with all views of the same memory."""
    memory: dict[Node, Node] = {}
    written: set[Node] = set()
    every = list(nodes)
    for node in every:
        schema = getattr(node.target, "_schema", None)
        memory[node] = node
        if schema is None:
            continue
        for place, argument in enumerate(schema.arguments):
            operand = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            if argument.alias_info is None:
                continue
            for one in operand if isinstance(operand, (list, tuple)) else [operand]:
                if isinstance(one, Node):
                    memory[node] = memory[one]
                    if argument.alias_info.is_write:
                        written.add(memory[one])
    return {node for node in every if memory[node] in written}
