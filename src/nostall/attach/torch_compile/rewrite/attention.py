"""Keep calls of attention whole that PyTorch would decompose into products and a softmax.

``scaled_dot_product_attention`` has fused back ends, which never write the scores to memory. They
need operands whose last stride is 1, and the fastest takes no mask at all. Programs miss them by

* a mask that masks nothing, or only what lies in the future, computed from positions: libraries
  build one while they are traced, and expand it, which makes its last stride 0;
* a bias whose heads lie innermost, as a table of relative positions has them.

The graph is changed before AOTAutograd: after it the forward pass saves fp32 probabilities. What
is not proven here keeps its mask.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from nostall.attach.torch_compile.rewrite.logits import Refused
from nostall.attach.torch_compile.rewrite.written_attention import (
    SOFTMAXES,
    Written,
    is_bias,
    join,
    sees_all_rows,
    written_attention,
)
from nostall.attach.warning import warn_once
from nostall.core.errors import one_line

MOST_ELEMENTS = 1 << 24
"""Most elements of a value that is computed."""

_VIEWS = frozenset((operator.getitem, torch.unsqueeze, torch.reshape, torch.broadcast_to))
_VIEW_METHODS = frozenset(
    ("bool", "broadcast_to", "contiguous", "expand", "reshape", "to", "unsqueeze", "view")
)
"""Operators whose result has no other elements than their operand, perhaps converted."""
_FUNCTIONS = frozenset(
    (operator.add, operator.and_, operator.eq, operator.floordiv, operator.ge, operator.gt,
     operator.invert, operator.le, operator.lt, operator.mul, operator.ne, operator.neg,
     operator.or_, operator.pow, operator.sub, operator.truediv, torch.abs, torch.add,
     torch.arange, torch.bitwise_and, torch.bitwise_not, torch.bitwise_or, torch.cumsum,
     torch.diff, torch.div, torch.eq, torch.full, torch.full_like, torch.ge, torch.gt, torch.le,
     torch.logical_and, torch.logical_not, torch.logical_or, torch.lt, torch.ne, torch.ones,
     torch.ones_like, torch.pow, torch.sub, torch.tril, torch.triu, torch.where, torch.zeros,
     torch.zeros_like)
)  # fmt: skip
_METHODS = frozenset(
    ("__add__", "__and__", "__eq__", "__ge__", "__gt__", "__invert__", "__le__", "__lt__",
     "__mul__", "__ne__", "__neg__", "__or__", "__pow__", "__rpow__", "__sub__", "abs", "cumsum",
     "diff", "div", "eq", "float", "ge", "gt", "int", "le", "logical_and", "logical_not",
     "logical_or", "long", "lt", "masked_fill", "ne", "new_full", "new_ones", "new_zeros", "pow",
     "tril", "triu")
)  # fmt: skip
"""Operators without effects, whose results depend on their operands alone."""
_NEVER_WRITE = frozenset(("torch", "torch._C._nn", "torch.nn.functional"))
"""Modules of functions that write to an operand only if their name or an argument says so."""
_IN_PLACE = frozenset(
    (operator.setitem, operator.delitem, operator.iadd, operator.iand, operator.iconcat,
     operator.ifloordiv, operator.ilshift, operator.imatmul, operator.imod, operator.imul,
     operator.ior, operator.ipow, operator.irshift, operator.isub, operator.itruediv,
     operator.ixor)
)  # fmt: skip
_COMPARISONS: Mapping[Any, Callable[[float, float], bool]] = {
    operator.ge: operator.ge, operator.gt: operator.gt, torch.ge: operator.ge,
    torch.gt: operator.gt, "ge": operator.ge, "gt": operator.gt, "__ge__": operator.ge,
    "__gt__": operator.gt,
}  # fmt: skip


class Masks:
    """What is proven of the masks in one graph; each value is computed once."""

    def __init__(self, graph: Graph) -> None:
        self._values: dict[Node, Tensor | None] = {}
        # Memory that an operator of the graph may write to.
        self._written = {
            memory
            for node in graph.nodes
            if may_write(node)
            for operand in node.all_input_nodes
            if (memory := memory_of(operand)) is not None
        }

    def without_condition(self, mask: Node) -> Node:
        """The operand that a mask always selects: ``where(always true, x, y)`` is x."""
        while mask.op in ("call_function", "call_method"):
            selected: Any = None
            operands = mask.args
            if mask.target is torch.where and len(operands) == 3:
                condition, selected, _ = operands
                is_constant = self._always(condition, True)
            elif mask.target in ("masked_fill", torch.masked_fill) and len(operands) == 3:
                selected, condition, _ = operands
                is_constant = self._always(condition, False)
            if not (isinstance(selected, Node) and is_constant and _is_same_kind(mask, selected)):
                break
            mask = selected
        return mask

    def masks_nothing(self, mask: Node) -> bool:
        """Whether a mask is true everywhere, or as a bias 0 everywhere."""
        if _is_boolean(mask):
            return self._always(mask, True)
        value = self.value(mask)
        return value is not None and not bool(_distinct(value).any())

    def is_causal(self, mask: Node) -> bool:
        """Whether a square mask lets each query attend to itself and to what came before."""
        value = self.value(mask)
        if value is None or value.dim() < 2 or value.shape[-1] != value.shape[-2]:
            return False
        value = _distinct(value)
        if value.dim() < 2 or value.shape[-1] != value.shape[-2] or value.shape[-1] < 2:
            return False
        before = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
        if value.dtype == torch.bool:
            return bool((value == before).all())
        if not value.is_floating_point():
            return False
        # What libraries add to a score that must not count: exp of it is 0.
        hidden = (value == float("-inf")) | (value == torch.finfo(value.dtype).min)
        return bool((torch.where(before, value == 0, hidden)).all())

    def _always(self, mask: Any, expected: bool) -> bool:
        """Whether a boolean value is proven to be the same everywhere."""
        if isinstance(mask, bool):
            return mask is expected
        if not isinstance(mask, Node) or not _is_boolean(mask):
            return False
        value = self.value(mask)
        if value is not None:
            return bool((_distinct(value) == expected).all())
        return expected and self._always_holds(mask)

    def value(self, node: Node) -> Tensor | None:
        """A value that depends on no input, and to whose memory no operator may write.

        None if that is not known, or if it is too large.
        """
        if node not in self._values:
            self._values[node] = None  # if it fails
            if self._is_certain(node):
                self._values[node] = self._computed(node)
        return self._values[node]

    def _computed(self, node: Node) -> Tensor | None:
        fake = node.meta.get("example_value")
        is_view = node.target in _VIEWS or node.target in _VIEW_METHODS
        if not isinstance(fake, Tensor) or not all(isinstance(n, int) for n in fake.shape):
            return None
        if not is_view and fake.numel() > MOST_ELEMENTS:
            return None
        operands: dict[Node, Tensor | None] = {n: self.value(n) for n in node.all_input_nodes}
        if any(value is None for value in operands.values()):
            return None
        args = _on_cpu(map_arg(node.args, operands.get))
        kwargs = _on_cpu(map_arg(node.kwargs, operands.get))
        try:
            if node.op == "call_method":
                value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                value = node.target(*args, **kwargs)
        except Exception:  # what PyTorch refuses on a CPU is not proven
            return None
        is_expected = isinstance(value, Tensor) and value.shape == fake.shape
        return value if is_expected and value.dtype == fake.dtype else None

    def _is_certain(self, node: Node) -> bool:
        """Whether a value is what its own operator computes, as long as the graph runs."""
        memory = memory_of(node)
        return _is_known(node) and memory is not None and memory not in self._written

    def _always_holds(self, node: Node) -> bool:
        """Whether a boolean value is true for all sizes."""
        if not self._is_certain(node):
            return False
        target, operands = node.target, node.args
        if target in _VIEWS or target in _VIEW_METHODS:
            source = operands[0]
            return _is_slice(node) and isinstance(source, Node) and self._holds_if_boolean(source)
        if target in (
            operator.and_,
            torch.logical_and,
            torch.bitwise_and,
            "logical_and",
            "__and__",
        ):
            return all(isinstance(x, Node) and self._holds_if_boolean(x) for x in operands[:2])
        if target in (operator.or_, torch.logical_or, torch.bitwise_or, "logical_or", "__or__"):
            return any(isinstance(x, Node) and self._holds_if_boolean(x) for x in operands[:2])
        if target is torch.ones or target == "new_ones":
            return True
        if target in _COMPARISONS and len(operands) == 2 and isinstance(operands[0], Node):
            limit, least = operands[1], self._least(operands[0])
            is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
            return is_number and least is not None and _COMPARISONS[target](least, limit)
        return False

    def _holds_if_boolean(self, node: Node) -> bool:
        return _is_boolean(node) and self._always_holds(node)

    def _least(self, node: Node) -> float | None:
        """A lower bound of positions: of arange, plus constants, and of views."""
        if not self._is_certain(node):
            return None
        operands = node.args
        if node.target is torch.arange:
            return _first_position(node)
        if node.target in (operator.add, torch.add) and len(operands) == 2 and not node.kwargs:
            source, constant = operands
            least = self._least(source) if isinstance(source, Node) else None
            return (
                least + constant
                if least is not None and isinstance(constant, (int, float))
                else None
            )
        is_view = node.target in _VIEWS or node.target in _VIEW_METHODS
        source = operands[0] if operands else None
        if is_view and node.target not in ("bool", "to") and isinstance(source, Node):
            return self._least(source) if _is_slice(node) else None
        return None


def _on_cpu(value: Any) -> Any:
    """Arguments with the CPU in the place of every device."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (tuple, list)):
        return type(value)(_on_cpu(each) for each in value)
    if isinstance(value, Mapping):
        return {
            key: "cpu" if key == "device" and each is not None else _on_cpu(each)
            for key, each in value.items()
        }
    return value


def _is_known(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in _METHODS or node.target in _VIEW_METHODS
    is_function = node.op == "call_function" and "out" not in node.kwargs
    return is_function and (node.target in _FUNCTIONS or node.target in _VIEWS)


def memory_of(node: Node) -> int | None:
    """What is equal for values that share memory, as Dynamo traced them; None if unknown."""
    fake = node.meta.get("example_value")
    if not isinstance(fake, Tensor) or fake.layout != torch.strided:
        return None
    try:
        return int(fake.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # subclasses without memory of their own
        return None


def may_write(node: Node) -> bool:
    """Whether a node may change an operand in place; so may all that is not known here."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and name not in _METHODS  # __setitem__ and __iadd__ do, too
    if node.op != "call_function":
        return bool(node.op == "call_module")
    target: Any = node.target
    if (schema := getattr(target, "_schema", None)) is not None:
        return bool(schema.is_mutable)
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    if module == "_operator":
        return any(target is each for each in _IN_PLACE)
    if module not in _NEVER_WRITE or name.endswith("_") or "out" in node.kwargs:
        return True
    is_flagged = any(x is True for x in (*node.args[1:], node.kwargs.get("inplace")))
    return bool(is_flagged and module == "torch.nn.functional")  # relu(x, True)


def _distinct(value: Tensor) -> Tensor:
    """A value without the elements that are only repeated along an axis."""
    for axis, stride in enumerate(value.stride()):
        if stride == 0:
            value = value.narrow(axis, 0, min(1, value.shape[axis]))
    return value


def _is_boolean(node: Node) -> bool:
    fake = node.meta.get("example_value")
    return isinstance(fake, Tensor) and fake.dtype == torch.bool


def _is_same_kind(node: Node, operand: Node) -> bool:
    """Whether an operand can take the place of a mask: attention broadcasts the rest."""
    fake, other = node.meta.get("example_value"), operand.meta.get("example_value")
    are_tensors = isinstance(fake, Tensor) and isinstance(other, Tensor)
    return are_tensors and fake.dtype == other.dtype and other.dim() >= 2


def _is_slice(node: Node) -> bool:
    """Whether a view has elements of its operand only, unconverted."""
    if node.target is not operator.getitem:
        return True
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(each is None or each is ... or isinstance(each, (slice, int)) for each in index)


def _first_position(node: Node) -> float | None:
    """The first, and least, value of ``arange(end)`` or ``arange(start, end)``."""
    is_wide = node.kwargs.get("dtype") in (None, torch.int64, torch.int32)  # others may overflow
    if not is_wide or node.kwargs.keys() & {"start", "end", "step"}:
        return None
    if len(node.args) == 1:
        return 0.0
    start = node.args[0]
    return float(start) if len(node.args) == 2 and isinstance(start, (int, float)) else None


ATTENTION = torch.nn.functional.scaled_dot_product_attention
OPERANDS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Operands of attention that may be given by position, in their order."""
DROPPED = "its mask masks nothing, and is left out"
CAUSAL = "its mask is causal, and is given as such"
WRITTEN = "its products and its softmax are one call"
CONTIGUOUS = "an operand's last stride is not 1; it is copied once"
DROPOUT = "it has dropout, whose random numbers would change; left as it is"


def calls_attention(module: GraphModule) -> bool:
    """Whether a graph of Dynamo has attention, or a softmax, outside of sub-graphs."""
    targets = (ATTENTION, *SOFTMAXES)
    return any(node.target in targets for node in module.graph.nodes)


def keep_attention(module: GraphModule, left: list[str] | None = None) -> list[str]:
    """Change the calls of attention in a graph of Dynamo, in place; says what changed.

    Empty if nothing changed. Calls of sub-graphs (checkpointing) stay as they are.
    """
    graph, done, stays = module.graph, Counter[str](), Counter[str]()
    _join_written(graph, done, stays)
    masks, copies = Masks(graph), dict[Node, Node]()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is ATTENTION:
            try:
                done.update(_keep_whole(graph, node, masks, copies))
            except Exception as error:  # must not end the user's compilation
                warn_once(f"a call of attention is left as it is: {one_line(error)}")
    if left is not None:
        stays[DROPOUT] += done[DROPOUT]
        left += [f"{count} x attention: {text}" for text, count in sorted(stays.items()) if count]
    if not done.keys() - {DROPOUT}:
        return []
    module.recompile()
    return [f"{count} x attention: {what}" for what, count in sorted(done.items())]


def _join_written(graph: Graph, done: Counter[str], stays: Counter[str]) -> None:
    """Make calls of attention of products and softmaxes; counts those that are and that are not."""
    masks = Masks(graph)
    for found in written_attention(graph):
        if isinstance(found, Refused):
            stays[f"its products and its softmax stay: {found}"] += 1
            continue
        try:
            given = [mask for mask in (found.added, found.condition) if mask is not None]
            values = [None if x is None else masks.value(x) for x in (found.added, found.condition)]
            known = bool(given) and len(given) == sum(value is not None for value in values)
            rows_are_seen = known and sees_all_rows(found, *values)
            if len(given) == 2 and not rows_are_seen:
                raise Refused("it has two masks")
            if found.added is not None and not (rows_are_seen or is_bias(found.added)):
                raise Refused("its mask may hide whole rows")
            _check_unchanged(graph, found)
            join(graph, found, rows_are_seen)
            done[WRITTEN] += 1
        except Refused as reason:
            stays[f"its products and its softmax stay: {reason}"] += 1
        except Exception as error:  # must not end the user's compilation
            warn_once(f"products and a softmax are left as they are: {one_line(error)}")


def _check_unchanged(graph: Graph, found: Written) -> None:
    """Raises :class:`Refused` if one call would read, or save, what the graph changes in place.

    One call reads operands of the first product later, and its backward pass reads its result.
    """
    assert found.output is not None
    read = [node for node in found.operands if node is not found.value]
    saved = [*found.operands, found.output] if _needs_gradients(found.output) else []
    until_output, ever = ({memory_of(node) for node in nodes} for nodes in (read, saved))
    node = found.product.next
    memory = until_output | ever
    while node.op != "root":
        if node is found.output:
            memory = ever
        if node not in found.nodes and may_write(node):
            for operand in node.all_input_nodes:
                if memory_of(operand) in memory:
                    raise Refused("an operand or its result is changed in place")
        node = node.next


def _needs_gradients(node: Node) -> bool:
    value = _fake(node)
    return value is None or value.requires_grad


def _keep_whole(graph: Graph, node: Node, masks: Masks, copies: dict[Node, Node]) -> list[str]:
    """Change one call; the names of the changes."""
    operands: dict[str, Any] = dict(zip(OPERANDS, node.args, strict=False)) | dict(node.kwargs)
    if operands.get("dropout_p", 0.0) != 0.0:
        return [DROPOUT]
    scale = operands.get("scale")
    if isinstance(scale, (int, float)) and scale <= 0:  # kernels scale what is_causal hides, too
        return []
    done = []
    mask = operands.get("attn_mask")
    if isinstance(mask, Node) and _fits(mask, operands):
        mask = masks.without_condition(mask)
        if masks.masks_nothing(mask):
            mask, done = None, [DROPPED]
        elif not operands.get("is_causal") and masks.is_causal(mask):
            mask, operands["is_causal"], done = None, True, [CAUSAL]
        elif mask is not operands["attn_mask"]:
            done = [DROPPED]
        operands["attn_mask"] = mask
    strided = [name for name in OPERANDS[:4] if _is_strided(operands.get(name))]
    for name in strided:
        operands[name] = _copied(graph, operands[name], name == "attn_mask", copies)
    if strided:
        done.append(CONTIGUOUS)
    if done:
        node.args, node.kwargs = (), operands
    return done


def _fits(mask: Node, operands: Mapping[str, Any]) -> bool:
    """Whether the mask of a call has no axis that the other operands lack: it cannot broadcast."""
    values = [_fake(operands[name]) for name in OPERANDS[:2]]
    value, query, key = _fake(mask), *values
    if value is None or query is None or key is None or value.dim() > query.dim():
        return False
    scores = (*query.shape[:-1], key.shape[-2])[-value.dim() :]
    pairs = zip(value.shape, scores, strict=True)
    return all(statically_known_true(a == 1) or statically_known_true(a == b) for a, b in pairs)


def _is_strided(node: Any) -> bool:
    """Whether an operand's last stride keeps it from the fused back ends."""
    value = _fake(node) if isinstance(node, Node) else None
    if value is None or value.dim() < 2:
        return False
    last = value.stride(-1)
    return isinstance(last, int) and last != 1 and not statically_known_true(value.shape[-1] == 1)


def _copied(graph: Graph, node: Node, is_mask: bool, copies: dict[Node, Node]) -> Node:
    """A contiguous copy of a node, made once; of a mask one head or batch where all are equal."""
    if node in copies:
        return copies[node]
    value = _fake(node)
    assert value is not None
    expanded = [is_mask and isinstance(s, int) and s == 0 for s in value.stride()[:-2]]
    source, result = node, value
    # Right after the operand, so that the copy comes before every call of attention that takes it.
    with graph.inserting_after(node):
        if any(expanded):
            index = (*(slice(0, 1) if each else slice(None) for each in expanded), ...)
            source, result = graph.call_function(operator.getitem, (node, index)), value[index]
            source.meta["example_value"] = result
    with graph.inserting_after(source):
        copy = graph.call_method("contiguous", (source,))
    copy.meta["example_value"] = result.contiguous()
    copies[node] = copy
    return copy


def _fake(node: Any) -> Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None
