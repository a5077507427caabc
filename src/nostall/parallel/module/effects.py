"""Effects of a forward pass besides its loss: random numbers, changed tensors, Python state.

Both planners ask here: the pipeline planners about graphs of ``torch.export``, the sharding
planners about joint graphs.  Operations inside of sub-graphs count as those of the graph itself:
``torch.export`` puts the parts under ``torch.no_grad`` or ``torch.autocast`` into sub-graphs.
"""

from __future__ import annotations

import operator as operators
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from nostall.parallel.errors import BadModel

_WITHOUT_RANDOMNESS: dict[str, float] = {
    "dropout_p": 0.0, "dropout": 0.0, "p": 0.0, "train": 0, "training": 0, "num_layers": 1,
}  # fmt: skip
"""Arguments of random operators, and the value with which an operator draws no random numbers.
Recurrent networks drop values between their layers, so those of one layer drop none."""
_BATCH_STATISTICS = ("batch_norm",)
"""Parts of the names of operators that use statistics of the batch if they are in training mode."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OWN_ATTRIBUTES = frozenset(vars(torch.nn.Module()))


def operations(nodes: Iterable[Node]) -> Iterator[Node]:
    """The operations among the nodes, each followed by those of its sub-graphs."""
    for node in nodes:
        if node.op == "call_function":
            yield node
            for graph in _subgraphs(node):
                yield from operations(graph.nodes)


def is_random(node: Node) -> bool:
    """Whether an operation draws random numbers: dropout with probability 0 does not."""
    return any(map(_draws_numbers, operations((node,))))


def random_operators(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Names of the operators that draw random numbers, each once."""
    drawing = (str(n.target) for n in operations(nodes) if _draws_numbers(n))
    return tuple(dict.fromkeys(drawing))


def batch_statistics_operator(nodes: Iterable[Node]) -> str:
    """Name of the first operator that takes statistics from the batch; empty if none does."""
    for node in operations(nodes):
        if any(part in str(node.target) for part in _BATCH_STATISTICS):
            values = _arguments(node)
            if values.get("training", values.get("train", False)):
                return str(node.target)
    return ""


def changed_arguments(node: Node) -> list[Node]:
    """The arguments of an operation that its sub-graphs change in place, as nodes of its graph."""
    changed: list[Node] = []
    for graph in _subgraphs(node):
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        operands = [leaf for leaf in tree_leaves([node.args, node.kwargs]) if _is_operand(leaf)]
        given = dict(zip(placeholders, operands[-len(placeholders) :], strict=False))
        for inner in operations_of(graph):
            roots = [_root(value) for value in (*written(inner), *changed_arguments(inner))]
            changed += [given.get(root, node) for root in roots if root.op != "call_function"]
    return changed


def operations_of(graph: Graph) -> list[Node]:
    """The operations of a graph without those of its sub-graphs."""
    return [node for node in graph.nodes if node.op == "call_function"]


def written(node: Node) -> list[Node]:
    """The arguments that an operator's schema says it changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    names = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    leaves = tree_leaves([v for name, v in _arguments(node).items() if name in names])
    return [leaf for leaf in leaves if isinstance(leaf, Node)]


def is_view(node: Node) -> bool:
    """Whether an operation returns a view of an argument, or an item of a tuple."""
    if node.target is operators.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
    )


class PythonState:
    """Values of a module and of its submodules that are no tensors, at one point in time.

    Counters are examples.  The states of Python's and NumPy's random number generators belong to
    them.  A trace has the values of one moment, so a step that changes them cannot be traced.
    """

    def __init__(self, *modules: Any) -> None:
        """``modules`` may have functions among them, which are left out."""
        self.values = {
            f"{name}.{key}" if name else key: _frozen(value)
            for module in modules
            if isinstance(module, torch.nn.Module)
            for name, part in module.named_modules()
            for key, value in vars(part).items()
            if key not in _OWN_ATTRIBUTES and isinstance(value, (*_PLAIN, *_CONTAINERS))
        }
        self._generators = _generator_states()

    def changed_since(self, before: PythonState) -> tuple[str, ...]:
        """Names of the values that changed.

        Values that a first call initialises do not count: those that were missing, None or False.
        """
        changed = [
            f"the attribute {name}"
            for name, value in self.values.items()
            if (old := before.values.get(name)) not in _UNSET and value != old
        ]
        generators = before._generators
        changed += [name for name, text in self._generators.items() if text != generators.get(name)]
        return tuple(changed)


def refuse_sparse(name: str, gradient: torch.Tensor) -> None:
    """Raise :class:`BadModel` for a sparse gradient."""
    if gradient.layout is not torch.strided:
        raise BadModel(
            f"the gradient of {name} is sparse, and ranks sum dense ones; build the embedding with "
            "sparse=False"
        )


def refuse_changed_state(names: Iterable[str]) -> None:
    """Raise :class:`BadModel` if there are names of changed values."""
    if names := list(names):
        raise BadModel(
            f"the forward pass changes {', '.join(names[:3])}, and a traced step always repeats "
            "what one pass did; move counters and random choices out of the forward pass, or draw "
            "random numbers with torch"
        )


_CONTAINERS = (list, tuple, dict, set, deque)
_UNSET = (None, ("NoneType", "None"), ("bool", "False"))


def _frozen(value: Any) -> Any:
    """A value that compares equal as long as the plain values in it do."""
    if isinstance(value, dict):
        return ("dict", tuple((_frozen(k), _frozen(v)) for k, v in value.items()))
    if isinstance(value, list | tuple | deque):
        return ("list", tuple(map(_frozen, value)))
    if isinstance(value, set):
        return ("set", tuple(sorted(map(repr, value))))
    kind = type(value).__name__
    return (kind, repr(value)) if isinstance(value, _PLAIN) else (kind, "")


def _generator_states() -> Mapping[str, str]:
    states = {"the state of Python's random": repr(random.getstate())}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["the state of numpy.random"] = repr(numpy.random.get_state(legacy=True))
    return states


def _draws_numbers(node: Node) -> bool:
    """Whether an operation itself, without its sub-graphs, draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    values = _arguments(node)
    return not any(values.get(name, off + 1) == off for name, off in _WITHOUT_RANDOMNESS.items())


def schema_arguments(
    operator: Any, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of an operator by name, with defaults; empty if it has no schema."""
    schema: Any = getattr(operator, "_schema", None)
    if schema is None:
        return {}
    values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    values |= dict(zip((a.name for a in schema.arguments), args, strict=False))
    return {**values, **kwargs}


def _arguments(node: Node) -> dict[str, Any]:
    return schema_arguments(node.target, node.args, node.kwargs)


def _subgraphs(node: Node) -> list[Graph]:
    modules = (_attribute(a) for a in node.all_input_nodes if a.op == "get_attr")
    return [module.graph for module in modules if isinstance(module, GraphModule)]


def _attribute(node: Node) -> Any:
    try:
        return reduce(getattr, str(node.target).split("."), node.graph.owning_module)
    except AttributeError:
        return None


def _is_operand(leaf: Any) -> bool:
    is_graph = isinstance(leaf, Node) and isinstance(
        _attribute(leaf) if leaf.op == "get_attr" else None, GraphModule
    )
    return isinstance(leaf, Node) and not is_graph


def _root(node: Node) -> Node:
    """The node whose memory the value of a node is in, as far as views and changes tell."""
    while node.op == "call_function" and (is_view(node) or written(node)):
        sources = written(node) or node.all_input_nodes
        if not sources:
            break
        node = sources[0]
    return node
