"""Find attention that a program writes as products and a softmax, in graphs of Dynamo.

``softmax(q @ k^T * scale + mask) @ v`` becomes a call of ``scaled_dot_product_attention`` where
that is the same: nothing else reads scores or probabilities, and a row that a mask hides as a whole
has the result that it had. Scores that a program hides with a number stay finite, so that gradients
do, too. Active dropout stays: fused attention would draw other numbers than Inductor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from nostall.attach.torch_compile.rewrite.logits import (
    Refused,
    add_call,
    arguments,
    check_modes,
    fake,
    name_of,
)
from nostall.core.errors import one_line

F = torch.nn.functional
SOFTMAXES = frozenset((torch.softmax, F.softmax, "softmax"))
_FUSED = (torch.bfloat16, torch.float16)
"""Dtypes of operands of the fast fused back ends."""
MAX_WIDTH = 256
"""Widest heads that they take."""
HIDDEN = -1e9
"""A score below it, or the least number of its dtype, has no share of a row with any other."""

_CASTS = frozenset(("float", "to", "type", "type_as", "contiguous", "half", "bfloat16"))
_PRODUCTS = frozenset((operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm", "__matmul__"))
_ADDS = frozenset((operator.add, operator.iadd, torch.add, "add", "add_"))
_SCALES = frozenset((operator.mul, torch.mul, "mul", operator.truediv, torch.div, "div"))
_DIVISIONS = frozenset((operator.truediv, torch.div, "div"))
_FILLS = frozenset((torch.masked_fill, "masked_fill", "masked_fill_"))
_CAPS = frozenset((torch.tanh, "tanh"))
_DROPOUTS = frozenset((F.dropout, torch.dropout))
_LOOKUPS = frozenset(
    (F.embedding, operator.getitem, "permute", torch.permute, "transpose", torch.transpose, "view",
     "reshape", torch.reshape, "unsqueeze", torch.unsqueeze, "contiguous", "expand")
)  # fmt: skip

_RELAID = _PRODUCTS | {F.linear, torch.reshape, "reshape", torch.flatten, "flatten", "contiguous"}
"""Operators whose result has a layout of its own."""


@dataclass
class Written:
    """One attention: operands (… x length x width), and the nodes that it consists of."""

    softmax: Node
    query: Node | None = None
    # As the graph has it: … x width x length.
    key_transposed: Node | None = None
    value: Node | None = None
    output: Node | None = None
    scale: float = 1.0
    # Added to the scores.
    added: Node | None = None
    # Scores that are hidden where it is true (or false), and what they are set to.
    condition: Node | None = None
    hides_where: bool = True
    fill: float = -math.inf
    # From the softmax to the first product, then from the softmax to the second one.
    nodes: list[Node] = field(default_factory=list)

    @property
    def product(self) -> Node:
        """The first product."""
        return next(node for node in self.nodes if node.target in _PRODUCTS)

    @property
    def operands(self) -> list[Node]:
        """What the attention reads."""
        every = (self.query, self.key_transposed, self.value, self.added, self.condition)
        return [node for node in every if node is not None]


def written_attention(graph: Graph) -> Iterator[Written | Refused]:
    """Attentions of a graph in their order; of those whose form is not known the reason."""
    for node in list(graph.nodes):
        if node.target not in SOFTMAXES or node.op not in ("call_function", "call_method"):
            continue
        found = Written(node)
        try:
            _find_scores(found)
            _find_output(found)
            _check_operands(found)
        except Refused as reason:
            # Other softmaxes are no attention.
            if any(x is not None for x in (found.query, found.added, found.condition)):
                yield reason
        except Exception as error:  # must not end the user's compilation
            yield Refused(f"its form is not known: {one_line(error)}")
        else:
            yield found


def _find_scores(found: Written) -> None:
    """Walk from the softmax to the first product.  Raises :class:`Refused` if there is none."""
    given = arguments(found.softmax, "input", "dim")
    node, axis = given.get("input"), given.get("dim")
    if not isinstance(node, Node) or axis not in (-1, fake(found.softmax).dim() - 1):
        raise Refused("its softmax is over another axis")
    found.nodes.append(found.softmax)
    while True:
        assert isinstance(node, Node)
        if len(node.users) != 1:
            raise Refused("its scores are read otherwise")
        found.nodes.append(node)
        if node.target in _PRODUCTS and len(node.args) == 2:
            found.query, found.key_transposed = node.args
            return
        node = _before(found, node)


def _before(found: Written, node: Node) -> Node:
    """The scores that a node changes; notes what it does to them."""
    operands = node.args
    is_first = bool(operands) and isinstance(operands[0], Node)
    if node.target in _CASTS and is_first:
        _check_cast(node, operands[0], "scores")
        if fake(node).dtype.itemsize < fake(operands[0]).dtype.itemsize:
            raise Refused("its scores are rounded")
        return operands[0]
    if node.target in _SCALES and len(operands) == 2 and not node.kwargs:
        first, second = operands
        if isinstance(second, Node) and node.target not in _DIVISIONS:
            first, second = second, first
        is_number = isinstance(second, (int, float)) and not isinstance(second, bool)
        if not isinstance(first, Node) or not is_number or second == 0:
            raise Refused("its scale is no constant")
        assert isinstance(second, (int, float))
        found.scale *= 1.0 / second if node.target in _DIVISIONS else float(second)
        return first
    if node.target in _CAPS:
        raise Refused("its scores have a soft cap")
    if found.scale != 1.0:
        raise Refused("its mask is scaled")
    if node.target in _ADDS and len(operands) == 2 and not node.kwargs:
        return _before_added(found, node)
    if (node.target in _FILLS and len(operands) == 3) or node.target is torch.where:
        return _before_hidden(found, node)
    raise Refused(f"{name_of(node)} changes its scores")


def _check_cast(node: Node, source: Node, what: str) -> None:
    """Raises :class:`Refused` if a conversion is not one of floats."""
    dtypes = fake(source).dtype, fake(node).dtype
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise Refused(f"its {what} are converted to {dtypes[1]}")


def _before_added(found: Written, node: Node) -> Node:
    first, second = node.args
    if not (isinstance(first, Node) and isinstance(second, Node)):
        raise Refused("a number is added to its scores")
    if not _leads_to_product(first):
        first, second = second, first
    if found.added is not None:
        raise Refused("it has two masks")
    if not _has_shape_of(first, node) or not _leads_to_product(first):
        raise Refused("its scores are broadcast")
    found.added = second
    return first


def _before_hidden(found: Written, node: Node) -> Node:
    if node.target is torch.where:
        if len(node.args) != 3:
            raise Refused("its mask is not known")
        condition, scores, fill = node.args
        hides_where = False
    else:
        scores, condition, fill = node.args
        hides_where = True
    if isinstance(fill, Node) or not isinstance(fill, (int, float)):
        raise Refused("what hides its scores is no constant")
    if found.condition is not None:
        raise Refused("it has two masks")
    if not isinstance(scores, Node) or not isinstance(condition, Node):
        raise Refused("its mask is no tensor")
    if fake(condition).dtype != torch.bool or not _has_shape_of(scores, node):
        raise Refused("its scores are broadcast")
    dtype = fake(node).dtype
    if not (fill <= HIDDEN or fill == torch.finfo(dtype).min):
        raise Refused("its hidden scores still count")
    found.condition, found.hides_where, found.fill = condition, hides_where, float(fill)
    return scores


def _leads_to_product(node: Node) -> bool:
    """Whether a node is a product, perhaps scaled, converted or masked."""
    for _ in range(8):
        if node.target in _PRODUCTS:
            return True
        known = _CASTS | _SCALES | _ADDS | _FILLS | _CAPS
        sources = [each for each in node.args if isinstance(each, Node)]
        if node.target is torch.where:
            sources = sources[1:]
        elif node.target not in known:
            return False
        if not sources:
            return False
        node = sources[0]
    return False


def _has_shape_of(node: Node, other: Node) -> bool:
    a, b = fake(node).shape, fake(other).shape
    return len(a) == len(b) and all(
        statically_known_true(x == y) for x, y in zip(a, b, strict=True)
    )


def _find_output(found: Written) -> None:
    """Walk from the softmax to the second product.  Raises :class:`Refused`."""
    node = found.softmax
    while True:
        if len(node.users) != 1:
            raise Refused("its probabilities are read otherwise")
        (user,) = node.users
        if user.target in _PRODUCTS and len(user.args) == 2 and user.args[0] is node:
            found.value, found.output = user.args[1], user
            return
        if user.target in _DROPOUTS:
            given = arguments(user, "input", "p", "training", "inplace")
            is_active = given.get("training", True) is not False and given.get("p", 0.5) != 0.0
            if is_active:
                raise Refused("it has dropout")
        elif user.target not in _CASTS:
            raise Refused(f"{name_of(user)} reads its probabilities")
        else:
            _check_cast(user, node, "probabilities")
        found.nodes.append(user)
        node = user


def _check_operands(found: Written) -> None:
    """Raises :class:`Refused` if the operands are not those of one call of attention."""
    if not all(isinstance(x, Node) for x in (found.query, found.key_transposed, found.value)):
        raise Refused("an operand is no tensor")
    assert found.query is not None and found.key_transposed is not None
    assert found.value is not None and found.output is not None
    if not {*found.operands}.isdisjoint((found.output, *found.nodes)):
        raise Refused("it reads its scores or probabilities as an operand, too")
    if check_modes(found.product, found.output, "between its products"):
        raise Refused("the gradient mode changes between its products")
    query, key, value = (fake(x) for x in (found.query, found.key_transposed, found.value))
    if not query.dim() == key.dim() == value.dim() or query.dim() not in (3, 4):
        raise Refused("its operands have other axes")
    sizes = [
        *zip(query.shape[:-2], key.shape[:-2], strict=True),
        *zip(query.shape[:-2], value.shape[:-2], strict=True),
        (query.shape[-1], key.shape[-2]),
        (key.shape[-1], value.shape[-2]),
    ]
    if not all(statically_known_true(a == b) for a, b in sizes):
        raise Refused("its operands are broadcast")
    if not 0.0 < found.scale < math.inf:  # kernels scale hidden scores, too
        raise Refused("its scale is not positive")
    if not query.dtype == key.dtype == value.dtype == fake(found.output).dtype:
        raise Refused("its operands have several dtypes")
    if not query.is_floating_point() or fake(found.product).device != query.device:
        raise Refused("its operands are no floats")
    if query.device.type == "cuda" and (query.dtype not in _FUSED or key.shape[-2] > MAX_WIDTH):
        raise Refused(f"fused attention of {query.dtype} may be slower")
    if found.added is not None and fake(found.added).dtype != query.dtype:
        raise Refused("its mask has another dtype")
    for mask in (found.added, found.condition):
        if mask is not None and (fake(mask).dim() > query.dim() or fake(mask).dim() < 2):
            raise Refused("its mask has other axes")


def join(graph: Graph, found: Written, rows_are_seen: bool) -> None:
    """Replace an attention by one call; an exception leaves the graph as it was.

    ``rows_are_seen``: whether the mask is proven to leave at least one key to each query.
    """
    output = found.output
    assert output is not None
    before = output.prev
    try:
        with graph.inserting_before(output):
            result = _call(graph, found, rows_are_seen)
    except Exception:
        while output.prev is not before:
            graph.erase_node(output.prev)
        raise
    output.replace_all_uses_with(result)
    wanted = {output, *found.nodes}
    for node in reversed([node for node in graph.nodes if node in wanted]):
        graph.erase_node(node)


def _call(graph: Graph, found: Written, rows_are_seen: bool) -> Node:
    """Add the call and what prepares its operands; the attention's result."""
    output = found.output
    assert output is not None and found.query is not None and found.value is not None

    def add(target: Any, *args: Any, **kwargs: Any) -> Node:
        return add_call(graph, target, args, kwargs)

    key = add("transpose", found.key_transposed, -2, -1)
    operands = [found.query, key, found.value]
    is_flat = fake(output).dim() == 3
    if is_flat:
        operands = [add("unsqueeze", each, 0) for each in operands]
    mask, hidden = _mask(add, found, rows_are_seen)
    call = add(F.scaled_dot_product_attention, *operands, attn_mask=mask, scale=found.scale)
    result = add("squeeze", call, 0) if is_flat else call
    if is_returned(output):  # fused back ends write heads innermost but one
        result = add("contiguous", result)
    if hidden is not None:
        # The mean of all values if hidden scores are equal numbers; nan if they are infinite.
        other: Any = math.nan
        if math.isfinite(found.fill):
            other = add("mean", found.value, -2, True)
        result = add(torch.where, hidden, other, result)
    return result


def _mask(add: Any, found: Written, rows_are_seen: bool) -> tuple[Node | None, Node | None]:
    """The mask of the call, and of its rows those that it hides as a whole."""
    if found.added is not None and found.condition is not None:
        return add("masked_fill", found.added, _hidden(add, found), -math.inf), None
    if found.added is not None:
        if rows_are_seen:
            return found.added, None
        return found.added, add("all", add(torch.eq, found.added, -math.inf), -1, True)
    if found.condition is None:
        return None, None
    hidden = _hidden(add, found)
    if rows_are_seen:
        return add(torch.logical_not, hidden), None
    rows = add("all", hidden, -1, True)
    if math.isinf(found.fill):
        return add(torch.logical_not, hidden), rows
    assert found.query is not None
    dtype = fake(found.query).dtype
    # Fused kernels scale scores by log2(e), which must not overflow.
    fill = max(HIDDEN, 0.5 * float(torch.finfo(dtype).min))
    zeros = add(torch.zeros_like, hidden, dtype=dtype)
    return add("masked_fill", zeros, hidden, fill), rows


def _hidden(add: Any, found: Written) -> Node:
    """Where scores are hidden."""
    hidden: Node = found.condition if found.hides_where else add(torch.logical_not, found.condition)
    return hidden


def is_returned(node: Node) -> bool:
    """Whether a graph returns a value, or what views and elementwise operators make of it."""
    seen, following = {node}, [node]
    while following:
        for user in following.pop().users:
            if user.op == "output":
                return True
            value = user.meta.get("example_value")
            is_as_large = isinstance(value, Tensor) and statically_known_true(
                value.numel() == fake(node).numel()
            )
            if is_as_large and user not in seen and user.target not in _RELAID:
                seen.add(user)
                following.append(user)
    return False


def is_bias(node: Node) -> bool:
    """Whether a mask is looked up in parameters, which hide nothing but by infinite numbers."""
    if node.op == "placeholder":
        return isinstance(fake(node), torch.nn.Parameter)
    sources = [each for each in node.all_input_nodes if fake(each).is_floating_point()]
    return node.target in _LOOKUPS and bool(sources) and all(map(is_bias, sources))


def sees_all_rows(found: Written, added: Tensor | None, condition: Tensor | None) -> bool:
    """Whether masks whose values are known leave at least one key to each query.

    With two masks what is added must not count beside the number that hides scores.
    """
    seen = torch.ones(1, 1, dtype=torch.bool)
    if added is not None:
        # The least number of fp16 is -65504.
        limit = HIDDEN if condition is None else max(1e-3 * HIDDEN, 0.25 * found.fill)
        seen = seen & (added > limit)
        if condition is not None and bool((added > -limit).any()):
            return False
    if condition is not None:
        seen = seen & (~condition if found.hides_where else condition)
    return bool(seen.any(-1).all())
