"""Entropies in graphs of Dynamo: sums over classes of probabilities by their logarithms."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from nostall.attach.torch_compile.rewrite.logits import (
    GATHERS,
    LOG_SOFTMAXES,
    NLL,
    Refused,
    arguments,
    fake,
    name_of,
)
from nostall.attach.torch_compile.rewrite.written_attention import SOFTMAXES

_EXPONENTIALS = frozenset((torch.exp, "exp"))
_PRODUCTS = frozenset((operator.mul, torch.mul, "mul"))
_NEGATIONS = frozenset((operator.neg, torch.neg, "neg"))
_SUMS = frozenset((torch.sum, "sum"))


@dataclass(frozen=True)
class Entropy:
    """A sum over the classes of ``p log p``, or of ``p`` by the logits."""

    node: Node
    logits: Node
    # Nodes between both.
    inner: frozenset[Node]
    by_logits: bool
    is_negated: bool
    # Whether the sum is over all tokens, too.
    is_total: bool


def entropies(graph: Graph) -> list[Entropy]:
    """The entropies of a graph whose gradients take all ways to the logits, or none."""
    found = []
    for node in graph.nodes:
        if node.target in _SUMS:
            with contextlib.suppress(Refused, AttributeError):
                found.append(_entropy(node))
    return [each for each in found if each is not None]


def _entropy(node: Node) -> Entropy | None:
    given = arguments(node, "input", "dim", "keepdim")
    product, dim = given.get("input"), given.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if "dtype" in given or not ("dim" not in given or dim in (-1, fake(product).dim() - 1)):
        return None
    inner: set[Node] = set()
    product, is_negated = _sign(product, inner)
    if product.target not in _PRODUCTS or len(product.args) != 2:
        return None
    inner.add(product)
    signs = [_sign(each, inner) for each in product.args]
    factors = dict(_factor(each, inner) for each, _ in signs)
    logits, is_negated = set(factors.values()), (is_negated + sum(x for _, x in signs)) % 2 == 1
    is_cut = fake(node).requires_grad and not all(
        fake(each).requires_grad == any(fake(x).requires_grad for x in each.all_input_nodes)
        for each in inner
    )
    if "p" not in factors or len(factors) != 2 or len(logits) != 1 or is_cut:
        return None
    return Entropy(
        node, logits.pop(), frozenset(inner), "x" in factors, is_negated, "dim" not in given
    )


def _sign(node: Any, inner: set[Node]) -> tuple[Any, bool]:
    """A value without its negation, and whether it has one."""
    if node.target not in _NEGATIONS:
        return node, False
    inner.add(node)
    return arguments(node, "input").get("input"), True


def _factor(node: Any, inner: set[Node]) -> tuple[str, Node]:
    """``p``, ``log p`` or ``x`` of logits, and these."""
    source: Any = node
    if node.target in _EXPONENTIALS:
        source = arguments(node, "input").get("input")
    is_log, given = source.target in LOG_SOFTMAXES, arguments(source, "input", "dim")
    is_row = given.get("dim") in (-1, fake(source).dim() - 1)
    if not is_row or not (is_log or (source.target in SOFTMAXES and source is node)):
        return "x", node
    inner.update((node, source))
    return "log p" if is_log and source is node else "p", given["input"]


def closed(found: Iterable[Entropy]) -> Iterator[Node]:
    """All nodes inside of entropies.  Raises :class:`Refused` if others read them."""
    ends = {each.node for each in found}
    inner = frozenset[Node]().union(*(each.inner for each in found))
    for node in inner:
        for user in node.users:
            is_gathered = node.target in LOG_SOFTMAXES and user.target in (*GATHERS, NLL)
            if user not in inner and user not in ends and not is_gathered:
                raise Refused(f"{name_of(user)} reads all probabilities")
        yield node
