"""Calls of ``_foreach_*`` operators as one ATen call for each tensor of their lists."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from nostall.fusion.capture.call import Unsupported

PREFIX = "aten._foreach_"
Expand = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, tuple[Any, ...], dict[str, Any]]]
"""Maps a call's arguments to the overload for one tensor and its arguments; lists stay lists."""

_UNARY = (
    "abs neg sqrt rsqrt reciprocal exp expm1 log log2 log10 log1p sign floor ceil round trunc "
    "sin cos tan sinh cosh asin acos atan tanh sigmoid erf erfc lgamma"
)
_BINARY = {
    "add": "add.Tensor",
    "sub": "sub.Tensor",
    "mul": "mul.Tensor",
    "div": "div.Tensor",
    "maximum": "maximum.default",
    "minimum": "minimum.default",
    "clamp_min": "clamp_min.Tensor",
    "clamp_max": "clamp_max.Tensor",
}
_WITH_NUMBER = {
    "maximum": "clamp_min.default",
    "minimum": "clamp_max.default",
    "clamp_min": "clamp_min.default",
    "clamp_max": "clamp_max.default",
}
"""Overloads for a second operand that is a number, where that of tensors does not take one."""


@dataclass(frozen=True)
class ListCall:
    """One call over lists: the ATen call that it makes for each slot."""

    node: Node
    target: Any
    """The overload that computes one slot."""
    args: tuple[Any, ...]
    """Arguments; a tuple holds one operand for each slot, all other values are for all slots."""
    kwargs: dict[str, Any]

    @property
    def lists(self) -> list[tuple[Any, ...]]:
        """The operands that differ from slot to slot."""
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, tuple)]


@dataclass(frozen=True)
class NormCall:
    """A call that computes one norm of each tensor of a list."""

    node: Node
    tensors: tuple[Node, ...]
    order: float


def aten(name: str) -> Any:
    """An overload by name, such as ``add.Tensor``."""
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _same(name: str) -> Expand:
    return lambda args, kwargs: (aten(name), args, kwargs)


def _scaled(name: str) -> Expand:
    """``addcmul`` and ``addcdiv``, whose factor is a keyword for a single tensor."""

    def expand(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = args[3] if len(args) > 3 else kwargs.get("value", kwargs.get("scalars", 1))
        return aten(name), args[:3], {"value": value}

    return expand


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return aten("copy.default"), args[:2], {}


def _zeroed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return aten("full_like.default"), (args[0], 0), {}


@cache
def _rules() -> dict[str, Expand]:
    rules = {f"{name}.default": _same(f"{name}.default") for name in _UNARY.split()}
    for name, overload in _BINARY.items():
        number = _WITH_NUMBER.get(name, overload)
        rules |= {f"{name}.{kind}": _same(overload) for kind in ("List", "Tensor")}
        rules |= {f"{name}.{kind}": _same(number) for kind in ("Scalar", "ScalarList")}
    for name in ("addcmul", "addcdiv"):
        rules |= {f"{name}.{kind}": _scaled(f"{name}.default") for kind in ("Scalar", "ScalarList")}
    rules |= {
        "pow.List": _same("pow.Tensor_Tensor"),
        "pow.Scalar": _same("pow.Tensor_Scalar"),
        "pow.ScalarList": _same("pow.Tensor_Scalar"),
        "pow.ScalarAndTensor": _same("pow.Scalar"),
        "copy.default": _copied,
        "zero.default": _zeroed,
    }
    return rules


NORMS = {1.0: "abs", 2.0: "square", float("inf"): "abs"}
"""Orders of norms that kernels compute, and what they add up or take the maximum of."""


def list_operators() -> frozenset[str]:
    """Names of the operators of lists that kernels compute."""
    return frozenset(f"{PREFIX}{name}" for name in (*_rules(), "norm.Scalar"))


def is_list_call(node: Node) -> bool:
    """Whether a node calls an operator of lists."""
    return node.op == "call_function" and str(node.target).startswith(PREFIX)


def list_call(node: Node) -> ListCall:
    """The pointwise call of a node.  Raises :class:`Unsupported` with the reason if it is none."""
    rule = _rules().get(str(node.target).removeprefix(PREFIX))
    if rule is None:
        raise Unsupported("a list operator without a rule")
    args = tuple(_frozen(value) for value in node.args)
    kwargs = {key: _frozen(value) for key, value in node.kwargs.items()}
    target, args, kwargs = rule(args, kwargs)
    return ListCall(node, target, args, kwargs)


def norm_call(node: Node) -> NormCall:
    """The norms of a node.  Raises :class:`Unsupported` with the reason if no kernel has them."""
    order = node.args[1] if len(node.args) > 1 else node.kwargs.get("ord", 2)
    if not isinstance(order, (int, float)) or float(order) not in NORMS:
        raise Unsupported(f"a norm of order {order}; kernels compute 1, 2 and infinity")
    tensors = node.args[0]
    assert isinstance(tensors, (list, tuple))
    return NormCall(node, tuple(tensors), float(order))


def is_norm(node: Node) -> bool:
    """Whether a node computes norms of a list."""
    return node.op == "call_function" and str(node.target) == f"{PREFIX}norm.Scalar"


def results(node: Node) -> dict[int, Node]:
    """The results of a list call that the graph reads, by slot."""
    return {int(user.args[1]): user for user in node.users if user.target is operator.getitem}


def _frozen(value: Any) -> Any:
    """Lists as tuples; a tuple of equal numbers as one number."""
    if not isinstance(value, (list, tuple)):
        return value
    numbers = [x for x in value if isinstance(x, (int, float))]
    # The text of a number has its type and the sign of a zero.
    if numbers and len(numbers) == len(value) and len({repr(x) for x in numbers}) == 1:
        return numbers[0]
    return tuple(value)
