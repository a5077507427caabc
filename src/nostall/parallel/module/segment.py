"""Segments: consecutive layers of a traced job as one function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from nostall.parallel.module.compilation import Compiled
from nostall.parallel.module.graph import TracedJob
from nostall.parallel.module.job import Job


@dataclass(frozen=True, eq=False)
class Segment:
    """A function of its own tensors, of leaves of the batch and of received tensors.

    Tensors that are both received and sent are passed on and are not part of the function.  The
    last segment of a model returns the loss and sends nothing.
    """

    function: GraphModule
    own: tuple[torch.Tensor, ...]
    """Parameters, buffers and constants, in the order of the function's first arguments."""
    dtypes: tuple[torch.dtype, ...]
    """Element types in which the function takes its own tensors."""
    leaves: tuple[int, ...]
    """Numbers of the leaves of (inputs, targets) that the function reads."""
    received: tuple[str, ...]
    """Names of the tensors that arrive from the layers before."""
    sent: tuple[str, ...]
    """Names of the tensors for the layers after."""
    used: tuple[str, ...]
    """The received tensors that the function reads."""
    computed: tuple[str, ...]
    """The sent tensors that the function computes; ``("loss",)`` in the last segment."""
    compiled_function: Compiled | None = None
    """What is called in the place of ``function``."""

    @cached_property
    def shares_weights(self) -> bool:
        """Whether several operations read a weight, or what is computed from weights alone."""
        keys = [id(own) if own.requires_grad else 0 for own in self.own]
        readers = Counter[int]()
        _count_readers(self.function, keys, readers)
        return any(count > 1 for key, count in readers.items() if key)

    def __call__(
        self, received: dict[str, torch.Tensor], inputs: Any, targets: Any
    ) -> dict[str, torch.Tensor]:
        """Run the function; returns the computed tensors by name."""
        leaves = tree_leaves((inputs, targets))
        own = (
            tensor if tensor.dtype is dtype else tensor.to(dtype)
            for tensor, dtype in zip(self.own, self.dtypes, strict=True)
        )
        values = (self.compiled_function or self.function)(
            *own, *(leaves[i] for i in self.leaves), *(received[name] for name in self.used)
        )
        return dict(zip(self.computed, values, strict=True))

    def compiled(self, note: Callable[[str], None]) -> Segment:
        """The segment with a compiled function; ``note`` is told why if it cannot be compiled."""
        return replace(self, compiled_function=Compiled(self.function, note))


def _count_readers(
    function: GraphModule, arguments: Sequence[int | None], readers: Counter[int]
) -> None:
    """Count the operations that read each value of weights alone, with those of nested graphs.

    ``arguments`` has for the first arguments the key of such a value, 0 for a constant, and None
    for other tensors.
    """
    placeholders = function.graph.find_nodes(op="placeholder")
    keys: dict[Node, int | None] = dict(zip(placeholders, arguments, strict=False))
    for node in function.graph.nodes:
        if node.op == "placeholder":
            continue
        nested = [n for n in node.all_input_nodes if n.op == "get_attr" and n not in keys]
        if nested:
            values = [v for v in tree_leaves(node.args) if isinstance(v, Node) and v not in nested]
            for graph in nested:
                inner = getattr(function, str(graph.target))
                _count_readers(inner, [keys.get(v) for v in values], readers)
            continue
        if node.op == "get_attr" and isinstance(getattr(function, str(node.target), None), Module):
            continue
        found = [keys.get(source) for source in node.all_input_nodes]
        readers.update(key for key in found if key)
        if None not in found:
            keys[node] = id(node) if any(found) else 0


def make_segment(
    job: Job,
    traced: TracedJob,
    inside: set[str],
    received: Sequence[str],
    sent: Sequence[str],
    device: torch.device,
) -> Segment:
    """The segment with the operations ``inside`` and all others that they need, on a device.

    These others depend on no parameter.  The segment's parameters are the module's own, moved to
    the device, so gradients arrive where the optimiser looks for them.
    """
    computed = [name for name in sent if name in inside] or ["loss"]
    ends = {traced.loss.name if name == "loss" else name for name in computed}
    nodes = _needed_nodes(traced, inside, ends, set(received))
    used = [name for name in received if any(n.name == name for n in nodes)]
    own_nodes = [n for n in nodes if traced.sources.get(n.name, ("input", 0))[0] != "input"]
    leaf_nodes = [n for n in nodes if traced.sources.get(n.name, ("", 0))[0] == "input"]
    received_nodes = [next(n for n in nodes if n.name == name) for name in used]
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in (*own_nodes, *leaf_nodes, *received_nodes):
        copies[node] = graph.placeholder(node.name)
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, lambda argument: copies[argument])
            _replace_device(copies[node], device)
    by_name = {node.name: copy for node, copy in copies.items()}
    graph.output(tuple(by_name[traced.loss.name if n == "loss" else n] for n in computed))
    return Segment(
        GraphModule(traced.graph_module, graph),
        tuple(_own_tensor(job, traced, node, device) for node in own_nodes),
        tuple(node.meta["val"].dtype for node in own_nodes),
        tuple(traced.sources[node.name][1] for node in leaf_nodes),
        tuple(received),
        tuple(sent),
        tuple(used),
        tuple(computed),
    )


def _needed_nodes(
    traced: TracedJob, inside: set[str], ends: set[str], received: set[str]
) -> list[Node]:
    """Nodes that ``ends`` depend on, in graph order; predecessors of received ones are left out."""
    order = {node: i for i, node in enumerate(traced.graph_module.graph.nodes)}
    needed: set[Node] = set()
    stack = [node for node in order if node.name in ends]
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        if node.name not in received or node.name in inside:
            stack.extend(node.all_input_nodes)
    return sorted(needed, key=lambda node: order[node])


def _own_tensor(job: Job, traced: TracedJob, node: Node, device: torch.device) -> torch.Tensor:
    """The parameter, buffer or constant of a placeholder, moved to the device."""
    kind, name = traced.sources[node.name]
    if kind == "constant":
        return traced.constants[name].to(device)
    is_parameter = kind == "parameter"
    tensor = job.module.get_parameter(name) if is_parameter else job.module.get_buffer(name)
    if tensor.device != device:
        tensor.data = tensor.data.to(device)
    return tensor


def _replace_device(node: Node, device: torch.device) -> None:
    """Replace the device of tracing in the arguments of operations that create tensors."""

    def replaced(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    node.args = map_aggregate(node.args, replaced)
    node.kwargs = map_aggregate(node.kwargs, replaced)
