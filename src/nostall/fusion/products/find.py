"""Find the matrix products of a captured graph that one kernel can compute with other operators.

From a product the search follows its readers: elementwise operators with the product's number of
elements, which read it at its own elements. Elementwise operators that only these need (the
derivative of an activation) and operators of a row or a column join them. Values that something
else reads, too, are results of the kernel. Another kernel also has reductions of what it computes
over all rows (the gradient of a bias) or over all columns (the sum of squares of a norm).

The prologue of a product are the elementwise operators that compute its left operand, if nothing
else reads that. A product may have several kernels: with its readers, with its prologue, and with
both.

Operators beside a kernel that Inductor would compute together with parts of it are measured with
it: what computes the left operand may be the last part of a kernel that reads the same tensors
anyway, such as that of a norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from torch.fx import Node as FxNode

from nostall.fusion.capture import CapturedGraph
from nostall.fusion.capture.memory import mutated_tensors
from nostall.fusion.errors import BadFusion, BadGraph
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE, DTYPE_BYTES, ELEMENTWISE
from nostall.fusion.products.emit import operand_axes, product_axes
from nostall.fusion.products.extraction import Extraction
from nostall.fusion.products.product_graph import ProductGraph
from nostall.fusion.products.rules import (
    CHANGED,
    INSIDE_CALL,
    NO_READER,
    PART,
    ProductCall,
    product_call,
    refusal,
)

FLOATS = ("float32", "float16", "bfloat16")
"""Dtypes of reductions."""
MAX_REDUCING_DEPTH = 2048
"""Depth of products with reductions at most: on an H200 a pass over the result that is saved takes
167 / depth of the product's own time, and kernels of deeper ones are further behind cuBLAS."""
MAX_OPERATORS = 64
"""Elementwise operators of one kernel at most."""


@dataclass(frozen=True)
class FoundProduct:
    """Products and operators around them that one kernel can compute."""

    kernel: ProductGraph
    calls: tuple[ProductCall, ...]
    origins: tuple[int, ...]
    """``origins[i]``: the captured node that node i of the kernel's graph stands for; -1 for nodes
    without one (the sums of a product before they are rounded)."""
    operators: frozenset[int]
    """Captured operators that the kernel computes."""
    repeated: frozenset[int] = frozenset()
    """Those of them that other kernels compute, too."""

    @property
    def anchors(self) -> tuple[int, ...]:
        """The captured nodes of the products."""
        roots = (self.kernel.rounded(index) for index in self.kernel.dots)
        return self.captured(tuple(roots))

    @property
    def products(self) -> tuple[FxNode, ...]:
        return tuple(call.node for call in self.calls)

    def captured(self, nodes: Collection[int]) -> tuple[int, ...]:
        """The captured nodes of nodes of the kernel's graph."""
        return tuple(self.origins[index] for index in nodes)

    def repeated_behind(self, graph: Graph) -> set[int]:
        """Those repeated operators that depend on the products; ``graph``: the captured graph."""
        return {
            index
            for index in self.repeated
            if any(graph.descendants[anchor] >> index & 1 for anchor in self.anchors)
        }

    @property
    def bytes_saved(self) -> int:
        """Bytes of products and of left operands that no kernel writes, and none reads again."""
        written = self.captured(self.kernel.graph.outputs)
        left = self.calls[0].left.meta["val"]
        saved = 2 * left.numel() * left.element_size() if self.kernel.prologue else 0
        graph = self.kernel.graph
        saved += sum(graph[graph[i].inputs[0]].bytes for i in self.kernel.reductions)
        for anchor, call in zip(self.anchors, self.calls, strict=True):
            value = call.node.meta["val"]
            saved += value.numel() * value.element_size() * (1 if anchor in written else 2)
        return saved


@dataclass
class Products:
    """What became of the products of a graph."""

    found: list[FoundProduct] = field(default_factory=list)
    """Kernels of products in the order in which they are measured; they may overlap.

    Pairs with their readers, then single products with theirs, then those with a prologue.
    """
    refused: Counter[str] = field(default_factory=Counter)
    """Products without a kernel, by reason."""

    def lines(self) -> list[str]:
        """The outcome as text."""
        with_readers = [each for each in self.found if not each.kernel.prologue]
        single = {each.products for each in with_readers if len(each.calls) == 1}
        pairs = len({each.products for each in with_readers if len(each.calls) == 2})
        computed = {each.products for each in self.found if each.kernel.prologue}
        lines = [
            f"{len(single)} matrix products with elementwise readers, {pairs} pairs of products "
            f"with one left operand, {len(computed)} whose left operand the kernel can compute"
        ]
        lines += [f"  {n} x matrix product: {reason}" for reason, n in self.refused.most_common()]
        return lines


def find_products(captured: CapturedGraph, input_views: Collection[int] = ()) -> Products:
    """All products that a kernel can compute with their readers, and the reasons against others.

    ``input_views``: views that are inputs of kernels themselves (seeds of random numbers).
    """
    search = _Search(captured, frozenset(input_views))
    outcome = Products()
    singles: list[FoundProduct] = []
    with_prologue: list[FoundProduct] = []
    for index in search.calls:
        if reason := search.refusals.get(index):
            outcome.refused[reason] += 1
            continue
        computing_left = list(search.grow_with_prologue((index,)))
        with_prologue += computing_left
        reducing = list(search.grow_with_reductions((index,)))
        singles += reducing
        try:
            singles.append(search.grow((index,)))
        except (BadFusion, BadGraph) as error:
            if not (computing_left or reducing):
                outcome.refused[str(error)] += 1
        for other in search.partners(index):
            with_prologue += search.grow_with_prologue((index, other))
            outcome.found += search.grow_with_reductions((index, other))
            try:
                outcome.found.append(search.grow((index, other)))
            except (BadFusion, BadGraph):
                continue  # each of them may still have a kernel
    outcome.found += singles + with_prologue
    return outcome


class _Search:
    """Grows kernels from the products of one graph."""

    def __init__(self, captured: CapturedGraph, input_views: frozenset[int]) -> None:
        self.captured, self.graph = captured, captured.graph
        self.input_views = input_views
        self.calls: dict[int, ProductCall] = {}
        self.refusals: dict[int, str] = {}
        mutated: set[FxNode] | None = None
        for node, index in captured.values.items():
            call = product_call(node)
            if call is None or not isinstance(index, int):
                continue
            if mutated is None:
                mutated = mutated_tensors(node.graph.nodes)
            self.calls[index] = call
            reason = refusal(call)
            if mutated & {node, *call.operands}:
                reason = reason or CHANGED
            if reason is not None:
                self.refusals[index] = reason

    def partners(self, index: int) -> Iterator[int]:
        """Later products of the same left operand that an operator reads together with this one."""
        left = self._matrix(self.calls[index].left)
        shape = self.calls[index].node.meta["val"].shape
        for other, call in self.calls.items():
            if (
                other > index
                and other not in self.refusals
                and self._matrix(call.left) == left
                and call.node.meta["val"].shape == shape
                and not self._depends(other, (index,))
                and self._meet(index, other)
            ):
                yield other

    def _matrix(self, operand: FxNode) -> tuple[object, ...]:
        """What an operand of a product is, whichever views lead to it."""
        index, value = self.captured.values[operand], operand.meta["val"]
        is_same = isinstance(index, int) and keeps_order(self.graph, index)
        below = self.graph.base(index) if is_same and isinstance(index, int) else index
        return below, tuple(value.shape), tuple(value.stride())

    def _meet(self, index: int, other: int) -> bool:
        """Whether some operator depends on both products, and all paths to it are elementwise."""
        elements = self.graph[index].elements
        reached = [self._forward((anchor,), elements) for anchor in (index, other)]
        joined = self._forward((index, other), elements)
        return any(
            set(self.graph.sources[i]) & {index, *reached[0]}
            and set(self.graph.sources[i]) & {other, *reached[1]}
            for i in joined
        )

    def grow(self, anchors: tuple[int, ...]) -> FoundProduct:
        """The kernel of products with their readers.  Raises :class:`BadFusion` if none exists."""
        members = self._epilogue_members(anchors)
        if not members:
            is_read = any(
                self.graph[i].kind in ELEMENTWISE for i in self.graph.consumers[anchors[0]]
            )
            raise BadFusion(PART if is_read else NO_READER)
        return self._kernel(anchors, members)

    def grow_with_reductions(self, anchors: tuple[int, ...]) -> Iterator[FoundProduct]:
        """The kernel of products with their readers that reduces these, too, if there is one."""
        if self.calls[anchors[0]].left.meta["val"].shape[1] > MAX_REDUCING_DEPTH:
            return
        elements = self.graph[anchors[0]].elements
        members = self._forward(anchors, elements)
        reductions = self._reductions(anchors, members)
        if not reductions:
            return
        members |= reductions
        self._drop_last_operators(members, reductions)
        members |= self._needed(anchors, members, elements)
        try:
            yield self._kernel(anchors, members)
        except (BadFusion, BadGraph):
            return  # there may be one without reductions

    def _reductions(self, anchors: tuple[int, ...], forward: Collection[int]) -> set[int]:
        """The reductions of products or their readers to one value a row or a column, with the
        other operators of their ATen calls."""
        sizes = {*self.calls[anchors[0]].node.meta["val"].shape}
        found: set[int] = set()
        for source in (*anchors, *sorted(forward)):
            for index in self.graph.consumers[source]:
                node = self.graph[index]
                if (
                    node.kind == "reduce"
                    and node.elements in sizes
                    and node.dtype in FLOATS
                    and keeps_order(self.graph, node.inputs[0])
                    and not self._is_read_with_rows(index, anchors)
                ):
                    found |= self._with_own_call(index)
        return found

    def _is_read_with_rows(self, index: int, anchors: tuple[int, ...]) -> bool:
        """Whether a kernel reads the result of each row and the row, as in a norm or a softmax.

        It has the whole row then, and reduces it without another pass over memory.
        """
        operand = self.graph[self.graph[index].inputs[0]]
        elements, readers = self.graph[anchors[0]].elements, self.graph.descendants[index]
        return len(operand.shape) - 1 in self.graph[index].dims and any(
            readers >> node.index & 1
            and node.elements >= elements
            and self._is_next(index, node.index)
            for node in self.graph
        )

    def _is_read_wide(self, index: int, anchors: tuple[int, ...], members: set[int]) -> bool:
        """Whether others, too, read what only widens a value before a reduction.

        They widen it again: the kernel writes the narrower value.
        """
        readers = set(self.graph.consumers[index])
        return (
            self._depends(index, anchors)
            and self._widens(index)
            and index not in self.graph.results
            and bool(readers - members)
            and any(self.graph[i].kind == "reduce" for i in members)
        )

    def _with_own_call(self, index: int) -> set[int]:
        """A reduction with what follows it in its ATen call; empty if that is more than scaling."""
        members, elements = {index}, self.graph[index].elements
        while index not in self.captured.origins:
            readers = self.graph.consumers[index]
            if len(readers) != 1:
                return set()
            (index,) = readers
            node = self.graph[index]
            others = set(self.graph.sources[index]) - members
            is_scaling = node.kind in ELEMENTWISE and node.elements == elements
            if not is_scaling or any(self.graph[i].kind != "constant" for i in others):
                return set()
            members.add(index)
        return members

    def grow_with_prologue(self, anchors: tuple[int, ...]) -> Iterator[FoundProduct]:
        """The kernels of products that compute their left operand: with all readers of the
        products, and a single product also without any."""
        prologue = self._prologue_members(anchors)
        if not prologue:
            return
        epilogue = self._epilogue_members(anchors)
        for members in (epilogue, set[int]()) if epilogue and len(anchors) == 1 else (epilogue,):
            if len(prologue | members) > MAX_OPERATORS:
                continue
            try:
                yield self._kernel(anchors, prologue | members)
            except (BadFusion, BadGraph):
                continue  # the other one may still exist

    def _kernel(self, anchors: tuple[int, ...], members: set[int]) -> FoundProduct:
        """The kernel of products and operators around them.  Raises :class:`BadFusion`."""
        again = {i for i in members if self._is_read_wide(i, anchors, members)}
        outputs = [
            index
            for index in (*anchors, *sorted(members - again))
            if (index in anchors or self._depends(index, anchors))
            and (
                index in self.graph.results or set(self.graph.consumers[index]) - (members - again)
            )
        ]
        if any(index not in self.captured.origins for index in outputs):
            raise BadFusion(INSIDE_CALL)
        extraction = Extraction(self.captured, members, self.input_views)
        calls = tuple(self.calls[index] for index in anchors)
        kernel, origins = extraction.extract(dict(zip(anchors, calls, strict=True)), outputs)
        product_axes(kernel)
        operand_axes(kernel)
        repeated = {
            index
            for index in members
            if not self._depends(index, anchors)
            and (
                index in self.graph.results
                or not members.union(anchors).issuperset(self.graph.consumers[index])
            )
        }
        return FoundProduct(kernel, calls, origins, frozenset(members), frozenset(repeated | again))

    def _epilogue_members(self, anchors: tuple[int, ...]) -> set[int]:
        """The operators that read products, with those that only these need; empty if none."""
        elements = self.graph[anchors[0]].elements
        forward = self._forward(anchors, elements)
        self._drop_last_operators(forward)
        return forward | self._needed(anchors, forward, elements) if forward else forward

    def _prologue_members(self, anchors: tuple[int, ...]) -> set[int]:
        """The operators that compute the left operand; empty if something else reads it.

        A right operand or an added tensor from the same operator would be a second reader.
        """
        calls = [self.calls[index] for index in anchors]
        last = self._base(calls[0].left)
        if last is None or any(self._base(call.left) != last for call in calls):
            return set()
        if any(self._base(each) == last for call in calls for each in call.operands[1:]):
            return set()
        node, readers = self.graph[last], set(self.graph.consumers[last])
        if node.kind not in ELEMENTWISE or last in self.graph.results or not readers <= {*anchors}:
            return set()
        members = {last} | self._needed(anchors, {last}, node.elements)
        # Random numbers would be drawn again for each tile of columns.
        is_drawn = any(self.graph[index].op == "random" for index in members)
        return set() if is_drawn or node.dtype == "float64" else members

    def _base(self, operand: FxNode) -> int | None:
        """The value below the views of an operand; None if it has several."""
        index = self.captured.values[operand]
        return self.graph.base(index) if isinstance(index, int) else None

    def _drop_last_operators(self, members: set[int], kept: Collection[int] = ()) -> None:
        """Drop operators whose values Inductor need not write: one kernel reads them all.

        It computes them from the values before them, such as the square in a norm.
        """
        for index in sorted(members.difference(kept), reverse=True):
            readers = self.graph.consumers[index]
            if not (members & set(readers) or index in self.graph.results) and all(
                self._is_next(index, reader) for reader in readers
            ):
                members.remove(index)

    def _is_next(self, index: int, reader: int) -> bool:
        """Whether Inductor may compute a value in the kernel of its reader."""
        between = self.graph.descendants[index] & self.graph.ancestors[reader]
        return self.graph[reader].kind != "opaque" and not between & self.graph.opaque

    def _depends(self, index: int, anchors: Collection[int]) -> bool:
        """Whether a value is computed from one of the anchors."""
        return any(self.graph.descendants[anchor] >> index & 1 for anchor in anchors)

    def _forward(self, anchors: tuple[int, ...], elements: int) -> set[int]:
        """The elementwise operators that read the anchors at their own elements, and so on.

        An operator that needs a value that others compute from the anchors is left out, so that no
        path leaves the kernel and returns.
        """
        members: set[int] = set()
        pending = sorted({i for anchor in anchors for i in self.graph.consumers[anchor]})
        seen: set[int] = set()
        while pending and len(members) < MAX_OPERATORS:
            index = min(pending)
            pending = [i for i in pending if i != index]
            if index in seen:
                continue
            seen.add(index)
            if self._joins(index, members | set(anchors), anchors, elements):
                members.add(index)
                pending += self.graph.consumers[index]
        return members

    def _joins(self, index: int, inside: set[int], anchors: tuple[int, ...], elements: int) -> bool:
        node = self.graph[index]
        if node.kind not in ELEMENTWISE or node.elements != elements or node.op == "random":
            return False
        for operand in node.inputs:
            source = self.graph.base(operand)
            if source in inside:
                if not keeps_order(self.graph, operand):
                    return False
            elif self._depends(source, anchors):
                return False
        return node.dtype in DTYPE_BYTES and node.dtype != "float64"

    def _needed(self, anchors: tuple[int, ...], forward: set[int], elements: int) -> set[int]:
        """Elementwise operators that only the kernel needs, and those that are cheap to repeat.

        The latter have few elements, or widen what is in memory.
        """
        members: set[int] = set()
        pending = sorted(forward, reverse=True)
        while pending and len(forward) + len(members) < MAX_OPERATORS:
            for operand in self.graph[pending.pop()].inputs:
                source = self.graph.base(operand)
                node = self.graph[source]
                inside = forward | members
                if source in inside or source in anchors or node.kind not in ELEMENTWISE:
                    continue
                is_own = source not in self.graph.results and inside.issuperset(
                    self.graph.consumers[source]
                )
                is_cheap = node.elements < elements or self._widens(source)
                if (
                    (is_own or is_cheap)
                    and node.elements <= elements
                    and not self._reads_inside_of_call(source)
                    and not self._depends(source, anchors)
                    and not self._is_sliced(operand)
                    and node.dtype != "float64"
                ):
                    members.add(source)
                    pending.append(source)
        return members

    def _reads_inside_of_call(self, index: int) -> bool:
        """Whether an operator reads a reduction that only its own ATen call has, as in a mean."""
        return any(
            self.graph[i].kind == "reduce" and i not in self.captured.origins
            for i in self.graph.sources[index]
        )

    def _widens(self, index: int) -> bool:
        """Whether an operator casts to a wider dtype: it reads fewer bytes than its value has."""
        node = self.graph[index]
        return node.op == "cast" and self.graph[node.inputs[0]].bytes < node.bytes

    def _is_sliced(self, index: int) -> bool:
        while self.graph[index].kind == "layout":
            if self.graph[index].op == "slice":
                return True
            index = self.graph[index].inputs[0]
        return False


def keeps_order(graph: Graph, index: int) -> bool:
    """Whether a value is the value below its views with all elements in the same order."""
    while graph[index].kind == "layout":
        node = graph[index]
        below = graph[node.inputs[0]]
        is_same = node.op == "view" or node.shape == below.shape
        if node.op == "permute":
            is_same = [d for d in node.dims if below.shape[d] > 1] == [
                d for d in range(len(below.shape)) if below.shape[d] > 1
            ]
        if not is_same or node.elements != below.elements:
            return False
        index = node.inputs[0]
    return True


MAX_PROLOGUE_SOURCES = 64
"""Operators that a prologue reads and that are measured with it, at most."""


def prologue_sources(graph: Graph, found: FoundProduct) -> frozenset[int]:
    """The operators whose results a prologue needs, up to the next opaque calls.

    ``graph``: the captured graph. Empty if the kernel reads its left operand.
    """
    kernel = found.kernel
    waiting = sorted(i for i in found.captured(kernel.prologue) if i >= 0)
    members: set[int] = set()
    while waiting and len(members) < MAX_PROLOGUE_SOURCES:
        for source in graph.sources[waiting.pop()]:
            is_next = graph[source].kind in COMPUTE and source not in found.operators
            if is_next and source not in members:
                members.add(source)
                waiting.append(source)
    return frozenset(members)
