"""Losses without logits in memory: a product and its cross-entropy become one chunked operator.

The graph is changed before AOTAutograd, so that the forward pass saves no logits. A mean or a sum
of cross-entropies computes its gradients in the same pass; log-probabilities of tokens, several
readers of the same logits, entropies, and fp16, whose gradients need the scale of the loss, compute
the logits again in the backward pass.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from nostall.attach.torch_compile.rewrite.attention import may_write, memory_of
from nostall.attach.torch_compile.rewrite.entropies import Entropy, closed, entropies
from nostall.attach.torch_compile.rewrite.logits import (
    CROSS_ENTROPY,
    GATHERS,
    LOG_SOFTMAXES,
    LOGSUMEXPS,
    NLL,
    Path,
    Product,
    Refused,
    Step,
    Terminal,
    add_call,
    apply_steps,
    arguments,
    check_modes,
    fake,
    product_before,
    terminals,
    transposed_source,
)
from nostall.attach.torch_compile.runtime.chunked_loss import (
    CHUNKS,
    LINEAR_LOG_PROBS,
    LINEAR_LOSS,
    chunk_rows,
)
from nostall.attach.warning import warn_once
from nostall.core.errors import one_line

LEAST_BYTES = 1 << 26
"""Smaller logits stay: their memory is not what a step needs."""
LEAST_ROWS = 256
"""Chunks with fewer tokens stay whole if they have a gradient of the weight: reading and writing
it takes longer than the products of a chunk."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_CROSS_ENTROPY = (
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction",
    "label_smoothing",
)  # fmt: skip


@dataclass
class LossChanges:
    """What became of the losses of a graph, one line for each kind."""

    changed: Counter[str] = field(default_factory=Counter)
    # Losses whose logits stay, and why.
    left: Counter[str] = field(default_factory=Counter)

    def lines(self, counts: Counter[str]) -> list[str]:
        return [f"{count} x loss: {text}" for text, count in sorted(counts.items())]


@dataclass(frozen=True)
class _Loss:
    """Arguments of a cross-entropy."""

    labels: Node
    class_weight: Node | None
    ignore_index: int
    reduction: str
    label_smoothing: float

    @classmethod
    def of(cls, node: Node) -> _Loss:
        """Raises :class:`Refused` if an argument is not known here."""
        names = _CROSS_ENTROPY[:-1] if node.target is NLL else _CROSS_ENTROPY
        given = arguments(node, *names)
        labels, weight = given.get("target"), given.get("weight")
        if given.get("size_average") is not None or given.get("reduce") is not None:
            raise Refused("its reduction is given by size_average or reduce")
        if not isinstance(labels, Node) or fake(labels).is_floating_point():
            raise Refused("its targets are probabilities")
        if (dtype := fake(labels).dtype) not in (torch.int64, torch.uint8):
            raise Refused(f"its targets are {dtype}; PyTorch's operator takes int64")
        if weight is not None and (not isinstance(weight, Node) or fake(weight).requires_grad):
            raise Refused("its class weights have gradients")
        ignored, reduction = given.get("ignore_index", -100), given.get("reduction", "mean")
        smoothing = given.get("label_smoothing", 0.0)
        if not isinstance(ignored, int) or not isinstance(smoothing, (int, float)):
            raise Refused("its ignored index or its label smoothing is no constant")
        if reduction not in ("mean", "sum", "none") or not 0.0 <= smoothing <= 1.0:
            raise Refused(f"its reduction is {reduction!r}")
        return cls(labels, weight, ignored, reduction, float(smoothing))


def has_losses(module: GraphModule) -> bool:
    """Whether a graph of Dynamo has what may be a loss of logits, outside of sub-graphs."""
    return any(_is_loss(node) for node in module.graph.nodes)


def _is_loss(node: Node) -> bool:
    return node.target in (CROSS_ENTROPY, NLL) or (
        (node.target in LOG_SOFTMAXES or _may_be_router(node))
        and isinstance(node.args[0] if node.args else None, Node)
    )


def _may_be_router(node: Node) -> bool:
    """Whether a node picks or adds up logits, as losses and routers do."""
    source = node.args[0] if node.args else None
    is_normalized = isinstance(source, Node) and source.target in LOG_SOFTMAXES
    return node.target in LOGSUMEXPS or (node.target in GATHERS and not is_normalized)


def chunk_losses(module: GraphModule, *, forced: bool = False, chunks: int = CHUNKS) -> LossChanges:
    """Change the losses in a graph of Dynamo, in place.

    ``forced``: also small ones, and those of few tokens.  Losses of sub-graphs stay as they are.
    """
    changes, graph = LossChanges(), module.graph
    known = entropies(graph)
    done: set[Node] = set()
    for node in [node for node in graph.nodes if _is_loss(node)]:
        product = None
        if node in done:
            continue
        try:
            product = product_before(node)
            if product is None:
                if node.target is CROSS_ENTROPY:
                    raise Refused(
                        "they are no product of this graph; if a graph break is between them, "
                        "TORCH_LOGS=graph_breaks names it"
                    )
                continue
            if product.node in done:
                continue
            found = terminals(product, known)
            _check_size(product, found, forced, chunks)
            changes.changed[_Rewrite(graph, product, found, chunks).run()] += 1
            done |= {product.node, *(each.node for each in found)}
        except Refused as reason:
            if not _may_be_router(node) or _has_many_bytes(product):
                done |= set() if product is None else {product.node}
                changes.left[f"its logits stay: {reason}"] += 1
        except Exception as error:  # must not end the user's compilation
            warn_once(f"a loss is left as it is: {one_line(error)}")
    if changes.changed:
        graph.lint()
        module.recompile()
    return changes


def _tokens(product: Product) -> int:
    """Tokens of the product, or for symbolic sizes those that were traced."""
    count = 1
    for size in fake(product.node).shape[:-1]:
        hint = size if isinstance(size, int) else size.node.hint
        if hint is None:
            raise Refused("the number of its tokens is not known")
        count *= int(hint)
    return count


def _bytes(product: Product) -> int:
    return _tokens(product) * product.classes * int(fake(product.node).element_size())


def _has_many_bytes(product: Product | None) -> bool:
    """Whether large logits stay; no guard on their symbolic sizes is added for the answer."""
    with contextlib.suppress(Refused):
        return product is not None and _bytes(product) >= LEAST_BYTES
    return False


def _check_size(product: Product, found: Sequence[Terminal], forced: bool, chunks: int) -> None:
    """Raises :class:`Refused` for logits that stay."""
    value = fake(product.node)
    if value.dtype not in _DTYPES or value.layout != torch.strided:
        raise Refused(f"they are {value.dtype}")
    ways = [(_selection(x.path), x.path.inner, x.path.cap, x.path.bias) for x in found]
    if any(way != ways[0] for way in ways):
        raise Refused("several losses read different tokens, or different scales of them")
    tokens, size = _tokens(product), _bytes(product)
    if forced:
        return
    if size < LEAST_BYTES:
        raise Refused(f"they take {size / 1e6:.1f} MB, and less than {LEAST_BYTES / 1e6:.0f} stay")
    rows = chunk_rows(tokens, chunks)
    if rows < LEAST_ROWS and fake(product.weight).requires_grad and value.requires_grad:
        raise Refused(f"a chunk has {rows} tokens, and less than {LEAST_ROWS} stay")


def _selection(path: Path) -> tuple[Step, ...]:
    """The steps of a path up to the last one that selects tokens; the others are views of all."""
    count = len(path.steps)
    while count and path.steps[count - 1][0] in ("reshape", "flatten"):
        count -= 1
    return path.steps[:count]


class _Rewrite:
    """Replaces the readers of one product's logits."""

    def __init__(
        self, graph: Graph, product: Product, found: Sequence[Terminal], chunks: int
    ) -> None:
        self.graph, self.product, self.found, self.chunks = graph, product, found, chunks
        self.path = found[0].path
        self.entropies = [each.entropy for each in found if each.entropy is not None]
        order = {node: number for number, node in enumerate(graph.nodes)}
        self.found = sorted(found, key=lambda each: order[each.node])
        self.order = order

    def run(self) -> str:
        """Replace the readers; returns what was done, as text."""
        text = self._text()
        labels = self._labels()
        inner = {*closed(self.entropies)}
        dead = inner.union(*((*each.path.nodes, each.node) for each in self.found))
        if any(node.kwargs.get("out") is not None for node in dead):
            raise Refused("an argument out takes a result")
        selectors = [each for each in (labels, *self._class_weights()) if each is not None]
        at, late = self._place(selectors)
        self._check_modes(at)
        self._check_unchanged(at, selectors)
        for node in late:
            at.prepend(node)
        with self.graph.inserting_before(at):
            if self._is_one_pass:
                self._insert_loss(_Loss.of(self.found[0].node))
            else:
                self._insert_log_probs(labels)
                text += "; the backward pass computes them again"
        for node in sorted(dead, key=lambda each: -self.order[each]):
            self.graph.erase_node(node)
        return text

    def _check_modes(self, at: Node) -> None:
        """Raises :class:`Refused` if the operator would get other gradients than its readers.

        Readers without gradients get results without any.
        """
        product, last = self.product.node, self.found[-1].node
        switches = check_modes(product, last, "between its product and its loss")
        before = [node.args[0] for node in switches if self.order[node] < self.order[at]]
        if switches and not (fake(product).requires_grad and before[-1:] in ([], [True])):
            raise Refused("the gradient mode changes between its product and its loss")
        if fake(product).requires_grad and any(
            fake(each.node).requires_grad
            and not all(fake(x).requires_grad for x in each.path.nodes)
            for each in self.found
        ):
            raise Refused("its bias has a gradient where its product has none")

    @property
    def _is_one_pass(self) -> bool:
        if len(self.found) != 1 or self.found[0].node.target not in (CROSS_ENTROPY, NLL):
            return False
        is_scalar = _Loss.of(self.found[0].node).reduction != "none"
        # Gradients before the scale of the loss may be too small for fp16.
        is_narrow = fake(self.product.node).dtype == torch.float16
        return is_scalar and not (is_narrow and fake(self.found[0].node).requires_grad)

    def _text(self) -> str:
        tokens, value = _tokens(self.product), fake(self.product.node)
        row_bytes = self.product.classes * value.element_size()
        rows = chunk_rows(tokens, self.chunks)
        dtype = str(value.dtype).removeprefix("torch.")
        return (
            f"its logits ({tokens} x {self.product.classes} {dtype}, "
            f"{tokens * row_bytes / 1e9:.3g} GB) are not written; chunks of {rows} tokens take "
            f"{rows * row_bytes / 1e9:.3g} GB (modelled)"
        )

    def _labels(self) -> Node | None:
        """The labels that the readers have in common, if any.  Raises :class:`Refused`."""
        labels: dict[Node, None] = {}
        for each in self.found:
            if each.node.target in (CROSS_ENTROPY, NLL):
                loss = _Loss.of(each.node)
                labels[loss.labels] = None
                _check_class_axis(each)
                if loss.label_smoothing and loss.class_weight and not self._is_one_pass:
                    raise Refused("losses of tokens have class weights and label smoothing")
            elif each.node.target in GATHERS:
                labels[self._index(each)] = None
            elif each.entropy is None:
                _check_logsumexp(each)
        if not labels and self.entropies:
            return None
        if len(labels) != 1:
            raise Refused(f"its losses have {len(labels)} sets of labels")
        if len({loss.ignore_index for loss in self._losses}) > 1:
            raise Refused("its losses ignore different labels")
        return next(iter(labels))

    @property
    def _losses(self) -> list[_Loss]:
        """The arguments of the readers that are a cross-entropy."""
        return [
            _Loss.of(each.node) for each in self.found if each.node.target in (CROSS_ENTROPY, NLL)
        ]

    def _class_weights(self) -> list[Node]:
        return [loss.class_weight for loss in self._losses if loss.class_weight is not None]

    def _index(self, each: Terminal) -> Node:
        """The index of a gather of one class for each token."""
        given = arguments(each.node, "input", "dim", "index")
        index = given.get("index")
        dim, rank = given.get("dim"), fake(each.path.nodes[-1]).dim()
        if not isinstance(index, Node) or dim not in (-1, rank - 1) or not each.path.is_last:
            raise Refused("a gather is not over the classes")
        shape = (*fake(each.path.nodes[-1]).shape[:-1], 1)
        if fake(index).dim() != len(shape) or not all(
            statically_known_true(a == b) for a, b in zip(fake(index).shape, shape, strict=True)
        ):
            raise Refused("a gather takes other than one class of each token")
        return index

    def _place(self, selectors: Sequence[Node]) -> tuple[Node, list[Node]]:
        """The reader before which the operator is inserted, and what is moved there before it.

        ``selectors``: labels and class weights.  Raises :class:`Refused`.
        """
        first, last = self.found[0].node, self.found[-1].node
        # Readers without gradients may come first; the operator stays outside of their mode.
        switches = check_modes(self.product.node, first, "between its product and its loss")
        first = switches[0] if switches else first
        users = [user for each in self.found for user in each.node.users]
        late: set[Node] = set()
        todo = [*selectors]
        while todo:
            if (node := todo.pop()) not in late and self.order[node] >= self.order[first]:
                late.add(node)
                todo += node.all_input_nodes
        if not any(self.order[user] < self.order[last] for user in users):
            return (last if late else first), []
        is_moved = late.isdisjoint(each.node for each in self.found) and not any(
            map(may_write, late)
        )
        read = {operand for node in late for operand in node.all_input_nodes}
        if not is_moved or self._writes(read, first, last):
            raise Refused("its labels or class weights are computed after other losses are read")
        return first, sorted(late, key=self.order.__getitem__)

    def _check_unchanged(self, at: Node, selectors: Sequence[Node]) -> None:
        """Raises :class:`Refused` if what the operator reads at ``at`` has another value there.

        ``selectors``: labels and class weights.
        """
        product, last = self.product.node, self.found[-1].node
        operands = [
            node for node in (self.product.hidden, self.product.weight, self.path.bias) if node
        ]
        if self._writes(operands, product, at):
            raise Refused("an operand of their product is changed in place before the loss")
        if self._writes(selectors, self.found[0].node, last):
            raise Refused("its labels or class weights are changed in place between its losses")
        paths = [set(each.path.nodes) for each in self.found]
        logits, shared = set[Node]().union(*paths), paths[0].intersection(*paths)
        if any(node not in shared for node in self._writes(logits, product, last)):
            raise Refused("its logits are changed in place")

    def _writes(self, nodes: Iterable[Node], first: Node, last: Node) -> list[Node]:
        """What may write to the memory of nodes between two others."""
        memory = {memory_of(node) for node in nodes}
        return [
            node
            for node, number in self.order.items()
            if self.order[first] < number < self.order[last]
            and may_write(node)
            and any(memory_of(operand) in memory for operand in node.all_input_nodes)
        ]

    def _emit(self, target: Any, args: tuple[Any, ...], **kwargs: Any) -> Node:
        return add_call(self.graph, target, args, kwargs)

    def _operands(self) -> tuple[Node, Node, Node | None, Node]:
        """Hidden (tokens x width), weight and bias in the product's dtype; the tokens' shape."""
        dtype = fake(self.product.node).dtype

        def converted(node: Node) -> Node:
            return node if fake(node).dtype == dtype else self._emit("to", (node, dtype))

        tokens = apply_steps(converted(self.product.hidden), self.path, self._emit)
        hidden = self._emit("reshape", (tokens, -1, self.product.width))
        weight = self.product.weight
        if self.product.is_transposed:
            source = transposed_source(weight)
            # A transpose without gradients of a weight that has some stays.
            if source is None or fake(source).requires_grad != fake(weight).requires_grad:
                source = self._emit("t", (weight,))
            weight = source
        bias = self.path.bias
        return hidden, converted(weight), None if bias is None else converted(bias), tokens

    def _insert_loss(self, loss: _Loss) -> None:
        node = self.found[0].node
        hidden, weight, bias, _ = self._operands()
        with_grad = fake(node).requires_grad
        wanted = [
            with_grad and each is not None and fake(each).requires_grad
            for each in (self.product.hidden, self.product.weight, self.path.bias)
        ]
        labels = self._emit("reshape", (loss.labels, -1))
        results = self._emit(
            LINEAR_LOSS,
            (hidden, weight, bias, labels, loss.class_weight, loss.ignore_index,
             loss.label_smoothing, self.path.inner, self.path.cap, loss.reduction == "mean",
             *wanted, self.chunks),
        )  # fmt: skip
        self._replace(node, self._item(results, 0))

    def _item(self, results: Node, index: int) -> Node:
        return self._emit(operator.getitem, (results, index))

    def _replace(self, node: Node, result: Node) -> None:
        if fake(result).dtype != fake(node).dtype:
            result = self._emit("to", (result, fake(node).dtype))
        if fake(self.product.node).requires_grad and not fake(node).requires_grad:
            result = self._emit("detach", (result,))
        node.replace_all_uses_with(result)

    def _insert_log_probs(self, labels: Node | None) -> None:
        hidden, weight, bias, first_tokens = self._operands()
        losses = self._losses
        if labels is None:
            flat = self._emit(torch.zeros_like, (hidden,), dtype=torch.int64)
            known = flat = self._emit("select", (flat, 1, 0))
        else:
            known = flat = self._emit("reshape", (labels, -1))
        if losses:
            is_ignored = self._emit(torch.eq, (flat, losses[0].ignore_index))
            known = self._emit("masked_fill", (flat, is_ignored, 0))
        results = self._emit(
            LINEAR_LOG_PROBS,
            (hidden, weight, bias, known, self.path.inner, self.path.cap, self.chunks,
             bool(self.entropies)),
        )  # fmt: skip
        picked, lse, mean, entropy = (self._item(results, index) for index in range(4))
        for each in self.found:
            if each.node.target in (CROSS_ENTROPY, NLL):
                result = self._reduced(_Loss.of(each.node), flat, picked, lse, mean)
            elif each.node.target in GATHERS:
                value = self._emit(torch.sub, (picked, lse)) if each.is_normalized else picked
                result = self._emit("view_as", (value, labels))
            else:
                value = lse if each.entropy is None else self._summed(each.entropy, lse, entropy)
                keeps = arguments(each.node, "input", "dim", "keepdim").get("keepdim", False)
                tokens = first_tokens
                if each.path.steps != self.path.steps:
                    tokens = apply_steps(self.product.hidden, each.path, self._emit)
                shape = self._emit("narrow", (tokens, -1, 0, 1))
                shape = shape if keeps else self._emit("squeeze", (shape, -1))
                is_total = each.entropy is not None and each.entropy.is_total
                result = self._emit(
                    *(("sum", (value,)) if is_total else ("view_as", (value, shape)))
                )
            self._replace(each.node, result)

    def _summed(self, found: Entropy, lse: Node, entropy: Node) -> Node:
        """Of each token what an entropy's node sums over the classes."""
        if not found.by_logits:
            return entropy if found.is_negated else self._emit(torch.neg, (entropy,))
        operands = (entropy, lse) if found.is_negated else (lse, entropy)
        return self._emit(torch.sub, operands)

    def _reduced(self, loss: _Loss, flat: Node, picked: Node, lse: Node, mean: Node) -> Node:
        """A cross-entropy of what is known of each token."""
        losses = self._emit(torch.sub, (lse, picked))
        if loss.label_smoothing:
            even = self._emit(torch.sub, (lse, mean))
            parts = [
                self._emit(torch.mul, (part, share))
                for part, share in (
                    (losses, 1.0 - loss.label_smoothing), (even, loss.label_smoothing)
                )
            ]  # fmt: skip
            losses = self._emit(torch.add, tuple(parts))
        is_ignored = self._emit(torch.eq, (flat, loss.ignore_index))
        weights = None
        if loss.class_weight is not None:
            safe = self._emit("masked_fill", (flat, is_ignored, 0))
            weights = self._emit(torch.index_select, (loss.class_weight, 0, safe))
            weights = self._emit("masked_fill", (weights, is_ignored, 0.0))
            losses = self._emit(torch.mul, (losses, weights))
        losses = self._emit("masked_fill", (losses, is_ignored, 0.0))
        if loss.reduction == "none":
            return self._emit("view_as", (losses, loss.labels))
        total = self._emit("sum", (losses,))
        if loss.reduction == "sum":
            return total
        counted = weights if weights is not None else self._emit("logical_not", (is_ignored,))
        return self._emit(torch.div, (total, self._emit("sum", (counted,))))


def _check_class_axis(each: Terminal) -> None:
    """Raises :class:`Refused` if a cross-entropy's classes are not those of the product."""
    if each.path.axis != 1 or fake(each.path.nodes[-1]).dim() < 2:
        raise Refused("its cross-entropy is not over the classes of the product")


def _check_logsumexp(each: Terminal) -> None:
    dim = arguments(each.node, "input", "dim").get("dim")
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    rank = fake(each.path.nodes[-1]).dim()
    if dim not in (-1, rank - 1) or not each.path.is_last:
        raise Refused("a logsumexp is not over the classes")
