"""Find products whose results only a loss reads, in graphs of Dynamo.

Between a product (tokens x classes) and its loss may be casts, views, slices of tokens, scalar
factors and a soft cap. Each of them is a step that the product's left operand can take in its
place, or a factor of the loss. Everything else that reads logits is named, and they stay.
"""

from __future__ import annotations

import builtins
import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from nostall.attach.torch_compile.rewrite.entropies import Entropy

F = torch.nn.functional
Step = tuple[Any, tuple[Any, ...]]
"""A method of a tensor, or a function, and the arguments behind the tensor."""

_SAME = frozenset(
    ("contiguous", "clone", "detach", "float", "double", "to", "type", torch.clone, torch.detach)
)
_VIEWS = frozenset(("view", "reshape", torch.reshape))
_FLATTENS = frozenset(("flatten", torch.flatten))
_TRANSPOSES = frozenset(("transpose", torch.transpose, "permute", torch.permute))
_FACTORS = frozenset(
    (operator.mul, operator.imul, torch.mul, "mul", "mul_", operator.truediv, operator.itruediv,
     torch.div, torch.true_divide, "div", "div_")
)  # fmt: skip
_DIVISIONS = frozenset(
    (operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_")
)
_TANHS = frozenset((torch.tanh, "tanh", F.tanh))
_MATMULS = frozenset((operator.matmul, torch.matmul, torch.mm, "matmul", "mm", "__matmul__"))
LOG_SOFTMAXES = frozenset((torch.log_softmax, F.log_softmax, "log_softmax"))
GATHERS = frozenset((torch.gather, "gather"))
LOGSUMEXPS = frozenset((torch.logsumexp, "logsumexp"))
CROSS_ENTROPY, NLL = F.cross_entropy, F.nll_loss
_AUTOCASTS = frozenset(
    (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
)
_INFERENCE_MODES = frozenset(
    (torch.autograd.grad_mode._enter_inference_mode,
     torch.autograd.grad_mode._exit_inference_mode)
)  # fmt: skip


class Refused(Exception):
    """Logits that stay; the text says why."""


@dataclass(frozen=True)
class Product:
    """``hidden`` (tokens x width) times the transpose of ``weight`` (classes x width)."""

    node: Node
    hidden: Node
    weight: Node
    bias: Node | None
    # Whether the graph has the weight as width x classes.
    is_transposed: bool

    @property
    def classes(self) -> int:
        return int(fake(self.node).shape[-1])

    @property
    def width(self) -> int:
        return int(fake(self.hidden).shape[-1])


@dataclass(frozen=True)
class Path:
    """What lies between a product and a reader of its logits."""

    # The axis of classes.
    axis: int
    # Steps that the product's left operand takes instead.
    steps: tuple[Step, ...] = ()
    inner: float = 1.0
    # 0: no soft cap; else logits are ``cap * tanh(inner * product)``.
    cap: float = 0.0
    bias: Node | None = None
    nodes: tuple[Node, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether classes are the last axis of what a node behind this path reads."""
        return bool(self.axis == fake(self.nodes[-1]).dim() - 1)


@dataclass(frozen=True)
class Terminal:
    """A node that reads logits and is replaced: a loss, or one term of log-probabilities."""

    node: Node
    path: Path
    # A logarithm of softmax between the logits and the node.
    is_normalized: bool
    entropy: Entropy | None = None


def fake(node: Node) -> Tensor:
    """The traced value of a node.  Raises :class:`Refused` if it is no tensor."""
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor):
        raise Refused(f"{name_of(node)} has no traced tensor")
    return value


def check_modes(first: Node, last: Node, place: str) -> list[Node]:
    """Switches of the gradient mode between two nodes, of which one replaces both.

    Raises :class:`Refused` if another mode changes there.
    """
    node, switches = first, []
    while node is not last:
        if node.target is torch._C._set_grad_enabled:
            switches.append(node)
        elif node.target in _INFERENCE_MODES:
            raise Refused(f"the inference mode changes {place}")
        elif node.target in _AUTOCASTS:
            raise Refused(f"autocast changes {place}")
        node = node.next
    return switches


def name_of(node: Node) -> str:
    """An operator's name in messages."""
    return (
        node.op
        if node.op in ("placeholder", "output")
        else (getattr(node.target, "__name__", None) or str(node.target))
    )


def arguments(node: Node, *names: str) -> dict[str, Any]:
    """Arguments by name, for ``names`` in the order of the function's signature."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def add_call(graph: Graph, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Node:
    """Add a call of a function, or of a method by its name, with its traced value."""
    is_method = isinstance(target, str)
    create = graph.call_method if is_method else graph.call_function
    node = create(target, args, dict(kwargs))
    values, named = map_arg((args, dict(kwargs)), lambda each: each.meta.get("example_value"))
    function = getattr(Tensor, target) if is_method else target
    fakes = (x for x in tree_leaves((values, named)) if isinstance(x, FakeTensor))
    with next((x.fake_mode for x in fakes), contextlib.nullcontext()):
        node.meta["example_value"] = function(*values, **named)
    return node


def product_of(node: Node) -> Product | None:
    """A node as a product with a matrix; None if it is none."""
    if node.target is F.linear or node.target is torch._C._nn.linear:
        given = arguments(node, "input", "weight", "bias")
        hidden, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
        is_transposed = False
    elif node.target in _MATMULS and len(node.args) == 2:
        (hidden, weight), bias, is_transposed = node.args, None, True
    elif node.target is torch.functional.einsum and len(node.args) == 3:
        equation, hidden, weight = node.args
        bias, order = None, _einsum_order(str(equation))
        if order is None:
            return None
        is_transposed = order
    else:
        return None
    if not (isinstance(hidden, Node) and isinstance(weight, Node)):
        return None
    is_matrix = fake(weight).dim() == 2 and fake(hidden).dim() >= 2
    if not is_matrix or (bias is not None and not isinstance(bias, Node)):
        return None
    sizes = (*fake(weight).shape, fake(hidden).shape[-1])
    if not all(isinstance(size, int) for size in sizes):
        raise Refused("the width or the number of its classes is dynamic")
    return Product(node, hidden, weight, bias, is_transposed)


def _einsum_order(equation: str) -> bool | None:
    """Whether an einsum's second operand is width x classes; None if it is no such product."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    left, comma, right = operands.partition(",")
    if not (arrow and comma) or "," in right or len(right) != 2 or not left:
        return None
    width = left[-1]
    if width not in right or right[0] == right[1]:
        return None
    classes = right[1] if right[0] == width else right[0]
    is_product = result == left[:-1] + classes and classes not in left and width not in left[:-1]
    return right[0] == width if is_product else None


def product_before(node: Node) -> Product | None:
    """The product whose logits a node may read."""
    source: Node | None = node
    for _ in range(32):
        source = _source(source)
        if source is None:
            return None
        if (product := product_of(source)) is not None:
            return product
    return None


def _source(node: Node) -> Node | None:
    """The first operand with floats and several axes, or with parts of such a tensor."""
    for operand in node.all_input_nodes:
        value = operand.meta.get("example_value")
        value = value[-1] if isinstance(value, (tuple, list)) and value else value
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            return operand
    return None


def terminals(product: Product, entropies: Sequence[Entropy]) -> list[Terminal]:
    """All readers of a product's logits; ``entropies``: those of the graph.

    Raises :class:`Refused` if something reads them that is no loss.
    """
    path = Path(fake(product.node).dim() - 1, bias=product.bias, nodes=(product.node,))
    readers = _readers(product, product.node, path, entropies)
    return [*{each.node: each for each in readers}.values()]


def _readers(
    product: Product, node: Node, path: Path, entropies: Sequence[Entropy]
) -> Iterator[Terminal]:
    for user in node.users:
        if user.op == "output":
            raise Refused("the graph returns its logits, so they must exist")
        if not user.users:
            raise Refused(f"nothing reads the result of {name_of(user)}, which reads its logits")
        is_normalized = user.target in LOG_SOFTMAXES
        summed = [each for each in entropies if user in each.inner and node is each.logits]
        if summed and not path.is_last:
            raise Refused(f"{name_of(user)} is not over the classes")
        yield from (Terminal(each.node, path, False, each) for each in summed)
        if is_normalized:
            if not path.is_last or not _is_axis(arguments(user, "input", "dim").get("dim"), user):
                raise Refused(f"{name_of(user)} is not over the classes")
            inside = {x for each in summed for x in (each.node, *each.inner)}
            for reader in (each for each in user.users if each not in inside):
                if reader.op == "output":
                    raise Refused("the graph returns its log-probabilities, so they must exist")
                if reader.target not in GATHERS and reader.target is not NLL:
                    raise Refused(f"{name_of(reader)} reads all log-probabilities")
                if reader.all_input_nodes.count(user) != 1 or reader.args[:1] != (user,):
                    raise Refused(f"{name_of(reader)} takes log-probabilities otherwise")
                path_with_node = replace(path, nodes=(*path.nodes, user))
                yield Terminal(reader, path_with_node, is_normalized)
        elif user.target is CROSS_ENTROPY or user.target in GATHERS or user.target in LOGSUMEXPS:
            if user.args[:1] != (node,) and user.kwargs.get("input") is not node:
                raise Refused(f"{name_of(user)} takes its logits otherwise")
            yield Terminal(user, path, is_normalized)
        elif not summed:
            behind = _step(product, user, node, path)
            behind = replace(behind, nodes=(*path.nodes, user))
            yield from _readers(product, user, behind, entropies)


def _is_axis(axis: Any, node: Node) -> bool:
    """Whether an axis that an operator gets is the last one of its result."""
    return axis in (-1, fake(node).dim() - 1)


def _step(product: Product, node: Node, source: Node, path: Path) -> Path:
    """The path behind one more node.  Raises :class:`Refused` if it is not known."""
    target, rest = node.target, node.args[1:]
    is_first = node.args[:1] == (source,)
    if target in _FACTORS:
        return _scaled(node, source, path)
    if target in (operator.add, torch.add, "add") and len(node.args) == 2 and not node.kwargs:
        return _biased(product, node, source, path)
    is_tensor = isinstance(node.meta.get("example_value"), Tensor)
    if not is_first or not is_tensor or fake(node).device != fake(source).device:
        raise Refused(f"{name_of(node)} reads its logits")
    if target in _TANHS:
        if path.cap:
            raise Refused("its logits have two soft caps")
        return replace(path, cap=1.0)
    if target in _SAME:
        dtype = fake(node).dtype
        if not dtype.is_floating_point or dtype.itemsize < fake(product.node).dtype.itemsize:
            raise Refused(f"its logits are converted to {dtype}")
        return path
    if target in _TRANSPOSES:
        return _transposed(node, source, path)
    if not path.is_last:
        raise Refused(f"{name_of(node)} reads its logits, whose classes are not the last axis")
    if target in _VIEWS:
        sizes = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
        return _with_step(product, node, path, ("reshape", (*sizes[:-1], product.width)))
    if target in _FLATTENS and not node.kwargs:
        return _with_step(product, node, path, ("flatten", rest))
    if target is operator.getitem:
        return _with_step(product, node, path, (operator.getitem, (_token_index(node, product),)))
    raise Refused(f"{name_of(node)} reads its logits")


def _with_step(product: Product, node: Node, path: Path, step: Step) -> Path:
    shape = fake(node).shape
    if len(shape) < 1 or not isinstance(shape[-1], int) or shape[-1] != product.classes:
        raise Refused(f"{name_of(node)} changes the classes of its logits")
    return replace(path, axis=len(shape) - 1, steps=(*path.steps, step))


def _scaled(node: Node, source: Node, path: Path) -> Path:
    others = [x for x in node.args if x is not source]
    factor = others[0] if len(others) == 1 and len(node.args) == 2 else None
    is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
    is_division = node.target in _DIVISIONS
    if not is_number or node.kwargs or factor == 0 or (is_division and node.args[0] is not source):
        raise Refused(f"{name_of(node)} of its logits has a factor that is no constant")
    if str(node.target).endswith("_") and len(source.users) > 1:
        raise Refused("its logits are changed in place")
    assert isinstance(factor, (int, float))
    scale = 1.0 / factor if is_division else float(factor)
    return (
        replace(path, cap=path.cap * scale) if path.cap else replace(path, inner=path.inner * scale)
    )


def _biased(product: Product, node: Node, source: Node, path: Path) -> Path:
    other = node.args[1] if node.args[0] is source else node.args[0]
    if fake(node).dtype != fake(product.node).dtype:
        raise Refused("its bias would be rounded")
    is_vector = isinstance(other, Node) and tuple(fake(other).shape) == (product.classes,)
    is_plain = path.bias is None and not path.cap and path.inner == 1.0 and path.is_last
    if not (is_vector and is_plain):
        raise Refused(f"{name_of(node)} reads its logits")
    return replace(path, bias=other)


def _transposed(node: Node, source: Node, path: Path) -> Path:
    """Classes in another place, before the loss; tokens keep their order."""
    axes, rest = list(range(fake(source).dim())), node.args[1:]
    if node.kwargs:
        raise Refused(f"{name_of(node)} reads its logits")
    if node.target in ("transpose", torch.transpose):
        first, second = (axes[axis] for axis in rest)
        axes[first], axes[second] = second, first
    else:
        given = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
        axes = [axes[axis] for axis in given]
    tokens = [axis for axis in axes if axis != path.axis]
    if tokens != sorted(tokens):
        raise Refused(f"{name_of(node)} changes the order of tokens")
    return replace(path, axis=axes.index(path.axis))


def _token_index(node: Node, product: Product) -> tuple[Any, ...]:
    """The index of a slice of tokens, for a tensor of the same tokens."""
    given = node.args[1]
    index = given if isinstance(given, tuple) else (given,)
    if not all(each is None or each is ... or isinstance(each, (slice, int)) for each in index):
        raise Refused("its logits are selected by a tensor")
    source = node.args[0]
    assert isinstance(source, Node)
    axes = sum(1 for each in index if each is not None and each is not ...)
    reaches_end = (... in index and index[-1] is not ...) or axes == fake(source).dim()
    if not reaches_end:
        return index
    last = index[-1]
    stop = last.stop if isinstance(last, slice) else 0
    is_whole = isinstance(last, slice) and last.step in (None, 1) and last.start in (None, 0)
    if not is_whole or not (stop is None or (isinstance(stop, int) and stop >= product.classes)):
        raise Refused("only some classes of its logits count")
    return (*index[:-1], slice(None))


def apply_steps(node: Node, path: Path, emit: Callable[..., Node]) -> Node:
    """The product's left operand with the steps of a path; ``emit`` adds a call to the graph."""
    for target, rest in path.steps:
        node = emit(target, (node, *rest))
    return node


def transposed_source(weight: Node) -> Node | None:
    """The matrix of which a node is the transpose, if it is one."""
    is_transpose = (
        weight.target in ("t", torch.t, "T", "mT")
        or (weight.target is builtins.getattr and weight.args[1:] in (("T",), ("mT",)))
        or (
            weight.target in ("transpose", torch.transpose)
            and sorted(axis % 2 for axis in weight.args[1:]) == [0, 1]
        )
    )
    source = weight.args[0] if weight.args else None
    return source if is_transpose and isinstance(source, Node) else None
